"""The eager products with low-rank factors.

y is updated in place, and dropout works on blocks of rows.

Letters: T tokens, I in_features, O out_features, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# elements of x that dropout handles at once: on a CPU they and their mask stay in the cache, on
# another device a block would only mean more launches
_BLOCK = {"cpu": 1 << 18}
# reference.keep_mask's factors, as int32
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - (1 << 32)


class Dropout(NamedTuple):
    """The mask of `reference.keep_mask`, kept as one word per row and per column of x."""

    rows: Tensor  # (T,), int32
    columns: Tensor  # (I,), int32
    threshold: int  # kept if the mixed word, as int32, is at least this

    def keep(self, rows: slice) -> Tensor:
        """Return the mask of some rows, (rows, I), as 0 and 1 in int32.

        Torch is faster with int32 arithmetic than with booleans.
        """
        word = self.rows[rows, None] ^ self.columns[None, :]
        word *= _FIRST
        # int32 shifts copy the sign: only the low 32 - 15 = 17 bits come from the word
        word ^= (word >> 15) & 0x1FFFF
        word *= _SECOND
        return word.ge_(self.threshold)


def _mixed(word: Tensor) -> Tensor:
    """Return `reference._mix` in int32, whose products wrap around."""
    word = (word ^ ((word >> 16) & 0xFFFF)) * _FIRST
    word = (word ^ ((word >> 15) & 0x1FFFF)) * _SECOND
    return word ^ ((word >> 16) & 0xFFFF)


def dropout(seed: Tensor, rows: int, columns: int, dropout_p: float) -> Dropout:
    """Return the `Dropout` of a 64-bit seed for x of (rows, columns)."""
    low = seed.to(torch.int32)
    high = (seed >> 32).to(torch.int32)
    key = _mixed(low ^ _mixed(high))
    at_row, at_column = (
        torch.arange(n, device=seed.device, dtype=torch.int32) for n in (rows, columns)
    )
    # the unsigned threshold less 2³¹, since signed words begin at -2³¹; 2³¹ would wrap
    threshold = min(round(dropout_p * 2**32), (1 << 32) - 1) - (1 << 31)
    return Dropout(_mixed(key + at_row), _mixed(at_column), threshold)


def _blocks(x: Tensor, drop: Dropout | None) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield blocks of rows: their slice, x after dropout, and the mask.

    There is only one block if nothing is dropped, and on a GPU.
    """
    whole = slice(None)
    if drop is None:
        yield whole, x, None
        return
    if torch.compiler.is_compiling():  # the compiler fuses it, for any number of tokens
        keep = drop.keep(whole)
        yield whole, x * keep, keep
        return
    # without tokens there is one empty block, so that the gradients of A and B are zeros
    tokens = max(1, x.shape[0])
    step = tokens
    if x.device.type in _BLOCK:
        step = max(1, _BLOCK[x.device.type] // max(1, x.shape[1]))
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        keep = drop.keep(rows)
        yield rows, x[rows] * keep, keep


def add_(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, drop: Dropout | None) -> None:
    """Add ``scale (drop(x) Aᵀ) Bᵀ`` to y, (T, O), in place.

    The scale includes dropout's 1 / (1 - p).
    """
    for rows, seen, _ in _blocks(x, drop):
        y[rows].addmm_((a @ seen.T).T, b.T, alpha=scale)


def gradients(
    grad: Tensor,  # (T, O)
    x: Tensor,  # (T, I)
    a: Tensor,  # (r, I)
    b: Tensor,  # (O, r)
    scale: float,
    drop: Dropout | None,
    dx: Tensor | None,  # (T, I), updated in place
    need_a: bool,
    need_b: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of A, (r, I), and B, (O, r), and add x's to ``dx``.

    ``g = s dy B``, ``dA = gᵀ drop(x)``, ``dB = s dyᵀ (drop(x) Aᵀ)``, ``dx += drop(g A)``. Here g
    and h = drop(x) Aᵀ are (r, T): narrow products are faster that way round.
    """
    if dx is not None or need_a:
        g = (b.T.contiguous() @ grad.T).mul_(scale)
    else:
        g = x.new_empty(0)
    # summed at the end: a running sum in half precision would soon stop growing
    das = []
    hs = []
    for rows, seen, keep in _blocks(x, drop):
        if need_a:
            das.append(g[:, rows] @ seen)
        if need_b:
            hs.append(a @ seen.T)
        if dx is not None and keep is not None:
            dx[rows] += (g[:, rows].T @ a).mul_(keep)
        elif dx is not None:
            dx.addmm_(g.T, a)
    da = db = None
    if need_a:
        da = das[0] if len(das) == 1 else torch.stack(das).sum(0)
    if need_b:
        h = hs[0] if len(hs) == 1 else torch.cat(hs, 1)
        db = (h @ grad).mul_(scale).T
    return da, db
