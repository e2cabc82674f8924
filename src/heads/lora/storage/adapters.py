"""`load_lora`: load an adapter from peft's files, after checking them."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch import nn

from model_components._folders import run_hint
from model_components._formats import reading
from model_components._hub import find_folder
from model_components._patterns import pattern_problem

from ..surgery.accelerate import accelerate_lora_
from ..surgery.prepare import (
    PREFIX,
    check_adapter_name,
    check_numbers,
    inject,
    is_quantized,
    quiet,
    skeleton,
)

WEIGHTS = "adapter_model.safetensors"


def load_lora(
    model: nn.Module,
    folder: str | Path,
    *,
    adapter_name: str = "default",
    is_trainable: bool = False,
    accelerate: bool = True,
    **options: Any,
) -> PeftModel:
    """Load an adapter as peft's `PeftModel.from_pretrained` does, with a leaner forward.

    Before anything is loaded, the names and shapes in the checkpoint are compared with the model,
    unless the model is quantized.

    Args:
        model: The base model, or a `PeftModel`, to which the adapter is added.
        folder: A folder with ``adapter_config.json`` and ``adapter_model.safetensors``, or the hub
            id of an adapter.
        adapter_name: Name of the adapter in this model.
        is_trainable: Whether to train the adapter further.
        accelerate: Also call `accelerate_lora_`, which gives the layers the lean forward.
        options: Further arguments of peft, such as ``autocast_adapter_dtype``. ``revision``,
            ``token`` and ``subfolder`` are used to find the files.

    Returns:
        The `PeftModel` with the adapter.

    Raises:
        ValueError: The folder or hub id does not exist; the adapter is not LoRA; its file is a
            pickle or truncated; its modules, tensors or shapes do not match the model and the
            config; a rank, an alpha or a weight is not a finite number; or ``adapter_name`` is
            invalid or already in use.

    >>> from peft import get_peft_model
    >>> model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder)
    ...     loaded = load_lora(nn.Sequential(nn.Linear(4, 4)), folder)
    >>> loaded.active_adapters
    ['default']
    """
    operation = "load_lora"
    check_adapter_name(operation, adapter_name)
    if isinstance(model, PeftModel) and adapter_name in model.peft_config:
        raise ValueError(
            f"{operation}: the model already has an adapter {adapter_name!r}; expected another "
            "adapter_name"
        )
    hub = {}
    for name in ("revision", "token"):  # peft reads the local folder and needs neither
        if name in options:
            hub[name] = options.pop(name)
    path = find_folder(folder, patterns=["*adapter_*"], operation=operation, **hub)
    path /= options.pop("subfolder", "")
    shapes = read_shapes(operation, path)
    with reading(path / "adapter_config.json", operation):
        config = PeftConfig.from_pretrained(str(path))
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"{operation}: the adapter in {path} is of type {config.peft_type}, expected LORA"
        )
    with reading(path / "adapter_config.json", operation):
        check_numbers(f"{operation}: {path / 'adapter_config.json'}", config)
        _check_patterns(operation, path, config, model)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not is_quantized(base):  # quantized layers cannot be copied to the meta device
        trial = skeleton(model)
        if isinstance(model, PeftModel):
            # `_compare` injects the new adapter into a base without adapters
            trial = trial.unload()
        with reading(path / "adapter_config.json", operation):
            _compare(operation, path, shapes, trial, config)
    with quiet(), reading(path, operation):
        if isinstance(model, PeftModel):
            peft_model = model
            peft_model.load_adapter(str(path), adapter_name, is_trainable=is_trainable, **options)
        else:
            peft_model = PeftModel.from_pretrained(
                base, str(path), adapter_name, is_trainable=is_trainable, **options
            )
    if accelerate:
        accelerate_lora_(peft_model)
    return peft_model


def _check_patterns(operation: str, path: Path, config: LoraConfig, model: nn.Module) -> None:
    """Raise ValueError for regular expressions that would take peft too long to match."""
    patterns: list[str] = []
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = getattr(config, name)
        # in a list, modules are plain names, but entries of layers_pattern are patterns
        if isinstance(value, str):
            patterns.append(value)
        elif name == "layers_pattern":
            patterns += map(str, value or ())
    for name in ("rank_pattern", "alpha_pattern"):
        patterns += map(str, getattr(config, name) or ())
    names = [name for name, _ in model.named_modules()]
    if why := pattern_problem(patterns, names):
        raise ValueError(f"{operation}: {path / 'adapter_config.json'}: {why}")


def read_shapes(operation: str, path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors, by name.

    Each tensor is read once, to check that its numbers are finite.
    """
    if not (path / WEIGHTS).exists():
        file_names = sorted(file.name for file in path.iterdir())
        why = ""
        if "adapter_model.bin" in file_names:
            why = "; adapter_model.bin is a pickle, which can run code: save it with safetensors"
        raise ValueError(
            f"{operation}: expected {WEIGHTS} in {path}, got {', '.join(file_names) or 'none'}{why}"
            f"{run_hint(path, ['adapter'])}"
        )
    shapes = {}
    with reading(path / WEIGHTS, operation), safe_open(path / WEIGHTS, "pt") as file:
        for name in file.keys():  # noqa: SIM118, not a mapping
            tensor = file.get_tensor(name)
            # a module that is saved in full may have counters, which are integers
            narrow = not tensor.is_floating_point() or tensor.dtype.itemsize < 2
            if ".lora_" in name and narrow:
                raise ValueError(
                    f"{operation}: {name} in {path} has dtype {tensor.dtype}, expected a "
                    "floating-point dtype of 16 bits or more"
                )
            if not torch.isfinite(tensor).all():
                raise ValueError(
                    f"{operation}: expected finite numbers in {path}, got NaN or infinity in {name}"
                )
            shapes[name] = tuple(tensor.shape)
    return shapes


