"""Methods that interpolate along angles: slerp, nuslerp, multislerp, karcher, model_stock.

Each method returns a linear combination of its inputs. The coefficients depend only on the inputs'
dot products, which are summed in float64.

Notation: x_i inputs (models or task vectors), G_ij = <x_i, x_j>, n_i = sqrt(G_ii), u_i = x_i / n_i.
Shape letters: K inputs, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .._torch import Tensor, torch
from . import coefficients
from .averaging import deltas, refuse_zero_sum, rows_of, weighted_sum
from .compiled import compiled
from .parameters import PerModel, Range
from .registry import merge_method

_SLICE = 1 << 17  # elements whose float64 copies stay in cache


def _gram(tensors: Sequence[Tensor], dot: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the dot products of all pairs of inputs, in the last two dimensions of the result."""
    products: dict[tuple[int, int], Tensor] = {}
    for i, first in enumerate(tensors):
        # a dot product is symmetric, so half of the pairs are enough
        for j, second in enumerate(tensors[: i + 1]):
            products[i, j] = products[j, i] = dot(first, second)
    places = range(len(tensors))
    rows = [torch.stack([products[i, j] for j in places], -1) for i in places]
    return torch.stack(rows, -2)


def gram(tensors: Sequence[Tensor]) -> Tensor:
    """Return the dot products (K, K) of whole inputs, in float64."""

    def dot(a: Tensor, b: Tensor) -> Tensor:
        slices = zip(a.flatten().split(_SLICE), b.flatten().split(_SLICE), strict=True)
        return torch.stack([torch.dot(x.double(), y.double()) for x, y in slices]).sum()

    return _gram(tensors, dot)


