"""The passes that compiled kernels make over the blocks of one tensor.

Blocks are read into buffers that are reused, so each thread needs a few megabytes, whatever the
model's size. `FusedTensor.chosen` also keeps one bit per element and model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..dtypes import BFLOAT16, FLOAT32, Array, numbers
from ..files import Source
from ..methods import BY_ROWS, STRETCH, fusion
from ..methods.noise import stream_keys
from ..planning import TensorPlan
from . import native
from .selector import Selector
from .tiles import ALL, CHOSEN, DRAW, MIDDLE, TILE, TRIM

T = TypeVar("T")

BLOCK = STRETCH

# the sample that gives the first estimate of thresholds: 32 ranges of 2048 elements
_STRETCHES = 32
_STRETCH = 2048
_LINE = 64  # bytes of a cache line
_NO_MASK = np.empty((0, 0), np.uint8)
_MANTISSA = 23  # bits in the mantissa of a float32
_OCTAVES = 16  # powers of 2 that bins span; smaller magnitudes are counted in the first bin
_MOST_BINS = 2048  # few enough that bins and their limits stay in the L1 cache
_FEWEST_BINS = 64  # four per power of 2, for short rows
_WORK_ROWS = 5  # rows that kernels use in addition to one per model; `shift` uses the most

Finish = Callable[[Array, int, int, int, Array], bool]
"""A function that computes a block of the result: ``finish(raw, count, place, block, out)``.

``raw`` has ``count`` elements of every input, ``place`` is the index of the first one in the
tensor, and ``block`` is the block's number. The result is written to ``out``. The function returns
whether the result has NaN or infinity."""

Scores = Callable[[Array, int, int], Array]
"""A function that computes the scores of a block's elements: ``scores(raw, count, block)``.

It returns two rows in float32, of at least ``count`` columns: the scores, which are 0 or more, and
zeros, which take the place of the base."""


def float32(values: Sequence[float] | Array) -> Array:
    """Return an array of values in float32, the dtype in which kernels compute."""
    return np.asarray(values, np.float32)


class Buffers(threading.local):
    """Arrays that each thread allocates for itself on first use, and then reuses."""

    def __init__(self) -> None:
        # threading.local calls __init__ once in every thread, so each thread has its own table
        self._arrays: dict[tuple[str, str], Array] = {}

    def get(self, name: str, rows: int, columns: int, dtype: npt.DTypeLike) -> Array:
        """Return the first ``rows`` rows of the buffer with a name and dtype."""
        key = (name, np.dtype(dtype).str)
        array = self._arrays.get(key)
        if array is None or array.shape[0] < rows or array.shape[1] != columns:
            array = self._arrays[key] = _aligned(rows, columns, np.dtype(dtype))
        return array[:rows]


def _aligned(rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
    """Return an uninitialized array that begins at a cache line, for fast vector instructions."""
    size = rows * columns * dtype.itemsize
    room = np.empty(size + _LINE, np.uint8)
    first = -room.ctypes.data % _LINE
    return room[first : first + size].view(dtype).reshape(rows, columns)


@dataclass(frozen=True)
class Kept:
    """The task vector elements that a method keeps, in a form that kernels can use.

    Args:
        kind: ``ALL``, ``TRIM``, ``MIDDLE``, ``DRAW`` or ``CHOSEN``.
        cuts: Each model's threshold. For ``MIDDLE``, each model's threshold of outliers follows.
        selectors: One selector per threshold, which has the number of ties that each block keeps.
        keys: The keys of each model's random numbers, (K, 4).
        wholes, limits: The two parts of each model's probability, as in `Noise.keep`.
        masks: A mask (K, bytes) for each block, with one bit per element. `arguments` removes a
            block's mask.
        norms: Each model's L1 norms before and after elements are dropped, (K, 2), if known.
    """

    kind: int = ALL
    cuts: Array = field(default_factory=lambda: np.empty(0, np.float32))
    selectors: Sequence[Selector] = ()
    keys: Array = field(default_factory=lambda: np.empty((0, 4), np.uint32))
    wholes: Array = field(default_factory=lambda: np.empty(0, np.int64))
    limits: Array = field(default_factory=lambda: np.empty(0, np.float32))
    masks: dict[int, Array] = field(default_factory=dict)
    norms: Array | None = None

    def arguments(self, block: int) -> tuple[Any, ...]:
        """Return the kernels' arguments for the kept elements of a block, and remove its mask."""
        budgets = np.array([selector.budget(block) for selector in self.selectors], np.int64)
        mask = self.masks.pop(block, _NO_MASK)
        return self.kind, self.cuts, budgets, self.keys, self.wholes, self.limits, mask


