"""The definitions of the merge methods.

Dense, slow, obvious, in whatever float dtype they are given.

Nothing here is optimized; the fast paths are judged against it. Random methods take the keep masks
they are to use. Source of each formula: the docstring of the method of the same name in
`mergekit_lite.methods`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Weights = Sequence[float]


def _total(terms: Iterable[Tensor]) -> Tensor:
    first, *rest = terms
    return sum(rest, first)


def linear(tensors: list[Tensor], base: None, *, weight: Weights, normalize: bool = True) -> Tensor:
    """Σ w_i W_i / Σ w_i."""
    total = _total(w * t for w, t in zip(weight, tensors, strict=True))
    if normalize:
        return total / sum(weight)
    return total


def passthrough(
    tensors: list[Tensor], base: None, *, scale: Sequence[float | None] = (None,)
) -> Tensor:
    """The tensor, or its multiple."""
    return tensors[0] * (1.0 if scale[0] is None else scale[0])


def _scaled_sum(changes: list[Tensor], weight: Weights, normalize: bool, lambda_: float) -> Tensor:
    total = _total(w * c for w, c in zip(weight, changes, strict=True))
    if normalize and abs(sum(weight)) >= 1e-8:
        divisor = sum(weight)
    else:
        divisor = 1.0
    return lambda_ * total / divisor


def task_arithmetic(
    tensors: list[Tensor],
    base: Tensor,
    *,
    weight: Weights,
    lambda_: float = 1.0,
    normalize: bool = False,
) -> Tensor:
    """B + λ Σ w_i D_i."""
    return base + _scaled_sum([t - base for t in tensors], weight, normalize, lambda_)


def nearswap(tensors: list[Tensor], base: Tensor, *, t: float) -> Tensor:
    """The mixture w W + (1 - w) B with w = t / |B - W|, at most 1."""
    w = (t / (base - tensors[0]).abs().clamp(min=1e-6)).clamp(0, 1)
    return w * tensors[0] + (1 - w) * base


def _arc(x: Tensor, y: Tensor, t: float, straight_below: float) -> Tensor:
    """Return the point at t on the arc, or on the line where the angle is small.

    Small: its squared sine is below the limit.
    """
    lengths = x.norm() * y.norm()
    if lengths > 0:
        cosine = (x * y).sum() / lengths
    else:
        cosine = torch.zeros_like(lengths)
    if 1 - cosine**2 <= straight_below:
        return (1 - t) * x + t * y
    angle = torch.arccos(cosine)
    return (((1 - t) * angle).sin() * x + (t * angle).sin() * y) / angle.sin()


def slerp(tensors: list[Tensor], base: Tensor, *, t: float) -> Tensor:
    """The point at t on the arc from B to W."""
    return _arc(base, tensors[0], t, 1 - 0.9995**2)


def nuslerp(
    tensors: list[Tensor],
    base: Tensor | None,
    *,
    weight: Weights,
    nuslerp_flatten: bool = True,
    nuslerp_row_wise: bool = False,
) -> Tensor:
    """The arc between the two models or task vectors.

    Whole, or vector by vector along the last or the first dimension.
    """
    x, y = tensors if base is None else [t - base for t in tensors]
    t = 0.5 if abs(sum(weight)) < 1e-6 else weight[1] / sum(weight)
    near = 1e-16
    if nuslerp_flatten:
        merged = _arc(x, y, t, near)
    else:
        x, y = (z.movedim(0, -1) if nuslerp_row_wise else z for z in (x, y))
        pairs = zip(x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]), strict=True)
        merged = torch.stack([_arc(a, b, t, near) for a, b in pairs]).reshape(x.shape)
        merged = merged.movedim(-1, 0) if nuslerp_row_wise else merged
    return merged if base is None else base + merged


def multislerp(
    tensors: list[Tensor],
    base: Tensor | None,
    *,
    weight: Weights,
    normalize_weights: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """Tangent mean of the unit tensors at their weighted mean direction, mapped back and scaled."""
    inputs = tensors if base is None else [t - base for t in tensors]
    if normalize_weights:
        w = [x / sum(weight) for x in weight]
    else:
        w = list(weight)
    units = [x / (x.norm() + eps) for x in inputs]
    mean = _total(a * u for a, u in zip(w, units, strict=True))
    if mean.norm() <= max(eps, 1e-6 * sum(abs(a) for a in w)):
        merged = _total(a * x for a, x in zip(w, inputs, strict=True))
    else:
        mean = mean / mean.norm()
        tangent = _total(a * (u - (u * mean).sum() * mean) for a, u in zip(w, units, strict=True))
        length = tangent.norm()
        if length <= 1e-6:
            point = mean
        else:
            point = mean * length.cos() + tangent / length * length.sin()
        merged = point * sum(a * x.norm() for a, x in zip(w, inputs, strict=True))
    return merged if base is None else base + merged


def karcher(tensors: list[Tensor], base: None, *, max_iter: int = 10, tol: float = 1e-5) -> Tensor:
    """Fixed-point iteration for the mean direction, on whole tensors."""
    present = [t for t in tensors if t.norm() > 0]
    if not present:
        return torch.zeros_like(tensors[0])
    units = [t / t.norm() for t in present]
    mean = _total(units) / len(units)
    if mean.norm() < 1e-6:
        return _total(tensors) / len(tensors)
    mean = mean / mean.norm()
    for _ in range(max_iter):
        pull = torch.zeros_like(mean)
        for u in units:
            cosine = (u * mean).sum().clamp(-1, 1)
            angle = torch.arccos(cosine)
            factor = angle / angle.sin() if angle.sin() > 1e-6 else 1.0
            pull = pull + factor * (u - cosine * mean) / len(units)
        length = pull.norm()
        if length < tol:
            break
        mean = mean * length.cos() + pull / length * length.sin()
        mean = mean / mean.norm()
    return mean * sum(t.norm() for t in tensors) / len(tensors)


def model_stock(tensors: list[Tensor], base: Tensor, *, filter_wise: bool = False) -> Tensor:
    """Interpolation towards the mean by the angle between task vectors."""
    if filter_wise and base.dim() > 1:
        rows = zip(base, *tensors, strict=True)
        return torch.stack([model_stock(list(row[1:]), row[0], filter_wise=True) for row in rows])
    changes = [t - base for t in tensors]
    count = len(tensors)
    cosines = []
    for i in range(count):
        for j in range(i):
            lengths = changes[i].norm() * changes[j].norm()
            dot = (changes[i] * changes[j]).sum()
            cosines.append(dot / lengths if lengths > 0 else torch.zeros_like(dot))
    cosine = _total(cosines) / len(cosines)
    below = 1 + (count - 1) * cosine
    if below.abs() < 1e-6:
        t = torch.zeros_like(cosine)
    else:
        t = count * cosine / below
    return t * _total(tensors) / count + (1 - t) * base


def keep_largest(change: Tensor, count: int) -> Tensor:
    """The change with all but its ``count`` largest magnitudes set to 0.

    Ties go to the lowest index.
    """
    order = change.detach().abs().flatten().sort(descending=True, stable=True).indices
    mask = torch.zeros(change.numel(), dtype=change.dtype)
    mask[order[:count]] = 1
    return change * mask.view(change.shape)


def _consensus(changes: list[Tensor], weight: Weights, normalize: bool) -> Tensor:
    weighted = torch.stack([w * c for w, c in zip(weight, changes, strict=True)])
    elected = torch.where(weighted.sum(0) >= 0, 1.0, -1.0).to(weighted.dtype)
    agrees = (weighted.sign() == elected).to(weighted.dtype)
    merged = (weighted * agrees).sum(0)
    if not normalize:
        return merged
    weights = torch.tensor(list(weight), dtype=weighted.dtype).view(-1, *[1] * (weighted.dim() - 1))
    share = (agrees * weights).sum(0)
    return merged / torch.where(share.abs() < 1e-8, 1.0, share)


def _rescaled(
    changes: list[Tensor], trimmed: list[Tensor], density: Weights, rescale: bool
) -> list[Tensor]:
    """What is left of the changes, with their L1 norms where these are wanted back."""
    if not rescale or min(density) >= 1:
        return trimmed
    pairs = zip(changes, trimmed, strict=True)
    return [t * (c.abs().sum() / t.abs().sum()) if t.abs().sum() > 0 else t for c, t in pairs]


def ties(
    tensors: list[Tensor],
    base: Tensor,
    *,
    weight: Weights,
    density: Weights,
    normalize: bool = True,
    rescale: bool = False,
    lambda_: float = 1.0,
) -> Tensor:
    """Trim, elect, average."""
    changes = [t - base for t in tensors]
    trimmed = [
        keep_largest(c, max(1, int(d * c.numel()))) for c, d in zip(changes, density, strict=True)
    ]
    return base + lambda_ * _consensus(
        _rescaled(changes, trimmed, density, rescale), weight, normalize
    )


def _middle(change: Tensor, density: float, gamma: float) -> Tensor:
    count = change.numel()
    trimmed = int(density * count)
    top = min(int(gamma * count), count - trimmed)
    return keep_largest(change, top + trimmed) - keep_largest(change, top)


def _crumbs(
    tensors: list[Tensor], base: Tensor, density: Weights, gamma: Weights, rescale: bool
) -> list[Tensor]:
    changes = [t - base for t in tensors]
    trimmed = [_middle(c, d, g) for c, d, g in zip(changes, density, gamma, strict=True)]
    return _rescaled(changes, trimmed, density, rescale)


def breadcrumbs(
    tensors: list[Tensor],
    base: Tensor,
    *,
    weight: Weights,
    density: Weights,
    gamma: Weights,
    normalize: bool = False,
    rescale: bool = False,
    lambda_: float = 1.0,
) -> Tensor:
    """Drop the largest and the smallest, then task arithmetic."""
    trimmed = _crumbs(tensors, base, density, gamma, rescale)
    return base + _scaled_sum(trimmed, weight, normalize, lambda_)


def breadcrumbs_ties(
    tensors: list[Tensor],
    base: Tensor,
    *,
    weight: Weights,
    density: Weights,
    gamma: Weights,
    normalize: bool = False,
    rescale: bool = False,
    lambda_: float = 1.0,
) -> Tensor:
    """Drop the largest and the smallest, then elect."""
    return base + lambda_ * _consensus(
        _crumbs(tensors, base, density, gamma, rescale), weight, normalize
    )


def sce(tensors: list[Tensor], base: Tensor, *, select_topk: float = 1.0) -> Tensor:
    """Select by variance, calculate weights by energy, erase minority signs."""
    changes = torch.stack([t - base for t in tensors])
    if select_topk < 1:
        variance = changes.detach().var(0, correction=0)
        count = int(select_topk * int((variance != 0).sum()))
        order = variance.flatten().sort(descending=True, stable=True).indices
        mask = torch.zeros(variance.numel(), dtype=changes.dtype)
        mask[order[:count]] = 1
        changes = changes * mask.view(variance.shape)
    energy = changes.square().flatten(1).sum(1)
    if energy.sum() > 0:
        weights = energy / energy.sum()
    else:
        weights = torch.full_like(energy, 1 / len(tensors))
    elected = torch.where(changes.sum(0) >= 0, 1.0, -1.0).to(changes.dtype)
    agrees = (changes.sign() == elected).to(changes.dtype) * weights.view(-1, *[1] * base.dim())
    return base + (changes * agrees).sum(0) / agrees.sum(0).clamp(min=1e-6)


def _dropped(
    tensors: list[Tensor], base: Tensor, density: Weights, rescale: bool, keep: Sequence[Tensor]
) -> list[Tensor]:
    changes = [t - base for t in tensors]
    trimmed = [c * k.to(c.dtype) for c, k in zip(changes, keep, strict=True)]
    return _rescaled(changes, trimmed, density, rescale)


def dare_linear(
    tensors: list[Tensor],
    base: Tensor,
    *,
    keep: Sequence[Tensor],
    weight: Weights,
    density: Weights,
    normalize: bool = False,
    rescale: bool = True,
    lambda_: float = 1.0,
) -> Tensor:
    """Drop by the given masks, restore the L1 norm, task arithmetic."""
    trimmed = _dropped(tensors, base, density, rescale, keep)
    return base + _scaled_sum(trimmed, weight, normalize, lambda_)


def dare_ties(
    tensors: list[Tensor],
    base: Tensor,
    *,
    keep: Sequence[Tensor],
    weight: Weights,
    density: Weights,
    normalize: bool = False,
    rescale: bool = True,
    lambda_: float = 1.0,
) -> Tensor:
    """Drop by the given masks, restore the L1 norm, elect."""
    return base + lambda_ * _consensus(
        _dropped(tensors, base, density, rescale, keep), weight, normalize
    )


# DELLA differs from DARE in how the masks are drawn; given the masks, the arithmetic is the same.
della_linear = dare_linear
della = functools.partial(dare_ties, normalize=True)


def keep_probabilities(change: Tensor, density: float, epsilon: float) -> Tensor:
    """Row by row, from density - ε for the smallest magnitude to density + ε for the largest."""
    rows = []
    for row in change:
        magnitudes = row.abs().tolist()
        places = range(row.numel())
        ranked = sorted(places, key=lambda i, m=magnitudes: (m[i], i))
        rank = {place: r for r, place in enumerate(ranked)}
        last = max(1, row.numel() - 1)
        rows.append([density - epsilon + 2 * epsilon * rank[i] / last for i in places])
    return torch.tensor(rows, dtype=change.dtype)


def arcee_fusion(tensors: list[Tensor], base: Tensor) -> Tensor:
    """Take the model where importance is an outlier."""
    model = tensors[0]
    w, b = (t.detach().reshape(-1, t.shape[-1]) for t in (model, base))
    p = w.softmax(-1)
    q = b.softmax(-1)
    importance = (w - b).abs() * (p * (p.log() - q.log())).sum(-1, keepdim=True).clamp(min=0)
    ordered = importance.flatten().sort().values
    low, median, high = (ordered[int(share * (ordered.numel() - 1))] for share in (0.25, 0.5, 0.75))
    return torch.where((importance >= median + 1.5 * (high - low)).view(base.shape), model, base)


def ram(tensors: list[Tensor], base: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Mean over the models that are active at an element."""
    changes = torch.stack([t - base for t in tensors])
    active = changes.abs() > epsilon
    return base + (changes * active).sum(0) / active.sum(0).clamp(min=1)