def gram_of_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Return the dot products (R, K, K) of matrices, row by row, in float64."""
    return _gram(tensors, lambda a, b: (a.double() * b.double()).sum(-1))


def combine(tensors: Sequence[Tensor], factors: Tensor) -> Tensor:
    """Return Σ c_i x_i for coefficients (K,), or for coefficients (R, K) with one set per row."""
    columns = [c.to(t.dtype) for c, t in zip(factors.unbind(-1), tensors, strict=True)]
    if factors.dim() > 1:
        columns = [c.unsqueeze(-1) for c in columns]
    return weighted_sum(tensors, columns)


@compiled
@merge_method("slerp", base="required", inputs=(1, 1), ranges={"t": Range(0, 1)})
def slerp(tensors: list[Tensor], base: Tensor, *, t: float) -> Tensor:
    """Interpolate on the sphere from the base (t=0) to the model (t=1).

    The result is (sin((1-t)θ) B + sin(tθ) W) / sin θ, where θ is the angle between the flattened
    tensors. If |cos θ| > 0.9995, the interpolation is linear instead.
    Source: Animating rotation with quaternion curves (Shoemake, 1985).

    >>> slerp([torch.tensor([0.0, 1.0])], torch.tensor([1.0, 0.0]), t=0.5)
    tensor([0.7071, 0.7071])
    """
    pair = [base, tensors[0]]
    return combine(pair, coefficients.slerp(gram(pair), t, torch))


@compiled
@merge_method("nuslerp", base="optional", inputs=(2, 2))
def nuslerp(
    tensors: list[Tensor],
    base: Tensor | None,
    *,
    weight: PerModel,
    nuslerp_flatten: bool = True,
    nuslerp_row_wise: bool = False,
) -> Tensor:
    """Interpolate two models on the sphere at t = w_2 / (w_1 + w_2).

    With a base, the models' task vectors are interpolated, and the base is added.

    There is one angle for the whole tensor. With ``nuslerp_flatten=False`` there is one for each
    vector along the last dimension or, with ``nuslerp_row_wise``, along the first dimension (the
    names and their meanings are mergekit's). Colinear inputs are interpolated on a straight line. A
    zero input is treated as orthogonal to the other input. Weights that sum to 0 give t = 1/2.
    Source: Shoemake 1985 as for slerp; normalized weights after mergekit's documentation.

    >>> nuslerp([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])], weight=[1.0, 1.0])
    tensor([0.7071, 0.7071])
    """
    inputs = tensors if base is None else deltas(tensors, base)
    # a scalar has no dimension to move
    along_first = nuslerp_row_wise and inputs[0].dim() > 0
    if nuslerp_flatten:
        merged = combine(inputs, coefficients.nuslerp(gram(inputs), weight, torch))
        return merged if base is None else base + merged
    if along_first:
        inputs = [x.movedim(0, -1) for x in inputs]
    rows = [rows_of(x) for x in inputs]
    merged = combine(rows, coefficients.nuslerp(gram_of_rows(rows), weight, torch))
    merged = merged.view(inputs[0].shape)
    if along_first:
        merged = merged.movedim(-1, 0)
    return merged if base is None else base + merged


def _multislerp_weights(parameters: Mapping[str, object]) -> None:
    refuse_zero_sum({"weight": parameters["weight"], "normalize": parameters["normalize_weights"]})


@compiled
@merge_method(
    "multislerp",
    base="optional",
    ranges={"eps": Range(0)},
    validate=_multislerp_weights,
)
def multislerp(
    tensors: list[Tensor],
    base: Tensor | None,
    *,
    weight: PerModel,
    normalize_weights: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """Return the weighted mean direction of any number of models, at the weighted mean length.

    With a base, the task vectors are merged this way and added to the base.

    The mean direction is m = Σ w_i u_i / |Σ w_i u_i|, and the result is m Σ w_i n_i. The original
    definition also averages the tangent vectors w_i (u_i - <u_i, m> m) at m, and maps their mean
    back to the sphere. But this mean is Σ w_i u_i - |Σ w_i u_i| m = 0, so the result is the same.
    If the directions cancel, m is not defined, and the result is the weighted sum.
    Source: the Multi-SLERP note published with mergekit (2025).

    >>> multislerp([torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])], weight=[1.0, 1.0])
    tensor([2.1213, 2.1213])
    """
    inputs = tensors if base is None else deltas(tensors, base)
    g = gram(inputs)
    merged = combine(inputs, coefficients.multislerp(g, weight, normalize_weights, eps, torch))
    return merged if base is None else base + merged


@compiled
@merge_method("karcher", ranges={"max_iter": Range(0), "tol": Range(0)})
def karcher(tensors: list[Tensor], base: None, *, max_iter: int = 10, tol: float = 1e-5) -> Tensor:
    """Return the Riemannian (Karcher) mean of the models' directions, at their mean length.

    All models have equal weights.

    The mean m is found by the iteration m ← cos|T| m + sin|T| T/|T|, where T is the mean of
    θ_i / sin θ_i (u_i - cos θ_i m). It ends when |T| < ``tol``, or after ``max_iter`` steps. As m
    lies in the span of the u_i, only its K coefficients are computed.
    Source: Karcher 1977; Grove and Karcher 1973.

    >>> karcher([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])])
    tensor([0.7071, 0.7071])
    """
    return combine(tensors, coefficients.karcher(gram(tensors), max_iter, tol, torch))


@compiled
@merge_method("model_stock", base="required", inputs=(2, None))
def model_stock(tensors: list[Tensor], base: Tensor, *, filter_wise: bool = False) -> Tensor:
    """Return t mean(W) + (1 - t) B, with t = K cos / (1 + (K - 1) cos).

    cos is the mean cosine between two task vectors. There is one t for the tensor, or with
    ``filter_wise`` one for each row. If the denominator is 0, t is 0. The cosine between a zero
    task vector and any other is 0.
    Source: Model Stock (Jang et al., arXiv 2403.19522).

    >>> model_stock([torch.tensor([2.0, 1.0]), torch.tensor([1.0, 2.0])], torch.tensor([0.0, 0.0]))
    tensor([1.3333, 1.3333])
    """
    task = deltas(tensors, base)
    if filter_wise:
        task = [rows_of(change) for change in task]
        g = gram_of_rows(task)
    else:
        g = gram(task)
    return base + combine(task, coefficients.model_stock(g, torch)).view(base.shape)
