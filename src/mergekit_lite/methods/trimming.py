"""Methods that keep the largest (or middling) changes, and sign consensus.

They are ties, breadcrumbs, breadcrumbs_ties and sce.

Trimming keeps exactly k elements; equal magnitudes at the threshold are kept lowest index first.
``scope="tensor"`` ranks each tensor on its own; ``"global"`` ranks a model's whole task vector, as
the TIES paper does.

Notation: D_i = W_i - B, d the density, N elements of a tensor, λ the overall scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._torch import Tensor, torch
from .averaging import deltas, normaliser, weighted_sum
from .parameters import Bound, PerModel, Range
from .registry import merge_method
from .selection import Asking, Cut, Largest, Sum

SCOPES = {"scope": ("tensor", "global")}
UNIT = Range(0, 1, open_low=True)


def consensus_mean(changes: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    """Weighted sum of the changes that agree with the sign of the weighted total.

    Divided by the agreeing weights.

    A total of 0 counts as positive. Where nothing agrees the result is 0.
    Source: TIES-Merging (Yadav et al., arXiv 2306.01708), elect and disjoint mean.

    >>> consensus_mean(
    ...     [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 1.0])], [1.0, 1.0], normalize=True
    ... )
    tensor([ 2., -2.])
    """
    weighted = [change * weight for change, weight in zip(changes, weights, strict=True)]
    # Adding 0.0 turns -0.0 into 0.0. Products, relu and sign run several times faster than boolean
    # masks on CPU.
    elected = torch.copysign(
        torch.ones((), dtype=weighted[0].dtype), sum(weighted[1:], weighted[0] + 0.0)
    )
    agreeing = [torch.relu(elected * w + 0.0) for w in weighted]
    merged = sum(agreeing[1:], agreeing[0]) * elected
    if not normalize:
        return merged
    share = weighted_sum([torch.sign(a.detach()) for a in agreeing], weights)
    if min(weights) > 0:
        return merged / share.clamp_(min=min(weights))
    return merged / torch.where(share.abs() < 1e-8, 1.0, share)


def l1(x: Tensor) -> Tensor:
    """The L1 norm, in float64."""
    return x.abs().sum(dtype=torch.float64)


def rescaled(changes: list[Tensor], remaining: list[Tensor]) -> Asking[list[Tensor]]:
    """Return the kept changes, each model's scaled to the L1 norm that it had over the tensor."""
    pairs = list(zip(changes, remaining, strict=True))
    norms = yield Sum(lambda: torch.stack([torch.stack([l1(c), l1(k)]) for c, k in pairs]))
    scales = torch.where(norms[:, 1] > 0, norms[:, 0] / norms[:, 1].clamp(min=1e-300), 1.0)
    return [k * s.to(k.dtype) for k, s in zip(remaining, scales, strict=True)]


def largest_magnitudes(
    changes: list[Tensor], counts: Sequence[Callable[[int], int]], scope: str
) -> Asking[list[Cut]]:
    """For each model, the cut that keeps its ``counts[i](N)`` largest changes."""
    return (
        yield [
            Largest(lambda change=change: change.abs(), count, scope)
            for change, count in zip(changes, counts, strict=True)
        ]
    )


def trimmed_count(n: int, density: float) -> int:
    """Return how many of ``n`` changes `ties` keeps."""
    return max(1, int(density * n)) if n else 0


def middle_counts(density: Sequence[float], gamma: Sequence[float]) -> list[Callable[[int], int]]:
    """Return for each model how many changes are left without the smallest.

    Then for each how many of those are outliers.
    """

    def outer(n: int, d: float, g: float) -> int:
        return min(n, int(d * n) + int(g * n))

    def inner(n: int, d: float, g: float) -> int:
        return outer(n, d, g) - int(d * n)

    pairs = list(zip(density, gamma, strict=True))
    return [lambda n, p=p: outer(n, *p) for p in pairs] + [
        lambda n, p=p: inner(n, *p) for p in pairs
    ]


def trimming_passes(parameters: Bound) -> int:
    """Return the reads of a method that trims.

    One for thresholds, one for the norms that are restored, one for the result.
    """
    if min(parameters["density"]) >= 1:
        return 1
    return 2 + parameters["rescale"]


@merge_method(
    "ties",
    base="required",
    chunking="elements",
    ranges={"density": UNIT},
    choices=SCOPES,
    passes=trimming_passes,
)
def ties(
    tensors: list[Tensor],
    base: Tensor,
    *,
    weight: PerModel,
    density: PerModel = 1.0,
    normalize: bool = True,
    rescale: bool = False,
    lambda_: float = 1.0,
    scope: str = "tensor",
) -> Asking[Tensor]:
    """Trim each task vector to its largest d·N changes, elect a sign, average what agrees.

    B + λ mean.

    k = max(1, ⌊d·N⌋) for each tensor, or over all tensors with ``scope="global"``. ``rescale``
    restores each trimmed vector's L1 norm.
    Source: TIES-Merging (Yadav et al., arXiv 2306.01708).

    >>> ties(
    ...     [torch.tensor([3.0, 0.1]), torch.tensor([1.0, -2.0])],
    ...     torch.zeros(2),
    ...     weight=1.0,
    ...     density=0.5,
    ... )
    tensor([ 3., -2.])
    """
    changes = deltas(tensors, base)
    if min(density) < 1:
        counts = [lambda n, d=d: trimmed_count(n, d) for d in density]
        cuts = yield from largest_magnitudes(changes, counts, scope)
        remaining = [cut.trim(change) for cut, change in zip(cuts, changes, strict=True)]
        if rescale:
            changes = yield from rescaled(changes, remaining)
        else:
            changes = remaining
    return base + lambda_ * consensus_mean(changes, weight, normalize)


