"""Check what must be the same in all models, and note other differences.

The checks read only headers, configs and vocabularies, and the values of integer and boolean
buffers, which must be equal in all models.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..dtypes import Array
from ..files import CheckpointError, Source, TensorInfo
from ..recipe import MergeRecipe
from ..recipe.templates import TEMPLATES
from ..vocabulary import (
    HEAD,
    embedding_rows,
    is_vocabulary_tensor,
    read_vocabulary,
    stage_tokens,
)
from .configs import layer_count, text_config
from .layout import Slot, is_usual_list, text_lists
from .models import Models
from .plan import CHUNK, Input, TensorPlan

_SHOWN = 5  # missing layers or tensors that a message names
# keys and values of attention, which some models share between layers
_SHARED = re.compile(r"(^|[._])(k|v|kv|key|value)([._]|$)")
WITH_ENDS = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Model types whose models store ``embed_tokens`` and ``norm`` next to the layers."""
_TORN = 2  # the largest number of layers that lack tensors if one file is lost
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


def _flat(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config with its nested configs (``text_config``, …) flattened to dotted keys."""
    flat = dict(config)
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, dict):
            for inner, part in _flat(value).items():
                flat[f"{key}.{inner}"] = part
    return flat


def missing_tensors(source: Source) -> list[str]:
    """Return a message for each kind of tensor that a model should have but lacks."""
    config = text_config(source.config)
    before, layers = _names_by_layer(source, config)
    problems = []
    for problem in (
        _missing_layers(config, before, layers),
        _missing_in_layers(before, layers),
        _missing_ends(source, config, before),
        _other_rows(source, config),
        _missing_head(source),
    ):
        if problem is not None:
            problems.append(f"{source.label}: {problem}")
    return problems


def layers_beyond(source: Source) -> list[str]:
    """Return a list that has a note if a model has more layers than its config says."""
    config = text_config(source.config)
    count = layer_count(config)
    before, layers = _names_by_layer(source, config)
    # layers that predict further tokens are numbered after the others
    if count is None or config.get("num_nextn_predict_layers") or max(layers, default=-1) < count:
        return []
    return [
        f"{source.label}: expected {count} layers, as in config.json, got tensors of "
        f"{before}{max(layers)}; transformers does not load layers from {count} on"
    ]


def _names_by_layer(
    source: Source, config: Mapping[str, object]
) -> tuple[str, dict[int, set[str]]]:
    """Return the prefix of a model's layers (``model.layers.``), and the tensors of each layer."""
    # only lists with usual names, because other lists may be heads
    lists = [before for before in text_lists(source.tensors, config) if is_usual_list(before)]
    layers: dict[int, set[str]] = {}
    if not lists:
        return "", layers
    before = lists[0]
    for name in source.tensors:
        if name.startswith(before):
            number, _, rest = name.removeprefix(before).partition(".")
            if number.isdigit():
                layers.setdefault(int(number), set()).add(rest)
    return before, layers


def _missing_in_layers(before: str, layers: Mapping[int, set[str]]) -> str | None:
    """Return a message that names tensors that one or two layers lack and all others have, or None.

    Layers may differ by design, so a layer counts as incomplete only under three conditions:

    - It is not the first layer, which has no norm in some models.
    - Another layer has all of its tensors and more. If only keys and values are missing, this must
      be a later layer: in some models the last layers share the keys and values of other layers.
    - At most two layers lack the same tensor, because one lost file affects at most two layers.
    """
    if len(layers) <= 2 * _TORN:  # too few to tell a rule from an exception
        return None
    holders: Counter[str] = Counter()
    for names in layers.values():
        holders.update(names)
    nearly_everywhere = set()
    for name, count in holders.items():
        # tensors that many layers lack are missing by design
        if 0 < len(layers) - count <= _TORN:
            nearly_everywhere.add(name)
    missing = []
    for number, names in sorted(layers.items()):
        if number and _is_torn(number, layers, nearly_everywhere):
            for name in sorted(nearly_everywhere - names):
                missing.append(f"{before}{number}.{name}")
    if not missing:
        return None
    return f"expected {_first_of(missing)} as in the other layers, got none"


def _is_torn(number: int, layers: Mapping[int, set[str]], nearly_everywhere: set[str]) -> bool:
    """Return whether another layer has all of a layer's tensors, plus some that most layers have.

    If only keys and values are missing, the other layer must be a later one.
    """
    names = layers[number]
    for other, others in layers.items():
        lacking = others - names
        if not (names < others and lacking <= nearly_everywhere):
            continue
        if other > number or not all(_SHARED.search(name) for name in lacking):
            return True
    return False


def _first_of(names: Sequence[str]) -> str:
    """Join the first few names for a message, and mark that others were left out."""
    more = ", ..." if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _missing_ends(source: Source, config: Mapping[str, object], before: str) -> str | None:
    """Return a message if a model of a type in `WITH_ENDS` lacks its embedding or last norm."""
    if config.get("model_type") not in WITH_ENDS or not before:
        return None
    model = before.removesuffix("layers.")
    missing = []
    for end in ("embed_tokens.weight", "norm.weight"):
        if f"{model}{end}" not in source.tensors:
            missing.append(f"{model}{end}")
    if not missing:
        return None
    return f"expected {' and '.join(missing)}, got none"


def _missing_layers(
    config: Mapping[str, object], before: str, layers: Mapping[int, set[str]]
) -> str | None:
    """Return a message that names layers that the config counts but that have no tensors, or None.

    Layers are found by the numbers in tensor names (``layers.3.``). A model whose layers all share
    one set of weights has no such numbers and is not checked.
    """
    count = layer_count(config) or 0
    missing = [f"{before}{number}" for number in range(count) if number not in layers]
    if not layers or not missing:
        return None
    return f"expected {count} layers, as in config.json, got no tensors of {_first_of(missing)}"


def _other_rows(source: Source, config: Mapping[str, object]) -> str | None:
    """Return a message if ``vocab_size`` is not the number of rows of the token embedding."""
    rows = embedding_rows(source)
    size = config.get("vocab_size")
    # with embeddings of several sizes it is unclear which one the config describes
    if not isinstance(size, int) or len(rows) != 1 or size in rows:
        return None
    return (
        f"expected a token embedding with {size} rows, the vocab_size in config.json, got "
        f"{max(rows)} rows"
    )


def _missing_head(source: Source) -> str | None:
    """Return a message if a causal model's head is missing and not tied to the embedding."""
    config = source.config
    causal = any("ForCausalLM" in str(name) for name in config.get("architectures") or ())
    has_head = any(HEAD.search(name) for name in source.tensors)
    # the default differs between families, so only an explicit false counts
    untied = config.get("tie_word_embeddings") is False
    if not causal or not untied or has_head or not embedding_rows(source):
        return None
    return (
        "expected a head such as lm_head.weight, because config.json does not tie the head to the "
        "embedding, got none"
    )


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
    """Return notes on models whose embedding rows belong to other tokens than the first model's.

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
            # known with another row, or new in a row that the first model uses
            if first.get(token, row) != row or (token not in first and row in rows):
                moved.append(token)
        if moved:
            notes.append(
                f"the tokenizers of {first_label} and {label} differ in {len(moved)} tokens "
                f"(for example {moved[0]!r}), but embedding rows are merged by index; to match "
                "rows by token, set tokenizer_source to base or union"
            )
    return notes


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


def _vocabulary_hint(name: str, infos: Sequence[TensorInfo]) -> str:
    """Return a hint if shapes differ only in the number of token rows, else an empty string."""
    columns = {info.shape[1:] for info in infos}
    if len(columns) > 1 or not is_vocabulary_tensor(name):
        return ""
    # as in a recipe: people search for these words, and mergekit's message has them, too
    return (
        " (the vocabularies differ; set tokenizer_source: base or union to match rows by token, "
        "or truncate_embeddings=True to cut them)"
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
