"""The fused paths of masked layers, for `model_components.measure_kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from model_components._fused import FusedPath, Trial, kernel_problem, random_tensor

from . import reference
from .functional import BLEND, LINEAR, blend, masked_linear


def paths() -> list[FusedPath]:
    """Return the fused paths of `blend` and `masked_linear`."""
    return [
        FusedPath(BLEND, _problem, _blend),
        FusedPath(LINEAR, _problem, _linear),
    ]


def _problem(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot run, or None if they can; ``shape`` is not used."""
    return kernel_problem(device, dtype)


def _weights(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Return two frozen weights on the CPU."""
    # random_tensor gives the same numbers for the same shape; adding k makes components differ
    return [(random_tensor(*shape) + k).to(dtype) for k in range(2)]


def _blend(shape: tuple[int, int], tokens: int, device: torch.device, dtype: torch.dtype) -> Trial:
    weights = _weights(shape, dtype)
    placed = [w.to(device) for w in weights]
    return Trial(
        fused=lambda masks: blend(placed, masks, impl="fused"),
        eager=lambda masks: blend(placed, masks, impl="eager"),
        reference=lambda masks: reference.blend([w.to(masks.dtype) for w in weights], masks),
        inputs={"masks": random_tensor(2, 1, shape[1])},
    )


def _linear(shape: tuple[int, int], tokens: int, device: torch.device, dtype: torch.dtype) -> Trial:
    weights = _weights(shape, dtype)
    placed = [w.to(device) for w in weights]
    return Trial(
        fused=lambda x, masks: masked_linear(x, placed, masks, impl="fused"),
        eager=lambda x, masks: masked_linear(x, placed, masks, impl="eager"),
        reference=lambda x, masks: reference.masked_linear(
            x, [w.to(x.dtype) for w in weights], masks
        ),
        inputs={"x": random_tensor(tokens, shape[1]), "masks": random_tensor(2, 1, shape[1])},
    )
