"""What the K mask values at one place must satisfy, and how masks begin. Small tensors, plain autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Clamp(torch.autograd.Function):
    """clamp whose gradient stays alive at the ends: it is cut only where a descent step would lead further outside."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(values)
        ctx.ends = low, high
        return values.clamp(low, high)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore
        (values,) = ctx.saved_tensors
        low, high = ctx.ends
        outwards = ((values < low) & (grad > 0)) | ((values > high) & (grad < 0))
        return grad.masked_fill(outwards, 0), None, None


def constrain(raw: Tensor, constraint: str) -> Tensor:
    """The masks that a trained tensor stands for.

    Values that satisfy a constraint already are left as they are (but for the last bit on the sphere), so any mask can
    be an initial one.

    Args:
        raw: What the optimizer changes, shape (K, ...).
        constraint: ``"none"``; ``"unit_interval"`` and ``"symmetric"`` clamp to 0..1 and -1..1, with a gradient that
            still leads back inside; ``"sum_to_one"`` subtracts what the sum over K exceeds one by, evenly;
            ``"unit_sphere"`` divides by the root of the sum of squares over K.

    >>> constrain(torch.tensor([1.5, 0.2]), "unit_interval")
    tensor([1.0000, 0.2000])
    >>> constrain(torch.tensor([1.0, 1.0]), "sum_to_one")
    tensor([0.5000, 0.5000])
    """
    if constraint == "none":
        return raw
    if constraint == "unit_interval":
        return _Clamp.apply(raw, 0.0, 1.0)
    if constraint == "symmetric":
        return _Clamp.apply(raw, -1.0, 1.0)
    if constraint == "sum_to_one":
        return raw - (raw.sum(0, keepdim=True) - 1) / raw.shape[0]
    return raw / raw.norm(dim=0, keepdim=True).clamp_min(1e-12)


def mask_shape(shape: Sequence[int], granularity: str, transposed: bool = False) -> tuple[int, ...]:
    """The shape of one component's mask over a weight of ``shape``; it broadcasts over the weight.

    A matrix is (O, I), or (I, O) when ``transposed``; leading dimensions (experts) have values of their own.
    A convolution's kernel (4 or more dimensions) is (O, I, ...). Vectors have one value an element unless scalar.

    >>> mask_shape((8, 4), "input"), mask_shape((8, 4), "output"), mask_shape((4, 8), "input", transposed=True)
    ((1, 4), (8, 1), (4, 1))
    >>> mask_shape((3, 8, 4), "scalar"), mask_shape((8,), "input"), mask_shape((8, 3, 5, 5), "input")
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
    kept = set() if conv else set(range(len(shape) - 2))
    kept |= {"input": {columns}, "output": {rows}, "scalar": set()}[granularity]
    return tuple(n if i in kept else 1 for i, n in enumerate(shape))


def initial_masks(
    count: int, shape: Sequence[int], initial: float | str | Sequence[float], generator: torch.Generator | None
) -> Tensor:
    """Masks to begin with, float32, shape (count, *shape).

    Args:
        count: K.
        shape: From `mask_shape`.
        initial: As in `MaskConfig`, or one number a component.
        generator: For ``"random"``.

    >>> initial_masks(2, (1,), "component:1", None).flatten()
    tensor([0., 1.])
    """
    if initial == "random":
        drawn = torch.rand(count, *shape, generator=generator)
        return drawn / drawn.sum(0, keepdim=True).clamp_min(1e-6)
    if initial == "average":
        values = [1 / count] * count
    elif isinstance(initial, str):
        chosen = int(initial.removeprefix("component:"))
        if chosen >= count:
            raise ValueError(f"MaskConfig: initial is {initial!r}, but there are {count} components")
        values = [float(k == chosen) for k in range(count)]
    else:
        values = [float(initial)] * count if isinstance(initial, (int, float)) else [float(v) for v in initial]
    return torch.tensor(values).view(count, *[1] * len(shape)).expand(count, *shape).clone()
