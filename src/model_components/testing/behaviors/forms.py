"""Dtypes and shapes of inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .subject import Behavior, Subject, cotangent, near, same

# Differences that are normal for bfloat16's 8 bits after a few sums, relative to the largest value
_HALF_PRECISION = 0.1


def float64(subject: Subject) -> None:
    """A module in float64 computes the same in float64."""
    expected = subject.step(subject.module())
    found = subject.step(subject.module(torch.float64))
    for name, value in found.items():
        assert value is None or value.dtype == torch.float64, f"{name} is {value.dtype}"
    same(found, expected, "float64")


def bfloat16(subject: Subject) -> None:
    """A module in bfloat16 trains."""
    _half(subject, torch.bfloat16)


def float16(subject: Subject) -> None:
    """A module in float16 trains."""
    _half(subject, torch.float16)


def _half(subject: Subject, dtype: torch.dtype) -> None:
    expected = subject.step(subject.module())
    for name, value in subject.step(subject.module(dtype)).items():
        true = expected[name]
        if value is None or true is None:
            assert value is true, f"{name} is missing in one of float32 and {dtype}"
            continue
        assert value.dtype == dtype, f"{name} is {value.dtype}, expected {dtype}"
        _roughly(name, value, true)


def _roughly(name: str, found: Tensor, expected: Tensor) -> None:
    if expected.numel():
        scale = float(expected.abs().max())
        error = float((found.double() - expected.double()).abs().max())
        assert error <= _HALF_PRECISION * max(scale, 1e-3), (
            f"{name} differs by {error:.1e}, where values are up to {scale:.1e}"
        )


def autocast(subject: Subject) -> None:
    """Under autocast the output is near that in float32, and gradients are float32."""
    module = subject.module()
    expected = subject.step(module)
    inputs = subject.inputs()
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = subject.call(module, *inputs)
    y.backward(cotangent(y))
    true = expected["the output"]
    assert true is not None
    _roughly("the output", y.detach(), true)
    for name, parameter in module.named_parameters():
        known = expected.get(f"the gradient of {name}")
        if known is not None:
            assert parameter.grad is not None, f"the gradient of {name} is missing"
            assert parameter.grad.dtype == torch.float32, f"{name} has {parameter.grad.dtype}"
            _roughly(f"the gradient of {name}", parameter.grad, known)


def leading_dimensions(subject: Subject) -> None:
    """Inputs may have no batch dimension, two, or three."""
    module = subject.module()
    y = subject.call(module, *subject.inputs()).detach()
    count = len(y)
    for shape in ((2, count // 2), (1, 2, count // 2)):
        inputs = [x.unflatten(0, shape) for x in subject.inputs()]
        found = subject.call(module, *inputs)
        assert found.shape == (*shape, *y.shape[1:]), (
            f"leading dimensions {shape} give {list(found.shape)}"
        )
        near(f"leading dimensions {shape}", found.flatten(0, len(shape) - 1), y)
    near("no leading dimension", subject.call(module, *(x[0] for x in subject.inputs())), y[0])


def batch_of_one(subject: Subject) -> None:
    """One row gives what it gives in a batch."""
    module = subject.module().eval()
    y = subject.call(module, *subject.inputs())
    near("a row alone", subject.call(module, *(x[:1] for x in subject.inputs())), y[:1])


def empty_batch(subject: Subject) -> None:
    """A batch without rows gives none, and gradients of zero."""
    module = subject.module()
    inputs = [x.detach()[:0].requires_grad_(x.requires_grad) for x in subject.inputs()]
    y = subject.call(module, *inputs)
    full = subject.call(module, *subject.inputs())
    assert y.shape == (0, *full.shape[1:]), f"the output has shape {list(y.shape)}"
    y.sum().backward()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            assert not parameter.grad.any(), f"the gradient of {name} is not zero"


def strided_inputs(subject: Subject) -> None:
    """Inputs that are not contiguous give the same."""
    module = subject.module()
    expected = subject.call(module, *subject.inputs())
    strided = [torch.stack([x.detach(), x.detach()], -1)[..., 0] for x in subject.inputs()]
    near("the output", subject.call(module, *strided), expected)


def modes_switched(subject: Subject) -> None:
    """``train`` and ``eval`` return the module; evaluation repeats itself."""
    module = subject.module()
    assert module.eval() is module, "eval() does not return the module"
    first = subject.call(module, *subject.inputs())
    second = subject.call(module, *subject.inputs())
    near("the second evaluation", second, first)
    assert module.train() is module, "train() does not return the module"
    assert all(child.training for child in module.modules() if type(child) is not nn.Identity)


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
