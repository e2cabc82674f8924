"""`merge_adapters`: merge several adapters of one base into one, without the base's weights."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model_components import _hub
from model_components._checks import MaybeWhole, check_choice, check_value
from model_components._folders import NewFolder, check_new
from model_components._model_folders import shown_name

from .._torch import Tensor, torch
from ..dtypes import FLOATS, Array, promote
from ..files import CheckpointError
from ..files.adapter import Adapter, Pair
from ..files.resolve import find_folder
from ..methods import METHODS, MergeMethod, get_method
from ..methods.parameters import Bound
from ..planning import PlanError
from ..vocabulary import copy_tokenizer
from .report import AdapterModule, AdapterReport
from .storage import module_of, truncated, with_bar, write_adapter

_MUCH = 0.2  # if more than this share of a change is missed, the report has a note
# methods that use the weights themselves, not only their changes
_NEEDS_WEIGHTS = ("slerp", "arcee_fusion")
# methods that strengthen every singular vector, even if its singular value is 0
_NEEDS_FULL_RANK = ("tsv", "iso_c")


def merge_adapters(
    adapters: Sequence[str | os.PathLike[str]],
    method: str = "linear",
    *,
    out: str | os.PathLike[str],
    rank: int | None = None,
    dtype: str | None = None,
    seed: int = 0,
    progress: bool = True,
    **parameters: object,
) -> AdapterReport:
    """Merge LoRA adapters of one base into one adapter.

    Methods work as in `merge_models`, and the result is the adapter that is closest to the merge of
    the adapted models. The base itself is not needed. ``"cat"`` concatenates the factors, so the
    result is exactly the weighted sum of the changes, and its rank is the sum of the ranks.

    Args:
        adapters: Folders or hub ids of plain LoRA adapters.
        method: ``"cat"``, ``"linear"``, or a method that uses a base, such as
            ``"task_arithmetic"``, ``"ties"`` or ``"dare_ties"``.
        out: Folder to write: a new path or an empty folder.
        rank: The largest rank of a module; default: the largest rank in the adapters. ``"cat"``
            ignores it.
        dtype: The dtype of the factors; default: the dtype to which the adapters' dtypes promote.
        seed: The seed of random methods.
        progress: Show a progress bar.
        **parameters: The method's parameters (``weight`` for most): one number, or for a per-model
            parameter a list with one number for each adapter.

    Returns:
        A report of each module's rank, and of the share of its change that is missed at this rank.
        A merged change can have a higher rank than the adapters.

    Raises:
        PlanError: The adapters cannot be merged. ``problems`` has every reason that was found.
        ValueError: An argument is invalid, or the result has NaN or infinity.
        OutputError: ``out`` is not empty or cannot be written.

    Example::

        merge_adapters(
            ["adapters/math", "adapters/code"],
            "ties",
            weight=[0.6, 0.4],
            density=0.5,
            out="adapters/both",
        )
    """
    _check_arguments(adapters, rank, dtype)
    merged = _method(method)
    bound = _bound(merged, len(adapters), parameters)
    check_new(out, "merge_adapters")
    opened, notes = _open(adapters)
    largest = max(_largest_rank(adapter) for adapter in opened)
    stored = promote(info.dtype for adapter in opened for info in adapter.tensors.values())
    chosen = dtype or stored.name
    factors: dict[str, tuple[Array, Array]] = {}
    modules: list[AdapterModule] = []
    names = _modules_of(opened)
    for name in with_bar(names, "merge_adapters", "module", progress=progress):
        pairs = [adapter.pairs.get(name) for adapter in opened]
        if merged is None:
            factors[name] = _side_by_side(pairs, bound["weight"])
            # this is the exact change, so the reported error is due to rounding alone
            change = factors[name][0] @ factors[name][1]
        else:
            # random streams are keyed by this name, so they are the same as in `merge_models`
            change = _merged_change(merged, pairs, bound, seed, f"{name}.weight")
            if not np.isfinite(change).all():
                raise ValueError(f"merge_adapters: the merge of {name} has NaN or infinity")
            factors[name] = truncated(change, rank or largest)
        modules.append(module_of(name, change, *factors[name], FLOATS[chosen]))
    first = opened[0].settings
    base = first.get("base_model_name_or_path")
    values = {"rank": rank, "dtype": dtype, "seed": seed, **parameters}
    options = ", ".join(f"{name}={value!r}" for name, value in values.items())
    shown = [shown_name(os.fspath(adapter)) for adapter in adapters]
    with NewFolder(out, "merge_adapters") as folder:
        folders = [adapter.folder for adapter in opened]
        # a tokenizer saved with an adapter comes first: it may have tokens that the base lacks
        copy_tokenizer([*folders, _local_folder(base)], folder.folder)
        nbytes = write_adapter(
            folder.folder,
            factors,
            dtype=chosen,
            base_model=base,
            call=f"merge_adapters({shown}, {method!r}, {options})",
            task_type=first.get("task_type"),
            fan_in_fan_out=bool(first.get("fan_in_fan_out")),
        )
    notes += _notes_on_errors(modules, rank or largest)
    return AdapterReport(Path(out), modules, [], {}, nbytes, notes)


def _modules_of(adapters: Sequence[Any]) -> list[str]:
    """Return the names of all modules that adapters change, in the first adapter's order."""
    names: dict[str, None] = {}
    for adapter in adapters:
        names |= dict.fromkeys(adapter.pairs)
    return list(names)


