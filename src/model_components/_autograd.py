"""Helpers for custom autograd functions.

A custom function saves memory in an ordinary training step. In every other situation (tracing,
`torch.func`, second derivatives) the same formula runs in plain torch operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Context(Protocol):
    """The ``ctx`` attributes that all operations use; subclasses declare additional ones."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors or None; the backward pass reads them as ``saved_tensors``."""
        ...


def transforming() -> bool:
    """Return whether a `torch.func` transform or forward-mode differentiation is active."""
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._functorch.maybe_current_level() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def needs_plain(x: Tensor) -> bool:
    """Return whether x needs plain torch operations.

    This is the case if x is traced, transformed or on the meta device.
    """
    return torch.compiler.is_compiling() or x.is_meta or transforming()


def launches_directly(x: Tensor) -> bool:
    """Return whether to launch a kernel directly instead of through its torch operator.

    Calling the operator takes longer than launching the kernel. The operator is needed for tracing,
    dispatch modes, tensor subclasses and tensors without data.
    """
    # dispatch modes, such as FakeTensorMode and operation counters, see only operators
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    # tensor subclasses such as DTensor also intercept operators
    return not traced and not x.is_meta and type(x) in (Tensor, torch.nn.Parameter)


def wants_graph() -> bool:
    """Return whether the running backward pass must record a graph (``create_graph=True``)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast casts x to, or None if it does not cast x.

    Autocast does not cast float64 and does not support the meta device.
    """
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def differentiable_gradients(
    formula: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return gradients that can be differentiated again, for a backward with ``create_graph=True``.

    Args:
        formula: A function that computes the output from the inputs with plain torch operations.
        inputs: The inputs of the operation; None stands for an optional input that is absent.
        needs: Whether each input needs a gradient.
        grad: The gradient of the output.

    Returns:
        The gradient of each input, or None for an input that needs none.
    """
    # use views, so that an input gets no gradient through other inputs computed from it
    views = [None if t is None else t.view_as(t) for t in inputs]
    y = formula(*views)
    wanted = [v for v, need in zip(views, needs, strict=True) if v is not None and need]
    gradients = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return tuple(next(gradients) if need else None for need in needs)
