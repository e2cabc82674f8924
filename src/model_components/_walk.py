"""Run a model one block at a time.

For each batch, the arguments of each block other than the hidden states (mostly masks and
positions) are recorded once. With these arguments, a single block can be run on any hidden states,
so only one block has to be loaded or changed at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """The arguments of a block for one batch, without the hidden states.

    Attributes:
        arguments: The positional arguments after the hidden states.
        named: The keyword arguments.
        keep: A boolean mask over all tokens of the batch, (B * L,), False for padding. None means
            that no token is padding.
    """

    arguments: tuple[object, ...]
    named: Mapping[str, object]
    keep: Tensor | None

    def mapped(self, function: Callable[[Any], Any]) -> Self:
        """Return a copy with a function applied to ``arguments`` and to ``named``."""
        return replace(self, arguments=function(self.arguments), named=function(self.named))

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        out = block(hidden, *self.arguments, **self.named)
        # blocks of some models return more values, such as attentions, after the hidden states
        return out[0] if isinstance(out, tuple) else out


def split_arguments(
    arguments: tuple, named: Mapping[str, Any], keep: Tensor | None
) -> tuple[Tensor, Call]:
    """Split a block's arguments into the hidden states and a `Call`; remove key-value caches.

    The recorded arguments are used many times. A cache would grow with each use, and the block
    would attend to tokens of earlier uses.
    """
    from transformers import Cache

    rest = dict(named)
    if arguments:
        hidden, *others = arguments
    else:
        hidden, others = rest.pop("hidden_states"), []
    if "use_cache" in rest:
        rest["use_cache"] = False
    for name, value in rest.items():
        if isinstance(value, Cache):
            rest[name] = None
    return hidden, Call(tuple(None if isinstance(a, Cache) else a for a in others), rest, keep)


class Stop(Exception):
    """An exception that ends a forward pass early, once all needed values are recorded."""


@contextmanager
def forwards_replaced(
    blocks: Sequence[nn.Module], forward: Callable[[int, tuple, dict[str, Any]], object]
) -> Iterator[None]:
    """Replace each block's forward with ``forward(number, arguments, named)`` inside a context."""

    # a lambda made in the loop below would see the loop's last number
    def replacement(number: int) -> Callable[..., object]:
        return lambda *arguments, **named: forward(number, arguments, named)

    # accelerate's hooks set a forward on the instance itself
    originals = [vars(block).get("forward") for block in blocks]
    try:
        for number, block in enumerate(blocks):
            block.forward = replacement(number)
        yield
    finally:
        for block, original in zip(blocks, originals, strict=True):
            vars(block).pop("forward", None)
            if original is not None:
                block.forward = original


def shaped_as(out: object, hidden: Tensor, rest: object = None) -> object:
    """Return ``hidden`` in the form of the block output ``out``: alone, or first in a tuple.

    Each further item of the tuple is ``rest``.

    >>> shaped_as(("states", "attentions"), "other states")
    ('other states', None)
    """
    if isinstance(out, tuple):
        return (hidden, *[rest] * (len(out) - 1))
    return hidden


def outputs_of(block: nn.Module, calls: Sequence[Call], hidden: Sequence[Tensor]) -> list[Tensor]:
    """Return the hidden states after a block, batch by batch."""
    return [call.run(block, states) for call, states in zip(calls, hidden, strict=True)]


def not_padding(batch: Batch) -> Tensor | None:
    """Return a batch's token mask, flattened, False for padding; None if there is no token mask."""
    mask = batch.get("attention_mask")
    # a mask of four dimensions is for pairs of positions and does not mark padding
    if mask is None or mask.dim() != 2:
        return None
    return mask.reshape(-1).bool()


def tokens(x: Tensor, keep: Tensor | None) -> Tensor:
    """Return an activation's tokens that are not padding, (N, F)."""
    flat = x.reshape(-1, x.shape[-1])
    # an expert gets only some of the tokens, and the mask does not show which ones
    if keep is None or len(keep) != len(flat):
        return flat
    return flat[keep]
