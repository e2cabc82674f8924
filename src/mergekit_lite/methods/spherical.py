"""Methods that follow angles: slerp, nuslerp, multislerp, karcher, model_stock.

Every one of them returns a linear combination of its inputs whose coefficients depend only on the inputs' dot
products. So the first pass sums the Gram matrix in float64 and the second combines.

Notation: x_i inputs (models or task vectors), G_ij = <x_i, x_j>, n_i = sqrt(G_ii), u_i = x_i / n_i.
Shape letters: K inputs, R rows (1 when a tensor is taken whole).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from ..select import Sum
from .averaging import deltas, refuse_zero_sum
from .registry import PerModel, Range, merge_method

_COLINEAR = 1e-8  # on sin θ
_SLICE = 1 << 17


def gram(tensors: list[Tensor]) -> Tensor:
    """The dot products of the inputs, in float64: K flat blocks give (K, K), K blocks of R rows give (R, K, K)."""
    flat = tensors[0].dim() == 1
    count = len(tensors)
    total: dict[tuple[int, int], Tensor] = {}
    # Slices small enough to stay in cache; torch's float64 matrix product is ten times slower at this shape.
    for part in zip(*(t.split(_SLICE) if flat else (t,) for t in tensors), strict=True):
        wide = [p.double() for p in part]
        for i in range(count):
            for j in range(i, count):
                product = torch.dot(wide[i], wide[j]) if flat else (wide[i] * wide[j]).sum(-1)
                total[i, j] = total[i, j] + product if (i, j) in total else product
    rows = [torch.stack([total[min(i, j), max(i, j)] for j in range(count)], -1) for i in range(count)]
    return torch.stack(rows, -2)


def combine(tensors: list[Tensor], coefficients: Tensor) -> Tensor:
    """Σ c_i x_i for coefficients (K,) or, one set a row, (R, K)."""
    columns = [c.to(t.dtype) for c, t in zip(coefficients.unbind(-1), tensors, strict=True)]
    if coefficients.dim() > 1:
        columns = [c.unsqueeze(-1) for c in columns]
    total = tensors[0] * columns[0]
    for tensor, column in zip(tensors[1:], columns[1:], strict=True):
        total = total.addcmul_(tensor, column)
    return total


def great_circle(g: Tensor, t: float, colinear: Tensor, cosine: Tensor) -> Tensor:
    """Coefficients (..., 2) of the point at ``t`` on the arc from input 0 to input 1; straight where colinear."""
    angle = torch.arccos(torch.where(colinear, 0.0, cosine))  # kept off ±1, where the gradient is infinite
    sine = angle.sin()
    arc = torch.stack([((1 - t) * angle).sin() / sine, (t * angle).sin() / sine], -1)
    straight = torch.tensor([1 - t, t], dtype=g.dtype, device=g.device)
    return torch.where(colinear.unsqueeze(-1), straight, arc)


def cosines(g: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine between inputs 0 and 1, and where it is defined (neither is zero)."""
    squared = g[..., 0, 0] * g[..., 1, 1]
    defined = squared > 0
    return torch.where(defined, g[..., 0, 1] / torch.where(defined, squared, 1.0).sqrt(), 1.0), defined


@merge_method("slerp", base="required", inputs=(1, 1), chunking="elements", ranges={"t": Range(0, 1)})
def slerp(tensors: list[Tensor], base: Tensor, *, t: float) -> Generator[Any, Any, Tensor]:
    """Spherical interpolation from the base (t=0) to the model (t=1): (sin((1-t)θ) B + sin(tθ) W) / sin θ.

    θ is the angle between the flattened tensors; where |cos θ| > 0.9995 the line is taken instead of the arc.
    Source: Animating rotation with quaternion curves (Shoemake, 1985).

    >>> slerp([torch.tensor([0.0, 1.0])], torch.tensor([1.0, 0.0]), t=0.5)
    tensor([0.7071, 0.7071])
    """
    pair = [base, tensors[0]]
    g = yield Sum(lambda: gram(pair))
    cosine, _ = cosines(g)
    return combine(pair, great_circle(g, t, cosine.abs() > 0.9995, cosine))


