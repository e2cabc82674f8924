"""Run a half-precision model in float32, one block at a time.

Weights that are loaded from files are memory-mapped, so they need not fit into memory. A float32
copy of all weights would need twice as much memory as the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from model_components._walk import forwards_replaced

_HALF = (torch.bfloat16, torch.float16)


def as_float32(value: Any) -> Any:
    """Return a nested value, with its half-precision tensors cast to float32."""
    return tree_map(lambda leaf: leaf.float() if _is_half(leaf) else leaf, value)


def has_half(module: nn.Module) -> bool:
    """Return whether any parameter or buffer of a module has half precision."""
    return any(map(_is_half, chain(module.parameters(), module.buffers())))


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Cast a module's half-precision parameters and buffers to float32 within a context.

    On exit, the old values are restored, and changes made within the context are lost.
    """
    tensors = filter(_is_half, chain(module.parameters(), module.buffers()))
    originals = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, value in originals:
            tensor.data = value.float()
        yield
    finally:
        for tensor, value in originals:
            tensor.data = value


@contextmanager
def blocks_in_float32(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Make half-precision blocks compute in float32 while the model runs within the context.

    The blocks' inputs are cast to float32, and their outputs are cast back.
    """
    half = [block for block in dict.fromkeys(blocks) if has_half(block)]
    originals: list[Callable[..., Any]] = [block.forward for block in half]

    def forward(number: int, arguments: tuple, named: dict[str, Any]) -> object:
        given = [leaf.dtype for leaf in tree_leaves((arguments, named)) if _is_half(leaf)]
        with in_float32(half[number]):
            out = originals[number](*as_float32(arguments), **as_float32(named))
        # the layers after the blocks, a norm and a head, compute in the model's own dtype
        return tree_map(lambda leaf: _cast_back(leaf, given[0]), out) if given else out

    with forwards_replaced(half, forward):
        yield


def _is_half(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in _HALF


def _cast_back(leaf: Any, dtype: torch.dtype) -> Any:
    is_float32 = isinstance(leaf, Tensor) and leaf.dtype == torch.float32
    return leaf.to(dtype) if is_float32 else leaf