def _compare(
    operation: str,
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    base: nn.Module,
    config: LoraConfig,
) -> None:
    """Raise ValueError if a checkpoint's tensors do not match the model and the config.

    ``base`` is a copy of the model on the meta device, and is changed.
    """
    of = f"{operation}: {path}, trained on {config.base_model_name_or_path},"
    modules = {name for name, _ in base.named_modules()}
    adapted = set()
    for name in shapes:
        module = re.sub(r"\.(lora_.*|base_layer.*|token_adapter.*|[^.]*)$", "", name)
        adapted.add(module.removeprefix(PREFIX))
    strange = sorted(adapted - modules)
    if strange:
        raise ValueError(
            f"{of} does not match this {type(base).__name__}: expected tensors for modules of the "
            f"model, which has no {_first(strange)}"
        )
    expected: dict[str, tuple[int, ...]] = {}
    for name, parameter in base.named_parameters():
        expected[PREFIX + name] = tuple(parameter.shape)
    trial = copy.deepcopy(config)
    # initializations such as PiSSA read the weights, which have no data on the meta device
    trial.init_lora_weights = False
    trial.inference_mode = False
    injected = inject(base, trial, "default")
    # with the default, "auto", peft would ask the hub for the base model's config
    tensors = get_peft_model_state_dict(injected, save_embedding_layers=False)
    # peft may save base layers, too
    for name, parameter in injected.named_parameters(remove_duplicate=False):
        expected[name] = tuple(parameter.shape)
    for name, tensor in tensors.items():
        expected[name] = tuple(tensor.shape)
    wrong = []
    for name, shape in shapes.items():
        if expected.get(name, shape) != shape:
            wrong.append(f"{name} has shape {list(shape)}, expected {list(expected[name])}")
    if wrong:
        raise ValueError(f"{of} does not match the model: {_first(wrong)}")
    left = sorted(shapes.keys() - expected.keys())
    if left:
        named = config.target_modules
        if not isinstance(named, str):
            named = sorted(named or ())
        raise ValueError(
            f"{of} has {_first(left)}, expected only tensors for the target_modules of its config, "
            f"{named}"
        )
    absent = sorted(tensors.keys() - shapes.keys())
    if absent:
        raise ValueError(f"{of} lacks {_first(absent)}, which its config requires")


def _first(names: Sequence[str]) -> str:
    """Return the first of several names and, if there are more, the number of the others."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} (and {len(names) - 1} more)"
