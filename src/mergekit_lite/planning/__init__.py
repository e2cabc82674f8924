"""`make_plan`: check a recipe against its models' headers and configs, and list every problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..dtypes import FLOAT32, FLOAT64, FLOATS, DType, promote
from ..files import Source, TensorInfo
from ..files.headers import Json
from ..methods import MergeMethod, get_method
from ..recipe import MergeRecipe
from ..vocabulary import AlignedSource, Vocabulary, plan_vocabulary
from .checks import (
    check_copies,
    compare_configs,
    compare_tokenizers,
    rounding_notes,
    row_problems,
    template_problems,
    tensor_problems,
)
from .complete import layers_beyond, misplaced_layer, missing_tensors
from .configs import output_config
from .layout import Layout, Slot, layer_of, stacked_slices, whole_models, with_layer
from .models import Models, PlannedSource, open_models, truncate_vocabularies
from .plan import (
    CHUNK,
    EAGER_STRETCH,
    Input,
    MergePlan,
    PlanError,
    TensorPlan,
    shard_header,
    shard_layout,
    size_text,
)
from .settings import check_parameters, idle_filters, settings_for

__all__ = [
    "CHUNK",
    "EAGER_STRETCH",
    "Input",
    "MergePlan",
    "PlanError",
    "TensorPlan",
    "make_plan",
    "shard_header",
    "size_text",
]


_ANYWAY = "to merge anyway, pass allow_incomplete=True (--allow-incomplete)"


def make_plan(
    recipe: MergeRecipe,
    *,
    max_shard_size: int = 5_000_000_000,
    threads: int = 1,
    allow_pickle: str | None = None,
    allow_incomplete: bool = False,
    allow_mixed: bool = False,
    truncate_embeddings: bool = False,
    stages: Mapping[int, Source] | None = None,
) -> MergePlan:
    """Check a recipe against its models' headers, and lay out the output.

    Args:
        recipe: The recipe of the merge.
        max_shard_size: Largest total size of the tensors in one file, in bytes.
        threads: Number of threads of the merge, for the estimate of its peak memory.
        allow_pickle: Pass ``"weights_only"`` to also read pickled checkpoints.
        allow_incomplete: Whether a model may lack tensors that its config implies or that its other
            layers have.
        allow_mixed: Whether configs may name different architectures.
        truncate_embeddings: Whether to cut embeddings and heads to the smallest number of rows in
            any model. This has no effect if the recipe names a tokenizer.
        stages: The results of the recipes that are listed as models, by the `id` of the recipe;
            default: these recipes are planned, too.

    Returns:
        The plan of what to read and write. Printing it shows a table.

    Raises:
        PlanError: The recipe cannot be merged. The error's ``problems`` list every reason that was
            found.
    """
    if stages is None:
        allowed = {
            "allow_pickle": allow_pickle,
            "allow_incomplete": allow_incomplete,
            "allow_mixed": allow_mixed,
            "truncate_embeddings": truncate_embeddings,
        }
        planned = {}
        for stage in recipe.stages():
            # by id, because a recipe holds dicts and cannot be hashed
            planned[id(stage)] = PlannedSource(make_plan(stage, **allowed))
        stages = planned
    method, problems, notes = _method_of(recipe)
    problems += template_problems(recipe)
    notes = [*recipe.notes, *_stage_notes(stages), *notes]
    models, unopened = open_models(recipe, stages, allow_pickle)
    if models is None:
        raise PlanError(problems + unopened)
    found, noted = _check_models(models, allow_incomplete, allow_mixed)
    problems += found
    notes += noted
    rows: int | None = None
    if truncate_embeddings:
        models, rows, note = _truncate(recipe, models)
        notes += note
    try:
        vocabulary, aligned = _align(recipe, models)
    except (ValueError, OSError) as error:
        raise PlanError([*problems, str(error)]) from error
    if vocabulary is None:
        notes += compare_tokenizers(models)
    else:
        notes += vocabulary.notes
        rows = vocabulary.rows
    if method is None:  # without a method, no tensor can be planned
        raise PlanError(problems)
    layout_of = stacked_slices if recipe.slices else whole_models
    layout = layout_of(recipe, aligned, method.base != "unused")
    notes += layout.notes
    problems += layout.problems
    problems += tensor_problems(layout.slots, aligned, vocabulary is not None)
    problems += row_problems(layout.slots, aligned)
    _stop_if(problems)
    tensors = _plan_tensors(layout, recipe, method, aligned)
    # the last check, because no other check reads values
    _stop_if(check_copies(tensors, aligned))
    notes += rounding_notes(recipe, tensors, aligned)
    names = {t.name for t in tensors}
    for t in tensors:
        names |= {i.name for i in t.everything}
    notes += idle_filters(recipe, names)
    config, misplaced = _output_config(recipe, aligned, tensors, rows)
    if misplaced is not None:
        if not allow_incomplete:
            raise PlanError([f"{misplaced}; {_ANYWAY}"])
        notes.append(misplaced)
    # the stem of the donor's file names, so that a diffusers folder keeps its names
    stem = getattr(models.sources[models.donor], "stem", "model")
    placed, shards = shard_layout(tensors, max_shard_size, stem)
    return MergePlan(
        recipe,
        list(aligned.sources),
        placed,
        shards,
        config,
        models.donor,
        vocabulary,
        list(dict.fromkeys(notes)),
        threads,
    )


def _check_models(
    models: Models, allow_incomplete: bool, allow_mixed: bool
) -> tuple[list[str], list[str]]:
    """Return the problems of the models, and notes. Problems that are allowed become notes."""
    problems: list[str] = []
    # differences are notes if they are allowed, else problems
    unlike, notes = compare_configs(models)
    (notes if allow_mixed else problems).extend(unlike)
    for source in models.sources:
        notes += getattr(source, "notes", [])
        notes += layers_beyond(source)
        missing = missing_tensors(source)
        if missing and not allow_incomplete:
            missing[-1] += f"; {_ANYWAY}"
        (notes if allow_incomplete else problems).extend(missing)
    return problems, notes


def _output_config(
    recipe: MergeRecipe, models: Models, tensors: list[TensorPlan], rows: int | None
) -> tuple[Json, str | None]:
    """Return the output's config, and a problem if the slices contradict it, otherwise None."""
    spans = []
    for piece in recipe.slices:
        first = piece.sources[0]
        assert first.layer_range is not None  # as `Slice` checks
        spans.append((models.of(first.model), *first.layer_range))
    config = output_config(models.sources, models.donor, tensors, rows, spans)
    if not spans or not config:
        return config, None
    donor = models.sources[models.donor]
    return config, misplaced_layer(donor, config, [t.name for t in tensors])


