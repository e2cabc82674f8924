"""Behaviors for different dtypes and shapes of inputs, and in both modes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .subject import Behavior, Subject, cotangent, gradients_of, near, require, same

# Differences, relative to the largest value, that are normal for sums in bfloat16 (8 bits)
_HALF_PRECISION = 0.1


def float64(subject: Subject) -> None:
    """Check that the float64 output and gradients agree with the float32 ones."""
    expected = subject.step(subject.module())
    actual = subject.step(subject.module(torch.float64))
    _check_dtypes(actual, torch.float64)
    same(actual, expected, "float64")


def bfloat16(subject: Subject) -> None:
    """Check that the bfloat16 output and gradients are close to the float32 ones."""
    _half(subject, torch.bfloat16)


def float16(subject: Subject) -> None:
    """Check that the float16 output and gradients are close to the float32 ones."""
    _half(subject, torch.float16)


def _half(subject: Subject, dtype: torch.dtype) -> None:
    expected = subject.step(subject.module())
    actual = subject.step(subject.module(dtype))
    _check_dtypes(actual, dtype)
    same(actual, expected, str(dtype), limit=_HALF_PRECISION)


def _check_dtypes(step: Mapping[str, Tensor | None], dtype: torch.dtype) -> None:
    for name, value in step.items():
        if value is not None:
            require(value.dtype == dtype, f"{name}: expected {dtype}, got {value.dtype}")


def autocast(subject: Subject) -> None:
    """Check that autocast gives an output close to the float32 output, and float32 gradients."""
    module = subject.module()
    expected = subject.step(module)
    inputs = subject.inputs()
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = subject.call(module, *inputs)
    y.backward(cotangent(y))
    actual: dict[str, Tensor | None] = {"the output": y.detach()}
    gradients = gradients_of(module, inputs)
    _check_dtypes(gradients, torch.float32)
    same(actual | gradients, expected, "autocast", limit=_HALF_PRECISION)


def leading_dimensions(subject: Subject) -> None:
    """Check that inputs may have no, two or three batch dimensions."""
    module = subject.module()
    y = subject.call(module, *subject.inputs()).detach()
    count = len(y)
    for shape in ((2, count // 2), (1, 2, count // 2)):
        inputs = [x.unflatten(0, shape) for x in subject.inputs()]
        actual = subject.call(module, *inputs)
        require(
            actual.shape == (*shape, *y.shape[1:]),
            f"leading dimensions {shape}: expected shape {[*shape, *y.shape[1:]]}, got "
            f"{list(actual.shape)}",
        )
        near(f"leading dimensions {shape}", actual.flatten(0, len(shape) - 1), y)
    near("no leading dimension", subject.call(module, *(x[0] for x in subject.inputs())), y[0])


def batch_of_one(subject: Subject) -> None:
    """Check that a single row gives the same output as in a batch."""
    # evaluation mode, because in training a batch normalization depends on the whole batch
    module = subject.module().eval()
    y = subject.call(module, *subject.inputs())
    near("a row alone", subject.call(module, *(x[:1] for x in subject.inputs())), y[:1])


def empty_batch(subject: Subject) -> None:
    """Check that an empty batch gives an empty output and no gradients other than zero."""
    module = subject.module()
    inputs = [x.detach()[:0].requires_grad_(x.requires_grad) for x in subject.inputs()]
    y = subject.call(module, *inputs)
    full = subject.call(module, *subject.inputs())
    require(
        y.shape == (0, *full.shape[1:]),
        f"the output: expected shape {[0, *full.shape[1:]]}, got {list(y.shape)}",
    )
    y.sum().backward()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            require(not parameter.grad.any(), f"the gradient of {name} is not zero")


def strided_inputs(subject: Subject) -> None:
    """Check that inputs that are not contiguous give the same output."""
    module = subject.module()
    expected = subject.call(module, *subject.inputs())
    # take every second number of tensors that are twice as large
    strided = [torch.stack([x.detach(), x.detach()], -1)[..., 0] for x in subject.inputs()]
    near("the output", subject.call(module, *strided), expected)


def modes_switched(subject: Subject) -> None:
    """Check that ``train`` and ``eval`` return the module, and that evaluation is repeatable."""
    module = subject.module()
    require(module.eval() is module, "eval() does not return the module")
    first = subject.call(module, *subject.inputs())
    second = subject.call(module, *subject.inputs())
    near("the second evaluation", second, first)
    require(module.train() is module, "train() does not return the module")


BEHAVIORS: tuple[Behavior, ...] = (
    float64,
    bfloat16,
    float16,
    autocast,
    leading_dimensions,
    batch_of_one,
    empty_batch,
    strided_inputs,
    modes_switched,
)
