"""The merges from which `learn_merge` starts, and with which it compares its result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..functional import build_recipe
from ..methods import CALIBRATED, METHODS, get_method
from ..planning import make_plan
from .config import OPERATION, LearnConfig

COMPARED = ("linear", "regmean")
"""The merges in the final table, if the caller names none."""


def merges_of(config: LearnConfig, models: Sequence[str], base: str | None) -> list[str]:
    """Return the methods of the final table; raise an error if one cannot merge the models."""
    compared = config.compare
    if compared is None:
        compared = COMPARED if base is None else (*COMPARED, "task_arithmetic")
    methods = {"compare": list(compared)}
    if config.start != "average" and not is_folder(config.start):
        methods["start"] = [config.start]
    for field, names in methods.items():
        for name in names:
            _check_method(field, name, models, base)
    # average is linear with equal weights, so the table has only one of them
    names_of_start = [config.start]
    if config.start in ("average", "linear"):
        names_of_start = ["average", "linear"]
    return [name for name in compared if name not in names_of_start]


def is_folder(name: str) -> bool:
    """Return whether ``name`` is a model's folder, and not the name of a method."""
    return name not in (*METHODS, *CALIBRATED, "average") and Path(name).is_dir()


def options_of(name: str, base: str | None) -> dict[str, Any]:
    """Return the arguments of `merge_models` for a method that needs no data."""
    options: dict[str, Any] = {}
    if "weight" in get_method(name).parameters:
        options["weight"] = 1.0
    if base is not None and get_method(name).base != "unused":
        options["base_model"] = base
    return options


def _check_method(field: str, name: str, models: Sequence[str], base: str | None) -> None:
    """Raise an error if a method requires settings that `learn_merge` does not give it."""
    if name in (*CALIBRATED, "average"):
        return
    try:
        method = get_method(name)
    except ValueError as error:
        kinds = "method or folder" if field == "start" else "method"
        raise ValueError(f"{OPERATION}: {field}: there is no such {kinds}: {error}") from error
    if method.base == "required" and base is None:
        raise ValueError(f"{OPERATION}: expected a base, as {name} in {field} requires, got none")
    # weight may be required, because `options_of` gives every model the weight 1
    required = [p.name for p in method.parameters.values() if p.required and p.name != "weight"]
    if required:
        raise ValueError(
            f"{OPERATION}: {field} names {name}, expected a method without required parameters, "
            f"but it requires {required[0]}; to train from such a merge, write it with "
            "merge_models and pass its folder as start"
        )
    options = options_of(name, base)
    try:
        make_plan(build_recipe(models, name, options.pop("base_model", None), options))
    except ValueError as error:
        raise ValueError(f"{OPERATION}: {field} names {name}: {error}") from error
