"""The pure functions of a thinker.

Attention over keys and values that are already projected, and codes of position.

Shapes: B batch, H heads, h = d / H, n queries, m keys, d width.
"""

from __future__ import annotations

from contextlib import nullcontext

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
    mask: Tensor | None = None,  # (B, 1, n, m) or broadcastable, True where a query may look
) -> Tensor:  # (B, n, d)
    """softmax(q kᵀ / √h) v of each head, heads side by side.

    Torch's fused kernel where there is one.

    Args:
        query: Queries.
        keys: Keys.
        values: Values.
        mask: Where to look; default everywhere. Each query needs one place at least.

    Raises:
        ValueError: Keys and values that differ in shape, or whose heads are not the queries'.

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
            f"attention: query {list(query.shape)}, keys {list(keys.shape)}, values "
            f"{list(values.shape)}; expected (B, H, n, h), (B, H, m, h) and the keys' shape"
        )
    # only torch's plain kernel has forward-mode derivatives
    with sdpa_kernel(SDPBackend.MATH) if transforming() else nullcontext():
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    return output.transpose(1, 2).flatten(2)


def rotate(
    x: Tensor,  # (B, H, n, h)
    angles: Tensor,  # (B or 1, n, h / 2) radians
) -> Tensor:  # (B, H, n, h)
    """Turn each pair (x_i, x_{i + h/2}) by its angle (rotary positions, Su et al. 2021).

    >>> rotate(torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), torch.pi / 2)).round()
    tensor([[[[-1., 1.]]]])
    """
    cosine, sine = (f(angles)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def angles(
    positions: Tensor,  # (..., n), whole or real
    size: int,
    *,
    base: float = 10_000.0,
) -> Tensor:  # (..., n, size), float32
    """Position times base^(-i / size) for i in 0 .. size - 1: the angles that `rotate` turns by.

    >>> angles(torch.tensor([0, 2]), 2, base=100.0)
    tensor([[0.0000, 0.0000],
            [2.0000, 0.2000]])
    """
    # in float64 and then rounded once, as the definition has them
    frequencies = base ** -(torch.arange(size, device=positions.device, dtype=torch.float64) / size)
    return positions.float()[..., None] * frequencies.float()
