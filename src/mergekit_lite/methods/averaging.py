"""Methods that weight models element by element: linear, task_arithmetic, nearswap, passthrough.

Notation: W_i model i, B the base, D_i = W_i - B the task vector of model i, w_i its weight, λ the
overall scale.
"""

from __future__ import annotations

from collections.abc import Sequence

from .._torch import Tensor
from .compiled import compiled
from .parameters import PerModel, Range
from .registry import merge_method


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float] | Sequence[Tensor]) -> Tensor:
    """Return Σ w_i T_i, with each product rounded before it is added.

    A fused multiply-add would round differently, and not every device has it.
    """
    total = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total = total.add_(tensor * weight)
    return total


def sum_of_products(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:
    """Return Σ T_i F_i, element by element."""
    products = [tensor * factor for tensor, factor in zip(tensors, factors, strict=True)]
    return sum(products[1:], products[0])


def deltas(tensors: Sequence[Tensor], base: Tensor) -> list[Tensor]:
    """Return the task vectors D_i = W_i - B."""
    return [tensor - base for tensor in tensors]


def rows_of(tensor: Tensor) -> Tensor:
    """Return a tensor as a matrix whose rows are its vectors along the last dimension."""
    return tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)


def refuse_zero_sum(parameters: dict) -> None:
    """Raise a ValueError if weights are to be normalized but sum to 0."""
    weights = parameters["weight"]
    # above 0, so that the test below also finds weights that are all 0
    largest = max([1e-30, *(abs(weight) for weight in weights)])
    if parameters["normalize"] and abs(sum(weights)) < 1e-8 * largest:  # 0 up to rounding
        raise ValueError(
            f"expected weights that can be normalized, got {weights}, which sum to 0: every result "
            "would be NaN or infinite"
        )


@compiled
@merge_method("linear", elementwise=True, validate=refuse_zero_sum)
def linear(
    tensors: list[Tensor], base: None, *, weight: PerModel, normalize: bool = True
) -> Tensor:
    """Return the weighted average Σ w_i W_i, divided by Σ w_i if ``normalize``.

    Source: Model soups (Wortsman et al., arXiv 2203.05482).

    >>> linear([torch.tensor([0.0, 2.0]), torch.tensor([4.0, 4.0])], weight=[3.0, 1.0])
    tensor([1.0000, 2.5000])
    """
    return weighted_sum(tensors, normalized(weight, normalize))


def normalized(weights: Sequence[float], normalize: bool) -> list[float]:
    """Return weights, divided by their sum if ``normalize``."""
    scale = 1.0
    if normalize:
        scale = 1 / sum(weights)
    return [weight * scale for weight in weights]


@compiled
@merge_method("passthrough", inputs=(1, 1), elementwise=True)
def passthrough(tensors: list[Tensor], base: None, *, scale: PerModel = None) -> Tensor:
    """Return the values of one model, unchanged or multiplied by ``scale``.

    Frankenmerges, which take layers from several models, use this method.

    >>> passthrough([torch.tensor([1.0, 2.0])], scale=0.5)
    tensor([0.5000, 1.0000])
    """
    if scale[0] is None:
        # the result must not share memory with the caller's tensor
        return tensors[0].clone()
    return tensors[0] * scale[0]


@compiled
@merge_method("task_arithmetic", base="required", elementwise=True)
def task_arithmetic(
    tensors: list[Tensor],
    base: Tensor,
    *,
    weight: PerModel,
    lambda_: float = 1.0,
    normalize: bool = False,
) -> Tensor:
    """Return B + λ Σ w_i D_i.

    With ``normalize``, the sum is divided by Σ w_i, unless that is 0.
    Source: Editing models with task arithmetic (Ilharco et al., arXiv 2212.04089).

    >>> task_arithmetic(
    ...     [torch.tensor([3.0]), torch.tensor([1.0])], torch.tensor([1.0]), weight=[0.5, 1.0]
    ... )
    tensor([2.])
    """
    total = weighted_sum(deltas(tensors, base), weight)
    return base + total * (lambda_ / normalizer(weight, normalize))


def normalizer(weights: Sequence[float], normalize: bool) -> float:
    """Return Σ w_i, or 1 if the sum is 0 or ``normalize`` is off."""
    total = sum(weights)
    # the same bound as in mergekit
    if normalize and abs(total) >= 1e-8:
        return total
    return 1.0


@merge_method("nearswap", base="required", inputs=(1, 1), elementwise=True, ranges={"t": Range(0)})
def nearswap(tensors: list[Tensor], base: Tensor, *, t: float) -> Tensor:
    """Return B + c (W - B) with c = t / max(|B - W|, 1e-6), but at most 1.

    So B becomes W where they differ by at most t, and moves by t toward W elsewhere.
    Source: the definition published with the NearSwap models (alchemonaut).

    >>> nearswap([torch.tensor([1.1, 3.0])], torch.tensor([1.0, 1.0]), t=0.2)
    tensor([1.1000, 1.2000])
    """
    delta = tensors[0] - base
    return base + delta * (t / delta.abs().clamp_(min=1e-6)).clamp_(0, 1)
