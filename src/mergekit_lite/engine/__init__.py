"""Execute a merge plan: compute its tensors in order, each with an engine that supports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from types import TracebackType
from typing import Self

from .._torch import torch
from ..dtypes import all_finite, stored_as
from ..planning import MergePlan, TensorPlan
from . import native
from .eager import EagerEngine
from .fused import FusedEngine
from .passes import BLOCK
from .sink import NotFiniteError, Sink, not_finite

__all__ = ["Engine", "NotFiniteError"]


class Engine:
    """A context manager that executes a merge plan.

    Args:
        plan: The plan of the merge.
        seed: The seed of random methods.
        device: The device that torch functions run on.
        threads: The number of torch threads, and of blocks that kernels compute in parallel.
        progress: A function that is called with a status message before kernels are loaded, and
            with an empty string when they are loaded.
        impl: ``"eager"`` runs torch functions. ``"fused"`` runs compiled kernels, which must exist
            for every tensor. ``"auto"`` runs kernels where possible.

    Raises:
        ValueError: ``impl`` is ``"fused"``, but kernels cannot run on this machine or device, or a
            tensor has no kernel.
    """

    def __init__(
        self,
        plan: MergePlan,
        seed: int,
        device: str,
        threads: int,
        progress: Callable[[str], None],
        impl: str,
    ):
        self.plan = plan
        self.notes = list[str]()
        self._seed = seed
        self._device = device
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads)
        self._progress = progress
        self._said = False
        self._eager: EagerEngine | None = None
        self._fused = self._compiled(impl) if impl != "eager" else None
        if impl == "fused" and (
            without := [t for t in plan.tensors if t.method and not t.has_kernel]
        ):
            raise ValueError(
                "merge_models: expected a kernel for every tensor, as impl='fused' requires, got "
                f"none for {without[0].name}; use impl='auto'"
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
        self.stop()
        if self._torch_threads is not None:
            # the setting applies to the whole process, so restore it for code after the merge
            torch.set_num_threads(self._torch_threads)

    def stop(self) -> None:
        """Cancel pending blocks, and wait until the blocks in progress are written."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _compiled(self, impl: str) -> FusedEngine | None:
        """Return the engine of compiled kernels, or None if torch computes all tensors.

        With ``impl="auto"``, torch is used if kernels cannot run or no tensor needs them.

        Raises:
            ValueError: ``impl`` is ``"fused"``, and kernels cannot run on this machine or device.
        """
        # a merge that only copies must not wait for kernels to load
        wanted = any(t.has_kernel and not self._moves(t) for t in self.plan.tensors)
        if impl == "auto" and (self._device != "cpu" or not wanted):
            return None
        if self._device != "cpu":
            raise ValueError(
                f"merge_models: expected device 'cpu' for impl='fused', got {self._device!r}"
            )
        why = native.why_unavailable()
        if why is not None and impl == "fused":
            raise ValueError(f"merge_models: expected compiled kernels for impl='fused', but {why}")
        if why is not None:
            self.notes.append(f"merged by torch, which is slower than compiled kernels: {why}")
            return None
        self._progress("loading kernels, which are compiled once per machine")
        self._said = True
        executor = self._executor if self._threads > 1 else None
        return FusedEngine(self.plan, self._seed, executor)

    def _torch_engine(self) -> EagerEngine:
        if self._eager is None:
            # this imports torch, which a merge that runs only kernels does not need
            self._torch_threads = torch.get_num_threads()
            torch.set_num_threads(self._threads)
            self._eager = EagerEngine(self.plan, self._seed, self._device)
        return self._eager

    def run_all(self, tensors: Sequence[TensorPlan], sink: Sink) -> Iterator[TensorPlan]:
        """Compute tensors in order, and yield the plan of each one when it is done.

        While one tensor is computed, the operating system reads the inputs of the next tensor.
        """
        for t, following in zip_longest(tensors, tensors[1:]):
            if following is not None:
                for i in following.everything:
                    self.plan.sources[i.source].prefetch(i.name)
            self.run(t, sink)
            yield t
            # the first tensor is done, so kernels are loaded: clear the status message
            if self._said:
                self._progress("")
                self._said = False

    def run(self, t: TensorPlan, sink: Sink) -> None:
        """Compute one tensor and pass its blocks to ``sink(plan, start, values)``."""
        # an empty tensor has only a header entry, and methods need at least one element
        if t.info.count == 0:
            return
        if self._moves(t):
            self._move(t, sink)
        elif self._fused is not None and t.has_kernel:
            self._fused.run(t, sink)
        else:
            self._torch_engine().run(t, sink)

    def _moves(self, t: TensorPlan) -> bool:
        """Return whether a tensor is copied, or passed through with no scale and no new dtype."""
        if t.method is None:
            return True
        if t.method.name != "passthrough" or t.parameters["scale"] != [None]:
            return False
        first = t.inputs[0]
        return self.plan.sources[first.source].tensors[first.name].dtype == t.dtype

    def _move(self, t: TensorPlan, sink: Sink) -> None:
        """Write the first input's values without merging them."""
        source = self.plan.sources[t.inputs[0].source]
        for start in range(0, t.info.count, BLOCK):
            values = source.read(t.inputs[0].name, start, min(start + BLOCK, t.info.count))
            if values.dtype != t.dtype.storage:  # a tensor with an adapter is read in float32
                values = stored_as(values, t.dtype)
            if t.dtype.is_floating_point and not all_finite(values):
                raise not_finite(t)
            sink(t, start, values)
