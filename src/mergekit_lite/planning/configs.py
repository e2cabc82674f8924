"""Build the config.json of the output."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from model_components._checks import is_whole

from ..files import Source
from ..files.headers import Json
from ..vocabulary import HEAD
from .plan import PlanError, TensorPlan

LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""The keys of the number of layers in config.json, depending on the model type."""

_TYPES = ("layer_types", "layers_block_type")  # Nemotron-H has these instead of a number
# settings that may be one value for all layers, or a list
_MAYBE_LISTS = (
    "activation_sparsity_pattern",
    "hybrid_override_pattern",
    "intermediate_size",
    "moe_topk",
    "num_experts",
    "num_shared_expert",
)


def output_config(
    sources: Sequence[Source],
    donor: int,
    tensors: Sequence[TensorPlan],
    rows: int | None,
    spans: Sequence[tuple[int, int, int]],
) -> dict[str, object]:
    """Return the donor's config with the output's dtype, vocabulary size and layers.

    ``tie_word_embeddings`` is set, too, if the models disagree on it.

    Args:
        sources: All models.
        donor: The index of the model whose config is used.
        tensors: The tensors of the output.
        rows: The number of rows of the output's embeddings, or None to keep the donor's
            ``vocab_size``.
        spans: For each slice, the index of the first source's model, the first layer, and the layer
            after the last. Empty for whole models.

    Raises:
        PlanError: A config's list with one entry per layer is too short for a slice.
    """
    # a deep copy, because the text_config inside is changed below
    config = copy.deepcopy(sources[donor].config)
    if not config:
        return config
    counts: Counter[str] = Counter()
    for t in tensors:
        if t.dtype.is_floating_point:
            counts[t.dtype.name] += t.info.count
    if counts:
        config.pop("torch_dtype", None)  # the key's name before transformers 5
        # the dtype of most elements: some models store a few buffers, such as a router's bias, in
        # float32
        config["dtype"] = counts.most_common(1)[0][0]
    _set_tie_word_embeddings(config, sources, any(HEAD.search(t.name) for t in tensors))
    inner = text_config(config)
    if rows is not None:
        inner["vocab_size"] = rows
        # some multimodal configs repeat vocab_size at the top level
        if "vocab_size" in config:
            config["vocab_size"] = rows
    if spans:
        _count_layers(inner, [text_config(source.config) for source in sources], spans)
    return config


def text_config(config: Json) -> Json:
    """Return the text_config of a multimodal model, or the config itself for other models."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def layer_count(config: Mapping[str, object]) -> int | None:
    """Return the number of layers in a config, or None if the config has no such number."""
    for key in LAYER_KEYS:
        value = config.get(key)
        if isinstance(value, int):
            return value
    for key in _TYPES:
        value = config.get(key)
        if isinstance(value, list):
            return len(value)
    return None


def _set_tie_word_embeddings(
    config: dict[str, object], sources: Sequence[Source], has_head: bool
) -> None:
    """Set ``tie_word_embeddings`` to fit the output, if the models disagree.

    The value becomes False if the output has its own head, and True if not.
    """
    flags = [source.config.get("tie_word_embeddings") for source in sources]
    # the default differs between model types: without the flag, a model with a head is untied
    own_heads = []
    for source, flag in zip(sources, flags, strict=True):
        if flag is None and any(HEAD.search(name) for name in source.tensors):
            own_heads.append(source)
    if has_head:
        if False in flags or (own_heads and config.get("tie_word_embeddings")):
            config["tie_word_embeddings"] = False
    elif config.get("tie_word_embeddings") is False and True in flags:
        config["tie_word_embeddings"] = True  # the output has no head, as in a tied model


def _count_layers(
    config: Json, configs: Sequence[Json], spans: Sequence[tuple[int, int, int]]
) -> None:
    """Set the number of layers, and build the config's per-layer lists from the slices."""
    keys = layer_keys(config)
    for key in LAYER_KEYS:
        if key in config:
            config[key] = sum(end - begin for _, begin, end in spans)
    for key in (*keys.entries, *keys.indices):
        lists = []
        for place, begin, end in spans:
            own = configs[place].get(key)
            # without such a list, assume that the model's layers are of the donor's kinds
            lists.append((own if isinstance(own, (list, str)) else config[key], begin, end))
        config[key] = _moved(lists) if key in keys.indices else _joined(key, lists)
    for key, value in config.items():
        if isinstance(value, dict) and "layer" in key and all(map(str.isdigit, value)):
            given = [(configs[place].get(key) or {}, begin, end) for place, begin, end in spans]
            config[key] = _moved_settings(given)


def _joined(key: str, lists: Sequence[tuple[Sequence[Any], int, int]]) -> Sequence[object]:
    """Join the per-layer entries of all slices into one list or one string."""
    entries: list[Any] = []
    for source, begin, end in lists:
        if len(source) < end:
            raise PlanError(
                [f"config.json: expected at least {end} entries in {key}, got {len(source)}"]
            )
        entries += source[begin:end]
    # Nemotron-H has a string with one letter for each layer
    return "".join(entries) if isinstance(lists[0][0], str) else entries


def _moved(lists: Sequence[tuple[Sequence[object], int, int]]) -> list[int]:
    """Join lists of layer indices: return the output's index of each listed layer in a slice."""
    indices = []
    first = 0  # the index in the output of the slice's first layer
    for source, begin, end in lists:
        for layer in range(begin, end):
            if layer in source:
                indices.append(first + layer - begin)
        first += end - begin
    return indices


def _moved_settings(given: Sequence[tuple[Json, int, int]]) -> dict[str, object]:
    """Return the per-layer settings of the layers that the slices take, by output index."""
    settings = {}
    first = 0
    for source, begin, end in given:
        for layer in range(begin, end):
            if str(layer) in source:
                settings[str(first + layer - begin)] = source[str(layer)]
        first += end - begin
    return settings


class LayerKeys(NamedTuple):
    """The keys of the lists in a config that determine the kinds of layers.

    Args:
        entries: Lists with one entry for each layer (``layer_types``).
        indices: Lists of the indices of some layers (``mlp_only_layers``).
    """

    entries: list[str]
    indices: list[str]


def layer_keys(config: Json) -> LayerKeys:
    """Find the lists in a config that determine the kinds of the layers."""
    count = layer_count(config)
    keys = LayerKeys([], [])
    for key, value in config.items():
        if count is None or not isinstance(value, (list, str)):
            continue
        named = "layer" in key or "idx" in key or key.endswith("types")
        if key not in _MAYBE_LISTS and (isinstance(value, str) or not named):
            continue
        # assume that increasing numbers below the number of layers are indices, because a list with
        # one entry per layer normally repeats values
        whole = isinstance(value, list) and all(is_whole(i) for i in value)
        if whole and value == sorted(set(value)) and all(0 <= i < count for i in value):
            keys.indices.append(key)
        elif len(value) == count:
            keys.entries.append(key)
    return keys
