"""The engine that runs torch functions: for other devices and dtypes, and methods without kernels.

A tensor is merged whole, or in stretches where the method goes element by element.
"""

from __future__ import annotations

from .._torch import Tensor, torch
from ..dtypes import stored_of, tensor_of, to_torch
from ..files import CheckpointError
from ..methods import MergeMethod, Noise
from ..planning import Input, MergePlan, TensorPlan
from .sink import NotFiniteError, Sink, not_finite

_STRETCH = 1 << 22  # elements; 16 MB of each input in float32


class EagerEngine:
    """Runs a plan's torch functions."""

    def __init__(self, plan: MergePlan, seed: int, device: str):
        self._sources = plan.sources
        self._seed = seed
        self._device = torch.device(device)

    def run(self, t: TensorPlan, sink: Sink) -> None:
        """Compute one tensor and hand it, rounded, to ``sink(plan, start, values)``."""
        assert t.method is not None
        # random words count from the tensor's first element, so what draws needs it whole
        cut = t.method.elementwise and not t.method.noisy
        stretch = _STRETCH if cut else t.info.count
        for start in range(0, t.info.count, stretch):
            stop = min(start + stretch, t.info.count)
            try:
                merged = self._merged(t, t.method, start, stop)
            except (NotFiniteError, CheckpointError):
                raise
            except ValueError as error:  # of a method, which does not know what tensor it merges
                raise ValueError(f"{t.name}: {error}") from error
            rounded = merged.reshape(-1).to(to_torch(t.dtype))
            # looked at after rounding: float16 ends at 65504, so a finite sum may overflow
            if not bool(torch.isfinite(rounded).all()):
                raise not_finite(t)
            sink(t, start, stored_of(rounded.contiguous().cpu()))

    def _merged(self, t: TensorPlan, method: MergeMethod, start: int, stop: int) -> Tensor:
        shape = t.shape if stop - start == t.info.count else (stop - start,)

        def read(i: Input) -> Tensor:
            stored = tensor_of(self._sources[i.source].read(i.name, start, stop))
            return stored.to(self._device, to_torch(t.work)).view(shape)

        base = None if t.base is None else read(t.base)
        noise = Noise(self._seed, t.name)
        return method.compute([read(i) for i in t.inputs], base, t.parameters, noise)
