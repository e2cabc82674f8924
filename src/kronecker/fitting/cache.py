"""Keep fitted layers on disk, so that an interrupted fit goes on where it was."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from model_components._stages import Stage
from model_components._walk import Batch


def fit_stage(
    folder: str | Path | None,
    model: nn.Module,
    settings: object,
    data: Sequence[Batch],
    operation: str,
) -> Stage:
    """Return the stage of the fitted layers of one model, one set of settings and calibration.

    Args:
        folder: Where the files are; None stores nothing.
        model: The model before anything is changed.
        settings: What else a fit depends on; JSON values.
        data: The calibration batches.
        operation: The name that error messages begin with.
    """
    return Stage(folder, "" if folder is None else _key(model, settings, data), operation)


def _key(model: nn.Module, settings: object, data: Sequence[Batch]) -> str:
    """Return a key of what a fitted part depends on: modules, weights, settings and data."""
    config = getattr(model, "config", None)
    fields = None
    if isinstance(config, PretrainedConfig):
        fields = config.to_dict()
        fields.pop("_name_or_path", None)  # a copy of the folder is the same model
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
