"""State that passes between encoding, thinking and reading off.

Shapes: B batch, n latents, L input length, O answer length, d width, T steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node
from transformers.utils import ModelOutput

from .memory import GrowMemory, KeysValues, Memory
from .positions import Places


@dataclass(frozen=True)
class Context:
    """An input that was read: keys and values of every layer, projected once for all steps.

    Args:
        keys_values: Keys and values by layer, (B, H, L, h) each.
        static: Those of the static tokens, by layer, (1, H, M, h) twice; empty without any.
        mask: (B, L), False is padding; none when there is none.
        index: (B or 1, L, 1 or 2), the place of each token in its row, or its row and column in a
            grid.
        places: The positions that were drawn.
        embedded: (B, L, d), where the latents are the tokens and start from it.
    """

    keys_values: tuple[KeysValues, ...]
    static: tuple[KeysValues, ...]
    mask: Tensor | None
    index: Tensor
    places: Places
    embedded: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (B, L) of the input."""
        keys = self.keys_values[0][0]
        return keys.shape[0], keys.shape[2]

    def map(self, change: Callable[[Tensor], Tensor]) -> Context:
        """Return the context with ``change`` applied to every tensor that has one row an input.

        A change chooses or repeats rows.
        """
        # static tokens and places belong to no row, and stay
        return replace(
            self,
            keys_values=tuple((change(k), change(v)) for k, v in self.keys_values),
            mask=None if self.mask is None else change(self.mask),
            # one row serves all where nothing is padded
            index=self.index if self.index.shape[0] == 1 else change(self.index),
            embedded=None if self.embedded is None else change(self.embedded),
        )


@dataclass(frozen=True)
class ThinkerState:
    """Latents and memory after some steps: goes back into `LatentThinker.think` as ``carry``.

    Args:
        latents: (B, n, d).
        memory: The written keys and values; None without memory.
        places: The positions that the answer must share.
    """

    latents: Tensor
    memory: Memory | None
    places: Places

    def map(self, change: Callable[[Tensor], Tensor]) -> ThinkerState:
        """The state with ``change`` applied to its latents and memory."""
        memory = None if self.memory is None else self.memory.map(change)
        return replace(self, latents=change(self.latents), memory=memory)

    def detach(self) -> ThinkerState:
        """Return the state without its history.

        The next segment's gradients stop here (deep supervision).
        """
        return self.map(Tensor.detach)


# so that torch.export can return a carry
for _kind in (Places, ThinkerState):
    torch.export.register_dataclass(_kind)
register_pytree_node(
    GrowMemory,
    lambda memory: ([memory.layers], None),
    lambda parts, _: GrowMemory(*parts),
    serialized_type_name="thinker.GrowMemory",
)


@dataclass(frozen=True)
class Thought:
    """Result of `LatentThinker.think`.

    Args:
        state: After the last step of each row.
        kept: Latents of the steps asked for, (B, n, d) by step counted from 1.
        residuals: (B, T), ‖z - z'‖ / ‖z'‖ against the step before, of the latent that moved most;
            0 after a row stopped.
        steps: (B,), how many steps each row took.
    """

    state: ThinkerState
    kept: dict[int, Tensor]
    residuals: Tensor
    steps: Tensor


@dataclass
class ThinkerOutput(ModelOutput):
    """Result of `LatentThinker`.

    Args:
        loss: Cross-entropy of the last answer, when there were labels.
        logits: (B, O, output_size) of the last step.
        step_logits: The logits of every requested step, in order.
        output_steps: Which steps those are, counted from 1.
        residuals: (B, T), how far each step moved the latent that moved most, relative to it.
        steps: (B,), how many steps each row took.
        carry: Latents and memory, to think on from.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    step_logits: tuple[torch.Tensor, ...] | None = None
    output_steps: tuple[int, ...] | None = None
    residuals: torch.Tensor | None = None
    steps: torch.Tensor | None = None
    carry: ThinkerState | None = None
