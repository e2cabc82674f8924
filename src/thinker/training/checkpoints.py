"""Conversion of a carry for `ThinkerTrainer`'s checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ThinkerConfig
from ..curriculum import StateDict
from ..memory import make_memory
from ..positions import Places
from ..state import ThinkerState


def pack_carry(carry: ThinkerState | None) -> StateDict | None:
    """Convert a carry to tensors that `torch.load` reads with ``weights_only=True``."""
    if carry is None:
        return None
    memory = None if carry.memory is None else list(carry.memory.layers)
    return {
        "latents": carry.latents,
        "memory": memory,
        "drawn": carry.places.drawn,
    }


def unpack_carry(
    packed: StateDict | None, config: ThinkerConfig, device: torch.device
) -> ThinkerState | None:
    """Rebuild a carry from the result of `pack_carry`."""
    if packed is None:
        return None

    def there(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.to(device)

    memory = make_memory(config)
    if memory is not None and packed["memory"] is not None:
        memory.layers = tuple((k.to(device), v.to(device)) for k, v in packed["memory"])
    places = Places(there(packed["drawn"]))
    return ThinkerState(packed["latents"].to(device), memory, places)
