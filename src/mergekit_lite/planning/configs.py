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
    # deep, as text_config inside it is changed below
    config = copy.deepcopy(sources[donor].config)
    if not config:
        return config
    floats = {t.dtype for t in tensors if t.dtype.is_floating_point}
    if floats:
        config.pop("torch_dtype", None)  # the name before transformers 5
        config["dtype"] = promote(floats).name
    _set_tie_word_embeddings(config, sources, any(HEAD.search(t.name) for t in tensors))
    # of a model of texts and images it is the texts' part that counts tokens and layers
    inner = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    if rows is not None:
        inner["vocab_size"] = rows
        # beside text_config some models repeat it at the top
        if "vocab_size" in config:
            config["vocab_size"] = rows
    if slices:
        _count_layers(inner, [piece.sources[0].layer_range or (0, 0) for piece in slices])
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
    """Set the number of layers, and let lists with an entry a layer follow."""
    layers: list[int] = []
    for begin, end in spans:
        layers += range(begin, end)
    old = None
    for key in LAYER_KEYS:
        if key in config:
            old = config[key] if old is None else old
            config[key] = len(layers)
    for key, value in config.items():
        listed = isinstance(value, list) and len(value) == old
        if listed and ("layer" in key or key.endswith("types")):  # layer_types and the like
            config[key] = [value[layer] for layer in layers]
