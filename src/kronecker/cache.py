"""Fitted layers on disk, so that an interrupted fit goes on where it was when it is started again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model_components._folders import new_file

from .data import Batch


class FitCache:
    """A folder of fitted parts, each a file, for one model, one set of settings and one calibration.

    Args:
        folder: Where they are; None keeps nothing.
        model: Before anything is changed.
        settings: What else a fit depends on, as JSON has it.
        data: The calibration batches.
        operation: Whose errors they are.
    """

    def __init__(
        self, folder: str | Path | None, model: nn.Module, settings: object, data: Sequence[Batch], operation: str
    ):
        self.folder, self.operation = None if folder is None else Path(folder), operation
        self.key = "" if folder is None else _key(model, settings, data)

    def store(self, name: str, tensors: Mapping[str, Tensor], errors: Mapping[str, float]) -> None:
        """Keep a part, under its final name only when it is whole."""
        if self.folder is None:
            return
        whole = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
        with new_file(self.folder / f"{name or 'model'}.safetensors", self.operation) as part:
            save_file(whole, part, metadata={"key": self.key, "errors": json.dumps(dict(errors))})

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, float]] | None:
        """A part that was kept for just this fit, with its errors, or None."""
        path = None if self.folder is None else self.folder / f"{name or 'model'}.safetensors"
        if path is None or not path.exists():
            return None
        with safe_open(path, "pt") as handle:
            metadata = handle.metadata() or {}
        if metadata.get("key") != self.key:
            return None
        return load_file(path), json.loads(metadata["errors"])


def _key(model: nn.Module, settings: object, data: Sequence[Batch]) -> str:
    """What a fitted part depends on: the weights, the settings and the data."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for tensor in (*model.state_dict().values(), *(v for b in data for v in b.values() if isinstance(v, Tensor))):
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
