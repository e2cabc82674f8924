"""`prepare_lora`: add adapters with peft, after a trial on a copy of the model without data."""

from __future__ import annotations

import copy
import difflib
import math
import re
from collections.abc import Collection
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from model_components._checks import is_whole

from ..layers import quiet
from .accelerate import accelerate_lora_

PREFIX = "base_model.model."
"""The prefix of parameter names in peft's files."""


def skeleton(model: nn.Module) -> Any:
    """Return a copy of a model on the meta device: its modules and names, without data."""
    # a memo for deepcopy, which treats these tensors as already copied, so tied ones stay tied
    meta: dict[int, object] = {id(t): t.to("meta") for t in model.buffers()}
    for p in model.parameters():
        meta[id(p)] = nn.Parameter(
            torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad
        )
    return copy.deepcopy(model, meta)


def is_quantized(model: nn.Module) -> bool:
    """Return whether any parameter is quantized, so that `skeleton` cannot copy it.

    A quantized parameter is not exactly an `nn.Parameter`, or its dtype is not floating-point.
    """
    return any(type(p) is not nn.Parameter or not p.is_floating_point() for p in model.parameters())


def inject(model: nn.Module, config: LoraConfig, adapter_name: str, **options: Any) -> PeftModel:
    """Call peft's `get_peft_model`, without the warnings that `quiet` silences."""
    with quiet():
        return get_peft_model(model, config, adapter_name=adapter_name, **options)


def check_adapter_name(operation: str, adapter_name: str) -> None:
    """Raise ValueError if an adapter name is empty, has dots or is "lora", which peft uses."""
    # the name becomes a key of a ModuleDict, which allows no dots
    if adapter_name == "lora" or "." in adapter_name or not adapter_name:
        raise ValueError(
            f"{operation}: adapter_name is {adapter_name!r}; expected a non-empty name without "
            "dots, other than 'lora'"
        )


def _near(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), 3, 0.4)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; modules of the model are {', '.join(sorted(known)[:12])}"


