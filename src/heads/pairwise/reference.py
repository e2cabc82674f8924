"""Reference definitions of attention within packed sequences, and of the Davidson link.

Shapes: T tokens of all sequences, S sequences, H query heads, G key and value heads, d width of a
head, P pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_attention(
    query: Tensor,  # (T, H, d)
    key: Tensor,  # (T, G, d)
    value: Tensor,  # (T, G, d)
    cu_seq_lens: Tensor,  # (S + 1,)
    *,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:
    """Compute softmax(scale q kᵀ) v, in which tokens attend only within their own sequence.

    With ``window``, tokens attend only to tokens that are at most ``window`` away. With ``causal``,
    they attend only to themselves and to earlier tokens.
    """
    tokens, heads, width = query.shape
    # neighboring query heads share a head of the key, as in torch's enable_gqa
    key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (key, value))
    place = torch.arange(tokens, device=query.device)
    # right=True: a sequence's end is the start of the next one; empty sequences get no token
    owner = torch.bucketize(place, cu_seq_lens[1:], right=True)
    seen = owner[:, None] == owner[None]
    if window is not None:
        seen = seen & ((place[:, None] - place[None]).abs() <= window)
    if causal:
        seen = seen & (place[:, None] >= place[None])
    weights = torch.einsum("qhd,khd->hqk", query, key) * (width**-0.5 if scale is None else scale)
    weights = weights.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def davidson(score_a: Tensor, score_b: Tensor, log_nu: Tensor) -> Tensor:
    """Return probabilities of A, B and tie, (P, 3), in proportion ``πA : πB : ν sqrt(πA πB)``.

    Source: Davidson 1970. π is ``exp(score)``.
    """
    a = score_a.exp()
    b = score_b.exp()
    parts = torch.stack([a, b, log_nu.exp() * (a * b).sqrt()], -1)
    return parts / parts.sum(-1, keepdim=True)
