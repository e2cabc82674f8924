"""`merge_models`: merge several checkpoints into one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from model_components._checks import MaybeWhole, check_choice, check_value
from model_components._devices import find_device
from model_components._folders import NewFolder, check_new

from ._torch import Tensor
from .methods import CALIBRATED, MergeMethod, get_method
from .recipe import RECIPE_KEYS, MergeRecipe, ModelEntry, TokenizerSpec, model_key
from .report import MergeReport
from .running import Run, merge_in_memory, merge_to_folder

if TYPE_CHECKING:
    from torch import device as Device
    from torch import dtype as TorchDType

# memory grows with the number of threads: each thread holds a block of every input
_MOST_THREADS = 8
_IMPLS = ("auto", "eager", "fused")


def parse_size(size: int | str) -> int:
    """Return a number of bytes, given as a number or as a string such as ``"5GB"`` (decimal units).

    >>> parse_size("1.5GB"), parse_size(100)
    (1500000000, 100)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)B?\s*", str(size))
    count = 0
    if match:
        # a letter's index is the power of 1000; the blank stands for plain bytes
        count = int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))
    if count < 1:
        raise ValueError(
            "max_shard_size: expected a number of bytes above 0, or a string such as '5GB', got "
            f"{size!r}"
        )
    return count


def _is_list_of_values(value: object) -> TypeGuard[Sequence[object]]:
    """Return whether a value is a list with one value per model, rather than a list of filters."""
    return isinstance(value, (list, tuple)) and not any(isinstance(v, Mapping) for v in value)


def build_recipe(
    models: Sequence[object],
    method: str,
    base_model: object,
    parameters: Mapping[str, object],
    **rest: Any,
) -> MergeRecipe:
    """Build a recipe from the arguments of `merge_models`.

    A list of values for a per-model parameter is split: each model gets its own value.

    Raises:
        ValueError: The method is unknown, or does not use the given base. A parameter is a recipe
            key or is given twice. A list does not have one value for each model except the base.
    """
    chosen = get_method(method)
    _refuse_recipe_keys(chosen, parameters)
    per_model = {name for name, p in chosen.parameters.items() if p.per_model}
    if base_model is not None and chosen.base == "unused":
        raise ValueError(
            f"{method}: expected no base_model, because this method uses none; to merge that model "
            "like the others, list it in models"
        )
    own_parameters: list[dict[str, object]] = [{} for _ in models]
    general: dict[str, object] = {}
    for key, value in parameters.items():
        if hasattr(value, "tolist"):  # a numpy array or a torch tensor
            value = value.tolist()
        # lambda is a Python keyword, so callers must write lambda_
        name = key.rstrip("_")
        if name != key and name in parameters:
            raise ValueError(f"{method}: expected either {name} or {key}, got both")
        if name in per_model and _is_list_of_values(value):
            takers = [
                o
                for o, m in zip(own_parameters, models, strict=True)
                if model_key(m) != model_key(base_model)
            ]
            if len(value) != len(takers):
                raise ValueError(
                    f"{method}: expected {len(takers)} values in {name}, one for each model except "
                    f"the base, got {len(value)}"
                )
            for taker, v in zip(takers, value, strict=True):
                taker[name] = v
        else:
            general[name] = value
    entries = [
        ModelEntry(model=m, parameters=o) for m, o in zip(models, own_parameters, strict=True)
    ]
    return MergeRecipe(
        merge_method=method,
        models=tuple(entries),
        base_model=base_model,
        parameters=general,
        **rest,
    )


def _refuse_recipe_keys(method: MergeMethod, parameters: Iterable[str]) -> None:
    """Raise an error for ``base``, or for a recipe key that is not a parameter of the method."""
    for key in parameters:
        name = key.rstrip("_")
        if key == "base":
            raise ValueError(f"{method.name}: unknown argument 'base'; did you mean base_model?")
        if name in RECIPE_KEYS and name not in method.parameters:
            raise ValueError(
                f"{method.name}: expected parameters of the method, got the recipe key {key}; pass "
                "a recipe instead: merge_models(load_recipe(...))"
            )


