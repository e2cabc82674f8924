"""Memory of past latents.

Their keys and values, of every layer, written once a step and looked up by later ones.

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
    """Everything written so far. Writing gives a new memory.

    The old one is as it was (but see `StaticMemory`).
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
        """The memory with another step's keys and values, by layer."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """The memory with every tensor changed: rows chosen, repeated or detached."""
        mapped = object.__new__(type(self))
        mapped.__dict__ |= self.__dict__
        mapped.layers = tuple((change(k), change(v)) for k, v in self.layers)
        return mapped


class GrowMemory(Memory):
    """A memory that keeps every write."""

    def write(self, layers: Sequence[KeysValues]) -> Memory:
        """Append a step's keys and values."""
        if not self.layers:
            return type(self)(layers)
        # new tensors each time: an older carry, and autograd, keep theirs
        joined = zip(self.layers, layers, strict=True)
        return type(self)(
            [(torch.cat([k, a], 2), torch.cat([v, b], 2)) for (k, v), (a, b) in joined]
        )


@dataclass
class _Room:
    """Storage that several handles share.

    Tensors with room for all writes, and how much of it is written.
    """

    layers: tuple[KeysValues, ...] = ()
    filled: int = 0


class StaticMemory(Memory):
    """Writes in place into room for ``size`` writes; for inference, where growing would copy.

    Handles share the room: only the newest can be written to.
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
        """The written part."""
        if not self.filled:
            return None
        keys, values = self.room.layers[layer]
        return keys[:, :, : self.filled], values[:, :, : self.filled]

    def write(self, layers: Sequence[KeysValues]) -> Memory:
        """Write a step's keys and values in place.

        Refused with gradients, whose saved keys it would change, past its room, and from an old
        handle.
        """
        if torch.is_grad_enabled():
            raise ValueError(
                'LatentThinker: memory="static" writes in place, which would change what autograd '
                'saved; expected memory="grow", or torch.no_grad()'
            )
        return self._write(layers)

    def _write(self, layers: Sequence[KeysValues]) -> Memory:
        batch, heads, n, size = layers[0][0].shape
        if not self.room.layers:
            whole = (batch, heads, n * self.size, size)
            self.room.layers = tuple((k.new_zeros(whole), v.new_zeros(whole)) for k, v in layers)
        # somebody has written behind the end of this handle
        if self.filled != self.room.filled:
            raise ValueError(
                'LatentThinker: this carry was thought on from before, and memory="static" was '
                'written in place; expected the newest carry, or memory="grow"'
            )
        end = self.filled + n
        if end > self.room.layers[0][0].shape[2]:
            raise ValueError(
                f"LatentThinker: static memory has room for {self.size} writes and is full; "
                "expected a larger memory_size"
            )
        for (keys, values), (k, v) in zip(self.room.layers, layers, strict=True):
            keys[:, :, self.filled : end] = k
            values[:, :, self.filled : end] = v
        self.room.filled = end
        return StaticMemory(self.size, self.room, end)

    def map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """A room of its own, changed."""
        # copied: what a change returns, such as a detached tensor, may be the same storage
        layers = tuple((change(k).clone(), change(v).clone()) for k, v in self.room.layers)
        return StaticMemory(self.size, _Room(layers, self.filled), self.filled)


def make_memory(config: ThinkerConfig) -> Memory | None:
    """An empty memory of the configured kind."""
    if config.memory == "grow":
        return GrowMemory()
    if config.memory == "none":
        return None
    assert config.memory_size is not None
    return StaticMemory(config.memory_size)
