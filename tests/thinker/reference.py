"""The definition of a thinker's answer: keys and values made anew in every step, attention written
out, nothing kept.

`think` takes a `LatentThinker`'s parameters by name, in any float dtype. It is the specification
that the model is judged against; nobody makes it faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from einops import einsum, rearrange
from torch import Tensor

from thinker.config import ThinkerConfig
from thinker.flow import FlowRow


def attend(query: Tensor, keys: Tensor, values: Tensor, heads: int, look: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √h) v for each head; (B, n, d), (B, m, d), (B, m, d); ``look`` (B, n, m) says
    where."""
    q, k, v = (rearrange(x, "b n (h e) -> b h n e", h=heads) for x in (query, keys, values))
    scores = einsum(q, k, "b h n e, b h m e -> b h n m") / math.sqrt(q.shape[-1])
    if look is not None:
        scores = scores.masked_fill(~look[:, None], -math.inf)
    return rearrange(scores.softmax(-1) @ v, "b h n e -> b n (h e)")


def think(
    weights: Mapping[str, Tensor],
    config: ThinkerConfig,
    tokens: Tensor,  # (B, L)
    mask: Tensor | None,  # (B, L)
    rows: Sequence[FlowRow],
    out_len: int,
    *,
    noise: Tensor | None = None,  # (B, n, d), of latents that start from noise
    n_latent: int | None = None,
    drawn: Tensor | None = None,  # positions that were drawn
) -> Tensor:  # (B, O, output_size)
    """The logits after ``rows``."""
    w, d, heads = weights, config.hidden_size, config.num_heads
    dtype = w["embedding.weight"].dtype
    batch, length = tokens.shape
    valid = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    place = valid.cumsum(1) - 1
    place = place.clamp(min=0)

    def norm(x: Tensor, name: str) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return (
            centered
            / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            * w[f"{name}.weight"]
        )

    def grid(position: Tensor) -> tuple[Tensor, Tensor]:
        columns = (valid.sum(1, keepdim=True) ** 0.5).round().long()
        return position // columns, position % columns

    def waves(position: Tensor, size: int, base: float = 10_000.0) -> Tensor:
        frequency = torch.tensor([base ** (-i / size) for i in range(size)], dtype=torch.float32)
        return position[..., None].float() * frequency

    def turned(x: Tensor, position: Tensor) -> Tensor:
        size, parts = d // heads, []
        if config.positions == "rotary":
            angle = waves(position, size // 2)
        elif config.positions == "rotary_2d":
            angle = torch.cat(
                [math.pi / 2 * waves(axis, size // 4, 30.0) for axis in grid(position)], -1
            )
        else:
            return x
        cosine, sine = angle.cos().to(dtype), angle.sin().to(dtype)
        for part in x.split(size, -1):
            first, second = part[..., : size // 2], part[..., size // 2 :]
            parts += [first * cosine - second * sine, second * cosine + first * sine]
        return torch.cat(parts, -1)

    def look_up(
        name: str,
        z: Tensor,
        source: Tensor,
        look: Tensor | None,
        q_at: Tensor | None,
        k_at: Tensor | None,
    ):
        query = norm(z, f"{name}.norm") @ w[f"{name}.query.weight"].T
        keys, values = (
            norm(source, f"{name}.source_norm") @ w[f"{name}.key_value.weight"].T
        ).split(d, -1)
        query = query if q_at is None else turned(query, q_at)
        keys = keys if k_at is None else turned(keys, k_at)
        query, keys, values = (x.expand(batch, -1, -1) for x in (query, keys, values))
        return attend(query, keys, values, heads, look) @ w[f"{name}.out.weight"].T

    def itself(name: str, z: Tensor, look: Tensor | None, at: Tensor | None) -> Tensor:
        projected = norm(z, f"{name}.norm") @ w[f"{name}.query_key_value.weight"].T
        query, keys, values = projected.split(d, -1)
        if at is not None:
            query, keys = turned(query, at), turned(keys, at)
        return attend(query, keys, values, heads, look) @ w[f"{name}.out.weight"].T

    def mlp(name: str, z: Tensor) -> Tensor:
        gate, up = (norm(z, f"{name}.norm") @ w[f"{name}.gate_up.weight"].T).split(
            config.mlp_size, -1
        )
        return (gate / (1 + (-gate).exp()) * up) @ w[f"{name}.down.weight"].T

    def mixed(name: str, z: Tensor) -> Tensor:
        by_channel = rearrange(norm(z, f"{name}.norm"), "b n d -> b d n")
        gate, up = (by_channel @ w[f"{name}.gate_up.weight"].T).chunk(2, -1)
        inner = gate / (1 + (-gate).exp()) * up
        return rearrange(inner @ w[f"{name}.down.weight"].T, "b d n -> b n d")

    at = place
    if config.positions == "aligned":
        at = torch.zeros_like(place)
        for row in range(batch):
            count = 0
            for i in range(length):
                at[row, i] = count
                if valid[row, i]:
                    count = 0 if int(tokens[row, i]) in config.separators else count + 1
    elif drawn is not None:
        at = drawn[place]
    x = w["embedding.weight"][tokens]
    if config.positions == "cyclic":
        at = at % config.num_positions
    if config.positions in ("learned", "cyclic", "random", "aligned"):
        x = x + w["positions.input.weight"][at]
    if config.from_end:
        x = x + w["positions.end.weight"][(valid.sum(1, keepdim=True) - 1 - place).clamp(min=0)]

    n = n_latent or config.latents_for(length)
    may_see, read, latent_at = None, valid[:, None].expand(batch, n, length), None
    if config.at_tokens:
        z, latent_at = x[:, length - n :], place[:, length - n :]
        read = torch.zeros(batch, n, length, dtype=torch.bool)
        far = config.window or length
        for i in range(n):
            at_ = length - n + i
            for j in range(at_ + 1 if config.causal else length):
                near = torch.full((batch,), abs(at_ - j) < far)
                if config.positions == "rotary_2d":
                    row, column = grid(place)
                    near = ((row[:, at_] - row[:, j]).abs() < far) & (
                        (column[:, at_] - column[:, j]).abs() < far
                    )
                read[:, i, j] = valid[:, j] & near
            read[:, i, at_] = True
        may_see = read[:, :, length - n :]
    elif config.latent_init == "noise":
        assert noise is not None
        z = w["latents"][None] + noise
    else:
        z = w["latents"][None, :n].expand(batch, n, d)

    written: list[Tensor] = []
    for row in rows:
        before = z
        for i in range(config.layers_per_step):
            name = f"layers.{i}"
            if row.read_input:
                z = z + look_up(f"{name}.read", z, x, read, latent_at, place)
            if row.static_mem_lookup:
                tokens_ = w["static_tokens"][None]
                z = z + look_up(f"{name}.static", z, tokens_, None, None, None)
            if row.mem_lookup and written:
                past = torch.cat(written, 1)
                look = None if may_see is None else may_see.repeat(1, 1, len(written))
                z = z + look_up(f"{name}.memory", z, past, look, None, None)
            if row.self_attention:
                part = f"{name}.self_attention"
                if config.mixer == "mlp":
                    told = mixed(part, z)
                else:
                    told = itself(part, z, may_see, latent_at)
                z = z + told
            z = z + mlp(f"{name}.mlp", z)
        if config.step_update == "normalized":
            unit, to = (
                y / (y.square().mean(-1, keepdim=True) + torch.finfo(dtype).eps).sqrt()
                for y in (before, z)
            )
            z = unit + w["rate"] * (to - unit)
            z = z / (z.square().mean(-1, keepdim=True) + torch.finfo(dtype).eps).sqrt()
        if row.mem_write:
            written.append(z)

    if config.at_tokens:
        answer = z
    else:
        ask = torch.arange(out_len)
        if drawn is not None:
            ask = drawn[ask]
        output_table = w["positions.output.weight"]
        if config.positions in ("random", "aligned"):
            answer = (w["positions.input.weight"][ask] + output_table)[None]
        else:
            answer = output_table[ask][None]
        answer = answer + look_up("readout.look", answer, z, None, None, None)
        if config.decoder_self_attention:
            answer = answer + itself("readout.self_attention", answer, None, None)
        answer = answer + mlp("readout.mlp", answer)
    return norm(answer, "readout.norm") @ w["readout.head.weight"].T
