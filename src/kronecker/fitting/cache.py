"""Store fitted layers on disk, so that an interrupted fit can continue."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig

from model_components._stages import Stage, hash_of
from model_components._walk import Batch


def fit_stage(
    folder: str | Path | None,
    model: nn.Module,
    settings: object,
    data: Sequence[Batch],
    operation: str,
) -> Stage:
    """Return the `Stage` that stores layers fitted for one model, calibration set and settings.

    Args:
        folder: The folder of the files, or None to store nothing.
        model: The model, before it is changed.
        settings: Other settings on which a fit depends, as JSON values.
        data: The calibration batches.
        operation: The name with which error messages begin.
    """
    return Stage(folder, "" if folder is None else _key(model, settings, data), operation)


def _key(model: nn.Module, settings: object, data: Sequence[Batch]) -> str:
    """Return a hash of everything on which fitted parts depend: model, settings and data."""
    config = getattr(model, "config", None)
    fields = None
    if isinstance(config, PretrainedConfig):
        fields = config.to_dict()
        fields.pop("_name_or_path", None)  # a copy of the folder is the same model
    beside = [json.dumps([settings, str(type(model)), fields], default=str)]
    for name, module in model.named_modules():  # a user may have replaced an activation
        # a plain function, such as an activation, is neither in the state dict nor in the repr
        functions = {
            key: value.__qualname__
            for key, value in vars(module).items()
            if inspect.isfunction(value)
        }
        beside.append(f"{name} {type(module).__qualname__} {module.extra_repr()} {functions}")
    # all weights, because weights that are not fitted affect the inputs of fitted ones
    values = list(model.state_dict().items())
    for number, batch in enumerate(data):
        values += [(f"batch {number} {name}", value) for name, value in batch.items()]
    return hash_of(values, *beside)
