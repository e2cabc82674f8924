"""Methods that drop changes at random: dare_linear, dare_ties, della, della_linear.

Random numbers are hashes of counters (`methods.noise`), with a key of seed, tensor name and model
index. So a result does not depend on the order of computation, threads, device or other tensors.
``density=1`` keeps every change, without random numbers.

Notation: D_i = W_i - B, λ the overall scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._torch import Tensor, torch
from .averaging import deltas, normalizer, rows_of, weighted_sum
from .compiled import compiled, compiled_by_rows
from .noise import Noise
from .parameters import Bound, PerModel, Range
from .registry import merge_method
from .trimming import UNIT, consensus_mean, rescaled


def _dropped(
    tensors: list[Tensor], base: Tensor, density: Sequence[float], rescale: bool, noise: Noise
) -> list[Tensor]:
    """Return the task vectors with elements dropped at random."""
    if min(density) >= 1:
        return deltas(tensors, base)
    remaining = []
    for i, tensor in enumerate(tensors):
        change = tensor - base
        kept = change * noise.keep(i, change, density[i])
        remaining.append(rescaled(change, kept) if rescale else kept)
    return remaining


_DARE: dict[str, Any] = {"base": "required", "ranges": {"density": UNIT}}


@compiled
@merge_method("dare_linear", **_DARE)
def dare_linear(
    tensors: list[Tensor],
    base: Tensor,
    *,
    noise: Noise,
    weight: PerModel,
    density: PerModel = 1.0,
    normalize: bool = False,
    rescale: bool = True,
    lambda_: float = 1.0,
) -> Tensor:
    """Keep each change with probability ``density``, then apply task arithmetic.

    ``rescale`` scales the kept changes to the L1 norm of all changes.

    Source: DARE (Yu et al., arXiv 2311.03099), with the L1 rescaling that mergekit made the
    default.

    >>> dare_linear([torch.tensor([3.0])], torch.tensor([1.0]), weight=0.5)
    tensor([2.])
    """
    remaining = _dropped(tensors, base, density, rescale, noise)
    return base + weighted_sum(remaining, weight) * (lambda_ / normalizer(weight, normalize))


@compiled
@merge_method("dare_ties", **_DARE)
def dare_ties(
    tensors: list[Tensor],
    base: Tensor,
    *,
    noise: Noise,
    weight: PerModel,
    density: PerModel = 1.0,
    normalize: bool = False,
    rescale: bool = True,
    lambda_: float = 1.0,
) -> Tensor:
    """Drop changes as in `dare_linear`, then elect signs as in `ties`.

    Source: DARE (arXiv 2311.03099) and TIES-Merging (arXiv 2306.01708).

    >>> dare_ties([torch.tensor([3.0]), torch.tensor([0.0])], torch.tensor([1.0]), weight=1.0)
    tensor([3.])
    """
    remaining = _dropped(tensors, base, density, rescale, noise)
    return base + lambda_ * consensus_mean(remaining, weight, normalize)


def keep_probabilities(change: Tensor, density: float, epsilon: float) -> Tensor:
    """Return the probability of keeping each element.

    It rises from density - ε for the smallest magnitude of a row to density + ε for the largest.

    Args:
        change: The rows (R, C) of a task vector. Equal magnitudes are ranked by index.
        density: The mean probability.
        epsilon: Half the difference between the largest and the smallest probability.
    """
    columns = change.shape[-1]
    # with an unstable sort, ranks of equal magnitudes would depend on the device
    order = change.detach().abs().argsort(dim=-1, stable=True)
    # avoid 0 / 0 in rows of one element
    steps = torch.arange(columns, dtype=change.dtype, device=change.device) / max(1, columns - 1)
    ranks = torch.empty_like(change).scatter_(-1, order, steps.expand_as(change))
    return (density - epsilon) + ranks * (2 * epsilon)


def _sampled_by_magnitude(
    tensors: list[Tensor],
    base: Tensor,
    density: Sequence[float],
    epsilon: Sequence[float],
    rescale: bool,
    noise: Noise,
) -> list[Tensor]:
    """Return the task vectors with elements dropped at random, smaller ones more often."""
    if min(density) >= 1:
        return deltas(tensors, base)
    remaining = []
    for i, tensor in enumerate(tensors):
        change = tensor - base
        kept = change
        # density 1 keeps all elements, but with epsilon some of the smallest would be dropped
        if density[i] < 1:
            chances = keep_probabilities(rows_of(change), density[i], epsilon[i])
            kept = change * noise.keep_each(i, chances).view(change.shape)
        remaining.append(rescaled(change, kept) if rescale else kept)
    return remaining


def _check_spread(parameters: Bound) -> None:
    for density, epsilon in zip(parameters["density"], parameters["epsilon"], strict=True):
        # the same rule as in mergekit; density 1 keeps all elements, so epsilon has no effect
        if density < 1 and not (density - epsilon > 0 and density + epsilon < 1):
            raise ValueError(
                f"della: density {density:g} with epsilon {epsilon:g} gives probabilities from "
                f"{density - epsilon:g} to {density + epsilon:g}, expected 0 < density - epsilon "
                "and density + epsilon < 1"
            )


_DELLA: dict[str, Any] = {
    "base": "required",
    "ranges": {"density": UNIT, "epsilon": Range(0, 1)},
    "validate": _check_spread,
}


@compiled_by_rows
@merge_method("della", **_DELLA)
def della(
    tensors: list[Tensor],
    base: Tensor,
    *,
    noise: Noise,
    weight: PerModel,
    density: PerModel = 1.0,
    epsilon: PerModel = 0.15,
    normalize: bool = True,
    rescale: bool = True,
    lambda_: float = 1.0,
) -> Tensor:
    """Drop changes at random, small ones more often, then elect signs as in `ties`.

    The probability of keeping a change rises with its rank in the row, from density - ε for the
    smallest magnitude to density + ε for the largest.
    Source: DELLA-Merging (Deep et al., arXiv 2406.11617).

    >>> della([torch.tensor([[3.0, 1.0]])], torch.zeros(1, 2), weight=1.0)
    tensor([[3., 1.]])
    """
    remaining = _sampled_by_magnitude(tensors, base, density, epsilon, rescale, noise)
    return base + lambda_ * consensus_mean(remaining, weight, normalize)


@compiled_by_rows
@merge_method("della_linear", **_DELLA)
def della_linear(
    tensors: list[Tensor],
    base: Tensor,
    *,
    noise: Noise,
    weight: PerModel,
    density: PerModel = 1.0,
    epsilon: PerModel = 0.15,
    normalize: bool = False,
    rescale: bool = True,
    lambda_: float = 1.0,
) -> Tensor:
    """Drop changes as in `della`, then apply task arithmetic.

    Source: DELLA-Merging (arXiv 2406.11617).

    >>> della_linear([torch.tensor([[3.0, 1.0]])], torch.zeros(1, 2), weight=0.5)
    tensor([[1.5000, 0.5000]])
    """
    remaining = _sampled_by_magnitude(tensors, base, density, epsilon, rescale, noise)
    return base + weighted_sum(remaining, weight) * (lambda_ / normalizer(weight, normalize))
