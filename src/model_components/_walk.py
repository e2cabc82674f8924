"""A walk through a model's blocks: what each block is called with, and what it makes of it.

Hidden states go from block to block, batch by batch. All other arguments, nearly always masks and
positions, are recorded once. So one block at a time can be run, changed or loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """Arguments of a block for one batch.

    Attributes:
        arguments: Positional arguments after the hidden states.
        named: Keyword arguments.
        keep: Which tokens are not padding, flat; None: all.
    """

    arguments: tuple[object, ...]
    named: Mapping[str, object]
    keep: Tensor | None

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        out = block(hidden, *self.arguments, **self.named)
        return out[0] if isinstance(out, tuple) else out


def split_arguments(
    arguments: tuple, named: Mapping[str, Any], keep: Tensor | None
) -> tuple[Tensor, Call]:
    """Split a block's arguments into its hidden states and the rest, without caches.

    A cache would grow with every walk, and later walks would attend to what earlier ones left in
    it.
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


@contextmanager
def forwards_replaced(
    blocks: Sequence[nn.Module], forward: Callable[[int, tuple, dict[str, Any]], object]
) -> Iterator[None]:
    """Let blocks call ``forward(number, arguments, named)`` in place of their own forward."""

    def of(number: int) -> Callable[..., object]:
        return lambda *arguments, **named: forward(number, arguments, named)

    before = [vars(block).get("forward") for block in blocks]  # as accelerate's hooks leave it
    try:
        for number, block in enumerate(blocks):
            block.forward = of(number)
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            vars(block).pop("forward", None)
            if own is not None:
                block.forward = own


def outputs_of(block: nn.Module, calls: Sequence[Call], hidden: Sequence[Tensor]) -> list[Tensor]:
    """Return the hidden states after a block, batch by batch."""
    return [call.run(block, states) for call, states in zip(calls, hidden, strict=True)]


def not_padding(batch: Batch) -> Tensor | None:
    """Return which tokens a batch's mask keeps, flat; None if there is no mask of tokens."""
    mask = batch.get("attention_mask")
    if mask is None or mask.dim() != 2:
        return None
    return mask.reshape(-1).bool()


def tokens(x: Tensor, keep: Tensor | None) -> Tensor:
    """Return an activation's tokens that are not padding, (N, F)."""
    flat = x.reshape(-1, x.shape[-1])
    if keep is None or len(keep) != len(flat):
        return flat
    return flat[keep]
