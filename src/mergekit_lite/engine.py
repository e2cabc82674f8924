"""The engine that carries a plan out: reads, computes and hands on one block of one tensor at a time.

Reading and writing overlap with arithmetic through the system's cache: the next tensor is fetched during the last,
and written pages go to disk behind our back. With an executor blocks also run side by side; sums are added in block
order, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Source
from .evaluate import Block, Collector, Evaluation
from .memory import HeapWatch
from .methods.registry import block_shape
from .noise import Noise
from .plan import CHUNK, MergePlan, TensorPlan
from .select import Largest, Selector

_CACHED = 24_000_000  # bytes of one tensor's inputs that are kept between passes
_ALLOWANCE = 16_000_000  # bytes that the process may grow by beyond the plan's estimate before freed memory goes back
_SLICES, _SLICE = 32, 2048  # the sample that thresholds start from


class NotFiniteError(ValueError):
    """A merge that would write NaN or infinity."""


@dataclass(frozen=True)
class TensorFact:
    """What was done to make one output tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    method: str
    passes: int


class StreamBlocks:
    """The blocks of one planned tensor, read on demand and cast to the dtype to compute in."""

    def __init__(self, t: TensorPlan, sources: Sequence[Source], device: torch.device, heap: HeapWatch, cached: bool):
        self._plan, self._sources, self._device, self._heap = t, sources, device, heap
        self.total = t.info.count
        row = block_shape(t.shape, "rows")[1] if t.chunking == "rows" else 1
        size = max(1, self.total) if t.chunking == "tensor" else max(row, CHUNK // max(1, row) * row)
        self._row = row
        self._edges = [*range(0, self.total, size), self.total] if self.total else [0, 0]
        held = self.total * t.work.itemsize * (len(t.inputs) + 1)
        self._cache: dict[int, Block] | None = {} if cached and t.passes > 1 and held <= _CACHED else None

    def __len__(self) -> int:
        return len(self._edges) - 1

    def span(self, index: int) -> tuple[int, int]:
        """First and last element (exclusive) of a block."""
        return self._edges[index], self._edges[index + 1]

    def _read(self, start: int, stop: int) -> Block:
        self._heap.check()
        t = self._plan
        view = {"elements": (-1,), "rows": (-1, self._row), "tensor": t.shape}[t.chunking]

        def values(source: int, name: str) -> Tensor:
            stored = self._sources[source].read(name, start, stop)
            return stored.to(self._device, t.work).view(view)

        tensors = [values(i.source, i.name) for i in t.inputs]
        return Block(tensors, values(t.base.source, t.base.name) if t.base else None, start)

    def load(self, index: int) -> Block:
        """Block ``index``; small tensors are read once for all passes."""
        if self._cache is None:
            return self._read(*self.span(index))
        if index not in self._cache:
            self._cache[index] = self._read(*self.span(index))
        return self._cache[index]

    def sample(self) -> Iterable[Block]:
        """Evenly spread stretches, whole rows where the method wants rows; nothing where one block is all."""
        if len(self) == 1:
            return
        width = max(self._row, _SLICE // self._row * self._row)
        step = max(width, self.total // _SLICES // self._row * self._row)
        for start in range(0, self.total, step):
            yield self._read(start, min(start + width, self.total))


class _Shifted:
    """A collector over many tensors, seen from the blocks of one of them."""

    def __init__(self, collector: Collector, first: int):
        self._collector, self._first, self.done = collector, first, True

    def answer(self, block: int) -> Any:
        return self._collector.answer(self._first + block)


class Engine:
    """Runs a plan: measures each tensor, then hands every finished block to a sink."""

    def __init__(self, plan: MergePlan, seed: int, device: torch.device, executor: Executor | None):
        self.plan, self._seed, self._device, self._executor = plan, seed, device, executor
        self._global: dict[str, list[_Shifted]] = {}
        self._heap = HeapWatch(_ALLOWANCE + 2 * plan.peak_memory)

    def evaluation(self, t: TensorPlan, cached: bool = True) -> tuple[Evaluation, StreamBlocks]:
        """The tensor's method, bound to its blocks."""
        assert t.method is not None
        blocks = StreamBlocks(t, self.plan.sources, self._device, self._heap, cached)
        noise = Noise(self._seed, t.name) if t.method.noisy else None
        return Evaluation(t.method.function, t.parameters, blocks, noise, self._executor), blocks

    def measure_globally(self, progress: Callable[[str], None]) -> None:
        """Answer the requests whose scope is the whole merge: every model's threshold over all tensors.

        Every pass reads every tensor anew; what is kept between passes is a window or a histogram for each model.
        """
        asking: list[tuple[TensorPlan, int, int]] = []  # plan, number of blocks, number of requests
        sizes: dict[str, int] = {}  # tensors with equal parameters are one vector, whose share is rounded once
        for t in self.plan.tensors:
            if t.parameters.get("scope") == "global" and t.info.count:
                evaluation, blocks = self.evaluation(t, cached=False)
                if (requests := evaluation.requests()) is not None:
                    asking.append((t, len(blocks), len(requests)))
                    sizes[repr(t.parameters)] = sizes.get(repr(t.parameters), 0) + t.info.count
        if not asking:
            return
        total, models = sum(sizes.values()), asking[0][2]
        counts, samples = [0] * models, [[] for _ in range(models)]
        for t, _, _ in asking:
            evaluation, _ = self.evaluation(t, cached=False)
            size = sizes.pop(repr(t.parameters), 0)
            held, requests = evaluation.samples(models), evaluation.requests()
            assert requests is not None
            for i, request in enumerate(requests):
                assert isinstance(request, Largest)
                counts[i] += request.count(size)
                scores = torch.cat(held[i]) if held[i] else request.compute().detach().flatten()
                wanted = max(1, round(t.info.count / total * (1 << 18)))  # a tensor's share of the sample is its size
                samples[i].append(scores[:: max(1, scores.numel() // wanted)].clone())
        dtype = torch.float64 if any(t.work == torch.float64 for t, _, _ in asking) else torch.float32
        collectors = [Selector(k, total, torch.cat(s), dtype) for k, s in zip(counts, samples, strict=True)]
        while not all(collector.done for collector in collectors):
            progress("thresholds over all tensors")
            first = 0
            for t, count, _ in asking:
                self.evaluation(t, cached=False)[0].observe(collectors, first)
                first += count
            for collector in collectors:
                collector.advance()
        first = 0
        for t, count, _ in asking:
            self._global[t.name] = [_Shifted(collector, first) for collector in collectors]
            first += count

    def run_all(
        self, tensors: Sequence[TensorPlan], sink: Callable[[TensorPlan, int, Tensor], None]
    ) -> Iterator[TensorFact]:
        """Run tensors in order; the system reads the next one's inputs while one is computed."""
        for t, following in zip_longest(tensors, tensors[1:]):
            if following is not None:
                for i in following.everything:
                    self.plan.sources[i.source].prefetch(i.name)
            yield self.run(t, sink)

    def run(self, t: TensorPlan, sink: Callable[[TensorPlan, int, Tensor], None]) -> TensorFact:
        """Compute one tensor and hand its blocks, rounded, to ``sink(plan, start, values)``."""
        if t.info.count == 0:
            return self.fact(t, 0)
        if t.method is None:
            source = self.plan.sources[t.inputs[0].source]
            for start in range(0, t.info.count, CHUNK):
                sink(t, start, source.read(t.inputs[0].name, start, min(start + CHUNK, t.info.count)).cpu())
            return self.fact(t, 1)
        evaluation, blocks = self.evaluation(t)
        if t.name in self._global:
            evaluation.answer(self._global[t.name])
        evaluation.measure()

        def finish(index: int) -> int:
            rounded = evaluation.result(index).reshape(-1).to(t.dtype)
            # A finite sum has finite terms; the slow look happens only when the sum is not.
            if not torch.isfinite(rounded.sum(dtype=t.work)) and not bool(torch.isfinite(rounded).all()):
                raise NotFiniteError(
                    f"{t.name}: the merge gives NaN or infinity in {t.dtype}: the inputs hold such values, or "
                    f"{t.method.name if t.method else 'the copy'} overflows or divides by zero there"
                )
            sink(t, blocks.span(index)[0], rounded.cpu())
            return rounded.numel()

        written = sum(evaluation.map(finish))
        assert written == t.info.count, f"{t.name}: not every element was written"
        return self.fact(t, evaluation.passes + 1)

    @staticmethod
    def fact(t: TensorPlan, passes: int) -> TensorFact:
        """What the report says of a tensor."""
        name = t.method.name if t.method else "copy"
        return TensorFact(t.name, t.shape, str(t.dtype).removeprefix("torch."), name, passes)
