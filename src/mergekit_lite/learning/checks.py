"""Checks of the arguments of `learn_merge`, before any work."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_components._folders import check_new
from model_components._formats import reading
from model_components._loading import read_config

from ..files import open_source
from ..masks.loading import refuse_unlike
from ..recipe import model_key
from .config import OPERATION

REPORT = "report.json"
"""The name of the report in a run's folder."""


def check_devices() -> None:
    """Raise an error if there are several processes, or several visible GPUs."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if processes > 1 or gpus > 1:
        raise ValueError(
            f"{OPERATION}: expected one process and at most one visible GPU, got {processes} "
            f"processes and {gpus} GPUs; set CUDA_VISIBLE_DEVICES=0, or train a Merger with "
            "MaskTrainer under torchrun"
        )


def first_tokenizer(names: Sequence[str]) -> Any:
    """Return the first model's tokenizer, and warn about models with another chat template."""
    tokenizers: list[Any] = []
    for name in names:
        with reading(f"the tokenizer of {name}", OPERATION):
            tokenizers.append(AutoTokenizer.from_pretrained(open_source(name).folder))
        if tokenizers[-1].chat_template != tokenizers[0].chat_template:
            warnings.warn(
                f"{OPERATION}: {name} has another chat template than {names[0]}; the template of "
                f"{names[0]} is used for all tasks",
                stacklevel=3,
            )
    return tokenizers[0]


def check_start(start: str, first: Path) -> None:
    """Raise an error if the model in ``start`` differs from the components in more than weights."""
    folders: list[Any] = [first, open_source(start).folder]
    configs = [read_config(folder, OPERATION) for folder in folders]
    labels = ["the first component", start]
    # the start is loaded in the components' dtype, so its own dtype may differ
    making = {"dtype": torch.float32}
    refuse_unlike(configs, folders, labels, AutoModelForCausalLM, making, strict=True)


def training_of(out: Path) -> Path:
    """Return the folder of a run's checkpoints and report."""
    return out.with_name(f"{out.name}.training")


def check_out(out: str | Path) -> Path:
    """Return the path of the output; raise an error if it is not new, or the run is finished."""
    if not isinstance(out, (str, os.PathLike)):
        raise ValueError(f"{OPERATION}: expected out as a path, got {type(out).__name__}")
    # absolute, because "." has no name
    report = training_of(Path(out).absolute()) / REPORT
    if report.is_file() and (Path(out) / "config.json").is_file():
        raise ValueError(
            f"{OPERATION}: {out} is not empty: it has a finished merge, whose report is {report}; "
            "choose another out"
        )
    return check_new(out, OPERATION)


def check_data(components: Sequence[str | Path], data: Sequence[Any]) -> None:
    """Check that there are two or more distinct models, and one data set for each."""
    for name, given in (("components", components), ("data", data)):
        # len() of a text would count its characters
        if isinstance(given, (str, Path)):
            raise ValueError(f"{OPERATION}: {name} is {str(given)!r}, expected a list")
    if len(components) < 2 or len(components) != len(data):
        raise ValueError(
            f"{OPERATION}: expected two or more components and one data set for each, got "
            f"{len(components)} components and {len(data)} data sets"
        )
    for model in components:
        if not isinstance(model, (str, os.PathLike)):
            raise ValueError(
                f"{OPERATION}: expected components as folders or hub ids, got "
                f"{type(model).__name__}; a Merger takes models in memory"
            )
    keys = [model_key(model) for model in components]
    for model in components:
        if keys.count(model_key(model)) > 1:
            raise ValueError(f"{OPERATION}: expected each component once, got {model} twice")
