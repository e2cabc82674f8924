"""Share and freeze the models that masks merge, and check that they can be merged."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..computing import LENGTHS, is_of_any_length, settings_of
from ..dtypes import byte_view, stored_of

Module = TypeVar("Module", bound=nn.Module)

# attributes that do not affect a module's output in evaluation mode
_IGNORED = (
    "training",
    "name_or_path",
    "p",
    "_is_hf_initialized",
    "gradient_checkpointing",
)
_HASHED = 1 << 22  # number of elements that are hashed at a time


def share_frozen(models: Sequence[Module], *, over_base: bool = False) -> list[Module]:
    """Return frozen copies of the models, which share the models' weights.

    No weight is copied, and the caller's models are not changed.

    Args:
        models: The components.
        over_base: Whether the last model is the base. If it is, a parameter of another model that
            equals the base's parameter is replaced by the base's tensor.
    """
    memo: dict[int, object] = {}
    base = dict(models[-1].named_parameters()) if over_base else {}
    # the base first, because other models look up its tensors in the memo
    for model in reversed(models):
        for name, own in model.named_parameters():
            twin = base.get(name, own)
            # a fine-tune of a few layers leaves all other weights unchanged
            if twin is not own and own.device == twin.device and torch.equal(own, twin):
                memo[id(own)] = memo[id(twin)]
            elif id(own) not in memo:
                memo[id(own)] = nn.Parameter(own.detach(), requires_grad=False)
        memo |= {id(buffer): buffer for buffer in model.buffers()}
    return [copy.deepcopy(model, memo).eval() for model in models]


def without_adapter(model: nn.Module) -> PreTrainedModel:
    """Return the model, or for a `PeftModel` a copy with the adapter merged into its weights."""
    fold = getattr(model, "merge_and_unload", None)
    # peft folds in place, and the caller's model must not change
    if callable(fold):
        # pyrefly: ignore[not-callable]: peft's method, though nn.Module says Tensor
        return copy.deepcopy(model).merge_and_unload()
    # pyrefly: ignore[bad-return]: every other model is a PreTrainedModel
    return model


def _attributes(module: nn.Module) -> dict[str, object]:
    """Return a module's settings: its attributes that are None, bools, numbers or strings."""
    if isinstance(module, nn.Dropout):
        # a fine-tune may have another dropout rate, which does not matter in evaluation mode
        return {}
    scalars = {
        k: v for k, v in vars(module).items() if v is None or isinstance(v, (bool, int, float, str))
    }
    # rotary positions do not depend on the maximum input length, so this length may differ
    ignored = _IGNORED + LENGTHS * is_of_any_length(getattr(module, "config", None))
    return {k: v for k, v in scalars.items() if k not in ignored and "drop" not in k}


def _ties(model: nn.Module) -> dict[str, str]:
    """Map each parameter name to the first name of the same (tied) tensor."""
    first: dict[int, str] = {}
    return {
        n: first.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)
    }


def _unequal(
    where: str, one: Mapping[str, object], other: Mapping[str, object], labels: tuple[str, str]
) -> Iterator[str]:
    for key in one.keys() & other.keys():
        if one[key] != other[key]:
            yield f"{where}.{key} is {one[key]!r} ({labels[0]}) and {other[key]!r} ({labels[1]})"


def _differences(one: nn.Module, other: nn.Module, labels: tuple[str, str]) -> Iterator[str]:
    """Yield differences that prevent a merge: architecture, tied weights, shapes, dtypes."""
    if type(one) is not type(other):
        yield (
            f"different architectures: {type(one).__name__} ({labels[0]}) and "
            f"{type(other).__name__} ({labels[1]})"
        )
        return
    ties = _ties(one), _ties(other)
    if ties[0].keys() != ties[1].keys():
        odd = sorted(ties[0].keys() ^ ties[1].keys())
        yield (
            f"different architectures: {odd[0]} is in only one of {labels[0]} and {labels[1]} "
            f"({len(odd)} such parameters)"
        )
        return
    if changed := [n for n in ties[0] if ties[0][n] != ties[1][n]]:
        yield (
            f"{changed[0]} is tied to another tensor in one of {labels[0]} and {labels[1]}; tie or "
            "untie it in both"
        )
    own = dict(one.named_parameters())
    theirs = dict(other.named_parameters())
    for name, parameter in own.items():
        if name not in theirs:
            # tied to another tensor in the other model, which is reported above
            continue
        if parameter.shape != theirs[name].shape:
            shapes = (
                f"{list(parameter.shape)} ({labels[0]}) and {list(theirs[name].shape)} "
                f"({labels[1]})"
            )
            hint = ""
            if isinstance(one, PreTrainedModel):
                tokens = one.get_input_embeddings()
            else:
                tokens = None
            if (
                parameter is getattr(tokens, "weight", None)
                and parameter.shape[1:] == theirs[name].shape[1:]
            ):
                hint = (
                    "; align the vocabularies first: merge_models([a, b], weight=[1, 0], "
                    "tokenizer_source='union') writes a with the tokens of both"
                )
            yield f"{name} has shapes {shapes}{hint}"
        elif parameter.dtype != theirs[name].dtype:
            yield (
                f"{name} has dtypes {parameter.dtype} ({labels[0]}) and {theirs[name].dtype} "
                f"({labels[1]}); load both in one dtype"
            )