def _truncate(recipe: MergeRecipe, models: Models) -> tuple[Models, int | None, list[str]]:
    """Cut vocabularies; return the models, their number of rows (None if uncut), and notes."""
    if recipe.tokenizer is not None:
        return (
            models,
            None,
            ["truncate_embeddings has no effect, because the recipe names a tokenizer"],
        )
    cut, rows = truncate_vocabularies(models)
    if rows is None:  # all models have the same number of rows
        return cut, None, []
    note = (
        f"embeddings and heads are cut to {rows} rows, the smallest number in any model; rows are "
        "matched by index, and the tokenizer may have more tokens"
    )
    return cut, rows, [note]


def _stage_notes(stages: Mapping[int, Source]) -> list[str]:
    """Return a note on the amount of data that each planned stage will read and write."""
    notes = []
    for stage in stages.values():
        if isinstance(stage, PlannedSource):
            plan = stage.plan
            notes.append(
                f"stage {stage.label}: reads {size_text(plan.bytes_read)} and writes "
                f"{size_text(plan.bytes_written)}, which are removed at the end"
            )
    return notes


def _method_of(recipe: MergeRecipe) -> tuple[MergeMethod | None, list[str], list[str]]:
    """Return a recipe's method, and problems and notes on the method and its parameters.

    The method is None if it is unknown.
    """
    try:
        method = get_method(recipe.merge_method)
    except ValueError as error:
        return None, [str(error)], []
    return method, *check_parameters(recipe, method)


