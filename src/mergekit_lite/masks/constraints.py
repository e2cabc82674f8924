"""Constraints on the K mask values of one weight element, and the initial masks.

Masks are small, so almost all functions use plain autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model_components._autograd import Context
from model_components._checks import check_choice


class _Clamp(torch.autograd.Function):
    """A clamp to 0..1; its gradient is 0 only where a descent step would move away from 0..1.

    A mask outside 0..1 can therefore return. The gradient of torch's clamp is always 0 outside this
    range.
    """

    # both methods are elementwise, so torch.func.vmap can batch them as they are
    generate_vmap_rule = True

    @staticmethod
    # pyrefly: ignore[bad-override]: torch types it (*args)
    def forward(values: Tensor) -> Tensor:
        return values.clamp(0, 1)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        # a step goes against the gradient: above 1, a negative gradient leads further outside
        outwards = ((values < 0) & (grad > 0)) | ((values > 1) & (grad < 0))
        return grad.masked_fill(outwards, 0)


def _clamped(raw: Tensor) -> Tensor:
    if torch.autograd.forward_ad._current_level >= 0:
        # forward-mode differentiation needs the true derivative, which _Clamp does not have
        return raw.clamp(0, 1)
    return _Clamp.apply(raw)


def _with_first(raw: Tensor) -> Tensor:
    return torch.cat([1 - raw.sum(0, keepdim=True), raw])


def _without_first(masks: Tensor) -> Tensor:
    sums = masks.sum(0)
    # the sum of K float32 numbers such as 1 / 3 differs from 1 by a few rounding errors
    if bool(((sums - 1).abs() > 1e-4).any()):
        raise ValueError(
            f"MaskConfig: the components' initial masks have sums of {float(sums.min()):g} to "
            f"{float(sums.max()):g}, but constraint 'sum_to_one' expects sums of 1; change "
            "initial, choose another constraint such as 'none', or use a base"
        )
    return masks[1:]


def _logit(masks: Tensor) -> Tensor:
    if not bool(((masks > 0) & (masks < 1)).all()):
        raise ValueError(
            f"MaskConfig: the initial masks are from {float(masks.min()):g} to "
            f"{float(masks.max()):g}, but constraint 'sigmoid' expects values above 0 and "
            "below 1, since a sigmoid never reaches 0 or 1"
        )
    return masks.logit()


class _Rule(NamedTuple):
    """A constraint: a function from trained values to masks (K, ...), and its inverse."""

    masks: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]


CONSTRAINTS = {
    "none": _Rule(lambda raw: raw, lambda masks: masks),
    "sum_to_one": _Rule(_with_first, _without_first),
    "unit_interval": _Rule(_clamped, lambda masks: masks.clamp(0, 1)),
    "sigmoid": _Rule(torch.sigmoid, _logit),
}
"""The constraints by name."""


def constrain(
    raw: Tensor,  # (K, ...); (K - 1, ...) for sum_to_one
    constraint: str,
) -> Tensor:  # (K, ...)
    """Turn trained values into masks that satisfy a constraint.

    Args:
        raw: The trained values, (K, ...), or (K - 1, ...) for ``"sum_to_one"``; `unconstrain` is
            the inverse.
        constraint: ``"none"`` returns the values. ``"unit_interval"`` clamps them to 0..1, with a
            gradient that can move values from outside this range back into it. ``"sigmoid"``
            returns their sigmoid. ``"sum_to_one"`` trains all masks except the first, which is 1
            minus the sum of the trained masks.

    Source: learned coefficients as in Differentiable Adaptive Merging (arXiv 2410.08371), which
    does not constrain them.

    Returns:
        Masks (K, ...).

    Raises:
        ValueError: The constraint is unknown.

    >>> constrain(torch.tensor([1.5, 0.2]), "unit_interval")
    tensor([1.0000, 0.2000])
    >>> constrain(torch.tensor([0.25]), "sum_to_one")
    tensor([0.7500, 0.2500])
    """
    check_choice("constrain", "constraint", constraint, tuple(CONSTRAINTS))
    return CONSTRAINTS[constraint].masks(raw)


def acting_masks(raw: Tensor, constraint: str, *, over_base: bool = False) -> Tensor:
    """Return the masks that multiply weights: one per component, and one for the base, if any.

    The base's mask is the last, and it is 1 minus the sum of the components' masks.

    Args:
        raw: The trained values, as for `constrain`.
        constraint: The constraint's name, as for `constrain`.
        over_base: Whether masks apply to differences from a base.

    >>> acting_masks(torch.tensor([0.5, 0.75]), "none", over_base=True)
    tensor([ 0.5000,  0.7500, -0.2500])
    """
    masks = constrain(raw, constraint)
    if over_base:
        return torch.cat([masks, 1 - masks.sum(0, keepdim=True)])
    return masks


def unconstrain(masks: Tensor, constraint: str) -> Tensor:
    """Return trained values for which `constrain` gives these masks.

    For ``"unit_interval"``, masks outside 0..1 are clamped first.

    Raises:
        ValueError: The constraint is unknown. For ``"sum_to_one"``, the masks do not sum to 1. For
            ``"sigmoid"``, a mask is not above 0 and below 1.

    >>> constrain(unconstrain(torch.tensor([0.9, 0.1]), "sigmoid"), "sigmoid")
    tensor([0.9000, 0.1000])
    """
    check_choice("unconstrain", "constraint", constraint, tuple(CONSTRAINTS))
    return CONSTRAINTS[constraint].values(masks)


def mask_shape(shape: Sequence[int], granularity: str, transposed: bool = False) -> tuple[int, ...]:
    """Return the shape of one component's mask, which broadcasts over a weight of ``shape``.

    A matrix is (O, I), or (I, O) when ``transposed``. Three dimensions are a stack of matrices,
    such as experts, and each matrix has its own mask values. Four or more dimensions are the kernel
    of a convolution, (O, I, ...). Vectors have one value per element, except with ``"scalar"``.

    >>> (
    ...     mask_shape((8, 4), "input"),
    ...     mask_shape((8, 4), "output"),
    ...     mask_shape((4, 8), "input", transposed=True),
    ... )
    ((1, 4), (8, 1), (4, 1))
    >>> (
    ...     mask_shape((3, 8, 4), "scalar"),
    ...     mask_shape((8,), "input"),
    ...     mask_shape((8, 3, 5, 5), "input"),
    ... )
    ((3, 1, 1), (8,), (1, 3, 1, 1))
    """
    shape = tuple(shape)
    if granularity == "element" or (len(shape) < 2 and granularity != "scalar"):
        return shape
    if len(shape) < 2:
        return (1,) * len(shape)
    conv = len(shape) > 3
    rows, columns = (0, 1) if conv else (len(shape) - 2, len(shape) - 1)
    if transposed:
        rows, columns = columns, rows
    full_axes = set() if conv else set(range(len(shape) - 2))
    full_axes |= {"input": {columns}, "output": {rows}, "scalar": set()}[granularity]
    return tuple(n if i in full_axes else 1 for i, n in enumerate(shape))


def initial_masks(
    count: int,
    shape: Sequence[int],
    initial: float | str | Sequence[float],
    generator: torch.Generator | None,
) -> Tensor:
    """Return the initial masks, float32, of shape (count, *shape).

    Args:
        count: The number of components, K.
        shape: The result of `mask_shape`.
        initial: The initial masks as in `MaskConfig`, or a number per component.
        generator: The random generator for ``"random"``.

    >>> initial_masks(2, (1,), "component:1", None).flatten()
    tensor([0., 1.])
    """
    if initial == "random":
        # on the CPU, so that a seed gives the same masks on every device
        drawn = torch.rand(count, *shape, generator=generator)
        # clamped to avoid a division by 0, because all K draws of an element may be 0
        return drawn / drawn.sum(0, keepdim=True).clamp_min(1e-6)
    if initial == "average":
        values = [1 / count] * count
    elif isinstance(initial, str):
        if not initial.removeprefix("component:").isdigit():
            raise ValueError(
                "MaskedLayer: expected initial to be a number, average, random or component:INDEX, "
                f"got {initial!r}"
            )
        chosen = int(initial.removeprefix("component:"))
        if chosen >= count:
            raise ValueError(
                f"MaskConfig: initial is {initial!r}, but there are only {count} components, "
                "counted from 0"
            )
        values = [float(k == chosen) for k in range(count)]
    else:
        if isinstance(initial, (int, float)):
            values = [float(initial)] * count
        else:
            values = [float(v) for v in initial]
        if len(values) != count:
            raise ValueError(
                f"MaskedLayer: expected initial with {count} numbers, one per component, got "
                f"{len(values)}"
            )
    return torch.tensor(values).view(count, *[1] * len(shape)).expand(count, *shape).clone()