def merge_models(
    models: Sequence[object] | MergeRecipe,
    method: str | None = None,
    *,
    base_model: object = None,
    out: str | os.PathLike[str] | None = None,
    dtype: str | TorchDType | None = None,
    out_dtype: str | TorchDType | None = None,
    device: str | Device = "cpu",
    impl: str = "auto",
    max_shard_size: int | str = "5GB",
    seed: int = 0,
    threads: int | None = None,
    progress: bool = True,
    fresh: bool = False,
    allow_pickle: str | None = None,
    allow_incomplete: bool = False,
    allow_mixed: bool = False,
    truncate_embeddings: bool = False,
    trust_remote_code: bool = False,
    tokenizer_source: str | os.PathLike[str] | None = None,
    calibration: Sequence[object] | None = None,
    **parameters: object,
) -> MergeReport | dict[str, Tensor]:
    """Merge several models into one.

    With ``out``, tensors are read, merged and written one at a time. Kernels keep only blocks of
    each model's tensor in memory, but torch functions may keep whole tensors. Arithmetic on the
    stored values runs in float32 or float64, and the result is rounded once.

    Args:
        models: Folders, hub ids (``org/name@revision``), ``"model+adapter"``, modules or state
            dicts, in any combination. A `MergeRecipe` is also possible: it replaces ``method``,
            ``base_model``, ``dtype``, ``out_dtype``, ``tokenizer_source`` and the method's
            parameters.
        method: The name of a merge method; default: ``"linear"``, or ``"regmean"`` if
            ``calibration`` is given.
        base_model: The model from which the other models were tuned, for methods that use a base.
            The base may also be listed in ``models``.
        out: Folder to write to: a new path or an empty folder. If None, a state dict is returned.
        dtype: Dtype of the result; default: the dtype that `torch.promote_types` returns for the
            inputs' dtypes. With ``"float64"``, arithmetic also runs in float64.
        out_dtype: Dtype of the result if it differs from ``dtype``.
        device: The device to compute on.
        impl: ``"eager"`` runs torch functions. ``"fused"`` runs compiled kernels, and raises an
            error if a tensor has no kernel. It does not import torch if all models are files.
            ``"auto"`` runs kernels where possible if ``out`` is given, and torch functions
            otherwise. Kernels and torch functions write the same bytes.
        max_shard_size: Largest size of a weight file, in bytes or as a string such as ``"5GB"``.
        seed: Random seed for methods that use random numbers.
        threads: Number of threads that kernels and torch use; default: one per core, at most 8.
            The results of kernels do not depend on it.
        progress: Show a progress bar.
        fresh: Start over instead of continuing an interrupted run of the same merge.
        allow_pickle: Pass ``"weights_only"`` to also read pickled checkpoints.
        allow_incomplete: Merge models even if they lack layers, embedding rows or a head that their
            config implies, or if some layers lack tensors that the other layers have. By default
            such models raise an error.
        allow_mixed: Merge models even if their configs have different architectures, such as
            different activations or numbers of heads. Their tensors must have the same shapes.
        truncate_embeddings: Cut token embeddings and heads to the smallest number of rows in any
            model. Rows are matched by index. This has no effect if ``tokenizer_source`` or the
            recipe names a tokenizer.
        trust_remote_code: Copy the Python files of the model that provides the output's config, and
            keep the ``auto_map`` entry that makes transformers run them. By default both are left
            out, with a note in the report.
        tokenizer_source: The source of the output's tokenizer: ``"union"``, ``"base"``, or the
            folder or hub id of a tokenizer. Rows of embeddings and heads are then matched by token;
            by default they are matched by index. Calibrated methods do not support this argument.
        calibration: One data set for each model, for the calibrated methods ``"regmean"`` and
            ``"regmean++"``. A data set is a text or JSON file, rows of text for
            `mergekit_lite.masks.TextExamples`, or examples with ``input_ids``.
            `mergekit_lite.layerwise.CalibratedMerge` lists the parameters of these methods.
        **parameters: Parameters of the method. A parameter is one value for all models or, if it
            is a per-model parameter, may be a list with one value for each of ``models`` except the
            base. Gradients and filters work as in recipes.

    Returns:
        A `MergeReport` if ``out`` is given, otherwise the merged state dict. Without ``out``, the
        notes that the report would hold are issued as warnings.

    Raises:
        PlanError: The merge is impossible. The error's ``problems`` list every reason that was
            found, and nothing was written.
        ValueError: An argument is invalid, or the result has NaN or infinity (`NotFiniteError`).
        OutputError: ``out`` is not empty or is being written by another run, or the disk is full.

    >>> a, b = {"w": torch.tensor([0.0, 2.0])}, {"w": torch.tensor([4.0, 4.0])}
    >>> merge_models([a, b], weight=[0.25, 0.75], progress=False)
    {'w': tensor([3.0000, 3.5000])}
    """
    if isinstance(models, MergeRecipe) and calibration is not None:
        _check_alone({"method": method, "dtype": dtype}, parameters)
        dtype = models.dtype
        models, method, parameters = _calibrated_recipe(models)
    calibrated = calibration is not None or method in CALIBRATED
    if calibrated:
        unsupported = {
            "base_model": base_model,
            "out_dtype": out_dtype,
            "allow_pickle": allow_pickle,
            "tokenizer_source": tokenizer_source,
        }
        _check_calibrated(models, method, calibration, out, unsupported)
    check_value("merge_models", "threads", threads, MaybeWhole)
    check_value("merge_models", "seed", seed, int)
    check_choice("merge_models", "impl", impl, _IMPLS)
    run = Run(
        device=find_device(str(device), "merge_models"),
        impl=impl,
        limit=parse_size(max_shard_size),
        seed=seed,
        threads=threads or _default_threads(),
        progress=progress,
        fresh=fresh,
        allow_pickle=allow_pickle,
        allow_incomplete=allow_incomplete,
        allow_mixed=allow_mixed,
        truncate_embeddings=truncate_embeddings,
        trust_remote_code=trust_remote_code,
    )
    if calibrated:
        assert calibration is not None  # `_check_calibrated` rejects None
        assert out is not None
        return _merge_calibrated(
            # pyrefly: ignore[bad-argument-type]: _check_calibrated rejects recipes
            models,
            method or "regmean",
            calibration,
            Path(out),
            parameters,
            dtype,
            run,
        )
    settings = {"dtype": dtype, "out_dtype": out_dtype, "tokenizer_source": tokenizer_source}
    recipe = _resolve_recipe(models, method, base_model, parameters, settings)
    if out is None:
        return merge_in_memory(recipe, run)[0]
    check_new(out, "merge")
    return merge_to_folder(recipe, Path(out), run)


