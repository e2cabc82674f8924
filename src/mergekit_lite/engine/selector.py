"""Select exactly the k largest of a stream of scores, in constant memory and without sorting.

Floats that are not negative sort like their bit patterns, read as integers. So the k-th largest
score is found by narrowing a window of integers: each pass over the scores counts those above the
window and those inside it. The first window comes from a sample and covers a few percent of the
scores, so usually memory can hold all scores inside it, and one pass is enough. A window with too
many scores is narrowed by a histogram of 2**16 bins. If the k-th largest score is outside the
window, the next window is the range above or below. Among elements equal to the threshold, those
with the lowest indices are kept, until k elements are kept.
"""

from __future__ import annotations

import threading

import numpy as np

from ..dtypes import Array
from .tiles import EVERY

_COLLECT = 1 << 20  # scores held in memory at once; 4 MB
_BINS = 1 << 16
# half-width of the first window, as a share of all scores, before 2 standard errors are added
_MARGIN = 0.0015
_TOP = int(np.float32(np.inf).view(np.int32)) + 1  # this pattern and larger ones are NaN


class Selector:
    """A search for the k-th largest of all scores, in one or more passes over all blocks.

    For each block, a pass counts the scores at or above ``high`` and collects the patterns from
    ``low`` to below ``high``.

    Args:
        k: The number of elements to keep.
        total: The number of scores in all blocks together.
        sample: Bit patterns of some of the scores, spread over all blocks; may be empty.
    """

    top = _TOP

    def __init__(self, k: int, total: int, sample: Array):
        self._lock = threading.Lock()
        self._ties: dict[int, int] = {}
        self.threshold = 0.0
        self.done = k >= total
        self.expect(k)
        self._open(*self._first_window(sample, total))

    def _first_window(self, sample: Array, total: int) -> tuple[int, int, bool]:
        """Return the first window, and whether memory can hold all patterns inside it."""
        size = sample.size
        if size == 0 or total == 0:
            return 0, _TOP, total <= _COLLECT
        rank = self._k / total
        # two standard errors of a share are at most size**-0.5
        margin = _MARGIN + size**-0.5
        # indices in the sorted sample
        high_at = size - 1 - int((rank - margin) * size)
        low_at = size - 2 - int((rank + margin) * size)
        places = [place for place in (low_at, high_at) if 0 <= place < size]
        ordered = np.partition(sample, places) if places else sample
        low = 0
        high = _TOP
        if high_at < size:
            high = min(int(ordered[high_at]) + 1, _TOP)
        if low_at >= 0:
            low = max(int(ordered[low_at]), 0)
        share = ((sample >= low) & (sample < high)).mean()
        return low, max(high, low + 1), share * total <= _COLLECT

    def _open(self, low: int, high: int, collect: bool) -> None:
        """Begin a pass with a window from ``low`` to below ``high``.

        If ``collect``, the patterns inside the window are held, otherwise counted in a histogram.
        """
        self.low = low
        self.high = high
        self._above = 0
        self._inside = 0
        self._blocks: dict[int, Array] = {}
        self._equal: dict[int, int] = {}
        # a bin's index has 16 bits, so the lower bits of an offset from `low` are shifted out
        self._shift = max(0, (high - low - 1).bit_length() - 16)
        self._histogram = None
        if not collect and high - low > 1:
            self._histogram = np.zeros(_BINS, np.int64)

    def take(self, block: int, above: int, inside: Array) -> None:
        """Add the result of a pass for one block.

        Blocks may be added in any order and from any thread.

        Args:
            block: The block's number.
            above: The number of scores above the window.
            inside: The bit patterns inside the window.
        """
        with self._lock:
            self._above += above
            self._inside += inside.size
            if self._histogram is not None:
                bins = (inside - self.low) >> self._shift
                self._histogram += np.bincount(bins, minlength=_BINS)
            elif self.high - self.low == 1:  # all are equal, so their count is enough
                self._equal[block] = inside.size
            elif self._inside <= 4 * _COLLECT:
                self._blocks[block] = inside
            else:  # more scores than the sample suggested: only count from here on
                self._blocks.clear()

    def expect(self, k: int) -> None:
        """Change the number of elements to keep; this is allowed during a pass."""
        self._k = k
        if k <= 0:
            self.done = True
            self.threshold = float("inf")

    def advance(self) -> None:
        """End a pass: finish the search, or open the next window."""
        if self.done:
            return
        if self._above >= self._k:
            self._open(self.high, _TOP, False)
        elif self._above + self._inside < self._k:
            self._open(0, self.low, False)
        elif self._histogram is not None:
            from_top = np.cumsum(self._histogram[::-1])
            # sums run from the top bin down, because k counts from the largest score
            index = _BINS - 1 - int(np.searchsorted(from_top, self._k - self._above))
            low = self.low + (index << self._shift)
            high = min(self.high, low + (1 << self._shift))
            self._open(low, high, int(self._histogram[index]) <= _COLLECT)
        elif self.high - self.low == 1:
            self._finish(self.low, self._k - self._above)
        elif self._inside > 4 * _COLLECT:
            self._open(self.low, self.high, False)
        else:
            patterns = np.concatenate(list(self._blocks.values()))
            place = patterns.size - (self._k - self._above)
            value = int(np.partition(patterns, place)[place])
            for block, held in self._blocks.items():
                self._equal[block] = int(np.count_nonzero(held == value))
            self._finish(value, self._k - self._above - int(np.count_nonzero(patterns > value)))

    def _finish(self, pattern: int, left: int) -> None:
        """Use a pattern as the threshold, and keep the first ``left`` scores equal to it."""
        self.threshold = float(np.int32(pattern).view(np.float32))
        # if all ties are kept, `budget` needs no table
        if sum(self._equal.values()) > left:
            for block in sorted(self._equal):
                # kernels count ties slowly, so only the block with the last kept tie gets a count
                self._ties[block] = EVERY if self._equal[block] <= left else left
                left -= min(left, self._equal[block])
        self._blocks = {}
        self.done = True

    def budget(self, block: int) -> int:
        """Return how many scores equal to the threshold a block keeps, lowest index first.

        `EVERY` means all of them.
        """
        if self._k <= 0:  # the threshold is infinity, which a score may equal
            return 0
        return self._ties.get(block, 0) if self._ties else EVERY