class FusedTensor:
    """One tensor of a plan: its blocks, and the passes of kernels over them."""

    def __init__(
        self,
        t: TensorPlan,
        sources: Sequence[Source],
        seed: int,
        buffers: Buffers,
        executor: Executor | None,
    ):
        self.plan = t
        self.models = len(t.inputs)
        self.size = t.info.count
        self._sources = sources
        self._seed = seed
        self._buffers = buffers
        self._executor = executor
        self._columns = t.shape[-1] if t.shape else 1
        if t.method in BY_ROWS:
            self._span = max(1, BLOCK // self._columns) * self._columns
        else:
            self._span = BLOCK
        # If all inputs are bfloat16, their bit patterns are read directly. Otherwise float32 inputs
        # are read directly, and other inputs are converted.
        empty = np.empty(0, np.uint8)
        dtypes = []
        direct = []
        for i in t.everything:
            source = sources[i.source]
            dtypes.append(source.tensors[i.name].dtype)
            # with an empty buffer this reads nothing, and returns whether the source supports it
            direct.append(source.read_into(i.name, 0, empty))
        narrow = all(direct) and set(dtypes) == {BFLOAT16}
        self._dtype = np.uint16 if narrow else np.float32
        self._readable = []
        for can, dtype in zip(direct, dtypes, strict=True):
            self._readable.append(can and (narrow or dtype == FLOAT32))

    def work(self) -> Array:
        """Return scratch memory for a kernel."""
        return self._buffers.get("work", self.models + _WORK_ROWS, TILE, np.float32)

    def _read(self, place: int, count: int, raw: Array) -> None:
        """Read ``count`` elements of each input into its own row of ``raw``; the base is last."""
        for row, i, readable in zip(raw, self.plan.everything, self._readable, strict=True):
            source = self._sources[i.source]
            if readable:
                source.read_into(i.name, place, row[:count])
            else:
                row[:count] = numbers(source.read(i.name, place, place + count))

    def each(self, work: Callable[[Array, int, int, int], T]) -> list[T]:
        """Call ``work(raw, count, place, block)`` for every block, and return the results in order.

        The arguments are the same as for a `Finish`, without ``out``.
        """
        places = range(0, self.size, self._span)
        rows = len(self.plan.everything)

        def one(block: int) -> T:
            raw = self._buffers.get("raw", rows, max(BLOCK, self._span), self._dtype)
            count = min(self._span, self.size - places[block])
            self._read(places[block], count, raw)
            return work(raw, count, places[block], block)

        if self._executor is None or len(places) == 1:
            return [one(block) for block in range(len(places))]
        # in block order, whichever block is done first, because `summed` relies on that order
        return list(self._executor.map(one, range(len(places))))

    def gram(self, *, shifted: bool) -> Array:
        """Return the dot products of all pairs of inputs; the base is the last input.

        If ``shifted``, they are the dot products of the task vectors.
        """
        rows = self.models if shifted else len(self.plan.everything)

        def work(raw: Array, count: int, place: int, block: int) -> Array:
            sums = np.zeros((rows, rows))
            native.run("gram", raw, count, rows, shifted, self.work(), sums)
            return sums

        return summed(self.each(work))

    def norms(self, kept: Kept) -> Array:
        """Return each model's L1 norms, before and after elements are dropped, (K, 2)."""

        def work(raw: Array, count: int, place: int, block: int) -> Array:
            sums = np.zeros((self.models, 2))
            arguments = kept.arguments(block)
            native.run("norms", raw, count, self.models, place, *arguments, self.work(), sums)
            return sums

        return summed(self.each(work))

    def restoring(self, kept: Kept, rescale: bool) -> Array:
        """Return the factors that restore the L1 norms, or an empty array if none are needed."""
        if not rescale or kept.kind == ALL:
            return np.empty(0, np.float32)
        return _factors(self.norms(kept) if kept.norms is None else kept.norms)

    def _sample(self) -> Array:
        """Return a sample of every input, from ranges that are spread over the tensor."""
        # the ranges never overlap; a small tensor is sampled completely
        step = max(_STRETCH, self.size // _STRETCHES)
        places = range(0, self.size, step)
        parts = []
        for place in places:
            count = min(_STRETCH, self.size - place)
            part = np.empty((len(self.plan.everything), count), self._dtype)
            self._read(place, count, part)
            parts.append(part)
        return numbers(np.concatenate(parts, 1))

    def trimmed(self, counts: Sequence[int]) -> Kept:
        """Find the thresholds that keep the k largest changes of each model.

        ``counts`` has each model's k. If it has two entries per model, the entries of the second
        half are the numbers of largest changes to drop.
        """
        sample = self._sample()
        selectors = []
        for place, k in enumerate(counts):
            change = sample[place % self.models] - sample[-1]
            selectors.append(Selector(k, self.size, np.abs(change).view(np.int32)))
        self._search(selectors)  # at least one pass, which detects NaN
        while not all(selector.done for selector in selectors):
            self._search(selectors)
        kind = TRIM if len(selectors) == self.models else MIDDLE
        return Kept(kind, float32([selector.threshold for selector in selectors]), selectors)

    def _search(self, selectors: Sequence[Selector], scores: Scores | None = None) -> None:
        """Make one pass over the tensor for all selectors.

        The selectors search the elements' scores if ``scores`` is given, otherwise the magnitudes
        of each model's changes.
        """
        lows = np.array([selector.low for selector in selectors], np.uint32)
        highs = np.array([selector.high for selector in selectors], np.uint32)
        top = np.uint32(selectors[0].top)

        def work(raw: Array, count: int, place: int, block: int) -> None:
            patterns = self._buffers.get("patterns", len(selectors), BLOCK, np.uint32)
            above = np.zeros(len(selectors), np.int64)
            inside = np.zeros(len(selectors), np.int64)
            arguments = (lows, highs, top, patterns, above, inside, self.work())
            if scores is not None:
                # the kernel subtracts the last row from the other rows, so the last row is zeros
                raw = scores(raw, count, block)
            if native.run("window", raw, count, self.models, *arguments):
                raise _nan(self.plan)
            for k, selector in enumerate(selectors):
                if not selector.done:
                    # astype makes a copy, because the thread's next block overwrites the buffer
                    selector.take(block, int(above[k]), patterns[k, : inside[k]].astype(np.int32))

        self.each(work)
        for selector in selectors:
            selector.advance()

    def fused_by_importance(self) -> Finish:
        """Return the `Finish` of `arcee_fusion`, which takes each element from model or base.

        The first pass computes the divergence of every row. Further passes find the quartiles of
        the elements' scores.
        """
        divergences: dict[int, Array] = {}
        # the sample has every stride-th element of each block
        stride = max(1, self.size // (_STRETCHES * _STRETCH))

        def scores(raw: Array, count: int, block: int) -> Array:
            rows = self._buffers.get("scores", 2, max(BLOCK, self._span), np.float32)
            rows[1] = 0  # in place of the base, which the kernel in `_search` subtracts
            arguments = (self._columns, divergences[block], self.work(), rows[0])
            native.run("importance", raw, count, *arguments)
            return rows

        def measure(raw: Array, count: int, place: int, block: int) -> Array:
            changed, origin = raw[:, :count].reshape(2, -1, self._columns)
            divergences[block] = fusion.row_divergences(changed, origin)
            return scores(raw, count, block)[0, :count:stride].copy()

        sample = np.concatenate(self.each(measure)).view(np.int32)
        selectors = []
        for rank in fusion.quartile_places(self.size):
            # a selector with k equal to its total would not search for the smallest score
            selectors.append(Selector(self.size - rank, self.size + 1, sample))
        while not all(selector.done for selector in selectors):
            self._search(selectors, scores)
        quartiles = [selector.threshold for selector in selectors]
        threshold = np.float32(fusion.outlier_threshold(*quartiles))

        def finish(raw: Array, count: int, place: int, block: int, out: Array) -> bool:
            arguments = (scores(raw, count, block)[0], threshold, self.work(), out)
            return native.run("pick_important", raw, count, *arguments)

        return finish

    def drawn(self, density: Sequence[float]) -> Kept:
        """Return settings with which kernels make the same random choices as `noise.Noise.keep`."""
        keys = []
        wholes = []
        limits = []
        for model, probability in enumerate(density):
            stream = f"{self._seed}|{self.plan.name}|{model}"
            keys.append([*stream_keys(stream), *stream_keys(f"{stream}|own")])
            whole, rest = divmod(probability * (1 << 8) - (1 << 7), 1)
            wholes.append(128 if probability >= 1 else int(whole))  # above any int8: all are kept
            limits.append(rest * (1 << 31) if rest else -1.0)
        return Kept(
            DRAW,
            keys=np.array(keys, np.uint32),
            wholes=np.array(wholes, np.int64),
            limits=float32(limits),
        )

    def chosen(self, density: Sequence[float], epsilon: Sequence[float]) -> Kept:
        """Choose elements at random, larger ones with a higher probability, as `della` does."""
        stream = f"{self._seed}|{self.plan.name}"
        keys = [stream_keys(f"{stream}|{model}|each") for model in range(self.models)]
        # in float32 as in `keep_probabilities`, so that both engines choose the same elements
        steps = np.arange(self._columns, dtype=np.float32) / np.float32(max(1, self._columns - 1))
        chances = []  # each model's probabilities, by rank
        for d, e in zip(density, epsilon, strict=True):
            chances.append((d - e) + steps * (2 * e))
        # random numbers are int32, so a probability p becomes the limit p * 2**32 - 2**31
        exact = np.rint(np.array(chances, np.float64) * 2**32 - 2**31)
        limits = exact.clip(max=2**31 - 1).astype(np.int32)
        # about one bin for every two elements, rounded down to a power of two
        most = min(_MOST_BINS, max(_FEWEST_BINS, self._columns // 2))
        bins = 1 << (most.bit_length() - 1)
        # each power of 2 has 2**23 bit patterns, of which a bin spans 2**shift
        shift = np.uint32((_OCTAVES << _MANTISSA).bit_length() - bins.bit_length())
        settings = (shift, np.array(keys, np.uint32), limits, np.array(density) >= 1)
        masks: dict[int, Array] = {}

        def choose(raw: Array, count: int, place: int, block: int) -> Array:
            masks[block] = np.zeros((self.models, -(-count // 8)), np.uint8)
            sums = np.zeros((self.models, 2))
            row = self._buffers.get("row", 3, self._columns, np.float32)
            table = self._buffers.get("bins", 3, bins, np.int32)
            arguments = (*settings, row, table, masks[block], sums)
            native.run("choose", raw, count, self._columns, self.models, place, *arguments)
            return sums

        norms = summed(self.each(choose))
        return Kept(CHOSEN, masks=masks, norms=norms)

    def combined(self, factors: Sequence[float] | Array) -> Finish:
        """Return a `Finish` that computes Σ c_k x_k over all inputs, the base last."""
        c = float32(factors)

        def finish(raw: Array, count: int, place: int, block: int, out: Array) -> bool:
            return native.run("combine", raw, count, c, self.work(), out)

        return finish

    def shifted(
        self,
        weights: Sequence[float] | Array,
        scale: float = 1.0,
        kept: Kept | None = None,
        scales: Array | None = None,
        normalize: bool | None = None,
    ) -> Finish:
        """Return a `Finish` that computes B + ``scale`` Σ w_k D_k.

        The D_k are the ``kept`` task vectors, multiplied by ``scales``. If ``normalize`` is not
        None, the `Finish` computes B + ``scale`` times the consensus of the D_k instead.
        """
        kept = kept or Kept()
        scales = np.empty(0, np.float32) if scales is None else scales
        w = float32(weights)
        voting = (normalize is not None, bool(normalize), np.float32(scale))

        def finish(raw: Array, count: int, place: int, block: int, out: Array) -> bool:
            arguments = (*kept.arguments(block), scales, w, *voting, self.work(), out)
            return native.run("shift", raw, count, self.models, place, *arguments)

        return finish

    def selected(self, share: float) -> Selector:
        """Return the selector of the positions at which the models' changes vary most.

        It selects ``share`` of the positions at which the variance over models is above 0. If
        ``share`` is 1 or more, it selects all positions.
        """
        if share >= 1:
            return Selector(self.size, self.size, np.empty(0, np.int32))
        sample = self._sample()
        deltas = sample[:-1] - sample[-1]
        bits = deltas.var(0, dtype=np.float32).view(np.int32)
        # the first pass counts the variances above 0; its window assumes that all are above 0
        selector = Selector(max(1, int(share * self.size)), self.size, bits)
        varied = self._search_variance(selector)
        selector.expect(int(share * varied))
        selector.advance()
        while not selector.done:
            self._search_variance(selector)
            selector.advance()
        return selector

    def _search_variance(self, selector: Selector) -> int:
        low = np.uint32(selector.low)
        high = np.uint32(selector.high)
        top = np.uint32(selector.top)

        def work(raw: Array, count: int, place: int, block: int) -> int:
            patterns = self._buffers.get("patterns", 1, BLOCK, np.uint32)[0]
            counts = np.zeros(3, np.int64)
            arguments = (low, high, top, patterns, counts, self.work())
            if native.run("variance_window", raw, count, self.models, *arguments):
                raise _nan(self.plan)
            selector.take(block, int(counts[0]), patterns[: counts[1]].astype(np.int32))
            return int(counts[2])

        return sum(self.each(work))


def _factors(norms: Array) -> Array:
    """Return the factors that restore each model's L1 norm, given the `FusedTensor.norms`."""
    before, after = norms.T
    # np.where computes both branches; 1e-300 avoids 0 / 0 in the branch that is not used
    return np.where(after > 0, before / np.maximum(after, 1e-300), 1.0).astype(np.float32)


def summed(parts: Sequence[Array]) -> Array:
    """Return the sum of the blocks' arrays, added in block order so that rounding is the same."""
    total = np.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def _nan(t: TensorPlan) -> ValueError:
    return ValueError(f"{t.name}: selecting the largest elements: expected numbers, got NaN")
