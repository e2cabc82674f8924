"""Methods that select changes element by element: arcee_fusion, ram, ramplus_tl.

Notation: D_i = W_i - B; a model is active where |D_i| > ε.
"""

from __future__ import annotations

from .._torch import Tensor, torch
from .averaging import deltas, rows_of, sum_of_products
from .parameters import Range
from .registry import merge_method
from .trimming import order_statistics

_STRETCH = 1 << 20  # elements processed at a time, so that temporaries are small


@merge_method("arcee_fusion", base="required", inputs=(1, 1))
def arcee_fusion(tensors: list[Tensor], base: Tensor) -> Tensor:
    """Use the model's value where the change is important, and the base's value elsewhere.

    The importance of an element is |W - B| times the Kullback-Leibler divergence of its row's
    softmax(W) from softmax(B). A change is important if this is at least the median plus 1.5
    interquartile ranges of the tensor's importances. The quartiles are lower order statistics,
    without interpolation. Source: the Arcee Fusion note published with mergekit (2025).

    >>> w = torch.tensor([[1.0, 2.0, 3.0, 9.0]])
    >>> arcee_fusion([w], torch.tensor([[1.0, 2.1, 2.9, 4.0]]))
    tensor([[1.0000, 2.1000, 2.9000, 9.0000]])
    """
    model = tensors[0]
    pairs = [rows_of(model.detach()), rows_of(base.detach())]
    count = max(1, _STRETCH // pairs[0].shape[-1])
    parts = []
    for changed, origin in zip(*(rows.split(count) for rows in pairs), strict=True):
        log_p = changed.log_softmax(-1)
        log_q = origin.log_softmax(-1)
        # rounding may make the divergence of nearly equal rows negative
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1, keepdim=True).clamp(min=0)
        parts.append((changed - origin).abs() * divergence)
    importance = torch.cat(parts).view(base.shape)
    last = importance.numel() - 1
    places = [int(share * last) for share in (0.25, 0.5, 0.75)]
    low, median, high = order_statistics(importance, places)
    return torch.where(importance >= median + 1.5 * (high - low), model, base)


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

    A model's change of an element is shared if another model is active there, too; otherwise it is
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