def _check_list(models: object) -> None:
    """Check that ``models`` is a non-empty list without None.

    If ``models`` is the path of a recipe, the error suggests `load_recipe`.
    """
    if isinstance(models, Sequence) and models and not isinstance(models, str):
        if any(model is None for model in models):
            raise ValueError("merge_models: expected models, got None in the list of models")
        return
    hint = ""
    if isinstance(models, (str, os.PathLike)) and os.fspath(models).endswith((".yml", ".yaml")):
        hint = f", or load_recipe({os.fspath(models)!r})"
    raise ValueError(
        f"merge_models: expected models as a list with at least one model{hint}, got "
        f"{'an empty list' if isinstance(models, list) else type(models).__name__}"
    )


def _resolve_recipe(
    models: Any,
    method: str | None,
    base_model: object,
    parameters: Mapping[str, object],
    settings: Mapping[str, Any],
) -> MergeRecipe:
    """Return ``models`` if it is a recipe; otherwise build a recipe from the arguments."""
    if isinstance(models, MergeRecipe):
        _check_alone({"method": method, "base_model": base_model, **settings}, parameters)
        return models
    _check_list(models)
    fields: dict[str, object] = {}
    for name, value in settings.items():
        if value is None:
            continue
        if name == "tokenizer_source":
            source = os.fspath(value) if isinstance(value, os.PathLike) else value
            fields["tokenizer"] = TokenizerSpec(source=source)
        else:
            # torch.float16 becomes "float16" without an import of torch
            fields[name] = str(value).removeprefix("torch.")
    return build_recipe(models, method or "linear", base_model, parameters, **fields)


def _check_alone(settings: Mapping[str, object], parameters: Mapping[str, object]) -> None:
    """Reject parameters, and settings other than None, that were passed along with a recipe."""
    extra = [*parameters, *(name for name, value in settings.items() if value is not None)]
    if extra:
        raise ValueError(
            f"merge_models: expected no {extra[0]} together with a MergeRecipe; set it in the "
            "recipe instead"
        )


