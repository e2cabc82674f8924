"""Methods that decide element by element whose change counts: arcee_fusion, ram, ramplus_tl.

Notation: D_i = W_i - B; a model is active where |D_i| > ε.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from .._torch import Tensor, torch
from .averaging import deltas
from .parameters import Range
from .registry import merge_method
from .selection import Asking, Largest, Sum


@merge_method("arcee_fusion", base="required", inputs=(1, 1), chunking="rows")
def arcee_fusion(tensors: list[Tensor], base: Tensor) -> Asking[Tensor]:
    """Take the model's value where the change is important, the base's elsewhere.

    Importance: |W - B| times the Kullback-Leibler divergence of the row's softmax(W) from
    softmax(B). Important: at or above median + 1.5 interquartile ranges, taken exactly over the
    tensor (lower order statistics). Source: the Arcee Fusion note published with mergekit (2025).

    >>> w = torch.tensor([[1.0, 2.0, 3.0, 9.0]])
    >>> arcee_fusion([w], torch.tensor([[1.0, 2.1, 2.9, 4.0]]))
    tensor([[1.0000, 2.1000, 2.9000, 9.0000]])
    """
    model = tensors[0]

    @functools.cache  # three requests look at one block
    def importance() -> Tensor:
        log_p = model.log_softmax(-1)
        log_q = base.log_softmax(-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1, keepdim=True).clamp(min=0)
        return (model - base).abs() * divergence

    # rank from the top of the lower order statistic at this quantile
    def above(share: float) -> Callable[[int], int]:
        return lambda n: n - int(share * (n - 1))

    cuts = yield [Largest(importance, above(q)) for q in (0.25, 0.5, 0.75)]
    low, median, high = (cut.threshold for cut in cuts)
    return torch.where(importance().detach() >= median + 1.5 * (high - low), model, base)


@merge_method("ram", base="required", chunking="elements", ranges={"epsilon": Range(0)})
def ram(tensors: list[Tensor], base: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """B plus, at each element, the mean change of the models that are active there.

    Source: Reinforced agent merging (Yuan et al., arXiv 2601.13572).

    >>> ram([torch.tensor([2.0, 2.0]), torch.tensor([4.0, 0.0])], torch.zeros(2))
    tensor([3., 2.])
    """
    changes = deltas(tensors, base)
    active = [(change.abs() > epsilon).to(base.dtype) for change in changes]
    count = sum(active[1:], active[0])
    total = sum(
        (c * a for c, a in zip(changes[1:], active[1:], strict=True)), changes[0] * active[0]
    )
    return base + total / count.clamp(min=1)


@merge_method(
    "ramplus_tl",
    base="required",
    chunking="elements",
    ranges={"epsilon": Range(0), "alpha": Range(0), "r": Range(0)},
)
def ramplus_tl(
    tensors: list[Tensor],
    base: Tensor,
    *,
    r: float = 0.1,
    alpha: float = 0.2,
    epsilon: float = 1e-5,
) -> Asking[Tensor]:
    """`ram`, with a model's unique changes scaled by 1 + r clamp(shared / unique, 0, α).

    Shared and unique changes are counted for each model over the whole tensor.

    Shared: elements where the model and another are active; unique: where it alone is.
    Source: Reinforced agent merging (arXiv 2601.13572), tensor-level RAM+.

    >>> ramplus_tl([torch.tensor([2.0, 2.0]), torch.tensor([4.0, 0.0])], torch.zeros(2))
    tensor([3.0000, 2.0400])
    """
    changes = deltas(tensors, base)
    active = [(change.abs() > epsilon).to(base.dtype) for change in changes]
    count = sum(active[1:], active[0])
    shared = (count > 1).to(base.dtype)
    counts = yield Sum(
        lambda: torch.stack([torch.stack([(a * shared).sum(), a.sum()]) for a in active])
    )
    unique = counts[:, 1] - counts[:, 0]
    scales = 1 + r * torch.where(unique > 0, counts[:, 0] / unique.clamp(min=1), 0.0).clamp(
        0, alpha
    )
    factors = [
        a * (shared + (1 - shared) * s.to(base.dtype)) for a, s in zip(active, scales, strict=True)
    ]
    total = sum(
        (c * f for c, f in zip(changes[1:], factors[1:], strict=True)), changes[0] * factors[0]
    )
    return base + total / count.clamp(min=1)