def _notes_on_errors(modules: Sequence[AdapterModule], rank: int) -> list[str]:
    missed = max(module.error for module in modules)
    if missed <= _MUCH:
        return []
    return [
        f"at rank {rank}, up to {missed:.0%} of a module's change is missed; a higher rank misses "
        "less"
    ]


def _largest_rank(adapter: Any) -> int:
    return max(pair.down.shape[0] for pair in adapter.pairs.values())


def _check_arguments(adapters: object, rank: object, dtype: str | None) -> None:
    if isinstance(adapters, (str, os.PathLike)) or not adapters:
        raise ValueError(
            f"merge_adapters: adapters is {adapters!r}, expected a list with at least one adapter"
        )
    check_value("merge_adapters", "rank", rank, MaybeWhole)
    check_choice("merge_adapters", "dtype", dtype or "float32", FLOATS)


def _local_folder(base: str | None) -> Path | None:
    """Return a base model's folder, or None if the model is not on this machine."""
    if not base:  # an empty path would be the current folder
        return None
    with contextlib.suppress(ValueError):
        # do not download a base only for its tokenizer
        return _hub.find_folder(base, local_files_only=True)
    return None


def _method(name: str) -> MergeMethod | None:
    """Return the method, or None for "cat".

    Raises:
        ValueError: The method is unknown, or needs the base's weights or changes of full rank.
    """
    if name == "cat":
        return None
    # linear does not need the base's weights either, if the models' weights sum to 1
    fitting = ["linear"]
    for method in METHODS.values():
        unfit = method.name in (*_NEEDS_WEIGHTS, *_NEEDS_FULL_RANK)
        if method.base == "required" and not unfit:
            fitting.append(method.name)
    if name in fitting:
        return get_method(name)
    choices = sorted(["cat", *fitting])
    near = difflib.get_close_matches(name, choices, n=1)
    advice = ""
    if name in METHODS:
        advice = ", which needs the base's weights or full-rank changes, and adapters have neither"
    elif near:
        advice = f"; did you mean {near[0]}?"
    raise ValueError(f"merge_adapters: expected one of {', '.join(choices)}, got {name}{advice}")


def _bound(method: MergeMethod | None, count: int, parameters: Bound) -> Bound:
    """Check a method's parameters, and add defaults; the method is None for "cat"."""
    if method is None:
        return _cat_weights(count, parameters)
    bound = method.bind(count, parameters)
    if method.base == "unused" and not bound["normalize"]:
        raise ValueError(
            f"merge_adapters: expected normalize=True for {method.name}, got False, which would "
            "also multiply the base; use task_arithmetic"
        )
    return bound


