"""Memory of past latents: their keys and values in every layer.

A step writes its keys and values once, and later steps attend to them.

Shapes: B batch, H heads, n latents, h = d / H; keys and values are (B, H, writes · n, h).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ThinkerConfig

KeysValues = tuple[Tensor, Tensor]


class Memory(ABC):
    """The base class of memories, which hold the keys and values written so far.

    Writing returns a new memory; the old one does not change (but see `StaticMemory`).
    """

    def __init__(self, layers: Sequence[KeysValues] = ()):
        self.layers = tuple(layers)

    @property
    def length(self) -> int:
        """The number of latents that can be looked up."""
        if self.layers:
            return self.layers[0][0].shape[2]
        return 0

    def read(self, layer: int) -> KeysValues | None:
        """Return the keys and values of a layer, or None if nothing was written."""
        if self.layers:
            return self.layers[layer]
        return None

    @abstractmethod
    def write(self, layers: Sequence[KeysValues]) -> Memory:
        """Return the memory with the keys and values of one more step, one pair per layer."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """Return the memory with ``change`` applied to every tensor.

        ``change`` selects, repeats or detaches rows.
        """
        mapped = object.__new__(type(self))
        mapped.__dict__ |= self.__dict__
        mapped.layers = tuple((change(k), change(v)) for k, v in self.layers)
        return mapped


class GrowMemory(Memory):
    """A memory that keeps every write."""

    def write(self, layers: Sequence[KeysValues]) -> Memory:
        """Return a memory with a step's keys and values appended."""
        if not self.layers:
            return type(self)(layers)
        # new tensors each time, since an older carry and autograd still use the old ones
        joined = zip(self.layers, layers, strict=True)
        return type(self)(
            [(torch.cat([k, a], 2), torch.cat([v, b], 2)) for (k, v), (a, b) in joined]
        )


@dataclass
class _Room:
    """Storage for all writes, which several memories share.

    ``filled`` is the number of latents written.
    """

    layers: tuple[KeysValues, ...] = ()
    filled: int = 0


class StaticMemory(Memory):
    """A memory that writes in place into storage for ``size`` writes.

    Use it for inference, where `GrowMemory` would copy all earlier writes in each step. The
    memories of successive steps share the storage, and only the newest can be written to.
    """

    def __init__(self, size: int, room: _Room | None = None, filled: int = 0):
        super().__init__()
        self.size = size
        self.room = room or _Room()
        self.filled = filled

    @property
    def length(self) -> int:
        """The number of latents that can be looked up."""
        return self.filled

    def read(self, layer: int) -> KeysValues | None:
        """Return the written keys and values of a layer, or None if nothing was written."""
        if not self.filled:
            return None
        keys, values = self.room.layers[layer]
        return keys[:, :, : self.filled], values[:, :, : self.filled]

    def write(self, layers: Sequence[KeysValues]) -> Memory:
        """Write a step's keys and values in place, and return a memory that includes them.

        Raises:
            ValueError: Gradients are on (the write would change keys that autograd saved), the
                storage is full, or a newer memory was written to.
        """
        if torch.is_grad_enabled():
            raise ValueError(
                'LatentThinker: memory="static" writes in place, which would change tensors that '
                'autograd saved; expected memory="grow", or torch.no_grad()'
            )
        return self._write(layers)

    def _write(self, layers: Sequence[KeysValues]) -> Memory:
        batch, heads, n, size = layers[0][0].shape
        if not self.room.layers:
            whole = (batch, heads, n * self.size, size)
            self.room.layers = tuple((k.new_zeros(whole), v.new_zeros(whole)) for k, v in layers)
        # a newer memory has already been written after the end of this one
        if self.filled != self.room.filled:
            raise ValueError(
                "LatentThinker: this carry is out of date, because an earlier call continued from "
                'it, and all carries share the storage of memory="static"; expected the newest '
                'carry, or memory="grow"'
            )
        end = self.filled + n
        if end > self.room.layers[0][0].shape[2]:
            raise ValueError(
                f"LatentThinker: the static memory has room for {self.size} writes and is full; "
                "expected a larger memory_size"
            )
        for (keys, values), (k, v) in zip(self.room.layers, layers, strict=True):
            keys[:, :, self.filled : end] = k
            values[:, :, self.filled : end] = v
        self.room.filled = end
        return StaticMemory(self.size, self.room, end)

    def map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """Return a memory with new storage, with ``change`` applied to every tensor."""
        # copied, since `change` may return a tensor with the same storage, such as a detached one
        layers = tuple((change(k).clone(), change(v).clone()) for k, v in self.room.layers)
        return StaticMemory(self.size, _Room(layers, self.filled), self.filled)


def make_memory(config: ThinkerConfig) -> Memory | None:
    """Return an empty memory of the configured kind, or None with ``memory="none"``."""
    if config.memory == "grow":
        return GrowMemory()
    if config.memory == "none":
        return None
    assert config.memory_size is not None
    return StaticMemory(config.memory_size)