def _nuslerp_chunking(parameters: dict[str, Any]) -> str:
    if parameters["nuslerp_flatten"]:
        return "elements"
    return "tensor" if parameters["nuslerp_row_wise"] else "rows"


@merge_method("nuslerp", base="optional", inputs=(2, 2), chunking=_nuslerp_chunking)
def nuslerp(
    tensors: list[Tensor],
    base: Tensor | None,
    *,
    weight: PerModel,
    nuslerp_flatten: bool = True,
    nuslerp_row_wise: bool = False,
) -> Generator[Any, Any, Tensor]:
    """Spherical interpolation of two models at t = w_2 / (w_1 + w_2); with a base, of their task vectors.

    The angle is taken over the whole tensor, or with ``nuslerp_flatten=False`` over each vector along the last
    dimension, or along the first with ``nuslerp_row_wise`` (mergekit's names and meaning). Colinear or zero inputs
    are interpolated along the line; weights that sum to 0 give t = 1/2.
    Source: Shoemake 1985 as for slerp; normalised weights after mergekit's documentation.

    >>> nuslerp([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])], weight=[1.0, 1.0])
    tensor([0.7071, 0.7071])
    """
    inputs = tensors if base is None else deltas(tensors, base)
    t = 0.5 if abs(sum(weight)) < 1e-6 else weight[1] / sum(weight)
    along_first = nuslerp_row_wise and not nuslerp_flatten
    shape = inputs[0].movedim(0, -1).shape if along_first else inputs[0].shape
    if along_first:  # the whole tensor is here
        inputs = [x.movedim(0, -1).reshape(-1, x.shape[0]) for x in inputs]
    g = (yield Sum(lambda: gram(inputs))) if nuslerp_flatten else gram(inputs)
    cosine, defined = cosines(g)
    straight = ~defined | (1 - cosine.square() <= _COLINEAR**2)
    merged = combine(inputs, great_circle(g, t, straight, cosine))
    if along_first:
        merged = merged.reshape(shape).movedim(-1, 0)
    return merged if base is None else base + merged


