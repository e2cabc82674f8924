"""Modules of a thinker: attention, the layer that a step runs, and the read-out.

Shapes: B batch, n latents, L input length, O answer length, d width, H heads, h = d / H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ThinkerConfig, swiglu_size
from .flow import FlowRow
from .functional import Band, Turn, attention, rotate
from .memory import KeysValues


def make_norm(config: ThinkerConfig) -> nn.LayerNorm:
    """Return a layer norm of the model's width, without a bias.

    On a CPU it is a single kernel, whereas torch composes an RMS norm from several kernels.
    """
    return nn.LayerNorm(config.hidden_size, bias=False)


class Attention(nn.Module):
    """Multi-head attention whose keys and values are projected once and used in many calls."""

    def __init__(self, config: ThinkerConfig):
        super().__init__()
        d = config.hidden_size
        self.num_heads = config.num_heads
        self.norm = make_norm(config)
        self.source_norm = make_norm(config)
        self.query = nn.Linear(d, d, bias=False)
        self.key_value = nn.Linear(d, 2 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def project(
        self,
        source: Tensor,  # (B, L, d)
        turn: Turn | None = None,  # for L positions
    ) -> KeysValues:  # (B, H, L, h) twice
        """Project ``source`` to keys and values."""
        projected = self.key_value(self.source_norm(source)).unflatten(-1, (2, self.num_heads, -1))
        # (B, L, 2, H, h) to (2, B, H, L, h)
        keys, values = projected.permute(2, 0, 3, 1, 4).unbind(0)
        return (keys if turn is None else rotate(keys, turn)), values

    def forward(
        self,
        x: Tensor,  # (B, n, d)
        keys_values: KeysValues,
        mask: Tensor | Band | None = None,
        turn: Turn | None = None,  # for n positions
    ) -> Tensor:  # (B, n, d)
        """Attend from ``x`` to keys and values that `project` returned."""
        query = self.query(self.norm(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if turn is not None:
            query = rotate(query, turn)
        # answer queries and static tokens have a batch size of 1, and all inputs share them
        (batch,) = torch.broadcast_shapes(x.shape[:1], keys_values[0].shape[:1])
        query, keys, values = (t.expand(batch, -1, -1, -1) for t in (query, *keys_values))
        return self.out(attention(query, keys, values, mask=mask))


class SelfAttention(nn.Module):
    """Multi-head self-attention, with one projection for queries, keys and values."""

    def __init__(self, config: ThinkerConfig):
        super().__init__()
        d = config.hidden_size
        self.num_heads = config.num_heads
        self.norm = make_norm(config)
        self.query_key_value = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def forward(
        self,
        x: Tensor,  # (B, n, d)
        mask: Tensor | Band | None = None,
        turn: Turn | None = None,  # for n positions
    ) -> Tensor:  # (B, n, d)
        """Attend from ``x`` to itself."""
        projected = self.query_key_value(self.norm(x)).unflatten(-1, (3, self.num_heads, -1))
        # (B, n, 3, H, h) to (3, B, H, n, h)
        query, keys, values = projected.permute(2, 0, 3, 1, 4).unbind(0)
        if turn is not None:
            query = rotate(query, turn)
            keys = rotate(keys, turn)
        return self.out(attention(query, keys, values, mask=mask))


class TokenMixing(nn.Module):
    """A SwiGLU across positions, instead of self-attention (MLP-Mixer, Tolstikhin et al. 2021).

    The same weights mix each channel over all positions, so the number of positions is fixed.
    """

    def __init__(self, config: ThinkerConfig):
        super().__init__()
        places = config.max_input_length
        inner = swiglu_size(places)
        self.norm = make_norm(config)
        self.gate_up = nn.Linear(places, 2 * inner, bias=False)
        self.down = nn.Linear(inner, places, bias=False)

    def forward(
        self,
        x: Tensor,  # (B, n, d)
        mask: Tensor | Band | None = None,
        turn: Turn | None = None,
    ) -> Tensor:  # (B, n, d)
        """Mix the positions of ``x``; ``mask`` and ``turn`` are ignored."""
        gate, up = self.gate_up(self.norm(x).transpose(1, 2)).chunk(2, -1)
        return self.down(F.silu(gate) * up).transpose(1, 2)


class SwiGLU(nn.Module):
    """A SwiGLU MLP after a layer norm: down(silu(gate(x)) · up(x)) (Shazeer 2020)."""

    def __init__(self, config: ThinkerConfig):
        super().__init__()
        self.norm = make_norm(config)
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.mlp_size, bias=False)
        self.down = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, n, d) to the same
        """Apply the norm and the MLP."""
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class ThinkLayer(nn.Module):
    """One layer of the shared block: read, static look-up, memory look-up, self-attention, MLP.

    A step's row in the `FlowPlan` selects the operations. With ``mixer="mlp"`` a token-mixing MLP
    replaces self-attention.
    """

    def __init__(self, config: ThinkerConfig):
        super().__init__()
        self.read = Attention(config)
        self.static = Attention(config) if config.num_static_tokens else None
        self.memory = Attention(config) if config.memory != "none" else None
        if config.mixer == "mlp":
            self.self_attention: nn.Module = TokenMixing(config)
        else:
            self.self_attention = SelfAttention(config)
        self.mlp = SwiGLU(config)

    def forward(
        self,
        z: Tensor,  # (B, n, d)
        row: FlowRow,
        read: KeysValues,
        static: KeysValues | None,
        memory: KeysValues | None,
        *,
        read_mask: Tensor | Band | None = None,
        memory_mask: Tensor | None = None,
        self_mask: Tensor | Band | None = None,
        turn: Turn | None = None,
    ) -> Tensor:  # (B, n, d)
        """Run the operations that ``row`` selects, except a look-up in an empty memory."""
        if row.read_input:
            z = z + self.read(z, read, read_mask, turn)
        if row.static_mem_lookup and static is not None:
            assert self.static is not None
            z = z + self.static(z, static)
        if row.mem_lookup and memory is not None:
            assert self.memory is not None
            z = z + self.memory(z, memory, memory_mask)
        if row.self_attention:
            z = z + self.self_attention(z, self_mask, turn)
        return z + self.mlp(z)


class Readout(nn.Module):
    """The read-out: queries attend to the latents and give the logits of the answer.

    Optionally the queries also attend to each other. An MLP, a norm and the output head follow. If
    each latent gives a symbol of the answer, there are only the norm and the head.
    """

    def __init__(self, config: ThinkerConfig):
        super().__init__()
        # if the latents are the answer, these parameters would be unused
        if not config.at_tokens:
            self.look = Attention(config)
            if config.decoder_self_attention:
                self.self_attention = SelfAttention(config)
            else:
                self.self_attention = None
            self.mlp = SwiGLU(config)
        self.norm = make_norm(config)
        self.head = nn.Linear(config.hidden_size, config.output_size, bias=False)

    def forward(
        self,
        latents: Tensor,  # (B, n, d)
        queries: Tensor | None,  # (1, O, d); None if the latents are the answer
    ) -> Tensor:  # (B, O, output_size)
        """Compute the logits of the answer."""
        x = latents
        if queries is not None:
            x = queries + self.look(queries, self.look.project(latents))
            if self.self_attention is not None:
                x = x + self.self_attention(x)
            x = x + self.mlp(x)
        return self.head(self.norm(x))
