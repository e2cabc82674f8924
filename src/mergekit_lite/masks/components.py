"""Models that are to be merged by masks: loaded once, shared, frozen, and refused where they do not fit together."""

from __future__ import annotations

import copy
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from ..dtypes import byte_view, stored_of

_IGNORED = ("training", "name_or_path", "p", "_is_hf_initialized", "gradient_checkpointing", "warnings_issued")
_HASHED = 1 << 22  # elements at a time
_COSMETIC = re.compile(r"drop|token|dtype|name|version|label|architectures|use_cache|task_|initializer|return_|output_")


def share_frozen(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights, frozen, in modules of its own: the caller's model is neither copied nor changed."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer
    return copy.deepcopy(model, memo).eval()


def load_components(
    paths: Sequence[str | os.PathLike[str]], auto_class: Any, dtype: str | torch.dtype, options: Mapping[str, Any]
) -> list[PreTrainedModel]:
    """Compare what the configs describe, on the meta device, then load each model once.

    Raises:
        ValueError: Fewer than two, or models that cannot be merged by masks.
    """
    if isinstance(paths, (str, os.PathLike)) or len(paths) < 2:
        raise ValueError(f"Merger: got {paths!r}, needed a list of at least two models")
    where = ("trust_remote_code", "revision", "token", "subfolder", "cache_dir", "local_files_only")
    found = {k: v for k, v in options.items() if k in where}
    configs = [_config(path, found) for path in paths]
    making = {} if dtype == "auto" else {"dtype": dtype}
    making |= {"trust_remote_code": True} if options.get("trust_remote_code") else {}
    with torch.device("meta"):
        described = [auto_class.from_config(config, **making) for config in configs]
    refuse_different(described, [str(p) for p in paths], values=False)
    return [auto_class.from_pretrained(path, dtype=dtype, **options).eval() for path in paths]


def _config(path: str | os.PathLike[str], options: Mapping[str, Any]) -> Any:
    try:
        return AutoConfig.from_pretrained(path, **options)
    except OSError as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"Merger: {os.fspath(path)}: no such folder, and the hub did not give it ({reason})"
        ) from error


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The settings that a module keeps: plain values among its attributes."""
    if isinstance(module, nn.Dropout):
        return {}
    kept = {k: v for k, v in vars(module).items() if v is None or isinstance(v, (bool, int, float, str))}
    return {k: v for k, v in kept.items() if k not in _IGNORED and "drop" not in k}


def _settings(model: nn.Module) -> dict[str, Any]:
    """What of a config says how the model computes: all but names, tokens, dtypes and dropout."""
    if not isinstance(model, PreTrainedModel):
        return {}
    kept = model.config.to_dict()
    return {k: v for k, v in kept.items() if not _COSMETIC.search(k)}


def _ties(model: nn.Module) -> dict[str, str]:
    """Every parameter's name, and the first name of the same tensor."""
    first: dict[int, str] = {}
    return {n: first.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}


def _unequal(where: str, one: dict[str, Any], other: dict[str, Any], labels: tuple[str, str]) -> Iterator[str]:
    for key in one.keys() & other.keys():
        if one[key] != other[key]:
            yield f"{where}.{key} is {one[key]!r} ({labels[0]}) and {other[key]!r} ({labels[1]})"


def _differences(one: nn.Module, other: nn.Module, labels: tuple[str, str], values: bool) -> Iterator[str]:
    if type(one) is not type(other):
        yield f"different architectures: {type(one).__name__} ({labels[0]}) and {type(other).__name__} ({labels[1]})"
        return
    ties = _ties(one), _ties(other)
    if ties[0].keys() != ties[1].keys():
        odd = sorted(ties[0].keys() ^ ties[1].keys())
        yield f"different architectures: {odd[0]} is in one of {labels[0]} and {labels[1]} alone ({len(odd)} such)"
        return
    if changed := [n for n in ties[0] if ties[0][n] != ties[1][n]]:
        yield f"{changed[0]} is tied to another tensor in one of {labels[0]} and {labels[1]}; untie or tie it in both"
    own, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    for name, parameter in own.items():
        if name not in theirs:
            continue
        if parameter.shape != theirs[name].shape:
            shapes = f"{list(parameter.shape)} ({labels[0]}) and {list(theirs[name].shape)} ({labels[1]})"
            hint = ""
            tokens = one.get_input_embeddings() if isinstance(one, PreTrainedModel) else None
            if parameter is getattr(tokens, "weight", None) and parameter.shape[1:] == theirs[name].shape[1:]:
                hint = "; align the vocabularies first: merge_models with a recipe whose tokenizer source is union"
            yield f"{name} has shapes {shapes}{hint}"
        elif parameter.dtype != theirs[name].dtype:
            yield f"{name} is {parameter.dtype} ({labels[0]}) and {theirs[name].dtype} ({labels[1]}); load both in one"
    modules = dict(other.named_modules())
    for name, module in one.named_modules():
        twin = modules.get(name)
        if type(twin) is not type(module):
            yield f"{name} is {type(module).__name__} ({labels[0]}) and {type(twin).__name__} ({labels[1]})"
            continue
        yield from _unequal(name or "model", _attributes(module), _attributes(twin), labels)
    yield from _unequal("config", _settings(one), _settings(other), labels)
    if values:
        buffers = dict(other.named_buffers())
        for name, buffer in one.named_buffers():
            if name not in buffers or not torch.equal(buffer, buffers[name]):
                yield f"the buffer {name} differs between {labels[0]} and {labels[1]}; masks lie over parameters only"


def _not_finite(model: nn.Module, label: str) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.sum(dtype=torch.float64)) and not bool(torch.isfinite(parameter).all()):
            yield f"{name} of {label} holds NaN or infinity"


def refuse_different(models: Sequence[nn.Module], labels: Sequence[str], *, values: bool = True) -> None:
    """Refuse components that are not one architecture with one arithmetic.

    Args:
        models: The components.
        labels: What to call them.
        values: Also compare buffers and look for NaN (not on the meta device).

    Raises:
        ValueError: With the first 5 differences.
    """
    if len(models) < 2:
        raise ValueError(f"Merger: got {len(models)} model, needed at least two")
    found = []
    for other, label in zip(models[1:], labels[1:], strict=True):
        found += list(_differences(models[0], other, (labels[0], label), values))
    if values and not found:
        found = [line for model, label in zip(models, labels, strict=True) for line in _not_finite(model, label)]
    if found:
        more = f"\nand {len(found) - 5} more" if len(found) > 5 else ""
        raise ValueError("Merger: these models cannot be merged by masks:\n- " + "\n- ".join(found[:5]) + more)


def component_hashes(components: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """A SHA-256 of each component: names, shapes, dtypes and values of the weights that masks lie over."""
    found = []
    for weights in components:
        digest = hashlib.sha256()
        for name in sorted(weights):
            value = weights[name]
            digest.update(f"{name} {list(value.shape)} {value.dtype}".encode())
            flat = value.detach().reshape(-1)
            for start in range(0, flat.numel(), _HASHED):
                digest.update(byte_view(stored_of(flat[start : start + _HASHED].cpu().contiguous())))
        found.append(digest.hexdigest())
    return found
