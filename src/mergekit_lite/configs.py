"""config.json: what must agree between models, and what the output's says."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from .checkpoint import Source
from .plan import TensorPlan
from .recipe import Slice
from .vocabulary import HEAD

_MUST_AGREE = ("model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "n_head", "hidden_act")
_MAY_DIFFER = ("rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings", "rms_norm_eps")
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def compare_configs(sources: Sequence[Source], donor: int) -> tuple[list[str], list[str]]:
    """Differences that make a merge impossible, and those that are only worth a note."""
    problems, notes = [], []
    first, *others = [s for s in sources if s.config] or [sources[0]]
    for other in others:
        for key in _MUST_AGREE:
            pair = first.config.get(key), other.config.get(key)
            if None not in pair and pair[0] != pair[1]:
                text = f"{key} is {pair[0]!r} in {first.label}, {pair[1]!r} in {other.label}"
                problems.append(f"different architectures: {text}")
        for key in _MAY_DIFFER:
            pair = first.config.get(key), other.config.get(key)
            if pair[0] != pair[1]:
                text = f"{pair[0]!r} in {first.label}, {pair[1]!r} in {other.label}"
                notes.append(f"config {key}: {text}; the output keeps {sources[donor].label}'s")
    return problems, notes


def output_config(
    sources: Sequence[Source], donor: int, tensors: Sequence[TensorPlan], rows: int | None, slices: Sequence[Slice]
) -> dict[str, Any]:
    """The donor's config with the dtype, tie flag, vocabulary size and layers of the output.

    Args:
        sources: All models.
        donor: Index of the model whose config is taken.
        tensors: The output's.
        rows: Its vocabulary size, where that was planned.
        slices: The recipe's, which layers are counted from.
    """
    config = copy.deepcopy(sources[donor].config)
    if not config:
        return config
    if floats := {t.dtype for t in tensors if t.dtype.is_floating_point}:
        config.pop("torch_dtype", None)
        config["dtype"] = str(reduce(torch.promote_types, floats)).removeprefix("torch.")
    flags = [source.config.get("tie_word_embeddings") for source in sources]
    if any(HEAD.search(t.name) for t in tensors):
        if False in flags:
            config["tie_word_embeddings"] = False
    elif config.get("tie_word_embeddings") is False and True in flags:
        config["tie_word_embeddings"] = True  # the head came from a tied model, as its embedding
    if rows is not None:
        config["vocab_size"] = rows
    if slices:
        _count_layers(config, [s.sources[0].layer_range or (0, 0) for s in slices])
    return config


def _count_layers(config: dict[str, Any], spans: Sequence[tuple[int, int]]) -> None:
    old = next((config[k] for k in _LAYER_KEYS if k in config), None)
    for key in _LAYER_KEYS:
        if key in config:
            config[key] = sum(end - begin for begin, end in spans)
    for key, value in config.items():  # layer_types and the like: one entry a layer
        listed = isinstance(value, list) and old is not None and len(value) == old
        if listed and ("layer" in key or key.endswith("types")):
            config[key] = [value[i] for begin, end in spans for i in range(begin, end)]
