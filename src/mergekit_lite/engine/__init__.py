"""Carries a plan out: every tensor by the engine that fits it, in order, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import zip_longest
from types import TracebackType
from typing import Self

from .._torch import torch
from ..dtypes import all_finite, stored_as
from ..planning import MergePlan, TensorPlan
from . import native
from .facts import BLOCK, NotFiniteError, Sink, TensorFact, fact, hash_inputs, not_finite
from .fused import FusedEngine
from .hashing import hash_bytes
from .programs import has_kernel
from .streaming import StreamingEngine

__all__ = ["Engine", "NotFiniteError", "Sink", "TensorFact", "fact"]


class Engine:
    """Runs a plan, as a context manager.

    Args:
        plan: What to compute.
        seed: Of methods that draw.
        device: Where torch functions run.
        executor: Runs blocks side by side; None runs them in order.
        progress: Told what takes a while before the first tensor.
        impl: ``"eager"`` runs torch functions; ``"fused"`` runs compiled kernels, or raises where
            there is none; ``"auto"`` runs kernels where it can.
        hashing: Put hashes of what was read into the facts.

    Raises:
        ValueError: ``"fused"`` where numba is missing, or for a tensor that no kernel merges.
    """

    def __init__(
        self,
        plan: MergePlan,
        seed: int,
        device: str,
        executor: Executor | None,
        progress: Callable[[str], None],
        impl: str = "auto",
        hashing: bool = False,
    ):
        self.plan = plan
        self.notes = list[str]()
        self._seed = seed
        self._device = device
        self._executor = executor
        self._progress = progress
        self._hashing = hashing
        self._said = False
        self._streaming: StreamingEngine | None = None
        self._fused = self._compiled(impl) if impl != "eager" else None
        if impl == "fused" and (
            without := [t for t in plan.tensors if t.method and not has_kernel(t)]
        ):
            raise ValueError(
                f"merge_models: impl='fused', and {without[0].name} is merged in a way without a "
                "kernel"
            )
        self._torch_threads: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)

    def _compiled(self, impl: str) -> FusedEngine | None:
        """The engine of kernels, where it can run and there is something for it to do."""
        wanted = any(has_kernel(t) and not self._moves(t) for t in self.plan.tensors)
        if impl == "auto" and (self._device != "cpu" or not wanted):
            return None
        if self._device != "cpu":
            raise ValueError(f"merge_models: impl='fused' runs on the CPU, not on {self._device}")
        why = native.why_unavailable()
        if why is not None and impl == "fused":
            raise ValueError(f"merge_models: impl='fused' expected compiled kernels, but {why}")
        if why is not None:
            self.notes.append(f"merged by torch, which is slower than compiled kernels: {why}")
            return None
        self._progress("loading kernels, which are compiled once on a machine")
        self._said = True
        return FusedEngine(self.plan, self._seed, self._executor, self._hashing)

    def _torch_engine(self) -> StreamingEngine:
        if self._streaming is None:
            self._torch_threads = torch.get_num_threads()
            torch.set_num_threads(1)  # blocks are the parallel unit
            self._streaming = StreamingEngine(self.plan, self._seed, self._device, self._executor)
            self._streaming.measure_globally(self._progress)
        return self._streaming

    def run_all(self, tensors: Sequence[TensorPlan], sink: Sink) -> Iterator[TensorFact]:
        """Run tensors in order; the system reads the next one's inputs while one is computed."""
        for t, following in zip_longest(tensors, tensors[1:]):
            if following is not None:
                for i in following.everything:
                    self.plan.sources[i.source].prefetch(i.name)
            yield self.run(t, sink)
            if self._said:
                self._progress("")
                self._said = False

    def run(self, t: TensorPlan, sink: Sink) -> TensorFact:
        """Make one tensor and hand its blocks to ``sink(plan, start, values)``."""
        if t.info.count == 0:
            return fact(t, 0, self._hashes(t))
        if self._moves(t):
            return self._move(t, sink)
        if self._fused is not None and has_kernel(t):
            result = self._fused.run(t, sink)
            if t.chunking == "elements":
                return result
            # hashes are of fixed blocks, and a kernel by rows reads others
            return replace(result, inputs=self._hashes(t))
        return replace(self._torch_engine().run(t, sink), inputs=self._hashes(t))

    def _moves(self, t: TensorPlan) -> bool:
        """Return whether stored values are written as they are: copied, or passed through."""
        if t.method is None:
            return True
        if t.method.name != "passthrough" or t.parameters["scale"] != [None]:
            return False
        first = t.inputs[0]
        return self.plan.sources[first.source].tensors[first.name].dtype == t.dtype

    def _move(self, t: TensorPlan, sink: Sink) -> TensorFact:
        """Write stored values as they are, in the blocks that are hashed."""
        source = self.plan.sources[t.inputs[0].source]
        hashes = []
        for start in range(0, t.info.count, BLOCK):
            values = source.read(t.inputs[0].name, start, min(start + BLOCK, t.info.count))
            if self._hashing:
                hashes.append([hash_bytes(values)])
            if values.dtype != t.dtype.storage:  # an adapted tensor is read in float32
                values = stored_as(values, t.dtype)
            if t.dtype.is_floating_point and not all_finite(values):
                raise not_finite(t)
            sink(t, start, values)
        if len(t.everything) > 1:  # copies, which were found equal
            return fact(t, 1, self._hashes(t))
        return fact(t, 1, hash_inputs(t, hashes) if self._hashing else ())

    def _hashes(self, t: TensorPlan) -> tuple[str, ...]:
        """Hashes of every input's stored values, by the same blocks as in the compiled engine."""
        if not self._hashing:
            return ()
        sources = self.plan.sources
        count = t.info.count
        blocks = [
            [
                hash_bytes(sources[i.source].read(i.name, at, min(at + BLOCK, count)))
                for i in t.everything
            ]
            for at in range(0, count, BLOCK)
        ]
        return tuple(hash_inputs(t, blocks))
