"""What the K mask values at one place must satisfy, and how masks begin. Small tensors, plain autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model_components._autograd import Context


class _ClampContext(Context, Protocol):
    ends: tuple[float, float]


class _Clamp(torch.autograd.Function):
    """clamp whose gradient stays alive at the ends: it is cut only where a descent step would lead further outside."""

    @staticmethod
    def forward(ctx: _ClampContext, values: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(values)
        ctx.ends = low, high
        return values.clamp(low, high)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ClampContext, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore
        (values,) = ctx.saved_tensors
        low, high = ctx.ends
        outwards = ((values < low) & (grad > 0)) | ((values > high) & (grad < 0))
        return grad.masked_fill(outwards, 0), None, None


_CLAMPS = {"unit_interval": (0.0, 1.0), "symmetric": (-1.0, 1.0)}
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "cosine": lambda raw: (1 - (math.pi * raw).cos()) / 2,
}
_PARALLEL = 0.9995  # of a cosine: beyond it the arc is a line


def constrain(
    raw: Tensor,  # (K, ...); (K - 1, ...) for sum_to_one, (1, ...) for spherical
    constraint: str,
    *,
    angle: Tensor | None = None,
) -> Tensor:  # (K, ...)
    """The masks that a trained tensor stands for.

    Args:
        raw: What the optimizer changes, (K, ...), or fewer as below; `unconstrain` gives it for masks.
        constraint: ``"none"``; ``"unit_interval"`` and ``"symmetric"`` clamp to 0..1 and -1..1, with a gradient that
            still leads back inside; ``"sigmoid"``, ``"tanh"`` and ``"cosine"``, (1 - cos πx) / 2, are functions onto
            these; ``"sum_to_one"`` trains all masks but the first, which is what is left of 1; ``"unit_sphere"``
            divides by the root of the sum of squares over K; ``"spherical"`` gives two components the coefficients of
            spherical interpolation at t = sigmoid(x).
        angle: Of ``"spherical"``: a scalar, between the components' weights, see `angle_between`.

    Source: learned coefficients as in Differentiable Adaptive Merging (arXiv 2410.08371), which leaves them free.

    Returns:
        Masks (K, ...).

    Raises:
        ValueError: An unknown constraint, or ``"spherical"`` without an angle.

    >>> constrain(torch.tensor([1.5, 0.2]), "unit_interval")
    tensor([1.0000, 0.2000])
    >>> constrain(torch.tensor([0.25]), "sum_to_one")
    tensor([0.7500, 0.2500])
    """
    if constraint == "none":
        return raw
    if constraint in _CLAMPS:
        return _Clamp.apply(raw, *_CLAMPS[constraint])
    if constraint in _FUNCTIONS:
        return _FUNCTIONS[constraint](raw)
    if constraint == "sum_to_one":
        return torch.cat([1 - raw.sum(0, keepdim=True), raw])
    if constraint == "unit_sphere":
        return raw / raw.norm(dim=0, keepdim=True).clamp_min(1e-12)
    if constraint != "spherical" or angle is None:
        known = ", ".join(("none", *_CLAMPS, *_FUNCTIONS, "sum_to_one", "unit_sphere", "spherical"))
        raise ValueError(
            f"constrain: constraint is {constraint!r}, angle {angle}; needed one of {known}, an angle last"
        )
    t = torch.sigmoid(raw)
    turned = angle.cos().abs() <= _PARALLEL
    sine = torch.where(turned, angle, 1.0).sin()
    first = torch.where(turned, ((1 - t) * angle).sin() / sine, 1 - t)
    second = torch.where(turned, (t * angle).sin() / sine, t)
    return torch.cat([first, second])


def acting_masks(raw: Tensor, constraint: str, *, angle: Tensor | None = None, over_base: bool = False) -> Tensor:
    """The masks to multiply by: `constrain`, and over a base its own, 1 minus their sum, as the last.

    Args:
        raw: As for `constrain`.
        constraint: As for it.
        angle: As for it.
        over_base: Masks lie over differences from a base.

    >>> acting_masks(torch.tensor([0.5, 0.75]), "none", over_base=True)
    tensor([ 0.5000,  0.7500, -0.2500])
    """
    masks = constrain(raw, constraint, angle=angle)
    return torch.cat([masks, 1 - masks.sum(0, keepdim=True)]) if over_base else masks


def unconstrain(masks: Tensor, constraint: str) -> Tensor:
    """Trained values for which `constrain` gives these masks, or masks near them where they break the constraint.

    Raises:
        ValueError: Sums other than 1 for ``"sum_to_one"``, masks at which a constraint's gradient is zero or undefined,
            or not two of them for ``"spherical"``.

    >>> constrain(unconstrain(torch.tensor([0.9, 0.1]), "sigmoid"), "sigmoid")
    tensor([0.9000, 0.1000])
    """
    if constraint == "sum_to_one":
        sums = masks.sum(0)
        if bool(((sums - 1).abs() > 1e-4).any()):
            raise ValueError(
                f"MaskConfig: masks begin with sums of {float(sums.min()):g} to {float(sums.max()):g}; constraint "
                "'sum_to_one' needed 1; name another, as 'none', or lay masks over a base"
            )
        return masks[1:]
    if constraint == "spherical":
        if len(masks) != 2:
            raise ValueError(f"MaskConfig: constraint 'spherical' is between 2 components, here are {len(masks)}")
        masks = masks[1:] / masks.sum(0, keepdim=True)
    if constraint in _CLAMPS:
        return masks.clamp(*_CLAMPS[constraint])
    if constraint == "unit_sphere" and not bool((masks.square().sum(0) > 0).all()):
        raise ValueError("MaskConfig: masks begin as 0; constraint 'unit_sphere' needed one that is not")
    if constraint in ("sigmoid", "spherical", "tanh", "cosine"):
        low = -1.0 if constraint == "tanh" else 0.0
        if not bool(((masks > low) & (masks < 1)).all()):
            raise ValueError(
                f"MaskConfig: masks begin between {float(masks.min()):g} and {float(masks.max()):g}; constraint "
                f"{constraint!r} needed values inside {low:g} and 1, at which it stands still"
            )
        if constraint == "cosine":
            return (1 - 2 * masks).acos() / math.pi
        return masks.atanh() if constraint == "tanh" else masks.logit()
    return masks


def angle_between(weights: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The angle between two weights, over all that share a mask value; over the whole of a vector.

    >>> angle_between([torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])], (1, 1))
    tensor([[1.5708]])
    """
    one, other = (w.double() for w in weights)
    dims = [i for i, n in enumerate(shape) if n == 1 or one.dim() < 2]
    cosine = (one * other).sum(dims, keepdim=True) / (
        one.square().sum(dims, keepdim=True) * other.square().sum(dims, keepdim=True)
    ).sqrt().clamp_min(1e-30)
    return cosine.clamp(-1, 1).acos().float()


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
    full_axes = set() if conv else set(range(len(shape) - 2))
    full_axes |= {"input": {columns}, "output": {rows}, "scalar": set()}[granularity]
    return tuple(n if i in full_axes else 1 for i, n in enumerate(shape))


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
