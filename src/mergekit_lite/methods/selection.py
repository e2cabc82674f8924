"""Exactly the k largest of a stream of scores, in constant memory and without sorting.

A float that is not negative orders as its bit pattern does, read as an integer. So the k-th largest
score is found by narrowing a window of integers: a pass counts the scores above the window and
those inside it. The first window comes from a sample, a few per cent wide, so that one pass usually
holds everything inside it and ends the search; a window that is still too full is cut by a
histogram of 2**16 bins. A missed window is replaced by the side that the rank lies on. Elements
that equal the threshold are kept lowest index first, until k are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .._torch import Tensor, torch

_COLLECT = 1 << 20  # scores held at once; 4 MB in float32
_BINS = 1 << 16
# half-width of the first window, as a share of all scores, beside 2 standard errors of the sample
_MARGIN = 0.0015


@dataclass(frozen=True)
class Cut:
    """The threshold of "the k largest", as it applies to one block.

    Args:
        threshold: The k-th largest score; infinity when k is 0.
        ties: How many elements equal to the threshold this block keeps, first ones first; None for
            all of them.
    """

    threshold: float
    ties: int | None = None

    def trim(self, x: Tensor) -> Tensor:
        """``x`` where its magnitude is among the k largest, else 0.

        The scores must have been ``x.abs()``.
        """
        if self.threshold == 0 and self.ties is None:
            return x
        if self.ties is None or self.ties == 0:
            dtype = np.float64 if x.dtype == torch.float64 else np.float32
            if self.ties == 0:
                below = self.threshold
            else:
                below = float(np.nextafter(dtype(self.threshold), dtype(0)))
            return torch.nn.functional.hardshrink(x, below)
        return x * self.mask(x.detach().abs())

    def mask(self, scores: Tensor) -> Tensor:
        """True where a score is among the k largest; same shape as ``scores``."""
        if self.ties is None:
            return scores >= self.threshold
        keep = scores > self.threshold
        if self.ties:
            equal = (scores == self.threshold).flatten().nonzero().flatten()[: self.ties]
            keep.view(-1)[equal] = True
        return keep


def bits_of(scores: Tensor, wide: bool) -> np.ndarray:
    """The bit patterns of scores, float64's if ``wide``, else float32's.

    Whole numbers that order as the scores do.
    """
    dtype, whole = (torch.float64, torch.int64) if wide else (torch.float32, torch.int32)
    return scores.detach().to(dtype).contiguous().view(whole).view(-1).cpu().numpy()


class Selector:
    """Finds the k-th largest of all scores observed, pass by pass.

    Every pass shows every block once.

    Args:
        k: How many are to be kept, 0 to ``total``.
        total: Number of scores in all blocks together.
        sample: Bit patterns of some of the scores, spread over the whole; may be empty.
        wide: Scores are float64; else float32.
    """

    def __init__(self, k: int, total: int, sample: np.ndarray, wide: bool = False):
        self._k = k
        self._wide = wide
        self._np = np.float64 if wide else np.float32
        self.top = int(np.array(np.inf, self._np).view(f"i{self._np().itemsize}")) + 1
        self._lock = threading.Lock()
        self._blocks: dict[int, np.ndarray | int] = {}
        self.done = k > total or total == 0
        self.threshold = 0.0
        self.expect(k)
        self._ties: dict[int, int | None] = {}
        self._seen = False
        self._open(*self._first_window(sample, total))

    def _first_window(self, sample: np.ndarray, total: int) -> tuple[int, int, bool]:
        size = sample.size
        if size == 0:
            return 0, self.top, total <= _COLLECT
        rank = self._k / total
        margin = _MARGIN + size**-0.5
        # places in the sample, from the smallest
        high_at = size - 1 - int((rank - margin) * size)
        low_at = size - 2 - int((rank + margin) * size)
        places = [place for place in (low_at, high_at) if 0 <= place < size]
        ordered = np.partition(sample, places) if places else sample
        low = 0
        high = self.top
        if high_at < size:
            high = min(int(ordered[high_at]) + 1, self.top)
        if low_at >= 0:
            low = max(int(ordered[low_at]), 0)
        share = ((sample >= low) & (sample < high)).mean()
        return low, max(high, low + 1), share * total <= _COLLECT

    def _open(self, low: int, high: int, collect: bool) -> None:
        self.low = low
        self.high = high
        self._collect = collect and high - low > 1
        self._above = self._inside = 0
        self._blocks = {}
        self._shift = max(0, (high - low - 1).bit_length() - 16)
        if self._collect or high - low == 1:
            self._histogram = None
        else:
            self._histogram = np.zeros(_BINS, np.int64)

    def observe(self, block: int, scores: Tensor) -> None:
        """Count one block in the current pass; blocks may come in any order and from any thread."""
        # numpy compares and compresses several times faster than torch does on CPU
        bits = bits_of(scores, self._wide)
        if not self._seen and bits.size and (bits.max() >= self.top or bits.min() < 0):
            raise ValueError("selecting the largest elements: the tensor holds NaN")
        reach = bits >= self.low
        over = bits >= self.high
        self.take(block, int(np.count_nonzero(over)), bits[reach ^ over])

    def take(self, block: int, above: int, inside: np.ndarray) -> None:
        """Take what `observe` found in a block.

        How many scores lie above the window, and the bit patterns inside it.
        """
        if self._histogram is None:
            bins = None
        else:
            bins = np.bincount((inside - self.low) >> self._shift, minlength=_BINS)
        with self._lock:
            self._above += above
            self._inside += inside.size
            if self._histogram is not None and bins is not None:
                self._histogram += bins
            elif self.high - self.low == 1:
                self._blocks[block] = inside.size
            elif self._inside <= 4 * _COLLECT:
                self._blocks[block] = inside
            else:  # the sample misjudged the window; the pass goes on as a count
                self._blocks.clear()

    def expect(self, k: int) -> None:
        """Change how many are to be kept, while a pass is under way."""
        self._k = k
        if k <= 0:
            self.done = True
            self.threshold = float("inf")

    def advance(self) -> None:
        """End a pass: finish, or open the next window."""
        if self.done:
            return
        self._seen = True
        if self._above >= self._k:
            return self._open(self.high, self.top, False)
        if self._above + self._inside < self._k:
            return self._open(0, self.low, False)
        if self.high - self.low == 1:
            return self._finish(self.low, {i: int(n) for i, n in self._blocks.items()})
        if self._histogram is not None:
            from_top = np.cumsum(self._histogram[::-1])
            index = _BINS - 1 - int(np.searchsorted(from_top, self._k - self._above))
            low = self.low + (index << self._shift)
            return self._open(
                low,
                min(self.high, low + (1 << self._shift)),
                int(self._histogram[index]) <= _COLLECT,
            )
        if self._inside > 4 * _COLLECT:
            return self._open(self.low, self.high, False)
        codes = np.concatenate([np.atleast_1d(v) for v in self._blocks.values()])
        rank = self._k - self._above
        value = int(np.partition(codes, codes.size - rank)[codes.size - rank])
        self._above += int(np.count_nonzero(codes > value))
        return self._finish(
            value, {i: int(np.count_nonzero(v == value)) for i, v in self._blocks.items()}
        )

    def _finish(self, bits: int, equal: dict[int, int]) -> None:
        self.threshold = float(np.array(bits, f"i{self._np().itemsize}").view(self._np))
        left = self._k - self._above
        if sum(equal.values()) > left:
            for block in sorted(equal):
                self._ties[block] = None if equal[block] <= left else left
                left -= min(left, equal[block])
        self._blocks = {}
        self._histogram = None
        self.done = True

    def answer(self, block: int) -> Cut:
        """The cut as it applies to ``block``."""
        return Cut(self.threshold, self._ties.get(block, 0) if self._ties else None)


@dataclass(frozen=True)
class Largest:
    """A request of a merge method: which elements of the whole tensor are the k largest.

    Args:
        scores: Makes the block's scores, one for each element in its order: not negative, float32
            or float64.
        count: From the tensor's number of elements to k.
        scope: ``"tensor"``, or ``"global"``: over all tensors of the merge together.
    """

    scores: Callable[[], Tensor]
    count: Callable[[int], int]
    scope: str = "tensor"

    def compute(self) -> Tensor:
        """The block's scores."""
        return self.scores()

    def start(self, total: int, sample: Tensor) -> Selector:
        """Start collecting the answer over the blocks of a tensor with ``total`` elements."""
        wide = sample.dtype == torch.float64
        return Selector(self.count(total), total, bits_of(sample, wide), wide)


class Summation:
    """Adds the blocks' partial sums in block order, so that threads cannot change the rounding."""

    def __init__(self) -> None:
        self._partials: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        self.done = False

    def observe(self, block: int, partial: Tensor) -> None:
        """Take one block's partial sum."""
        self._partials[block] = partial

    def advance(self) -> None:
        """End the only pass."""
        if not self.done:
            self._total = torch.stack([self._partials[i] for i in sorted(self._partials)]).sum(0)
            self.done = True

    def answer(self, block: int) -> Tensor:
        """The sum over all blocks."""
        assert self._total is not None
        return self._total


@dataclass(frozen=True)
class Sum:
    """A request of a merge method: a quantity summed over the blocks of the tensor, in float64.

    Args:
        partial: Makes the block's share; any fixed shape.
    """

    partial: Callable[[], Tensor]

    def compute(self) -> Tensor:
        """The block's share, in float64."""
        return self.partial().double()

    def start(self, total: int, sample: Tensor) -> Summation:
        """Start collecting the sum."""
        return Summation()


T = TypeVar("T")
Request = Sum | Largest
Asking = Generator[Request | list[Largest], Any, T]
"""What a method is that yields requests and returns T; to a `Sum` comes a tensor, to a `Largest` a
`Cut`."""