def _different_settings(
    one: nn.Module, other: nn.Module, labels: tuple[str, str], values: bool
) -> Iterator[str]:
    """Yield differences in config fields, classes and settings of modules, and buffers."""
    if isinstance(one, PreTrainedModel) and isinstance(other, PreTrainedModel):
        ours, theirs = settings_of(one.config), settings_of(other.config)
        yield from _unequal("config", ours, theirs, labels)
    modules = dict(other.named_modules())
    for name, module in one.named_modules():
        twin = modules.get(name)
        if type(twin) is not type(module):
            yield (
                f"{name} is {type(module).__name__} ({labels[0]}) and {type(twin).__name__} "
                f"({labels[1]})"
            )
            continue
        yield from _unequal(name or "model", _attributes(module), _attributes(twin), labels)
    if values:
        buffers = dict(other.named_buffers())
        for name, buffer in one.named_buffers():
            if name not in buffers or not torch.equal(buffer, buffers[name]):
                yield (
                    f"the buffer {name} differs between {labels[0]} and {labels[1]}; masks merge "
                    "only parameters"
                )


def refuse_different(
    models: Sequence[nn.Module],
    labels: Sequence[str],
    *,
    values: bool = True,
    strict: bool = True,
    whose: str = "first component's",
) -> None:
    """Raise an error if components differ in architecture, parameters, settings or buffers.

    Args:
        models: The components.
        labels: The components' names in messages.
        values: Whether to compare buffers, too. On the meta device, buffers have no values.
        strict: Whether different settings and buffers are an error; otherwise warn.
        whose: The owner of the settings and buffers that are used, as the warning names it.

    Raises:
        ValueError: The components differ. The message lists the first 5 differences.
    """
    if len(models) < 2:
        raise ValueError(f"Merger: expected at least two models, got {len(models)}")
    pairs = [
        (models[0], other, (labels[0], label))
        for other, label in zip(models[1:], labels[1:], strict=True)
    ]
    say_or_refuse([line for one, other, names in pairs for line in _differences(one, other, names)])
    # without strict, only the call that also compares buffers warns, so there is one warning
    if strict or values:
        lines = [
            line
            for one, other, names in pairs
            for line in _different_settings(one, other, names, values)
        ]
        say_or_refuse(lines, strict=strict, whose=whose)


def refuse_not_finite(models: Sequence[nn.Module], labels: Sequence[str]) -> None:
    """Raise an error if components hold NaN or infinity.

    Args:
        models: The components.
        labels: The components' names in messages.

    Raises:
        ValueError: Parameters are not finite. The message lists the first 5.
    """
    problems = []
    for model, label in zip(models, labels, strict=True):
        for name, value in model.named_parameters():
            # a finite sum proves that all terms are finite, and needs no tensor of bools; the sum
            # of large finite terms can overflow, so if it is not finite, check every element
            if not torch.isfinite(value.sum(dtype=torch.float64)) and not bool(
                torch.isfinite(value).all()
            ):
                problems.append(f"{name} of {label} holds NaN or infinity")
    say_or_refuse(problems)


def say_or_refuse(
    differences: Sequence[str], *, strict: bool = True, whose: str = "first component's"
) -> None:
    """Raise an error that lists the differences, or only warn if not ``strict``."""
    if not differences:
        return
    if len(differences) > 5:
        more = f"\nand {len(differences) - 5} more"
    else:
        more = ""
    lines = "\n- ".join(differences[:5]) + more
    if strict:
        raise ValueError(f"Merger: these models cannot be merged:\n- {lines}")
    warnings.warn(
        f"Merger: the components differ; in each case the {whose} version is used:\n- {lines}",
        stacklevel=3,
    )


def component_hashes(components: Iterable[Iterable[tuple[str, Tensor]]]) -> list[str]:
    """Return a SHA-256 hash of each component.

    A hash covers the names, shapes, dtypes and values of the component's tensors, in order.
    """
    hashes = []
    for weights in components:
        digest = hashlib.sha256()
        for name, value in weights:
            digest.update(f"{name} {list(value.shape)} {value.dtype}".encode())
            flat = value.detach().reshape(-1)
            for start in range(0, flat.numel(), _HASHED):
                digest.update(
                    byte_view(stored_of(flat[start : start + _HASHED].cpu().contiguous()))
                )
        hashes.append(digest.hexdigest())
    return hashes