def _check_config(operation: str, model: nn.Module, config: object, adapter_name: str) -> None:
    """Raise ValueError for an invalid config.

    peft accepts some of these configs, and rejects others only after changing the model.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"{operation}: config is a {type(config).__name__}, expected a peft.LoraConfig"
        )
    if isinstance(model, PeftModel):
        raise ValueError(
            f"{operation}: expected a model without adapters, got a PeftModel; to add another "
            "adapter, call its add_adapter and then accelerate_lora_"
        )
    check_adapter_name(operation, adapter_name)
    check_numbers(operation, config)
    _check_targets(operation, model, config)
    _check_patterns(operation, model, config)


def _check_patterns(operation: str, model: nn.Module, config: LoraConfig) -> None:
    """Raise ValueError if a module's rank or alpha depends on the order of matching patterns.

    peft uses the first pattern that matches, but sorts patterns when it saves a config.
    """
    targets = config.target_modules or ()
    if isinstance(targets, str):
        names = [name for name, _ in model.named_modules() if re.fullmatch(targets, name)]
    else:
        ends = tuple(f".{target}" for target in targets)
        names = [name for name, _ in model.named_modules() if f".{name}".endswith(ends)]
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(config, field) or {}
        for name in names:
            # the same expression as in peft
            found = [one for one in patterns if re.match(rf"(.*\.)?({one})$", name)]
            if found and patterns[found[0]] != patterns[min(found)]:
                raise ValueError(
                    f"{operation}: {field} has {' and '.join(map(repr, found))}, which all match "
                    f"{name} with different values; expected one match, because peft sorts the "
                    "patterns when it saves the adapter, so another one would apply after loading"
                )


def check_numbers(operation: str, config: LoraConfig) -> None:
    """Raise ValueError if a rank, alpha, dropout, module name or LoftQ setting is invalid."""
    for name, rank in _values(config, "r", "rank_pattern"):
        if not is_whole(rank, 1):
            raise ValueError(
                f"{operation}: {name} is {rank!r}, expected a whole number of at least 1"
            )
    for name, alpha in _values(config, "lora_alpha", "alpha_pattern"):
        if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
            raise ValueError(f"{operation}: {name} is {alpha!r}, expected a finite number")
    dropout = config.lora_dropout
    if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ValueError(
            f"{operation}: lora_dropout is {dropout!r}, expected a number of at least 0 and below 1"
        )
    for field in ("target_modules", "modules_to_save", "exclude_modules"):
        wanted = getattr(config, field)
        names = [] if wanted is None or isinstance(wanted, str) else wanted
        if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"{operation}: {field} is {wanted!r}, expected a string or a list of module names"
            )
    _check_loftq(operation, config.loftq_config)


def _check_loftq(operation: str, loftq: object) -> None:
    rounds = 1
    if isinstance(loftq, dict):
        rounds = loftq.get("loftq_iter", 1)
    if not is_whole(rounds, 1):
        raise ValueError(
            f"{operation}: loftq_iter is {rounds!r}, expected a whole number of at least 1"
        )


def _values(config: LoraConfig, field: str, pattern: str) -> list[tuple[str, object]]:
    """Return (name, value) of a setting, and of each value that replaces it in some modules."""
    named = [(field, getattr(config, field))]
    for module, value in (getattr(config, pattern) or {}).items():
        named.append((f"{pattern}[{module!r}]", value))
    return named


def _check_targets(operation: str, model: nn.Module, config: LoraConfig) -> None:
    """Raise ValueError for a name or a pattern that matches no module."""
    names = [name for name, _ in model.named_modules()]
    last = set()  # last parts of names, which the message may suggest
    for name, module in model.named_modules():
        if not list(module.children()):
            last.add(name.rpartition(".")[2])
    targets = config.target_modules
    for field, wanted in (("target_modules", targets), ("modules_to_save", config.modules_to_save)):
        if not isinstance(wanted, (list, set, tuple)):
            continue
        for target in sorted(wanted):
            if not any(f".{name}".endswith(f".{target}") for name in names):
                raise ValueError(
                    f"{operation}: {field} has {target!r}, which matches no "
                    f"module{_near(target, last)}"
                )
    is_pattern = isinstance(targets, str) and targets != "all-linear"
    if is_pattern and not any(re.fullmatch(targets, name) for name in names):
        raise ValueError(
            f"{operation}: target_modules is the pattern {targets!r}, which matches none of "
            f"the names of the model's {len(names)} modules"
        )


def _rehearse(operation: str, model: nn.Module, config: LoraConfig, adapter_name: str) -> None:
    """Inject adapters into a copy without data; raise ValueError if a rank exceeds a dimension."""
    if is_quantized(model):
        return
    trial = copy.deepcopy(config)
    # initializations such as PiSSA read the weights, which have no data on the meta device
    trial.init_lora_weights = False
    # drawing initial values here must not change the user's random state
    with torch.random.fork_rng(devices=[]):
        injected = inject(skeleton(model), trial, adapter_name)
    too_small: list[tuple[int, int, int, str, int]] = []
    for name, layer in injected.named_modules():
        if isinstance(layer, LoraLayer) and adapter_name in layer.r:
            sides: Any = (layer.out_features, layer.in_features)
            rank = layer.r[adapter_name]
            if rank > min(sides):
                too_small.append((min(sides), *sides, name.removeprefix(PREFIX), rank))
    if too_small:
        most, rows, columns, name, rank = min(too_small)  # report only the smallest
        raise ValueError(
            f"{operation}: r is {rank}, but the weight of {name!r} is {rows} x {columns}; expected "
            f"at most {most}"
        )


def prepare_lora(
    model: nn.Module,
    config: LoraConfig,
    *,
    adapter_name: str = "default",
    accelerate: bool = True,
    **options: object,
) -> PeftModel:
    """Add LoRA adapters as `get_peft_model` does, and give the layers a leaner forward.

    The config is first tried on a copy of the model. The copy is on the meta device, so it takes no
    memory.

    Args:
        model: The base model, which peft changes in place. If this function raises a ValueError,
            the model has not changed.
        config: A `peft.LoraConfig`.
        adapter_name: Name of the adapter.
        accelerate: Also call `accelerate_lora_`, which gives the layers the lean forward.
        options: Further arguments of `get_peft_model`, such as ``autocast_adapter_dtype``.

    Returns:
        The `PeftModel`, with newly initialized adapters.

    Raises:
        ValueError: A rank is below 1 or larger than a dimension of its weight, an alpha is not
            finite, the dropout is below 0 or at least 1, a target matches no module (the message
            suggests similar names), patterns with different ranks or alphas match one module,
            ``adapter_name`` is invalid, or the model already has adapters.

    A quantized model cannot be copied, so ranks that are too large are not noticed in advance.

    >>> model = nn.Sequential(nn.Linear(4, 8))
    >>> prepare_lora(model, LoraConfig(r=5, target_modules=["0"]))
    Traceback (most recent call last):
    ValueError: prepare_lora: r is 5, but the weight of '0' is 8 x 4; expected at most 4
    >>> prepare_lora(model, LoraConfig(r=2, target_modules=["0"])).get_nb_trainable_parameters()
    (24, 64)
    """
    operation = "prepare_lora"
    _check_config(operation, model, config, adapter_name)
    _rehearse(operation, model, config, adapter_name)
    peft_model = inject(model, config, adapter_name, **options)
    if accelerate:
        accelerate_lora_(peft_model)
    return peft_model