def _stop_if(problems: list[str]) -> None:
    if problems:
        raise PlanError(list(dict.fromkeys(problems)))


def _align(recipe: MergeRecipe, models: Models) -> tuple[Vocabulary | None, Models]:
    """Return the output's vocabulary (None if the recipe names none), and the models with its rows.

    Without a vocabulary, the models are unchanged.
    """
    if recipe.tokenizer is None:
        return None, models
    base = None
    if recipe.base_model is not None:
        base = models.of(recipe.base_model)
    sources = models.sources
    vocabulary = plan_vocabulary(sources, recipe.tokenizer, models.donor, base, models.index)
    aligned = [AlignedSource(sources, place, vocabulary) for place in range(len(sources))]
    return vocabulary, replace(models, sources=aligned)


def _plan_tensors(
    layout: Layout, recipe: MergeRecipe, method: MergeMethod, models: Models
) -> list[TensorPlan]:
    """Plan every tensor; raise one `PlanError` with the problems of all tensors."""
    tensors = []
    problems = []
    for slot in layout.slots:
        try:
            tensors.append(_tensor(slot, recipe, method, models))
        except ValueError as error:
            problems.append(str(error))
    _stop_if(problems)
    return tensors


def _tensor(slot: Slot, recipe: MergeRecipe, method: MergeMethod, models: Models) -> TensorPlan:
    """Plan one tensor of the output."""
    inputs = tuple(i for _, i in slot.inputs)
    everything = inputs
    if slot.base is not None:
        everything = (*inputs, slot.base)
    infos = [models.sources[i.source].tensors[i.name] for i in everything]
    shape = infos[0].shape
    kind = infos[0].dtype
    if not kind.is_floating_point:  # copied, if all models have the same values
        parts = _parts(slot, everything[0], models, shape, kind)
        return TensorPlan(slot.name, shape, kind, kind, everything, None, None, {}, parts=parts)
    stored = promote(info.dtype for info in infos)
    # `dtype` changes the arithmetic only if it is float64; half precision is for the output
    asked = FLOATS.get(recipe.dtype or "")
    dtype = FLOATS.get(recipe.out_dtype or "", asked or stored)
    method.check_inputs(len(inputs), slot.base is not None)
    common = [recipe.parameters]
    if slot.piece is not None:
        # the first level with a value is used, so the slice comes before the recipe
        common.insert(0, slot.piece.parameters)
    by_model: list[tuple[Mapping[str, object], str, str]] = []
    for (entry, i), name in zip(slot.inputs, slot.names, strict=True):
        own = {} if entry is None else entry.parameters  # a base without parameters has no entry
        by_model.append((own, name, models.label(i.source)))
    bound = settings_for(method, slot.name, slot.depth, by_model, common)
    return TensorPlan(
        slot.name,
        shape,
        dtype,
        FLOAT64 if FLOAT64 in (stored, asked) else FLOAT32,
        inputs,
        slot.base,
        method,
        bound,
        parts=_parts(slot, everything[0], models, shape, dtype),
    )


def _parts(
    slot: Slot, first: Input, models: Models, shape: tuple[int, ...], dtype: DType
) -> tuple[TensorInfo, ...]:
    """Return the tensors that the file holds for an output tensor, named as in the first model.

    The result is empty if the file holds the output tensor under its own name.
    """
    found = getattr(models.sources[first.source], "parts", {}).get(first.name, ())
    layer = layer_of(slot.name)
    parts = []
    for info in found:
        name = info.name
        if layer is not None:  # slices move layers
            name = with_layer(name, layer)
        # a tensor that is only renamed may have been cut or extended
        parts.append(TensorInfo(name, shape if len(found) == 1 else info.shape, dtype))
    # no parts are needed: the file has the tensor under this name
    if [info.name for info in parts] == [slot.name]:
        return ()
    return tuple(parts)
