"""State that passes between encoding, thinking and decoding.

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
    """An encoded input: keys and values of every layer, projected once for all steps.

    Args:
        keys_values: The keys and values of each layer, (B, H, L, h) each.
        static: The keys and values of the M static tokens in each layer, (1, H, M, h) each; empty
            without static tokens.
        mask: (B, L), False at padding; None without padding.
        index: (B or 1, L, 1 or 2), the position of each token in its sequence, or its row and
            column in a grid.
        places: The positions that were drawn.
        embedded: (B, L, d), the embedded tokens, if the latents start from them.
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
        """Return the context with ``change`` applied to every tensor that has a batch axis.

        ``change`` selects or repeats rows of the batch.
        """
        # static tokens and places are the same for all rows, so they do not change
        return replace(
            self,
            keys_values=tuple((change(k), change(v)) for k, v in self.keys_values),
            mask=None if self.mask is None else change(self.mask),
            # without padding, all inputs share one row
            index=self.index if self.index.shape[0] == 1 else change(self.index),
            embedded=None if self.embedded is None else change(self.embedded),
        )


@dataclass(frozen=True)
class ThinkerState:
    """Latents and memory after some steps, to pass to `LatentThinker.think` as ``carry``.

    Args:
        latents: The latents, (B, n, d).
        memory: The keys and values written so far; None without a memory.
        places: The positions drawn for the input, which the answer must share.
    """

    latents: Tensor
    memory: Memory | None
    places: Places

    def map(self, change: Callable[[Tensor], Tensor]) -> ThinkerState:
        """Return the state with ``change`` applied to its latents and memory."""
        memory = None if self.memory is None else self.memory.map(change)
        return replace(self, latents=change(self.latents), memory=memory)

    def detach(self) -> ThinkerState:
        """Return the state detached from the autograd graph.

        A later call that continues from this state has no gradients into earlier calls (deep
        supervision).
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
        state: The state after the last step of each row.
        kept: The latents of each requested step, (B, n, d), keyed by the step's number, counted
            from 1.
        residuals: (B, T), ‖z - z'‖ / ‖z'‖ of the latent z that moved most, where z' is the latent
            before the step; 0 for steps after a row stopped.
        steps: (B,), the number of steps that each row took.
    """

    state: ThinkerState
    kept: dict[int, Tensor]
    residuals: Tensor
    steps: Tensor


@dataclass
class ThinkerOutput(ModelOutput):
    """Result of `LatentThinker`.

    Args:
        loss: Cross-entropy of ``logits``, if labels were given.
        logits: (B, O, output_size), the logits of the last step in ``output_steps``.
        step_logits: The logits of every step in ``output_steps``, in the same order.
        output_steps: The numbers of the requested steps, counted from 1, in ascending order.
        residuals: (B, T), the relative change of the latent that changed most in each step; see
            `Thought`.
        steps: (B,), the number of steps that each row took.
        carry: The latents and memory from which a later call can continue.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    step_logits: tuple[torch.Tensor, ...] | None = None
    output_steps: tuple[int, ...] | None = None
    residuals: torch.Tensor | None = None
    steps: torch.Tensor | None = None
    carry: ThinkerState | None = None