def _cat_weights(count: int, parameters: Bound) -> Bound:
    """Check the parameters of "cat", and return one weight for each adapter."""
    unknown = sorted(parameters.keys() - {"weight"})
    if unknown:
        raise ValueError(
            f"merge_adapters: expected weight as the only parameter of cat, got {unknown[0]!r}"
        )
    weight = parameters.get("weight", 1.0)
    weights = list(weight) if isinstance(weight, (list, tuple)) else [weight] * count
    largest = float(np.finfo(np.float32).max)  # the factors are float32
    numbers = [w for w in weights if isinstance(w, (int, float)) and abs(w) <= largest]
    if len(weights) != count or len(numbers) != count:
        raise ValueError(
            f"merge_adapters: weight is {weight!r}, expected a number, or a list with one number "
            f"for each of {count} adapters"
        )
    return {"weight": weights}


def _open(adapters: Sequence[str | os.PathLike[str]]) -> tuple[list[Adapter], list[str]]:
    """Return the opened adapters, and notes about them.

    Raises:
        PlanError: An adapter cannot be read, replaces tensors or changes an embedding, or the
            adapters do not fit the same base.
    """
    problems: list[str] = []
    opened: list[Adapter] = []
    for adapter in adapters:
        try:
            opened.append(Adapter(find_folder(os.fspath(adapter))))
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
    for adapter in opened:
        problems += _problems_of(adapter)
    shapes: dict[str, tuple[int, int]] = {}
    for adapter in opened:
        for name, pair in adapter.pairs.items():
            shape = pair.up.shape[0], pair.down.shape[1]
            if shapes.setdefault(name, shape) != shape:
                problems.append(
                    f"{name}: expected the same shape in all adapters, got {list(shapes[name])} "
                    f"and, in {adapter.folder}, {list(shape)}"
                )
    if problems:
        raise PlanError(problems)
    bases = {str(adapter.settings.get("base_model_name_or_path") or "") for adapter in opened}
    bases.discard("")
    if len(bases) < 2:
        return opened, []
    note = f"the adapters name different bases: {', '.join(sorted(bases))}"
    for adapter in opened[1:]:
        # two names may mean one base, for example a copy, so accept adapters with a common module
        if not adapter.pairs.keys() & opened[0].pairs.keys():
            folders = f"{opened[0].folder} and {adapter.folder}"
            raise PlanError([f"{note}, and {folders} have no module in common"])
    return opened, [note]


def _problems_of(adapter: Adapter) -> list[str]:
    """Return the reasons why an adapter cannot be merged without its base."""
    problems = []
    if adapter.replaced:
        name = next(iter(adapter.replaced))
        problems.append(
            f"adapter {adapter.folder}: expected only LoRA factors, got a full copy of {name}; "
            "merge the whole models with merge_models"
        )
    if not adapter.pairs:
        problems.append(f"adapter {adapter.folder}: expected LoRA factors (A and B), got none")
    if any(pair.embedding for pair in adapter.pairs.values()):
        problems.append(
            f"adapter {adapter.folder}: changes an embedding; merge the whole models with "
            "merge_models"
        )
    return problems


def _side_by_side(pairs: Sequence[Pair | None], weights: Sequence[float]) -> tuple[Array, Array]:
    """Return B (out, Σ r) and A (Σ r, in) whose product is the weighted sum of the changes."""
    ups = []
    downs = []
    for pair, weight in zip(pairs, weights, strict=True):
        if pair is not None:
            # B includes scale and weight, because the written config has alpha = r
            ups.append(pair.up * np.float32(pair.scale * weight))
            downs.append(pair.down)
    return np.concatenate(ups, 1), np.concatenate(downs, 0)


def _merged_change(
    method: MergeMethod,
    pairs: Sequence[Pair | None],
    bound: dict[str, object],
    seed: int,
    name: str,
) -> Array:
    """Apply the method to one module's changes; an adapter without the module has a zero change."""
    changes: list[Tensor | None] = []
    for pair in pairs:
        if pair is None:
            changes.append(None)
        else:
            changes.append(torch.from_numpy(pair.up @ pair.down * np.float32(pair.scale)))
    nothing = torch.zeros(next(change.shape for change in changes if change is not None))
    changed = [nothing if change is None else change for change in changes]
    # changes are relative to the base, so the base itself is all zero
    base = nothing if method.base == "required" else None
    return method(changed, base, seed=seed, name=name, **bound).numpy()
