"""The engine that runs compiled kernels; it does not import torch."""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np

from ..dtypes import BFLOAT16, FLOAT32, Array
from ..planning import MergePlan, TensorPlan
from .passes import BLOCK, Buffers, FusedTensor
from .programs import PROGRAMS
from .sink import Sink, not_finite


class FusedEngine:
    """An engine that merges tensors with compiled kernels."""

    def __init__(self, plan: MergePlan, seed: int, executor: Executor | None):
        self._plan = plan
        self._seed = seed
        self._executor = executor
        self._buffers = Buffers()

    def run(self, t: TensorPlan, sink: Sink) -> None:
        """Compute one tensor and pass its blocks, rounded, to ``sink(plan, start, values)``."""
        assert t.method is not None
        x = FusedTensor(t, self._plan.sources, self._seed, self._buffers, self._executor)
        with np.errstate(all="ignore"):  # the result is checked for NaN and infinity
            finish = PROGRAMS[t.method](x, **t.parameters)
        dtype = np.uint16 if t.dtype == BFLOAT16 else np.float32

        def work(raw: Array, count: int, place: int, block: int) -> None:
            # always of full size, so that the last block, which is shorter, reuses the buffer
            out = self._buffers.get("out", 1, max(BLOCK, count), dtype)[0, :count]
            if finish(raw, count, place, block, out):
                raise not_finite(t)
            # kernels write float32 and bfloat16 only; numpy converts to the other dtypes
            if dtype is np.float32 and t.dtype != FLOAT32:
                with np.errstate(over="ignore"):
                    out = out.astype(t.dtype.storage)
                if not np.isfinite(out).all():
                    raise not_finite(t)
            sink(t, place, out)

        x.each(work)
