"""Methods that trim changes (ties, breadcrumbs, breadcrumbs_ties, sce), and sign consensus.

Trimming keeps exactly k elements. Among magnitudes equal to the threshold, those with the lowest
indices are kept.

Notation: D_i = W_i - B, d the density, N elements of a tensor, λ the overall scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._torch import Tensor, torch
from .averaging import deltas, normalizer, sum_of_products, weighted_sum
from .compiled import compiled
from .parameters import PerModel, Range
from .registry import merge_method

UNIT = Range(0, 1, open_low=True)


def order_statistics(scores: Tensor, places: Sequence[int]) -> list[float]:
    """Return the values at some indices of the sorted scores.

    Raises:
        ValueError: A score is NaN.
    """
    flat = scores.detach().flatten()
    if bool(flat.isnan().any()):
        raise ValueError("selecting the largest elements: expected numbers, got NaN")
    if flat.device.type == "cpu":  # numpy's selection takes half of torch's time
        ordered = np.partition(flat.numpy(), places)
        return [float(ordered[place]) for place in places]
    return [float(flat.kthvalue(place + 1).values) for place in places]


def largest(scores: Tensor, k: int) -> Tensor:
    """Return a mask of the k largest scores; among equal scores, the first are chosen.

    >>> largest(torch.tensor([2.0, 1.0, 3.0, 2.0]), 2)
    tensor([ True, False,  True, False])
    """
    count = scores.numel()
    if k <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    (threshold,) = order_statistics(scores, [max(0, count - k)])
    chosen = (scores > threshold).flatten()
    equal = (scores == threshold).flatten().nonzero().flatten()
    chosen[equal[: k - int(chosen.sum())]] = True
    return chosen.view(scores.shape)


def trim(change: Tensor, k: int) -> Tensor:
    """Return a change with all but its k largest elements set to 0."""
    return torch.where(largest(change.detach().abs(), k), change, 0.0)


def consensus_mean(changes: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    """Return the weighted sum of the changes that agree with the sign of the weighted total.

    If ``normalize``, the sum is divided by the sum of the agreeing changes' weights. A total of 0
    counts as positive. Where no change agrees, the result is 0.
    Source: TIES-Merging (Yadav et al., arXiv 2306.01708), elect and disjoint mean.

    >>> consensus_mean(
    ...     [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 1.0])], [1.0, 1.0], normalize=True
    ... )
    tensor([ 2., -2.])
    """
    pairs = list(zip(changes, weights, strict=True))
    # One change at a time, so that few temporaries are in memory. Starting from 0.0 turns -0.0 into
    # 0.0. Products, relu and sign run several times faster than boolean masks on CPU.
    total = torch.zeros_like(changes[0])
    for change, weight in pairs:
        total = total + change * weight
    elected = torch.copysign(torch.ones((), dtype=total.dtype, device=total.device), total)
    merged = torch.zeros_like(total)
    share = torch.zeros_like(total)
    for change, weight in pairs:
        agreeing = torch.relu(elected * (change * weight) + 0.0)
        merged = merged + agreeing
        if normalize:
            share += torch.sign(agreeing.detach()) * weight
    merged = merged * elected
    if not normalize:
        return merged
    # the divisor is 0 where no change agrees, or where weights of both signs cancel
    return merged / torch.where(share.abs() < 1e-8, 1.0, share)


def l1(x: Tensor) -> Tensor:
    """Return the L1 norm, in float64."""
    return x.abs().sum(dtype=torch.float64)


def rescaled(change: Tensor, kept: Tensor) -> Tensor:
    """Return the kept elements of a change, scaled to the L1 norm of the whole change."""
    norm = l1(kept)
    # the norm is 0 if all elements were dropped; `where` computes both branches, and 0 / 0 in the
    # branch that is not used would make the gradient NaN
    scale = torch.where(norm > 0, l1(change) / norm.clamp(min=1e-300), 1.0)
    return kept * scale.to(kept.dtype)


def trimmed_count(n: int, density: float) -> int:
    """Return how many of ``n`` changes `ties` keeps."""
    return max(1, int(density * n)) if n else 0


def middle_counts(n: int, density: float, gamma: float) -> tuple[int, int]:
    """Return how many of the largest of ``n`` changes to select, and how many of these to drop.

    The second number counts outliers, which are the very largest of the selected changes.
    """
    kept = int(density * n)
    outer = min(n, kept + int(gamma * n))
    return outer, outer - kept


@compiled
@merge_method("ties", base="required", ranges={"density": UNIT})
def ties(
    tensors: list[Tensor],
    base: Tensor,
    *,
    weight: PerModel,
    density: PerModel = 1.0,
    normalize: bool = True,
    rescale: bool = False,
    lambda_: float = 1.0,
) -> Tensor:
    """Trim each task vector to its k largest changes, elect signs, and average agreeing changes.

    The result is B + λ times the average, with k = max(1, ⌊d·N⌋). ``rescale`` scales each trimmed
    task vector to its L1 norm before the trimming.
    Source: TIES-Merging (Yadav et al., arXiv 2306.01708).

    >>> ties(
    ...     [torch.tensor([3.0, 0.1]), torch.tensor([1.0, -2.0])],
    ...     torch.zeros(2),
    ...     weight=1.0,
    ...     density=0.5,
    ... )
    tensor([ 3., -2.])
    """
    if min(density) >= 1:
        return base + lambda_ * consensus_mean(deltas(tensors, base), weight, normalize)
    remaining = []
    for tensor, d in zip(tensors, density, strict=True):
        change = tensor - base
        kept = trim(change, trimmed_count(change.numel(), d))
        remaining.append(rescaled(change, kept) if rescale else kept)
    return base + lambda_ * consensus_mean(remaining, weight, normalize)


def _without_outliers(
    tensors: list[Tensor],
    base: Tensor,
    density: Sequence[float],
    gamma: Sequence[float],
    rescale: bool,
) -> list[Tensor]:
    """Return the task vectors without their largest and smallest changes, as in `breadcrumbs`."""
    if min(density) >= 1:
        return deltas(tensors, base)
    remaining = []
    for tensor, d, g in zip(tensors, density, gamma, strict=True):
        change = tensor - base
        outer, outliers = middle_counts(change.numel(), d, g)
        # all outliers are among the `outer` largest, so the difference is exactly the value or 0
        kept = trim(change, outer) - trim(change, outliers)
        remaining.append(rescaled(change, kept) if rescale else kept)
    return remaining


_CRUMBS: dict[str, Any] = {
    "base": "required",
    "ranges": {"density": UNIT, "gamma": Range(0, 1, open_high=True)},
}


@compiled
@merge_method("breadcrumbs", **_CRUMBS)
def breadcrumbs(
    tensors: list[Tensor],
    base: Tensor,
    *,
    weight: PerModel,
    density: PerModel = 1.0,
    gamma: PerModel = 0.01,
    normalize: bool = False,
    rescale: bool = False,
    lambda_: float = 1.0,
) -> Tensor:
    """Drop each task vector's largest and smallest changes, then apply task arithmetic.

    The ⌊γN⌋ largest changes are dropped, then the smallest ones until ⌊dN⌋ are left. If d + γ > 1,
    fewer of the largest changes are dropped, so that ⌊dN⌋ are left.
    Source: Model breadcrumbs (Davari and Belilovsky, arXiv 2312.06795).

    >>> w = torch.tensor([9.0, 1.0, 2.0, 0.1])
    >>> breadcrumbs([w], torch.zeros(4), weight=1.0, density=0.5, gamma=0.25)
    tensor([0., 1., 2., 0.])
    """
    remaining = _without_outliers(tensors, base, density, gamma, rescale)
    return base + weighted_sum(remaining, weight) * (lambda_ / normalizer(weight, normalize))


@compiled
@merge_method("breadcrumbs_ties", **_CRUMBS)
def breadcrumbs_ties(
    tensors: list[Tensor],
    base: Tensor,
    *,
    weight: PerModel,
    density: PerModel = 1.0,
    gamma: PerModel = 0.01,
    normalize: bool = False,
    rescale: bool = False,
    lambda_: float = 1.0,
) -> Tensor:
    """Drop changes as in `breadcrumbs`, then elect signs as in `ties`.

    Source: Model breadcrumbs (arXiv 2312.06795) and TIES-Merging (arXiv 2306.01708).

    >>> w = torch.tensor([9.0, 1.0, 2.0, 0.1])
    >>> breadcrumbs_ties([w, -w / 2], torch.zeros(4), weight=1.0, density=0.5, gamma=0.25)
    tensor([0., 1., 2., 0.])
    """
    remaining = _without_outliers(tensors, base, density, gamma, rescale)
    return base + lambda_ * consensus_mean(remaining, weight, normalize)


@compiled
@merge_method("sce", base="required", ranges={"select_topk": Range(0, 1)})
def sce(tensors: list[Tensor], base: Tensor, *, select_topk: float = 1.0) -> Tensor:
    """Select positions by variance, weight models by energy, and erase minority signs.

    If ``select_topk`` is below 1, only the ⌊select_topk · m⌋ positions with the largest population
    variance over models are kept, where m is the number of positions with a variance above 0. A
    model's weight is its mean D_i² over kept positions, divided by the sum over models. At each
    kept position, the weighted mean of the D_i whose sign agrees with that of Σ D_i is added to B.
    Source: FuseChat (Wan et al., arXiv 2408.07990).

    >>> sce([torch.tensor([2.0, -1.0]), torch.tensor([4.0, 1.0])], torch.zeros(2))
    tensor([3.5455, 1.0000])
    """
    changes = deltas(tensors, base)
    if select_topk < 1:
        mean = sum(changes[1:], changes[0]) / len(changes)
        squares = [(change - mean).square() for change in changes]
        # the choice of positions is not differentiable
        variance = sum(squares[1:], squares[0]).detach() / len(changes)
        keep = largest(variance, int(select_topk * int(torch.count_nonzero(variance))))
        changes = [change * keep for change in changes]
    # in float64, in which squares of tiny changes do not underflow
    energy = torch.stack([change.double().square().sum() for change in changes])
    total = energy.sum()
    if total > 0:
        weights = energy / total
    else:
        weights = torch.full_like(energy, 1 / len(changes))
    elected = torch.copysign(torch.ones((), dtype=base.dtype), sum(changes[1:], changes[0] + 0.0))
    shares = []
    for change, weight in zip(changes, weights, strict=True):
        shares.append((change * elected > 0).to(base.dtype) * weight.to(base.dtype))
    total_share = sum(shares[1:], shares[0])
    return base + sum_of_products(changes, shares) / total_share.clamp(min=1e-6)
