"""Run a half-precision model in float32, one block at a time.

Weights loaded from files are memory-mapped, so that a float32 copy of all of them would take twice
the model's size where the model itself takes none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

_HALF = (torch.bfloat16, torch.float16)


def as_float32(value: Any) -> Any:
    """Return a value with each tensor of half precision in it cast to float32."""

    def cast(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf

    return tree_map(cast, value)


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Cast a module's half-precision parameters and buffers to float32, in a context.

    On exit the old tensors come back, so that what was changed inside is lost.
    """
    originals = [
        (tensor, tensor.data)
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.dtype in _HALF
    ]
    try:
        for tensor, value in originals:
            tensor.data = value.float()
        yield
    finally:
        for tensor, value in originals:
            tensor.data = value


@contextmanager
def blocks_in_float32(model: nn.Module) -> Iterator[None]:
    """Run each block of a whole model in float32, in a context.

    Its weights and inputs are cast before it, and its outputs are cast back after it.
    """
    # by block: the open context of its weights, and the dtype of the hidden states it was given
    running: dict[nn.Module, tuple[ExitStack, torch.dtype]] = {}

    def begin(block: nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple:
        hidden = arguments[0] if arguments else named["hidden_states"]
        context = ExitStack()
        context.enter_context(in_float32(block))
        running[block] = context, hidden.dtype
        return as_float32((arguments, named))

    def end(block: nn.Module, arguments: tuple, out: Any) -> Any:
        if block not in running:  # a caller's hook raised before `begin` ran
            return out
        context, dtype = running.pop(block)
        context.close()
        # what comes after the blocks, a norm and a head, computes in the model's own dtype
        return tree_map(lambda leaf: _cast_back(leaf, dtype), out)

    with ExitStack() as hooks:
        for block in _outermost_list_members(model):
            hooks.enter_context(
                block.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
            )
            # also after an exception: callers end a forward early by raising `Stop`
            hooks.enter_context(block.register_forward_hook(end, always_call=True))
        yield


def _cast_back(leaf: Any, dtype: torch.dtype) -> Any:
    is_float32 = isinstance(leaf, Tensor) and leaf.dtype == torch.float32
    return leaf.to(dtype) if is_float32 and dtype in _HALF else leaf


def _outermost_list_members(model: nn.Module) -> list[nn.Module]:
    """Return the members of the model's outermost lists of modules."""
    blocks: list[nn.Module] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(inside):
            blocks += module
            inside = (*inside, f"{name}.")
    return blocks
