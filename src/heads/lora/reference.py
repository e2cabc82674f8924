"""The reference implementation of a LoRA layer: plain and slow, for any floating-point dtype.

The faster implementations are tested against it.

Letters: T tokens, I in_features, O out_features, r rank, *B any leading dimensions.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_WORD = 0xFFFFFFFF  # mask for arithmetic modulo 2³²


def _mix(word: Tensor) -> Tensor:
    """Return a hash of each 32-bit word, stored as int64 (Wellons' lowbias32).

    The hash is a bijection. Every bit of it depends on all bits of the word.
    """
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return word ^ (word >> 16)


def dropout_codes(seed: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the hashes that `keep_mask` combines, one for each row and one for each column.

    Their shapes are (rows,) and (columns,). Each hash has 32 bits and is stored as int64. Only the
    hashes of the rows depend on the seed, which has 64 bits.
    """
    low = seed & _WORD
    high = (seed >> 32) & _WORD
    # hash the high half first: otherwise seeds with equal low ^ high would share a mask
    key = _mix(low ^ _mix(high))
    at_row, at_column = (
        torch.arange(n, device=seed.device, dtype=torch.int64) for n in (rows, columns)
    )
    return _mix((key + at_row) & _WORD), _mix(at_column)


def keep_mask(seed: Tensor, rows: int, columns: int, dropout_p: float) -> Tensor:
    """Return the boolean dropout mask of a matrix.

    Its shape is (rows, columns). Each element is False with probability ``dropout_p``, and depends
    only on the seed and on the position of the element.
    """
    row, column = dropout_codes(seed, rows, columns)
    # xor alone is not enough: the four corners of any rectangle would depend on each other
    word = ((row[:, None] ^ column[None, :]) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    # flip the sign bit, so that words are ordered as they are in int32
    return (word ^ 0x80000000) >= round(dropout_p * 2**32)


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

    ``drop`` multiplies x by `keep_mask`, of shape (T, I), and divides it by 1 - dropout_p.
    """
    # computed before dropout, which applies only to the input of the update
    y = F.linear(x, weight.T if transposed else weight, bias)
    if dropout_p:
        assert seed is not None
        flat = x.reshape(-1, x.shape[-1])
        x = (
            flat * keep_mask(seed, flat.shape[0], flat.shape[1], dropout_p) / (1 - dropout_p)
        ).view_as(x)
    return y + scaling * ((x @ lora_a.T) @ lora_b.T)
