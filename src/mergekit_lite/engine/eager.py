"""The engine that runs torch functions: for GPUs, for float64, and for methods without kernels.

A tensor is merged whole, or in stretches if the method works element by element.
"""

from __future__ import annotations

from .._torch import Tensor, torch
from ..dtypes import stored_of, tensor_of, to_torch
from ..files import CheckpointError
from ..methods import MergeMethod, Noise
from ..planning import EAGER_STRETCH, Input, MergePlan, TensorPlan
from .sink import NotFiniteError, Sink, not_finite


class EagerEngine:
    """An engine that merges tensors with torch functions."""

    def __init__(self, plan: MergePlan, seed: int, device: str):
        self._sources = plan.sources
        self._seed = seed
        self._device = torch.device(device)

    def run(self, t: TensorPlan, sink: Sink) -> None:
        """Compute one tensor and pass it, rounded, to ``sink(plan, start, values)``."""
        assert t.method is not None
        stretch = EAGER_STRETCH if t.method.is_cut else t.info.count
        for start in range(0, t.info.count, stretch):
            stop = min(start + stretch, t.info.count)
            try:
                merged = self._merged(t, t.method, start, stop)
            except (NotFiniteError, CheckpointError):
                raise
            except ValueError as error:  # a method's message does not name the tensor
                raise ValueError(f"{t.name}: {error}") from error
            rounded = merged.detach().reshape(-1).to(to_torch(t.dtype))
            # checked after rounding: float16 ends at 65504, so a finite sum may overflow
            if not bool(torch.isfinite(rounded).all()):
                raise not_finite(t)
            sink(t, start, stored_of(rounded.contiguous().cpu()))

    def _merged(self, t: TensorPlan, method: MergeMethod, start: int, stop: int) -> Tensor:
        shape = t.shape if stop - start == t.info.count else (stop - start,)

        def read(i: Input) -> Tensor:
            stored = tensor_of(self._sources[i.source].read(i.name, start, stop))
            # a copy, because a user's own method may change its inputs in place
            return stored.to(self._device, to_torch(t.work), copy=True).view(shape)

        base = None if t.base is None else read(t.base)
        noise = Noise(self._seed, t.name)
        return method.compute([read(i) for i in t.inputs], base, t.parameters, noise)
