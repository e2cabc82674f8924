"""config.json of the output."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from ..dtypes import promote
from ..files import Source
from ..recipe import Slice
from ..vocabulary import HEAD
from .plan import TensorPlan

LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Names of the number of layers in config.json."""


def output_config(
    sources: Sequence[Source],
    donor: int,
    tensors: Sequence[TensorPlan],
    rows: int | None,
    slices: Sequence[Slice],
) -> dict[str, object]:
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
        config["dtype"] = promote(floats).name
    _set_tie_word_embeddings(config, sources, any(HEAD.search(t.name) for t in tensors))
    if isinstance(config.get("text_config"), dict):
        inner = config["text_config"]
    else:
        inner = config
    if rows is not None:
        for part in (config, inner):
            if part is inner or "vocab_size" in part:
                part["vocab_size"] = rows
    if slices:
        _count_layers(inner, [s.sources[0].layer_range or (0, 0) for s in slices])
    return config


def _set_tie_word_embeddings(
    config: dict[str, object], sources: Sequence[Source], has_head: bool
) -> None:
    """Set ``tie_word_embeddings`` if the models disagree: False if the output has its own head."""
    flags = [source.config.get("tie_word_embeddings") for source in sources]
    if has_head:
        if False in flags:
            config["tie_word_embeddings"] = False
    elif config.get("tie_word_embeddings") is False and True in flags:
        config["tie_word_embeddings"] = True  # the head came from a tied model, as its embedding


def _count_layers(config: dict[str, object], spans: Sequence[tuple[int, int]]) -> None:
    old = next((config[k] for k in LAYER_KEYS if k in config), None)
    for key in LAYER_KEYS:
        if key in config:
            config[key] = sum(end - begin for begin, end in spans)
    for key, value in config.items():  # layer_types and the like: one entry a layer
        listed = isinstance(value, list) and old is not None and len(value) == old
        if listed and ("layer" in key or key.endswith("types")):
            config[key] = [value[i] for begin, end in spans for i in range(begin, end)]
