"""Check the properties that all models must share, and note other differences.

The checks read only headers, configs and vocabularies, the values of integer and boolean buffers,
which must be equal in all models, and samples of weights that adapters change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..dtypes import BFLOAT16, FLOAT16, Array, DType
from ..files import CheckpointError, LoraSource, Source, TensorInfo
from ..files.sources import View
from ..recipe import MergeRecipe
from ..recipe.templates import TEMPLATES
from ..vocabulary import embedding_rows, is_vocabulary_tensor, read_vocabulary, stage_tokens
from .layout import Slot
from .models import Models
from .plan import CHUNK, Input, TensorPlan

# settings that change the computation, even if all shapes are equal
_MUST_AGREE = (
    "model_type",
    "hidden_size",
    "n_embd",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "n_head",
    "hidden_act",
    "activation_function",
    "num_experts",
    "num_experts_per_tok",
)
# settings that may differ, although the output can have only one value
_MAY_DIFFER = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "rms_norm_eps",
    "sliding_window",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


_MUCH_LOST = 0.1  # a note is shown if rounding loses a larger fraction of an adapter's change


def _flat(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config with its nested configs (``text_config``, …) flattened to dotted keys."""
    flat = dict(config)
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, dict):
            for inner, part in _flat(value).items():
                flat[f"{key}.{inner}"] = part
    return flat


def compare_configs(models: Models) -> tuple[list[str], list[str]]:
    """Return the differences between configs that prevent a merge, and those worth a note."""
    problems = []
    notes = []
    configured = [source for source in models.sources if source.config]
    for other in configured[1:]:
        first = configured[0]
        ours = _flat(first.config)
        theirs = _flat(other.config)
        for key in dict.fromkeys([*ours, *theirs]):
            name = key.rpartition(".")[2]
            pair = (ours.get(key), theirs.get(key))
            if pair[0] == pair[1]:
                continue
            text = f"{pair[0]!r} in {first.label}, {pair[1]!r} in {other.label}"
            # a setting that one config leaves out has a default that is not known here
            if name in _MUST_AGREE and None not in pair:
                problems.append(f"different architectures: {key} is {text}")
            elif name in _MAY_DIFFER:
                notes.append(
                    f"config {key}: {text}; the output has the value of "
                    f"{models.label(models.donor)}"
                )
    return problems, notes


def _known_tokens(source: Source) -> dict[str, int] | None:
    """Return a model's vocabulary, or None if it is unknown.

    For a model in memory, use the folder from which it was loaded, if the config has the path.
    """
    planned = stage_tokens(source)
    if planned is not None:
        return dict(planned)
    folder = source.folder
    name = source.config.get("_name_or_path")
    if folder is None and isinstance(name, str) and name:
        folder = Path(name)
    if folder is None or not folder.is_dir():
        return None
    try:
        return read_vocabulary(folder, source.label)
    except CheckpointError:
        return None


def compare_tokenizers(models: Models) -> list[str]:
    """Return a note for each model whose embedding rows have other tokens than the first model's.

    Rows are merged by index if the recipe names no tokenizer.
    """
    notes: list[str] = []
    vocabularies = []
    for source in models.sources:
        tokens = _known_tokens(source)
        if tokens is not None:
            vocabularies.append((source.label, tokens))
    for label, tokens in vocabularies[1:]:
        first_label, first = vocabularies[0]
        rows = set(first.values())
        moved = []
        for token, row in tokens.items():
            # the first model has the token in another row, or has another token in this row
            if first.get(token, row) != row or (token not in first and row in rows):
                moved.append(token)
        if moved:
            notes.append(
                f"the tokenizers of {first_label} and {label} differ in {len(moved)} tokens "
                f"(for example {moved[0]!r}), but embedding rows are merged by index; to match "
                "rows by token, set tokenizer_source to base or union"
            )
    return notes


def rounding_notes(recipe: MergeRecipe, tensors: Sequence[TensorPlan], models: Models) -> list[str]:
    """Return a note for each adapter if rounding loses much of its change.

    Only tensors that one adapted model alone gives are checked, in a dtype of 16 bits that the
    model has, too. Other tensors would be rounded even without the adapter.
    """
    changed: dict[int, list[str]] = {}
    dtypes: dict[int, DType] = {}
    for t in tensors:
        if len(t.everything) != 1 or t.dtype not in (BFLOAT16, FLOAT16):
            continue
        source = t.inputs[0].source
        name = t.inputs[0].name
        adapter = _adapter_of(models.sources[source])
        if adapter is None or not adapter.adapts(name):
            continue
        if adapter.without_adapters.tensors[name].dtype == t.dtype:
            changed.setdefault(source, []).append(name)
            dtypes[source] = t.dtype
    setting = "out_dtype" if recipe.out_dtype else "dtype"
    notes = []
    for source, names in changed.items():
        adapter = _adapter_of(models.sources[source])
        assert adapter is not None
        lost = adapter.lost_to_rounding(names)
        if lost > _MUCH_LOST:
            notes.append(
                f"rounding to {dtypes[source]} loses about {lost:.0%} of the adapter's change in "
                f"{adapter.label}; to keep it, set {setting} to float32"
            )
    return notes


