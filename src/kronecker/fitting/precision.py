"""Blocks of a model in half precision, computed in float32, one at a time.

A model's own weights stay as they are: loaded from files they are mapped memory, which takes no
room until it is read, and a copy of all would take the room of two models.
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
    """Give a module float32 copies of its weights in half precision, in a context."""
    own = [
        (tensor, tensor.data)
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.dtype in _HALF
    ]
    try:
        for tensor, value in own:
            tensor.data = value.float()
        yield
    finally:
        for tensor, value in own:
            tensor.data = value


@contextmanager
def blocks_in_float32(model: nn.Module) -> Iterator[None]:
    """Run each block of a whole model in float32, in a context, with what it is given."""
    running: dict[nn.Module, ExitStack] = {}
    dtypes: dict[nn.Module, torch.dtype] = {}  # of the hidden states that a block was given

    def begin(block: nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple:
        running[block] = ExitStack()
        running[block].enter_context(in_float32(block))
        hidden = arguments[0] if arguments else named["hidden_states"]
        dtypes[block] = hidden.dtype
        return as_float32((arguments, named))

    def end(block: nn.Module, arguments: tuple, out: Any) -> Any:
        # no context where the first hook did not run, because an earlier one raised
        running.pop(block, ExitStack()).close()
        # what comes after the blocks, a norm and a head, computes in the model's own dtype
        return tree_map(lambda leaf: _returned(leaf, dtypes[block]), out)

    with ExitStack() as hooks:
        for block in _blocks(model):
            hooks.enter_context(
                block.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
            )
            # also after an error, with which a caller may end a run that has shown enough
            hooks.enter_context(block.register_forward_hook(end, always_call=True))
        yield


def _returned(leaf: Any, dtype: torch.dtype) -> Any:
    is_float32 = isinstance(leaf, Tensor) and leaf.dtype == torch.float32
    return leaf.to(dtype) if is_float32 and dtype in _HALF else leaf


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of the model's outermost lists of modules."""
    blocks: list[nn.Module] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(inside):
            blocks += module
            inside = (*inside, f"{name}.")
    return blocks
