"""Pure functions of a thinker: attention over projected keys and values, and rotary positions.

Shapes: B batch, H heads, h = d / H, n queries, m keys, d width.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model_components._autograd import transforming


def attention(
    query: Tensor,  # (B, H, n, h)
    keys: Tensor,  # (B, H, m, h)
    values: Tensor,  # (B, H, m, h)
    *,
    mask: Tensor | Band | None = None,  # (B, 1, n, m) or broadcastable, True at attended keys
) -> Tensor:  # (B, n, d)
    """Compute softmax(q kᵀ / √h) v for each head, and concatenate the heads.

    Torch's ``scaled_dot_product_attention`` computes it, unless ``mask`` is a `Band`.

    Args:
        query: Queries.
        keys: Keys.
        values: Values.
        mask: True where a query attends to a key, or a `Band`; default: everywhere. Each query
            needs at least one key.

    Raises:
        ValueError: Keys and values differ in shape, queries and keys differ in the number or size
            of heads, or a tensor does not have four axes.

    Source: Vaswani et al. 2017, section 3.2.1.

    >>> q = torch.zeros(1, 2, 3, 4)
    >>> attention(q, torch.zeros(1, 2, 5, 4), torch.ones(1, 2, 5, 4)).shape
    torch.Size([1, 3, 8])
    """
    if (
        keys.shape != values.shape
        or query.dim() != 4
        or keys.dim() != 4
        or query.shape[1::2] != keys.shape[1::2]
    ):
        raise ValueError(
            f"attention: query has shape {list(query.shape)}, keys {list(keys.shape)}, values "
            f"{list(values.shape)}; expected (B, H, n, h), and (B, H, m, h) for keys and values"
        )
    if isinstance(mask, Band):
        return mask.attend(query, keys, values)
    # only torch's math kernel has forward-mode derivatives
    with sdpa_kernel(SDPBackend.MATH) if transforming() else nullcontext():
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    return output.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Band:
    """The keys near each query, from ``behind`` positions before it to ``ahead`` after it.

    The last query has the position of the last key. Time and memory are O(n W), where W is the
    width of the band, behind + 1 + ahead; with a mask over m keys they are O(n m).

    Args:
        seen: (B or 1, n, behind + 1 + ahead), True where the query attends to a key. Each query
            needs at least one key.
        behind: Number of positions before the query's own.
        ahead: Number of positions after the query's own.
    """

    seen: Tensor
    behind: int
    ahead: int

    def attend(
        self,
        query: Tensor,  # (B, H, n, h)
        keys: Tensor,  # (B, H, m, h), m >= n
        values: Tensor,  # (B, H, m, h)
    ) -> Tensor:  # (B, n, d)
        """Compute `attention` from each query to the keys in its band."""
        n = query.shape[2]
        start = keys.shape[2] - n
        keys, values = (F.pad(x, (0, 0, self.behind, self.ahead)) for x in (keys, values))
        # products of half precision are summed in float32, as in torch's kernel
        wide = torch.promote_types(query.dtype, torch.float32)
        logits = []
        for shift in range(self.seen.shape[2]):
            near = keys[:, :, start + shift : start + shift + n]
            logits.append((query * near).sum(-1, dtype=wide))
        scaled = torch.stack(logits, -1) * query.shape[-1] ** -0.5
        weights = scaled.masked_fill(~self.seen[:, None], -math.inf).softmax(-1).to(values.dtype)
        output = torch.zeros_like(query)
        for shift in range(self.seen.shape[2]):
            near = values[:, :, start + shift : start + shift + n]
            output = output + weights[..., shift : shift + 1] * near
        return output.transpose(1, 2).flatten(2)

    def mask(self) -> Tensor:  # (B or 1, 1, n, n)
        """Return the band as a mask for `attention`, for equal numbers of keys and queries."""
        n = self.seen.shape[1]
        mask = torch.zeros(len(self.seen), n, n, dtype=torch.bool, device=self.seen.device)
        for shift, seen in enumerate(self.seen.unbind(2)):
            offset = shift - self.behind
            if abs(offset) < n:
                inside = seen[:, max(0, -offset) : n - max(0, offset)]
                mask = mask | torch.diag_embed(inside, offset)
        return mask[:, None]


Turn = tuple[Tensor, Tensor]
"""Cosines and sines of the angles by which `rotate` rotates, each (B or 1, n, h / 2)."""


def rotate(
    x: Tensor,  # (B, H, n, h)
    turn: Turn,
) -> Tensor:  # (B, H, n, h)
    """Rotate each pair (x_i, x_{i + h/2}) by its angle (rotary positions, Su et al. 2021).

    >>> quarter = torch.full((1, 1, 1), torch.pi / 2)
    >>> rotate(torch.ones(1, 1, 1, 2), (quarter.cos(), quarter.sin())).round()
    tensor([[[[-1., 1.]]]])
    """
    cosine, sine = (part[:, None].to(x.dtype) for part in turn)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def angles(
    positions: Tensor,  # (..., n), integer or float
    size: int,
    *,
    base: float = 10_000.0,
) -> Tensor:  # (..., n, size), float32
    """Return the angles for `rotate`: position * base^(-i / size) for i = 0 .. size - 1.

    >>> angles(torch.tensor([0, 2]), 2, base=100.0)
    tensor([[0.0000, 0.0000],
            [2.0000, 0.2000]])
    """
    # computed in float64 and rounded once
    frequencies = base ** -(torch.arange(size, device=positions.device, dtype=torch.float64) / size)
    return positions.float()[..., None] * frequencies.float()
