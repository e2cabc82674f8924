"""Keep fitted layers on disk, so that an interrupted fit goes on where it was."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from model_components._folders import new_file
from model_components._walk import Batch


class FitCache:
    """A folder of fitted parts, each a file.

    It is for one model, one set of settings and one calibration.

    Args:
        folder: Where the files are; None stores nothing.
        model: The model before anything is changed.
        settings: What else a fit depends on; JSON values.
        data: The calibration batches.
        operation: The name that error messages begin with.
    """

    def __init__(
        self,
        folder: str | Path | None,
        model: nn.Module,
        settings: object,
        data: Sequence[Batch],
        operation: str,
    ):
        self.folder = None if folder is None else Path(folder)
        self.operation = operation
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
        if self.folder is None:
            path = None
        else:
            path = self.folder / f"{name or 'model'}.safetensors"
        if path is None or not path.exists():
            return None
        try:
            with safe_open(path, "pt") as handle:
                metadata = handle.metadata() or {}
            if metadata.get("key") != self.key:
                return None
            return load_file(path), json.loads(metadata["errors"])
        except SafetensorError:  # cut short: it is fitted again
            return None


def _key(model: nn.Module, settings: object, data: Sequence[Batch]) -> str:
    """Return a key of what a fitted part depends on: modules, weights, settings and data."""
    config = getattr(model, "config", None)
    if isinstance(config, PretrainedConfig):
        fields = config.to_dict()
    else:
        fields = None
    text = json.dumps([settings, str(type(model)), fields], default=str)
    digest = hashlib.sha256(text.encode())
    for name, module in model.named_modules():  # a user may have put another activation there
        functions = {
            key: value.__qualname__
            for key, value in vars(module).items()
            if inspect.isfunction(value)
        }
        digest.update(
            f"{name} {type(module).__qualname__} {module.extra_repr()} {functions}".encode()
        )
    named = [*model.state_dict().items(), *((n, v) for batch in data for n, v in batch.items())]
    for name, value in named:
        if not isinstance(value, Tensor):
            digest.update(f"{name} {value!r}".encode())
            continue
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
