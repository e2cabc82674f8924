"""The engine that runs torch functions: for GPUs, for float64, and for methods without kernels.

If the method works element by element and without random numbers, a tensor is merged in ranges of
elements. Otherwise, it is merged as a whole.
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
            except ValueError as error:  # add the tensor's name, which a method does not know
                raise ValueError(f"{t.name}: {error}") from error
            rounded = merged.detach().reshape(-1).to(to_torch(t.dtype))
            # checked after rounding: a finite sum may overflow in float16, whose maximum is 65504
            if not bool(torch.isfinite(rounded).all()):
                raise not_finite(t)
            sink(t, start, stored_of(rounded.contiguous().cpu()))

    def _merged(self, t: TensorPlan, method: MergeMethod, start: int, stop: int) -> Tensor:
        shape = t.shape if stop - start == t.info.count else (stop - start,)

        def read(i: Input) -> Tensor:
            stored = tensor_of(self._sources[i.source].read(i.name, start, stop))
            # a copy, because a custom method may change its inputs in place
            return stored.to(self._device, to_torch(t.work), copy=True).view(shape)

        base = None if t.base is None else read(t.base)
        noise = Noise(self._seed, t.name)
        return method.compute([read(i) for i in t.inputs], base, t.parameters, noise)
