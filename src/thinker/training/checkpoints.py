"""`ThinkerTrainer`'s own files in a checkpoint, written last, and which checkpoints are whole."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..config import ThinkerConfig
from ..curriculum import StateDict
from ..memory import make_memory
from ..positions import Places
from ..state import ThinkerState

logger = logging.get_logger(__name__)


def pack_carry(carry: ThinkerState | None) -> StateDict | None:
    """A carry as tensors and numbers, which `torch.load` reads with ``weights_only=True``."""
    if carry is None:
        return None
    memory = None if carry.memory is None else list(carry.memory.layers)
    return {
        "latents": carry.latents,
        "memory": memory,
        "drawn": carry.places.drawn,
        "offset": carry.places.offset,
    }


def unpack_carry(
    packed: StateDict | None, config: ThinkerConfig, device: torch.device
) -> ThinkerState | None:
    """Unpack what `pack_carry` packed."""
    if packed is None:
        return None

    def there(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.to(device)

    memory = make_memory(config)
    if memory is not None and packed["memory"] is not None:
        memory.layers = tuple((k.to(device), v.to(device)) for k, v in packed["memory"])
    places = Places(there(packed["drawn"]), packed["offset"])
    return ThinkerState(packed["latents"].to(device), memory, places)


def read_state(path: Path) -> StateDict:
    """Read what `ThinkerTrainer` wrote into a checkpoint.

    Raises:
        ValueError: It is not there, or is cut short.
    """
    if not path.exists():
        raise ValueError(
            f"ThinkerTrainer: {path.parent} has no {path.name}; expected a whole checkpoint that "
            "ThinkerTrainer wrote"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise what they like for a file that is cut
        raise ValueError(
            f"ThinkerTrainer: {path} cannot be read ({error}); expected a whole checkpoint"
        ) from error


def newest_whole(folder: Path, name: str) -> Path:
    """The newest whole checkpoint; warns of newer ones that are not whole.

    Raises:
        ValueError: There is none.
    """
    numbers = {
        p: p.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        for p in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    }
    for path in sorted(
        (p for p, n in numbers.items() if n.isdigit()), key=lambda p: -int(numbers[p])
    ):
        try:
            # of all processes
            for file in {path / name, *path.glob(f"{Path(name).stem}*{Path(name).suffix}")}:
                read_state(file)
        except ValueError as error:
            logger.warning(
                "ThinkerTrainer: the checkpoint %s is not whole and is passed over: %s", path, error
            )
        else:
            return path
    raise ValueError(f"ThinkerTrainer: {folder} has no whole checkpoint to resume from")
