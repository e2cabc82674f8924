"""The definition of a LoRA layer: dense, slow, obvious, in any float dtype.

The fast paths are tested against it.

Letters: T tokens, I in_features, O out_features, r rank, *B any leading shape.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_WORD = 0xFFFFFFFF  # arithmetic is modulo 2³²


def _mix(word: Tensor) -> Tensor:
    """Apply a bijection of 32-bit words, held in int64 (Wellons' lowbias32).

    Every bit of the result depends on all bits of the word.
    """
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return word ^ (word >> 16)


def dropout_codes(seed: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the hash words that `keep_mask` combines, one per row and one per column.

    Their shapes are (rows,) and (columns,). Each word has 32 bits, stored in int64. Only the row
    words depend on the seed, which has 64 bits.
    """
    low = seed & _WORD
    high = (seed >> 32) & _WORD
    # mix the high half first: otherwise seeds with equal low ^ high would share a mask
    key = _mix(low ^ _mix(high))
    at_row, at_column = (
        torch.arange(n, device=seed.device, dtype=torch.int64) for n in (rows, columns)
    )
    return _mix((key + at_row) & _WORD), _mix(at_column)


def keep_mask(seed: Tensor, rows: int, columns: int, dropout_p: float) -> Tensor:
    """Return a boolean mask, (rows, columns), that is False with probability ``dropout_p``.

    Each element depends only on the seed and its position.
    """
    row, column = dropout_codes(seed, rows, columns)
    # an xor alone is not enough: the four corners of any rectangle would depend on each other
    word = ((row[:, None] ^ column[None, :]) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return (word ^ 0x80000000) >= round(dropout_p * 2**32)  # flip the sign bit: the order of int32


def lora_linear(
    x: Tensor,  # (*B, I)
    weight: Tensor,  # (O, I), or (I, O) when transposed
    lora_a: Tensor,  # (r, I)
    lora_b: Tensor,  # (O, r)
    bias: Tensor | None = None,  # (O,)
    *,
    scaling: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,  # (), int64
    transposed: bool = False,
) -> Tensor:
    """Return ``x Wᵀ + b + scaling · (drop(x) Aᵀ) Bᵀ``.

    drop multiplies by `keep_mask`, (T, I), and divides by 1 - dropout_p.
    """
    # before dropout: the base layer receives all of x
    y = F.linear(x, weight.T if transposed else weight, bias)
    if dropout_p:
        assert seed is not None
        flat = x.reshape(-1, x.shape[-1])
        x = (
            flat * keep_mask(seed, flat.shape[0], flat.shape[1], dropout_p) / (1 - dropout_p)
        ).view_as(x)
    return y + scaling * ((x @ lora_a.T) @ lora_b.T)
