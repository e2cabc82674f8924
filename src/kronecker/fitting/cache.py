"""Keep fitted layers on disk, so that an interrupted fit can continue."""

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
    """Return the `Stage` of layers fitted for one model, calibration set and settings.

    Args:
        folder: The folder of the files; None stores nothing.
        model: The model before anything is changed.
        settings: Other settings that a fit depends on, as JSON values.
        data: The calibration batches.
        operation: The name that error messages begin with.
    """
    return Stage(folder, "" if folder is None else _key(model, settings, data), operation)


def _key(model: nn.Module, settings: object, data: Sequence[Batch]) -> str:
    """Return a hash of all that fitted parts depend on: modules, weights, settings and data."""
    config = getattr(model, "config", None)
    fields = None
    if isinstance(config, PretrainedConfig):
        fields = config.to_dict()
        fields.pop("_name_or_path", None)  # a copy of the folder is the same model
    beside = [json.dumps([settings, str(type(model)), fields], default=str)]
    for name, module in model.named_modules():  # a user may have replaced an activation
        # an activation that is a plain function is in no state and in no repr
        functions = {
            key: value.__qualname__
            for key, value in vars(module).items()
            if inspect.isfunction(value)
        }
        beside.append(f"{name} {type(module).__qualname__} {module.extra_repr()} {functions}")
    # all weights, because those that are not fitted affect the inputs of the fitted ones
    values = list(model.state_dict().items())
    for number, batch in enumerate(data):
        values += [(f"batch {number} {name}", value) for name, value in batch.items()]
    return hash_of(values, *beside)