def _check_calibrated(
    models: object,
    method: str | None,
    calibration: object,
    out: object,
    unsupported: Mapping[str, object],
) -> None:
    """Check that a merge with calibration has all required and no unsupported arguments."""
    if method is not None and method not in CALIBRATED:
        raise ValueError(
            "merge_models: expected a method that uses calibration "
            f"({', '.join(CALIBRATED)}), got {method!r}"
        )
    lost = None
    if isinstance(models, MergeRecipe):
        lost = "a list of models"
    elif out is None:
        lost = "out="
    elif calibration is None:
        lost = "calibration="
    if lost is not None:
        raise ValueError(
            f"merge_models: {method or 'calibration'} needs {lost}; pass a list of models, "
            "calibration= with a file or rows for each model, and out="
        )
    passed = [name for name, value in unsupported.items() if value]
    if passed:
        raise ValueError(
            "merge_models: expected only arguments that "
            f"{method or 'calibration'} supports, got {', '.join(passed)}"
        )


def _calibrated_recipe(recipe: MergeRecipe) -> tuple[list[object], str, dict[str, object]]:
    """Return the models, the method and the parameters of a recipe, for `_merge_calibrated`.

    Raises:
        ValueError: The recipe has entries that a merge with calibration does not support.
    """
    told = {
        "slices": recipe.slices,
        "base_model": recipe.base_model,
        "tokenizer": recipe.tokenizer,
        "chat_template": recipe.chat_template,
        "out_dtype": recipe.out_dtype,
    }
    if unsupported := [name for name, value in told.items() if value]:
        raise ValueError(
            f"merge_models: {recipe.merge_method} with calibration does not support "
            f"{unsupported[0]}; remove {unsupported[0]} from the recipe"
        )
    if strange := sorted(
        {name for entry in recipe.models for name in entry.parameters} - {"weight"}
    ):
        raise ValueError(
            f"merge_models: {recipe.merge_method} with calibration: expected no parameter of a "
            f"single model except 'weight', got {strange[0]!r}"
        )
    parameters = dict(recipe.parameters)
    if any(entry.parameters for entry in recipe.models):
        usual = parameters.get("weight", 1.0)
        parameters["weight"] = [entry.parameters.get("weight", usual) for entry in recipe.models]
    return [entry.model for entry in recipe.models], recipe.merge_method, parameters


def _merge_calibrated(
    models: Sequence[object],
    method: str,
    calibration: Sequence[object],
    out: Path,
    parameters: Mapping[str, Any],
    dtype: object,
    run: Run,
) -> MergeReport:
    """Merge block by block, and write each merged block into a folder next to ``out``.

    A ``passthrough`` merge then turns the blocks into a checkpoint in ``out``.
    """
    # this imports transformers, which most merges do not need
    from .layerwise import CalibratedMerge, merged_source

    started = time.perf_counter()
    cpu_started = time.process_time()
    path = check_new(out, "merge")
    settings = {"dtype": dtype}
    # an invalid dtype raises an error here, not only after all blocks are merged
    _resolve_recipe(list(models[:1]), "passthrough", None, {}, settings)
    try:
        merge = CalibratedMerge(method=method, **parameters)
    except TypeError as error:
        # the message begins with CalibratedMerge.__init__(), which the caller did not write
        raise ValueError(f"merge_models: {method}: {str(error).partition(' ')[2]}") from error
    blocks = path.with_name(f"{path.name}.blocks")
    with NewFolder(blocks, "merge", resumable=True, fresh=run.fresh) as stage:
        source = merged_source(
            models, calibration, merge, stage, device=run.device, progress=run.progress
        )
        recipe = _resolve_recipe([source], "passthrough", None, {}, settings)
        report = merge_to_folder(recipe, path, run)
        # otherwise the blocks would be published as an output folder
        stage.discard()
    # so far the report has only the times of the passthrough merge
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_started
    return replace(report, seconds=seconds, cpu_seconds=cpu_seconds)


def _default_threads() -> int:
    # this process may be limited to some of the cores; macOS cannot report which ones
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(cores, _MOST_THREADS)
