"""Products with low-rank factors, for the eager implementation.

The output y is updated in place, and dropout is applied to one block of rows at a time.

Letters: T tokens, I in_features, O out_features, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# number of elements of x in a block: on a CPU, a block and its mask stay in the cache; on other
# devices, several blocks would only mean more kernel launches
_BLOCK = {"cpu": 1 << 18}
# the factors in reference.keep_mask, as int32
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - (1 << 32)


class Dropout(NamedTuple):
    """The mask of `reference.keep_mask`, stored as a hash for each row and each column of x."""

    rows: Tensor  # (T,), int32
    columns: Tensor  # (I,), int32
    threshold: int  # an element is kept if its hash, as int32, is at least this number

    def keep(self, rows: slice) -> Tensor:
        """Return the mask of some rows, of shape (rows, I), as 0 and 1 in int32.

        Torch's arithmetic is faster with int32 than with booleans.
        """
        word = self.rows[rows, None] ^ self.columns[None, :]
        word *= _FIRST
        # shifts of int32 copy the sign bit: only the low 32 - 15 = 17 bits come from the word
        word ^= (word >> 15) & 0x1FFFF
        word *= _SECOND
        return word.ge_(self.threshold)


def _mixed(word: Tensor) -> Tensor:
    """Return the hash of `reference._mix`, but compute it in int32, where products wrap around."""
    word = (word ^ ((word >> 16) & 0xFFFF)) * _FIRST
    word = (word ^ ((word >> 15) & 0x1FFFF)) * _SECOND
    return word ^ ((word >> 16) & 0xFFFF)


def dropout(seed: Tensor, rows: int, columns: int, dropout_p: float) -> Dropout:
    """Return the `Dropout` of a 64-bit seed, for x of shape (rows, columns)."""
    low = seed.to(torch.int32)
    high = (seed >> 32).to(torch.int32)
    key = _mixed(low ^ _mixed(high))
    at_row, at_column = (
        torch.arange(n, device=seed.device, dtype=torch.int32) for n in (rows, columns)
    )
    # the unsigned threshold minus 2³¹, because int32 begins at -2³¹; a result of 2³¹ would wrap
    threshold = min(round(dropout_p * 2**32), (1 << 32) - 1) - (1 << 31)
    return Dropout(_mixed(key + at_row), _mixed(at_column), threshold)


def _blocks(x: Tensor, drop: Dropout | None) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield, for each block of rows, its slice, its x after dropout, and its mask.

    All rows are one block if there is no dropout, during compilation, and on devices other than
    CPUs.
    """
    whole = slice(None)
    if drop is None:
        yield whole, x, None
        return
    if torch.compiler.is_compiling():  # the compiler fuses this for any number of tokens
        keep = drop.keep(whole)
        yield whole, x * keep, keep
        return
    # if there are no tokens, one empty block makes the gradients of A and B zeros
    tokens = max(1, x.shape[0])
    step = tokens
    if x.device.type in _BLOCK:
        step = max(1, _BLOCK[x.device.type] // max(1, x.shape[1]))
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        keep = drop.keep(rows)
        yield rows, x[rows] * keep, keep


def add_(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, drop: Dropout | None) -> None:
    """Add ``scale (drop(x) Aᵀ) Bᵀ`` to y, of shape (T, O), in place.

    ``scale`` includes dropout's factor 1 / (1 - p), and ``drop`` only sets elements to 0.
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
    """Return the gradients of A and B, and add the gradient of x to ``dx``.

    The formulas are ``g = s dy B``, ``dA = gᵀ drop(x)``, ``dB = s dyᵀ (drop(x) Aᵀ)`` and
    ``dx += drop(g A)``. In the code, g and h = drop(x) Aᵀ are transposed, of shape (r, T), because
    narrow products are faster in this layout.
    """
    if dx is not None or need_a:
        g = (b.T.contiguous() @ grad.T).mul_(scale)
    else:
        g = x.new_empty(0)
    # summed at the end, because a running sum in half precision would soon stop growing
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