def unit_gram(g: Tensor, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Dot products of the inputs scaled to length 1 (zero inputs stay zero), and their norms (..., K)."""
    squared = g.diagonal(dim1=-2, dim2=-1)
    present = squared > 0
    norms = torch.where(present, torch.where(present, squared, 1.0).sqrt(), 0.0)
    inverse = torch.where(present, 1 / (norms + eps).clamp(min=1e-300), 0.0)
    return g * inverse.unsqueeze(-1) * inverse.unsqueeze(-2), norms


def _multislerp_weights(parameters: dict[str, Any]) -> None:
    refuse_zero_sum({"weight": parameters["weight"], "normalize": parameters["normalize_weights"]})


@merge_method(
    "multislerp", base="optional", chunking="elements", ranges={"eps": Range(0)}, validate=_multislerp_weights
)
def multislerp(
    tensors: list[Tensor],
    base: Tensor | None,
    *,
    weight: PerModel,
    normalize_weights: bool = True,
    eps: float = 1e-8,
) -> Generator[Any, Any, Tensor]:
    """Weighted mean direction of any number of models, at the weighted mean length; with a base, of task vectors.

    m = normalised Σ w_i u_i; the tangent vectors w_i (u_i - <u_i, m> m) at m are averaged and mapped back to the
    sphere; the result is scaled by Σ w_i n_i. By the choice of m the tangent mean is Σ w_i u_i - |Σ w_i u_i| m = 0,
    so the result is m Σ w_i n_i, which is what is computed here. Where the directions cancel, so that m is not
    defined, the weighted sum is returned.
    Source: the Multi-SLERP note published with mergekit (2025).

    >>> multislerp([torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])], weight=[1.0, 1.0])
    tensor([2.1213, 2.1213])
    """
    inputs = tensors if base is None else deltas(tensors, base)
    g = yield Sum(lambda: gram(inputs))
    units, norms = unit_gram(g, eps)
    w = torch.tensor(weight, dtype=g.dtype, device=g.device)
    w = w / w.sum() if normalize_weights else w
    squared = w @ units @ w
    length = squared.clamp(min=0).sqrt()
    direction = w * torch.where(norms > 0, 1 / (norms + eps).clamp(min=1e-300), 0.0)
    merged = combine(inputs, torch.where(length > eps, direction / length.clamp(min=1e-300) * (w @ norms), w))
    return merged if base is None else base + merged


@merge_method("karcher", chunking="elements", ranges={"max_iter": Range(1), "tol": Range(0)})
def karcher(tensors: list[Tensor], base: None, *, max_iter: int = 10, tol: float = 1e-5) -> Generator[Any, Any, Tensor]:
    """Riemannian (Karcher) mean of the models' directions on the sphere, at their mean length; equal weights.

    Fixed point: m ← cos|T| m + sin|T| T/|T| with T the mean of θ_i / sin θ_i (u_i - cos θ_i m), until |T| < ``tol``
    or ``max_iter`` rounds. m lies in the span of the u_i, so the iteration runs on its K coefficients.
    Source: Karcher 1977; Grove and Karcher 1973.

    >>> karcher([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])])
    tensor([0.7071, 0.7071])
    """
    g = yield Sum(lambda: gram(tensors))
    units, norms = unit_gram(g)
    present = (norms > 0).to(g.dtype)
    share = present / present.sum().clamp(min=1)
    start = (share @ units @ share).sqrt()
    if start < 1e-7:  # all zero, or opposite directions: the mean direction is not defined
        return combine(tensors, torch.full_like(norms, 1 / len(tensors)))
    mean = share / start
    for _ in range(max_iter):
        cosine = (units @ mean).clamp(-1, 1)
        angle = torch.arccos(cosine)
        sine = angle.sin()
        pull = share * torch.where(sine > 1e-12, angle / sine.clamp(min=1e-12), 1.0)
        tangent = pull - (pull @ cosine) * mean
        length = (tangent @ units @ tangent).clamp(min=0).sqrt()
        if length < tol:
            break
        mean = length.cos() * mean + length.sin() / length * tangent
        size = (mean @ units @ mean).clamp(min=0).sqrt()
        if size < 1e-7:  # a direction and its opposite: no mean direction to go on from
            return combine(tensors, torch.full_like(norms, 1 / len(tensors)))
        mean = mean / size
    return combine(tensors, mean * (share @ norms) / norms.clamp(min=1e-300) * present)


def _model_stock_chunking(parameters: dict[str, Any]) -> str:
    return "rows" if parameters["filter_wise"] else "elements"


@merge_method("model_stock", base="required", inputs=(2, None), chunking=_model_stock_chunking)
def model_stock(tensors: list[Tensor], base: Tensor, *, filter_wise: bool = False) -> Generator[Any, Any, Tensor]:
    """T mean(W) + (1 - t) B with t = K cos / (1 + (K - 1) cos), cos the mean cosine between task vectors.

    One t a tensor, or a row with ``filter_wise``. Where the denominator vanishes t is 0; a zero task vector counts
    as cosine 0.
    Source: Model Stock (Jang et al., arXiv 2403.19522).

    >>> model_stock([torch.tensor([2.0, 1.0]), torch.tensor([1.0, 2.0])], torch.tensor([0.0, 0.0]))
    tensor([1.3333, 1.3333])
    """
    task = deltas(tensors, base)
    g = gram(task) if filter_wise else (yield Sum(lambda: gram(task)))
    units, _ = unit_gram(g)
    count = len(task)
    cosine = (units.sum((-2, -1)) - units.diagonal(dim1=-2, dim2=-1).sum(-1)) / (count * (count - 1))
    below = 1 + (count - 1) * cosine
    t = torch.where(below.abs() < 1e-6, 0.0, count * cosine / torch.where(below.abs() < 1e-6, 1.0, below))
    return base + combine(task, (t / count).unsqueeze(-1).expand(*t.shape, count))