def ramplus_tl(
    tensors: list[Tensor],
    base: Tensor,
    *,
    r: float = 0.1,
    alpha: float = 0.2,
    epsilon: float = 1e-5,
) -> Tensor:
    """`ram`, unique changes strengthened."""
    changes = torch.stack([t - base for t in tensors])
    active = changes.abs() > epsilon
    count = active.sum(0)
    scaled = []
    for change, on in zip(changes, active, strict=True):
        shared = int((on & (count > 1)).sum())
        unique = int((on & (count == 1)).sum())
        scale = 1 + r * min(max(shared / unique if unique else 0.0, 0.0), alpha)
        scaled.append(change * on * torch.where(count == 1, scale, 1.0).to(change.dtype))
    return base + torch.stack(scaled).sum(0) / count.clamp(min=1)


def _mean_change(tensors: list[Tensor], base: Tensor, weight: Weights, alpha: float) -> Tensor:
    return base + alpha * sum(w * (t - base) for w, t in zip(weight, tensors, strict=True)) / len(
        tensors
    )


def _procrustes(matrix: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


def tsv(tensors: list[Tensor], base: Tensor, *, weight: Weights, alpha: float = 1.0) -> Tensor:
    """Concatenate the top singular triples and make them orthogonal."""
    if base.dim() != 2:
        return _mean_change(tensors, base, weight, alpha)
    keep = max(1, min(base.shape) // len(tensors))
    us = []
    ss = []
    vs = []
    for w, t in zip(weight, tensors, strict=True):
        u, s, v = torch.linalg.svd(w * (t - base), full_matrices=False)
        us.append(u[:, :keep])
        ss.append(s[:keep])
        vs.append(v[:keep])
    u = _procrustes(torch.cat(us, 1))
    v = _procrustes(torch.cat(vs, 0))
    return base + alpha * u @ torch.diag(torch.cat(ss)) @ v


def iso_c(tensors: list[Tensor], base: Tensor, *, weight: Weights, alpha: float = 1.0) -> Tensor:
    """Flatten the spectrum of the summed change."""
    if base.dim() != 2:
        return _mean_change(tensors, base, weight, alpha)
    u, s, v = torch.linalg.svd(
        sum(w * (t - base) for w, t in zip(weight, tensors, strict=True)), full_matrices=False
    )
    return base + alpha * u @ torch.diag(s.mean().expand_as(s)) @ v
