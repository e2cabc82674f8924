"""The eager products with low-rank factors: in place, in blocks where there is dropout, nothing (tokens, O) beside y.

Letters: T tokens, I in_features, O out_features, r rank; R the ranks of several adapters that share x, stacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 1 << 18  # elements of x that dropout handles at once: they and their mask stay in the cache
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)  # reference.keep_mask's factors, as int32


class Dropout(NamedTuple):
    """Which elements of x an adapter sees: `reference.keep_mask`, from a word for each row and each column."""

    rows: Tensor  # (T,), int32
    columns: Tensor  # (I,), int32
    threshold: int  # kept where the mixed word, as int32, is at least this

    def keep(self, rows: slice) -> Tensor:
        """The mask of some rows, (rows, I)."""
        word = self.rows[rows, None] ^ self.columns[None, :]
        word *= _FIRST
        word ^= (word >> 15) & 0x1FFFF
        word *= _SECOND
        return word >= self.threshold


def _mixed(word: Tensor) -> Tensor:
    """`reference._mix` in int32, whose products wrap around."""
    word = (word ^ ((word >> 16) & 0xFFFF)) * _FIRST
    word = (word ^ ((word >> 15) & 0x1FFFF)) * _SECOND
    return word ^ ((word >> 16) & 0xFFFF)


def dropout(seed: Tensor, rows: int, columns: int, dropout_p: float) -> Dropout:
    """`Dropout` of a 64-bit seed."""
    low, high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
    key = _mixed(low ^ _mixed(high))
    at_row, at_column = (torch.arange(n, device=seed.device, dtype=torch.int32) for n in (rows, columns))
    return Dropout(_mixed(key + at_row), _mixed(at_column), round(dropout_p * 2**32) - (1 << 31))


def _blocks(x: Tensor, drop: Dropout | None) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Rows, x there as the adapters see it, and what was kept; all at once where nothing is dropped."""
    tokens = x.shape[0]
    if drop is None:
        yield slice(0, tokens), x, None
        return
    step = tokens if torch.compiler.is_compiling() else max(1, _BLOCK // max(1, x.shape[1]))
    for start in range(0, tokens, max(1, step)):
        rows = slice(start, min(start + step, tokens))
        keep = drop.keep(rows)
        yield rows, x[rows] * keep, keep


def add_(ys: Sequence[Tensor], x: Tensor, a: Tensor, bs: Sequence[Tensor], scales: Sequence[float],
         drop: Dropout | None) -> None:  # fmt: skip
    """``y_k += s_k (drop(x) A_kᵀ) B_kᵀ`` for adapters that share x; A is theirs stacked, (R, I)."""
    ranks = [b.shape[1] for b in bs]
    for rows, seen, _ in _blocks(x, drop):
        for y, h, b, scale in zip(ys, (seen @ a.T).split(ranks, 1), bs, scales, strict=True):
            y[rows].addmm_(h, b.T, alpha=scale)


def gradients(
    grads: Sequence[Tensor],  # (T, O_k)
    x: Tensor,  # (T, I)
    a: Tensor,  # (R, I)
    bs: Sequence[Tensor],  # (O_k, r_k)
    scales: Sequence[float],
    drop: Dropout | None,
    dx: Tensor | None,  # (T, I), added to
    need_a: bool,
    need_b: bool,
) -> tuple[Tensor | None, list[Tensor] | None]:
    """Gradients of the stacked A and of each B; x's is added to ``dx``.

    ``g_k = s_k dy_k B_k``, ``dA = gᵀ drop(x)``, ``dB_k = s_k dy_kᵀ (drop(x) A_kᵀ)``, ``dx += drop(g A)``.
    """
    ranks = [b.shape[1] for b in bs]
    g = h = da = None
    if dx is not None or need_a:
        parts = [(grad @ b).mul_(scale) for grad, b, scale in zip(grads, bs, scales, strict=True)]
        g = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if drop is not None:  # what is summed over blocks is summed in float32
        da = torch.zeros(a.shape, dtype=torch.promote_types(a.dtype, torch.float32), device=a.device) if need_a else None
        h = x.new_empty(x.shape[0], a.shape[0]) if need_b else None
    for rows, seen, keep in _blocks(x, drop):
        if need_a:
            assert g is not None
            part = g[rows].T @ seen
            da = part if da is None else da.add_(part)
        if need_b and h is None:
            h = seen @ a.T
        elif need_b:
            h[rows] = seen @ a.T
        if dx is not None and keep is None:
            dx.addmm_(g, a)
        elif dx is not None:
            dx[rows] += (g[rows] @ a).mul_(keep)
    dbs = None
    if need_b:
        assert h is not None
        parts = zip(grads, h.split(ranks, 1), scales, strict=True)
        dbs = [(part.T @ grad).mul_(scale).T for grad, part, scale in parts]
    return None if da is None else da.to(a.dtype), dbs