def _adapter_of(source: Source) -> LoraSource | None:
    """Return the adapted model that a source is, or is a view of; None if there is none."""
    while isinstance(source, View) and not isinstance(source, LoraSource):
        source = source.model
    return source if isinstance(source, LoraSource) else None


def template_problems(recipe: MergeRecipe) -> list[str]:
    """Return a problem if a recipe names an unknown chat template."""
    asked = recipe.chat_template
    # every Jinja template has a brace
    if asked is None or asked in ("auto", *TEMPLATES) or "{" in asked or os.path.isfile(asked):
        return []
    names = ", ".join(["auto", *TEMPLATES])
    return [f"chat_template: expected one of {names}, Jinja text or a file, got {asked!r}"]


def tensor_problems(slots: Sequence[Slot], models: Models, by_token: bool) -> list[str]:
    """Return a problem for each slot whose inputs cannot be merged."""
    problems = []
    for slot in slots:
        inputs = [i for _, i in slot.inputs]
        if slot.base is not None:
            inputs.append(slot.base)
        infos = [models.sources[i.source].tensors[i.name] for i in inputs]
        if len({info.shape for info in infos}) > 1:
            shown = []
            for i, info in zip(inputs, infos, strict=True):
                shown.append(f"{models.label(i.source)} {list(info.shape)}")
            hint = "" if by_token else _vocabulary_hint(slot.name, infos)
            problems.append(f"shapes differ: {slot.name}: {', '.join(shown)}{hint}")
            continue
        floats = [info.dtype.is_floating_point for info in infos]
        names = [info.dtype.name for info in infos]
        if len(set(names)) > 1 and not all(floats):
            problems.append(f"dtypes differ: {slot.name}: {', '.join(names)}")
    return problems


def row_problems(slots: Sequence[Slot], models: Models) -> list[str]:
    """Return a problem if embeddings and heads of different slices have unequal row counts."""
    found = []
    for slot in slots:
        first = slot.inputs[0][1] if slot.inputs else slot.base
        if slot.piece is not None and first is not None and is_vocabulary_tensor(slot.name):
            rows = models.sources[first.source].tensors[first.name].shape[0]
            found.append((rows, slot.name, first.source))
    # the config has the number of rows of its own model
    for rows in embedding_rows(models.sources[models.donor]) if found else ():
        found.append((rows, "the config of " + models.label(models.donor), models.donor))
    # one model may have embeddings of several sizes
    if len({source for _, _, source in found}) < 2 or len({rows for rows, _, _ in found}) < 2:
        return []
    shown = " and ".join(f"{name} with {rows} rows" for rows, name, _ in found)
    return [
        f"slices: expected embeddings and heads with equal numbers of rows, got {shown} (the "
        "vocabularies differ; set tokenizer_source: base or union to match rows by token)"
    ]


def _vocabulary_hint(name: str, infos: Sequence[TensorInfo]) -> str:
    """Return a hint if shapes differ only in the number of token rows, else an empty string."""
    columns = {info.shape[1:] for info in infos}
    if len(columns) > 1 or not is_vocabulary_tensor(name):
        return ""
    # the words of recipes and of mergekit's message, because users search for them
    return (
        " (the vocabularies differ; set tokenizer_source: base or union to match rows by token, "
        "or truncate_embeddings=True (--truncate-embeddings) to cut them)"
    )


def check_copies(tensors: Sequence[TensorPlan], models: Models) -> list[str]:
    """Return a problem for each integer or boolean buffer that differs between models."""
    problems = []
    for t in tensors:
        if t.method is not None:
            continue
        for other in t.inputs[1:]:
            if not _equal(t, t.inputs[0], other, models):
                problems.append(
                    f"{t.name}: expected equal values in all models, because tensors of dtype "
                    f"{t.dtype} cannot be merged, got different values"
                )
    return problems


def _equal(t: TensorPlan, first: Input, other: Input, models: Models) -> bool:
    """Return whether two tensors hold the same values."""

    def read(i: Input, begin: int) -> Array:
        return models.sources[i.source].read(i.name, begin, min(begin + CHUNK, t.info.count))

    # in chunks, because a buffer such as a causal mask can be large
    for begin in range(0, t.info.count, CHUNK):
        if not np.array_equal(read(first, begin), read(other, begin)):
            return False
    return True
