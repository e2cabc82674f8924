"""The fused paths of masked layers, for `model_components.measure_kernels`."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from model_components._fused import FusedPath, Trial

from . import reference
from .functional import BLEND, EMBEDDING, LINEAR, blend, masked_embedding, masked_linear


def paths() -> list[FusedPath]:
    """Return the fused paths of `blend`, `masked_linear` and `masked_embedding`."""
    return [
        FusedPath(BLEND, _problem, _blend),
        FusedPath(LINEAR, _problem, _linear),
        FusedPath(EMBEDDING, _problem, _embedding),
    ]


def _problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot run on a device."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the device is {device.type}, and the kernel needs CUDA (or TRITON_INTERPRET=1)"
    if device.type != "cuda" and dtype == torch.bfloat16:
        return "triton's interpreter stores bfloat16 wrongly; try float32"
    return None


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def _weights(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Return two frozen weights on the CPU."""
    return [(_random(*shape) + k).to(dtype) for k in range(2)]


def _blend(shape: tuple[int, int], tokens: int, device: torch.device, dtype: torch.dtype) -> Trial:
    weights = _weights(shape, dtype)
    placed = [w.to(device) for w in weights]
    return Trial(
        fused=lambda masks: blend(placed, masks, impl="fused"),
        eager=lambda masks: blend(placed, masks, impl="eager"),
        reference=lambda masks: reference.blend([w.to(masks.dtype) for w in weights], masks),
        inputs={"masks": _random(2, 1, shape[1])},
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
        inputs={"x": _random(tokens, shape[1]), "masks": _random(2, 1, shape[1])},
    )


def _embedding(
    shape: tuple[int, int], tokens: int, device: torch.device, dtype: torch.dtype
) -> Trial:
    weights = _weights(shape, dtype)
    placed = [w.to(device) for w in weights]
    ids = torch.randint(0, shape[0], (tokens,), generator=torch.Generator().manual_seed(0))
    placed_ids = ids.to(device)
    return Trial(
        fused=lambda masks: masked_embedding(placed_ids, placed, masks, impl="fused"),
        eager=lambda masks: masked_embedding(placed_ids, placed, masks, impl="eager"),
        reference=lambda masks: reference.masked_embedding(
            ids, [w.to(masks.dtype) for w in weights], masks
        ),
        inputs={"masks": _random(2, 1, shape[1])},
    )
