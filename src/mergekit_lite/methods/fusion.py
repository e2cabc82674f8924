"""Methods that select changes element by element: arcee_fusion, ram, ramplus_tl.

Notation: D_i = W_i - B; a model is active where |D_i| > ε.
"""

from __future__ import annotations

import numpy as np

from .._torch import Tensor, torch
from ..dtypes import Array, numbers
from .averaging import deltas, rows_of, sum_of_products
from .compiled import compiled_by_rows
from .parameters import Range
from .registry import merge_method
from .trimming import order_statistics

_TILE = 1 << 15  # elements processed at a time, so that temporaries stay in cache


def row_divergences(changed: Array, origin: Array) -> Array:
    """Return the Kullback-Leibler divergence of softmax(changed) from softmax(origin), row by row.

    The divergence between rows of real weights is about 1e-6 or less. A logarithm of a probability
    in float32 has a rounding error of the same size, so the computation is in float64.

    Args:
        changed: A matrix, (rows, columns), of numbers or of stored values as in `numbers`.
        origin: A matrix of the same shape and dtype.

    Returns:
        The divergences, (rows,), in float64 if the matrices are in float64, otherwise in float32.
        The divergence of a row with NaN or infinity is NaN.

    >>> row_divergences(np.log([[1.0, 3.0]]), np.log([[1.0, 1.0]])).round(4)
    array([0.1308])
    """
    # convert an empty part, because only the dtype of the numbers matters here
    divergences = np.empty(changed.shape[0], numbers(changed[:0]).dtype)
    step = max(1, _TILE // changed.shape[1])
    with np.errstate(all="ignore"):  # the result of NaN or infinity is NaN
        for start in range(0, changed.shape[0], step):
            x, x_powers, x_total = _exponentials(changed[start : start + step])
            y, _, y_total = _exponentials(origin[start : start + step])
            # Σ p log(p / q), with p = x_powers / x_total
            # and log(p / q) = x - y - log(x_total / y_total)
            mean_difference = np.einsum("ij,ij->i", x_powers, x - y) / x_total
            divergence = mean_difference - np.log(x_total / y_total)
            # rounding may make the divergence of nearly equal rows negative
            divergences[start : start + step] = np.maximum(divergence, 0)
    return divergences


def _exponentials(stored: Array) -> tuple[Array, Array, Array]:
    """Return each row minus its maximum, the exponentials of these numbers, and their row sums.

    The shapes are (rows, columns), (rows, columns) and (rows,). All are in float64.
    """
    rows = numbers(stored)
    shifted = np.subtract(rows, rows.max(-1, keepdims=True), dtype=np.float64)
    powers = np.exp(shifted)
    return shifted, powers, powers.sum(-1)


def outlier_threshold(low: float, median: float, high: float) -> float:
    """Return the smallest importance with which an element counts as an outlier.

    It is the median plus 1.5 times the interquartile range, computed from the three quartiles.
    """
    return median + 1.5 * (high - low)


def quartile_places(size: int) -> list[int]:
    """Return the indices of the three quartiles among ``size`` sorted numbers, rounded down."""
    return [int(share * (size - 1)) for share in (0.25, 0.5, 0.75)]


@compiled_by_rows
@merge_method("arcee_fusion", base="required", inputs=(1, 1))
def arcee_fusion(tensors: list[Tensor], base: Tensor) -> Tensor:
    """Use the model's value where the change is important, and the base's value elsewhere.

    The importance of an element is |W - B| times the Kullback-Leibler divergence of its row's
    softmax(W) from softmax(B). A change is important if its importance is at least the median plus
    1.5 interquartile ranges of the tensor's importances. The quartiles are lower order statistics,
    without interpolation. Source: the Arcee Fusion note published with mergekit (2025).

    >>> w = torch.tensor([[1.0, 2.0, 3.0, 9.0]])
    >>> arcee_fusion([w], torch.tensor([[1.0, 2.1, 2.9, 4.0]]))
    tensor([[1.0000, 2.1000, 2.9000, 9.0000]])
    """
    model = tensors[0]
    changed = rows_of(model.detach())
    origin = rows_of(base.detach())
    divergences = row_divergences(changed.cpu().numpy(), origin.cpu().numpy())
    of_rows = torch.from_numpy(divergences).to(base.device)
    importance = (changed - origin).abs() * of_rows[:, None]
    quartiles = order_statistics(importance, quartile_places(importance.numel()))
    chosen = importance >= outlier_threshold(*quartiles)
    return torch.where(chosen.view(base.shape), model, base)


@merge_method("ram", base="required", elementwise=True, ranges={"epsilon": Range(0)})
def ram(tensors: list[Tensor], base: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Add to each element of B the mean change of the models that are active there.

    A model is active where its change is larger than ``epsilon`` in magnitude.
    Source: Reinforced agent merging (Yuan et al., arXiv 2601.13572).

    >>> ram([torch.tensor([2.0, 2.0]), torch.tensor([4.0, 0.0])], torch.zeros(2))
    tensor([3., 2.])
    """
    changes = deltas(tensors, base)
    active = [(change.abs() > epsilon).to(base.dtype) for change in changes]
    count = sum(active[1:], active[0])
    return base + sum_of_products(changes, active) / count.clamp(min=1)


@merge_method(
    "ramplus_tl",
    base="required",
    ranges={"epsilon": Range(0), "alpha": Range(0), "r": Range(0)},
)
def ramplus_tl(
    tensors: list[Tensor],
    base: Tensor,
    *,
    r: float = 0.1,
    alpha: float = 0.2,
    epsilon: float = 1e-5,
) -> Tensor:
    """Merge like `ram`, but enlarge each model's unique changes.

    A model's change of an element is shared if another model is also active there. Otherwise it is
    unique. Unique changes are multiplied by 1 + r clamp(shared / unique, 0, α), where shared and
    unique are the model's numbers of such changes in the whole tensor.
    Source: Reinforced agent merging (arXiv 2601.13572), tensor-level RAM+.

    >>> ramplus_tl([torch.tensor([2.0, 2.0]), torch.tensor([4.0, 0.0])], torch.zeros(2))
    tensor([3.0000, 2.0400])
    """
    changes = deltas(tensors, base)
    active = [(change.abs() > epsilon).to(base.dtype) for change in changes]
    count = sum(active[1:], active[0])
    shared = (count > 1).to(base.dtype)
    # in float64, because float32 counts exactly only up to 2**24
    together = torch.stack([(a * shared).sum(dtype=torch.float64) for a in active])
    alone = torch.stack([(a * (1 - shared)).sum(dtype=torch.float64) for a in active])
    # a model without unique changes has none to scale
    ratios = torch.where(alone > 0, together / alone.clamp(min=1), 0.0)
    scales = 1 + r * ratios.clamp(0, alpha)
    factors = []
    for own, scale in zip(active, scales, strict=True):
        factors.append(own * (shared + (1 - shared) * scale.to(base.dtype)))
    return base + sum_of_products(changes, factors) / count.clamp(min=1)
