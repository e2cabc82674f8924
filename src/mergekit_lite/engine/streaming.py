"""The engine that runs torch functions over a plan.

For user methods, spectral ones, other devices, other dtypes.

It reads, computes and hands on one block of one tensor at a time. Reading and writing overlap with
arithmetic through the system's cache. With an executor blocks also run side by side; sums are added
in block order, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

from .._torch import Tensor, torch
from ..dtypes import stored_of, tensor_of, to_torch
from ..files import CheckpointError, Source
from ..methods import Noise
from ..methods.evaluation import Block, Collector, Evaluation
from ..methods.registry import block_shape
from ..methods.selection import Largest, Selector, bits_of
from ..planning import CHUNK, MergePlan, TensorPlan
from .facts import NotFiniteError, Sink, TensorFact, fact, not_finite

_CACHED = 24_000_000  # bytes of one tensor's inputs that are kept between passes
# the sample that thresholds start from
_SLICES = 32
_SLICE = 2048
_GLOBAL_SAMPLE = 1 << 18
_LARGE = 10**9  # a size at which two tensors that ask for different shares ask for different counts


class StreamBlocks:
    """The blocks of one planned tensor, read on demand and cast to the dtype to compute in."""

    def __init__(
        self, t: TensorPlan, sources: Sequence[Source], device: str | torch.device, cached: bool
    ):
        self._plan = t
        self._sources = sources
        self._device = device
        self.total = t.info.count
        row = block_shape(t.shape, "rows")[1] if t.chunking == "rows" else 1
        if t.chunking == "tensor":
            size = max(1, self.total)
        else:
            size = max(row, CHUNK // max(1, row) * row)
        self._row = row
        if self.total:
            self._edges = [*range(0, self.total, size), self.total]
        else:
            self._edges = [0, 0]
        nbytes = self.total * t.work.itemsize * (len(t.inputs) + 1)
        if cached and t.passes > 1 and nbytes <= _CACHED:
            self._cache: dict[int, Block] | None = {}
        else:
            self._cache = None

    def __len__(self) -> int:
        return len(self._edges) - 1

    def span(self, index: int) -> tuple[int, int]:
        """First and last element (exclusive) of a block."""
        return self._edges[index], self._edges[index + 1]

    def _read(self, start: int, stop: int) -> Block:
        t = self._plan
        view = {"elements": (-1,), "rows": (-1, self._row), "tensor": t.shape}[t.chunking]

        def values(source: int, name: str) -> Tensor:
            stored = tensor_of(self._sources[source].read(name, start, stop))
            return stored.to(self._device, to_torch(t.work)).view(view)

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
        """Evenly spread stretches, whole rows where the method wants rows.

        Nothing where one block is all.
        """
        if len(self) == 1:
            return
        width = max(self._row, _SLICE // self._row * self._row)
        step = max(width, self.total // _SLICES // self._row * self._row)
        for start in range(0, self.total, step):
            yield self._read(start, min(start + width, self.total))


class _Shifted:
    """A collector over many tensors, seen from the blocks of one of them."""

    def __init__(self, collector: Collector, first: int):
        self._collector = collector
        self._first = first
        self.done = True

    def answer(self, block: int) -> object:
        return self._collector.answer(self._first + block)


class StreamingEngine:
    """Run a plan's torch functions.

    It measures each tensor, then hands every finished block to a sink.
    """

    def __init__(
        self, plan: MergePlan, seed: int, device: str | torch.device, executor: Executor | None
    ):
        self.plan = plan
        self._seed = seed
        self._device = torch.device(device)
        self._executor = executor
        self._global: dict[str, list[_Shifted]] = {}

    def _evaluation(self, t: TensorPlan, cached: bool = True) -> tuple[Evaluation, StreamBlocks]:
        """The tensor's method, bound to its blocks."""
        assert t.method is not None
        blocks = StreamBlocks(t, self.plan.sources, self._device, cached)
        noise = Noise(self._seed, t.name) if t.method.noisy else None
        return Evaluation(t.method.function, t.parameters, blocks, noise, self._executor), blocks

    def measure_globally(self, progress: Callable[[str], None]) -> None:
        """Answer the requests whose scope is the whole merge.

        They are every model's thresholds over many tensors.

        Tensors that keep the same share of their elements are one vector, ranked as one; where a
        filter gives some tensors another density, they are a vector of their own. Every pass reads
        every tensor anew; what is kept between passes is a window or a histogram for each model.
        """
        # shares: its tensors, and their blocks
        vectors: dict[tuple[int, ...], list[tuple[TensorPlan, int]]] = {}
        for t in self.plan.tensors:
            if t.parameters.get("scope") == "global" and t.info.count:
                evaluation, blocks = self._evaluation(t, cached=False)
                if (requests := evaluation.requests()) is not None:
                    shares = tuple(
                        request.count(_LARGE)
                        for request in requests
                        if isinstance(request, Largest)
                    )
                    vectors.setdefault(shares, []).append((t, len(blocks)))
        for members in vectors.values():
            self._measure_vector(members, progress)

    def _measure_vector(
        self, members: Sequence[tuple[TensorPlan, int]], progress: Callable[[str], None]
    ) -> None:
        total = sum(t.info.count for t, _ in members)
        counts: list[int] = []
        samples: list[list[Tensor]] = []
        for t, _ in members:
            evaluation, _ = self._evaluation(t, cached=False)
            requests = evaluation.requests()
            assert requests is not None
            sampled = evaluation.samples(len(requests))
            counts = [request.count(total) for request in requests if isinstance(request, Largest)]
            samples = samples or [[] for _ in requests]
            for i, request in enumerate(requests):
                if sampled[i]:
                    scores = torch.cat(sampled[i])
                else:
                    scores = request.compute().detach().flatten()
                # its share of the sample is its size
                wanted = max(1, round(t.info.count / total * _GLOBAL_SAMPLE))
                samples[i].append(scores[:: max(1, scores.numel() // wanted)].clone())
        wide = any(t.work.name == "float64" for t, _ in members)
        collectors = [
            Selector(k, total, bits_of(torch.cat(s), wide), wide)
            for k, s in zip(counts, samples, strict=True)
        ]
        while not all(collector.done for collector in collectors):
            progress("thresholds over all tensors")
            first = 0
            for t, count in members:
                self._evaluation(t, cached=False)[0].observe(collectors, first)
                first += count
            for collector in collectors:
                collector.advance()
        first = 0
        for t, count in members:
            self._global[t.name] = [_Shifted(collector, first) for collector in collectors]
            first += count

    def run(self, t: TensorPlan, sink: Sink) -> TensorFact:
        """Compute one tensor and hand its blocks, rounded, to ``sink(plan, start, values)``."""
        try:
            return self._run(t, sink)
        except (NotFiniteError, CheckpointError):
            raise
        except ValueError as error:  # of a method, which does not know what tensor it merges
            raise ValueError(f"{t.name}: {error}") from error

    def _run(self, t: TensorPlan, sink: Sink) -> TensorFact:
        evaluation, blocks = self._evaluation(t)
        if t.name in self._global:
            evaluation.answer(self._global[t.name])
        evaluation.measure()

        def finish(index: int) -> int:
            rounded = evaluation.result(index).reshape(-1).to(to_torch(t.dtype))
            # A finite sum has finite terms; the slow look happens only when the sum is not.
            if not torch.isfinite(rounded.sum(dtype=to_torch(t.work))) and not bool(
                torch.isfinite(rounded).all()
            ):
                raise not_finite(t)
            sink(t, blocks.span(index)[0], stored_of(rounded.contiguous().cpu()))
            return rounded.numel()

        written = sum(evaluation.map(finish))
        assert written == t.info.count, f"{t.name}: not every element was written"
        return fact(t, evaluation.passes + 1)