def _without_outliers(
    changes: list[Tensor],
    density: Sequence[float],
    gamma: Sequence[float],
    rescale: bool,
    scope: str,
) -> Asking[list[Tensor]]:
    """Drop the ⌊γN⌋ largest changes of each model and then the smallest until ⌊dN⌋ are left."""
    if min(density) >= 1:
        return changes
    cuts = yield from largest_magnitudes(changes + changes, middle_counts(density, gamma), scope)
    # The largest are a subset of the larger set kept, so subtracting them leaves exact values or
    # exact zeros.
    remaining = [
        wide.trim(c) - top.trim(c)
        for c, wide, top in zip(changes, cuts, cuts[len(changes) :], strict=False)
    ]
    if rescale:
        return (yield from rescaled(changes, remaining))
    return remaining


_CRUMBS: dict[str, Any] = {
    "base": "required",
    "chunking": "elements",
    "ranges": {"density": UNIT, "gamma": Range(0, 1, open_high=True)},
    "choices": SCOPES,
    "passes": trimming_passes,
}


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
    scope: str = "tensor",
) -> Asking[Tensor]:
    """Task arithmetic after dropping each vector's largest and smallest changes.

    ⌊γN⌋ of the largest go; ⌊dN⌋ stay.

    When d + γ > 1 fewer of the largest are dropped, so that density has its way.
    Source: Model breadcrumbs (Davari and Belilovsky, arXiv 2312.06795).

    >>> w = torch.tensor([9.0, 1.0, 2.0, 0.1])
    >>> breadcrumbs([w], torch.zeros(4), weight=1.0, density=0.5, gamma=0.25)
    tensor([0., 1., 2., 0.])
    """
    remaining = yield from _without_outliers(deltas(tensors, base), density, gamma, rescale, scope)
    return base + weighted_sum(remaining, weight) * (lambda_ / normaliser(weight, normalize))


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
    scope: str = "tensor",
) -> Asking[Tensor]:
    """`breadcrumbs` trimming followed by the sign election of `ties`.

    Source: Model breadcrumbs (arXiv 2312.06795) and TIES-Merging (arXiv 2306.01708).

    >>> w = torch.tensor([9.0, 1.0, 2.0, 0.1])
    >>> breadcrumbs_ties([w, -w / 2], torch.zeros(4), weight=1.0, density=0.5, gamma=0.25)
    tensor([0., 1., 2., 0.])
    """
    remaining = yield from _without_outliers(deltas(tensors, base), density, gamma, rescale, scope)
    return base + lambda_ * consensus_mean(remaining, weight, normalize)


@merge_method(
    "sce",
    base="required",
    chunking="elements",
    ranges={"select_topk": Range(0, 1)},
    passes=lambda parameters: 4 if parameters["select_topk"] < 1 else 2,
)
def sce(tensors: list[Tensor], base: Tensor, *, select_topk: float = 1.0) -> Asking[Tensor]:
    """Select the positions of largest variance over models, weigh by energy, erase minority signs.

    Kept: the ⌊select_topk · m⌋ positions of largest population variance among the m where it is not
    0. Model weights: mean D_i² over kept positions, normalised. Then a weighted mean over the
       models whose sign agrees with
    that of Σ D_i.
    Source: FuseChat (Wan et al., arXiv 2408.07990).

    >>> sce([torch.tensor([2.0, -1.0]), torch.tensor([4.0, 1.0])], torch.zeros(2))
    tensor([3.5455, 1.0000])
    """
    changes = deltas(tensors, base)
    if select_topk < 1:

        def variance() -> Tensor:
            mean = sum(changes[1:], changes[0]) / len(changes)
            squares = [(change - mean).square() for change in changes]
            return sum(squares[1:], squares[0]) / len(changes)

        varied = yield Sum(lambda: torch.count_nonzero(variance()))
        cut = yield Largest(variance, lambda n: int(select_topk * int(varied)))
        keep = cut.mask(variance().detach()).to(base.dtype)
        changes = [change * keep for change in changes]
    energy = yield Sum(lambda: torch.stack([change.double().square().sum() for change in changes]))
    total = energy.sum()
    if total > 0:
        weights = energy / total
    else:
        weights = torch.full_like(energy, 1 / len(changes))
    elected = torch.copysign(torch.ones((), dtype=base.dtype), sum(changes[1:], changes[0] + 0.0))
    agrees = [
        (change * elected > 0).to(base.dtype) * w.to(base.dtype)
        for change, w in zip(changes, weights, strict=True)
    ]
    share = sum(agrees[1:], agrees[0])
    merged = sum(
        (c * a for c, a in zip(changes[1:], agrees[1:], strict=True)), changes[0] * agrees[0]
    )
    return base + merged / share.clamp(min=1e-6)
