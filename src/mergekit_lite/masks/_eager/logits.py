"""Logits of a chunk of positions.

Made by heads, blended for the student, and worked on in place by rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .blend import blend_any, part_of, pieces

_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}  # of a chunk that one elementwise step touches
# positions in a chunk: a sixteenth of all, between these
_SMALLEST = 16
# two buffers of a sixteenth are an eighth of whole logits
_SHARE = 16
_LARGEST = 512
# a whole blended head can be as large as the logits that chunks avoid
_BLOCK = {"cpu": 2048, "cuda": 16384}  # vocabulary rows of the head that are blended at a time


class Heads:
    """Hidden states to logits: through the frozen heads, blended for the student.

    Without heads they stay as they are.
    """

    def __init__(
        self, heads: Sequence[Tensor] | None, masks: Tensor | None, biases: Sequence[Tensor | None]
    ):
        self.heads = heads
        self.masks = masks
        self.biases = biases

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The student's head by rows."""
        assert self.heads is not None
        for rows in pieces(self.heads[0].shape[0], _BLOCK.get(self.heads[0].device.type, 16384)):
            parts = [h[rows] for h in self.heads]
            if self.masks is None:
                weight = parts[0]
            else:
                weight = blend_any(parts, part_of(self.masks, rows, 1), False)
            yield rows, weight

    def teacher(self, k: int, hidden: Tensor, out: Tensor) -> Tensor:
        """Logits of component k into ``out``."""
        if self.heads is None:
            return out.copy_(hidden)
        # mm writes into its own dtype alone; half precision needs a copy
        if out.dtype == hidden.dtype:
            torch.mm(hidden, self.heads[k].T, out=out)
        else:
            out.copy_(torch.mm(hidden, self.heads[k].T))
        bias = self.biases[k]
        return out if bias is None else out.add_(bias)

    def student(self, hidden: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Logits of the merged model into ``out``."""
        if self.heads is None:
            return out.copy_(hidden)
        for rows, weight in self.blocks():
            out[:, rows] = torch.mm(hidden, weight.T)
        return out if bias is None else out.add_(bias)


def stretches(rows: Tensor) -> Iterator[slice]:
    """Rows of logits that fit a cache together."""
    return pieces(
        rows.shape[0], max(1, _ELEMENTS.get(rows.device.type, 1 << 26) // max(1, rows.shape[1]))
    )


def sum_of(terms: Tensor) -> Tensor:
    """The sum of all, rows first."""
    return terms.sum(-1).sum(dtype=torch.float64)


def log_softmax_(logits: Tensor) -> None:
    """In place."""
    for piece in stretches(logits):
        # log_softmax subtracts the maximum first, which is more exact than x - logsumexp(x)
        logits[piece] = logits[piece].log_softmax(-1)


def entropies(logs: Tensor) -> Tensor:  # (N, 1)
    """Return the entropies of rows of log probabilities."""
    entropy = logs.new_zeros(logs.shape[0], 1)
    for piece in stretches(logs):
        p = logs[piece].exp()
        # an impossible token has log -inf, and 0 * -inf is NaN
        entropy[piece] = -torch.where(p == 0, 0, p * logs[piece]).sum(-1, keepdim=True)
    return entropy


def logaddexp_(total: Tensor, other: Tensor, rows: Tensor | slice) -> None:
    """``total[rows] = logaddexp(total[rows], other)``."""
    for piece in stretches(other):
        if isinstance(rows, slice):
            torch.logaddexp(total[piece], other[piece], out=total[piece])
        else:
            total[rows[piece]] = torch.logaddexp(total[rows[piece]], other[piece])


def chunks(
    states: Tensor, heads: Heads, dtype: torch.dtype, *, buffers: int
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Consecutive positions, and room for their logits."""
    positions = states.shape[0]
    if heads.heads is None:
        vocabulary = states.shape[1]
    else:
        vocabulary = heads.heads[0].shape[0]
    size = min(positions, max(_SMALLEST, min(_LARGEST, positions // _SHARE)))
    room = [
        torch.empty(size, vocabulary, dtype=dtype, device=states.device) for _ in range(buffers)
    ]
    for chunk in pieces(positions, size):
        yield chunk, [b[: chunk.stop - chunk.start] for b in room]
