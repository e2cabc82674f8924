"""Check that a model has the tensors and the sizes that its config promises.

The checks read only names and shapes. Some checks apply only to the families in `LLAMA_LIKE`,
whose layers are alike. In other families, layers may differ by design, so less can be checked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from model_components._checks import is_whole

from ..files import Source
from ..files.experts import StackedSource
from ..files.headers import Json
from ..vocabulary import HEAD, embedding_rows
from .configs import LAYER_KEYS, LayerKeys, layer_count, layer_keys, text_config
from .layout import COMPUTED, is_usual_list, layer_lists, text_lists

_SHOWN = 5  # maximum number of missing layers or tensors that a message lists
# keys and values of attention, which some models share between layers
_SHARED = re.compile(r"(^|[._])(k|v|kv|key|value)([._]|$)")
LLAMA_LIKE = (
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
"""Model types with ``embed_tokens`` and ``norm`` next to the layers, and with equal layers.

All layers of a model have the same tensors, except that only some layers may have experts."""

TIED = ("gemma", "gemma2", "gemma3_text", "smollm3")
"""`LLAMA_LIKE` types whose head is tied to the embedding if the config has no setting for it."""

BIASES = {
    "attention_bias": (
        "self_attn.q_proj",
        (
            "gemma",
            "gemma2",
            "gemma3_text",
            "granite",
            "llama",
            "qwen3",
            "qwen3_moe",
            "smollm3",
        ),
    ),
    "mlp_bias": ("mlp.up_proj", ("granite", "llama", "smollm3")),
}
"""For each setting that adds biases, a layer that then has one, and the setting's model types."""

_MATRIX = re.compile(r"^(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<matrix>.+)$")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OTHER_HEAD = re.compile(r"(^|\.)(head|output)\.weight$")  # in DeepSeek-V4 and GIT
_TORN = 2  # the largest number of layers that lack tensors if one file is lost


def missing_tensors(source: Source) -> list[str]:
    """Return messages about tensors that contradict the model's config or its other layers."""
    config = text_config(source.config)
    # the names in the files, because a stack of experts hides which matrix is missing
    stored = source.model if isinstance(source, StackedSource) else source
    names = list(stored.tensors)
    before, layers = _names_by_layer(names, config)
    problems = [
        _not_counts(config),
        _missing_layers(config, names, before, layers),
        _missing_in_layers(config, before, layers),
        _missing_experts(config, names, before),
        _missing_ends(config, names, before),
        _missing_biases(config, names, before),
        _other_rows(source, config),
        _missing_head(source, config),
        _too_few_experts(source, config, before),
        *_other_sizes(source, config, before),
    ]
    return [f"{source.label}: {problem}" for problem in problems if problem is not None]


def layers_beyond(source: Source) -> list[str]:
    """Return a note if a model has more layers than its config counts.

    The result is a list with this note, or an empty list.
    """
    config = text_config(source.config)
    count = layer_count(config)
    before, layers = _names_by_layer(list(source.tensors), config)
    # layers that predict further tokens have the numbers after the last ordinary layer
    if count is None or config.get("num_nextn_predict_layers") or max(layers, default=-1) < count:
        return []
    return [
        f"{source.label}: expected {count} layers, as in config.json, got tensors of "
        f"{before}{max(layers)}; transformers does not load layers from {count} on"
    ]


def misplaced_layer(source: Source, config: Json, names: Sequence[str]) -> str | None:
    """Return a message if a layer is not of the kind that the output's config expects, or None.

    Two layers are of the same kind if they have the same tensors. For example, only some layers
    have experts. Lists in the config (``mlp_only_layers``) may determine the kind of each layer.
    A layer of the output must be of the same kind as a layer of ``source`` with the same entries in
    these lists. If layers of ``source`` with the same entries differ in some tensors, the layer
    must have the same ones of these tensors as the layer at this position in ``source``.

    Args:
        source: The model whose config the output has.
        config: The output's config.
        names: The names of the output's tensors.
    """
    source_config = text_config(source.config)
    output_config = text_config(config)
    before, layers = _names_by_layer(names, output_config)
    keys = layer_keys(source_config)
    kinds = _kinds_of(source, source_config)
    by_entries: dict[object, list[set[str]]] = {}
    for number, kind in enumerate(kinds):
        by_entries.setdefault(_entries(source_config, keys, number), []).append(kind)
    # the tensors that depend on a layer's position, because the entries do not determine them
    by_position: set[str] = set()
    for same in by_entries.values():
        by_position |= set().union(*same) - set(same[0]).intersection(*same)
    positions = [kind & by_position for kind in kinds]
    for number, names_of_layer in sorted(layers.items()):
        kind = _stored(names_of_layer)
        # the kind is unknown for entries that the source does not have
        known = by_entries.get(_entries(output_config, keys, number), [kind])
        fits = not by_position or kind & by_position == _at_position(number, positions)
        if kind not in known or not fits:
            return (
                f"slices: expected {before}{number} to be a layer of the kind that the output's "
                f"config.json (from {source.label}) has at this position, got a layer with other "
                "tensors, which transformers would not load there"
            )
    return None


def _kinds_of(source: Source, config: Json) -> list[set[str]]:
    """Return the set of tensor names of each layer, without layers beyond the config's number."""
    _, layers = _names_by_layer(list(source.tensors), config)
    count = layer_count(config)
    kinds = []
    for number, names in sorted(layers.items()):
        if count is None or number < count:  # later layers predict further tokens
            kinds.append(_stored(names))
    return kinds


def _stored(names: set[str]) -> set[str]:
    """Return a layer's tensor names, except those of buffers that transformers computes."""
    return {name for name in names if not COMPUTED.search(name)}


def _entries(config: Json, keys: LayerKeys, number: int) -> tuple[str | bool, ...]:
    """Return a layer's entry in each list of a config.

    For a list of indices, the entry is whether the list contains the layer.
    """
    # as texts, because an entry may be a list
    entries = [repr(config[key][number]) for key in keys.entries]
    return (*entries, *(number in config[key] for key in keys.indices))


def _at_position(number: int, kinds: Sequence[set[str]]) -> set[str] | None:
    """Return the expected tensors of the layer at a position, or None if they are unknown.

    Beyond the last of ``kinds``, a periodic pattern is continued. Without one, the last kind is
    repeated if the last two layers are of the same kind.
    """
    if number < len(kinds):
        return kinds[number]
    for period in range(1, len(kinds) // 2 + 1):
        if kinds[period:] == kinds[:-period]:
            return kinds[number % period]
    if len(kinds) >= 2 and kinds[-1] == kinds[-2]:
        return kinds[-1]
    return None


def _not_counts(config: Json) -> str | None:
    """Return a message if a config's number of layers or tokens is not a whole number, or None."""
    # transformers reads the first of these keys
    present = [key for key in LAYER_KEYS if key in config][:1]
    for key in (*present, "vocab_size"):
        value = config.get(key)
        # in some models, the value is a mapping with one number for each tower
        if isinstance(value, (bool, float, str)):
            return f"expected {key} in config.json to be a whole number, got {value!r}"
    return None


def _names_by_layer(names: Sequence[str], config: Json) -> tuple[str, dict[int, set[str]]]:
    """Return the prefix of a model's layers (``model.layers.``), and the tensors of each layer."""
    # only lists of layers with usual names, because other numbered lists may be heads
    lists = [before for before in text_lists(names, config) if is_usual_list(before)]
    layers: dict[int, set[str]] = {}
    if not lists:
        return "", layers
    before = lists[0]
    for name in names:
        if name.startswith(before):
            number, _, rest = name.removeprefix(before).partition(".")
            if number.isdigit():
                layers.setdefault(int(number), set()).add(rest)
    return before, layers


def _missing_in_layers(config: Json, before: str, layers: Mapping[int, set[str]]) -> str | None:
    """Return a message that names tensors that one or two layers lack and all others have, or None.

    Layers may differ by design, so a layer counts as incomplete only under these conditions:

    - Another layer has all of its tensors and more.
    - At most two layers lack the same tensor, because one lost file affects at most two layers.

    In a family that is not `LLAMA_LIKE`, there are four more conditions:

    - A weight is missing, not only a bias or a buffer.
    - There are more than four layers, enough to tell a rule from an exception.
    - The layer is not the first, which has no norm or no router in some models.
    - If only keys and values are missing, a later layer has them: in some models the last layers
      share the keys and values of other layers.
    """
    alike = config.get("model_type") in LLAMA_LIKE
    if len(layers) <= 2 * _TORN and not alike:
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
        lost = sorted(nearly_everywhere - names)
        has_lost_weight = any(name.endswith("weight") for name in lost)
        if not alike and (number == 0 or not has_lost_weight):
            continue
        if _is_torn(number, layers, nearly_everywhere, alike):
            missing += [f"{before}{number}.{name}" for name in lost]
    if not missing:
        return None
    return f"expected {_first_of(missing)} as in the other layers, got none"


def _is_torn(
    number: int, layers: Mapping[int, set[str]], nearly_everywhere: set[str], alike: bool
) -> bool:
    """Return whether another layer has all of a layer's tensors, plus some that most layers have.

    If only keys and values are missing, the other layer must be a later one, unless the layers of
    the family are alike.
    """
    names = layers[number]
    for other, others in layers.items():
        lacking = others - names
        if not (names < others and lacking <= nearly_everywhere):
            continue
        if alike or other > number or not all(_SHARED.search(name) for name in lacking):
            return True
    return False


def _missing_experts(config: Json, names: Sequence[str], before: str) -> str | None:
    """Return a message that names an expert, or a matrix of an expert, that is missing, or None."""
    experts: dict[str, dict[int, set[str]]] = {}
    for name in names:
        match = _MATRIX.match(name)
        if match is not None and name.startswith(before):
            layer = experts.setdefault(match["experts"], {})
            layer.setdefault(int(match["number"]), set()).add(match["matrix"])
    promised = _expert_count(config)
    for prefix, layer in experts.items():
        matrices = set().union(*layer.values())
        # experts beyond the promised ones may be of another kind, without all matrices
        count = 1 + max(layer) if promised is None else promised
        for number in range(count):
            missing = sorted(matrices - layer.get(number, set()))
            if missing:
                return f"expected {prefix}.{number}.{missing[0]}, got none"
    return None


def _expert_count(config: Json) -> int | None:
    """Return a config's number of experts, or None if it has no such number."""
    for key in _EXPERT_COUNTS:
        if is_whole(config.get(key)):
            return config[key]
    return None


def _too_few_experts(source: Source, config: Json, before: str) -> str | None:
    """Return a message if a tensor of stacked experts has fewer than the config says, or None."""
    promised = _expert_count(config)
    if promised is None:
        return None
    for name, info in source.tensors.items():
        is_stack = name.startswith(before) and ".experts." in name and len(info.shape) == 3
        # more are allowed: some experts, such as ones that return zeros, are not counted
        if is_stack and info.shape[0] < promised:
            return f"expected {promised} experts, as in config.json, got {info.shape[0]} in {name}"
    return None


def _first_of(names: Sequence[str]) -> str:
    """Join the first few names for a message, and add "..." if there are more."""
    more = ", ..." if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _missing_ends(config: Json, names: Sequence[str], before: str) -> str | None:
    """Return a message if a `LLAMA_LIKE` model lacks its embedding or last norm."""
    if config.get("model_type") not in LLAMA_LIKE or not before:
        return None
    model = before.removesuffix("layers.")
    missing = []
    for end in ("embed_tokens.weight", "norm.weight"):
        # under any prefix, because a multimodal model may store its text model in two parts
        if not any(name.endswith(end) and not name.startswith(before) for name in names):
            missing.append(f"{model}{end}")
    if not missing:
        return None
    return f"expected {' and '.join(missing)}, got none"


def _missing_layers(
    config: Json, names: Sequence[str], before: str, layers: Mapping[int, set[str]]
) -> str | None:
    """Return a message that names layers that the config counts but that have no tensors, or None.

    Layers are found by the numbers in tensor names (``layers.3.``). A model whose layers all share
    one set of weights has no such numbers and is not checked. Models whose config may count
    something else are not checked either: image models, and models with several equally long lists.
    """
    counts = layer_lists(names)
    lengths = [counts[prefix] for prefix in text_lists(names, config)]
    if "image_size" in config or lengths.count(len(layers)) > 1:
        return None
    count = layer_count(config) or 0
    missing = [f"{before}{number}" for number in range(count) if number not in layers]
    if not layers or not missing:
        return None
    return f"expected {count} layers, as in config.json, got no tensors of {_first_of(missing)}"


def _missing_biases(config: Json, names: Sequence[str], before: str) -> str | None:
    """Return a message if a `LLAMA_LIKE` model lacks a bias that its config promises, or None."""
    for key, (layer, families) in BIASES.items():
        if config.get(key) is not True or config.get("model_type") not in families:
            continue
        for name in names:
            bias = f"{name.removesuffix('weight')}bias"
            inside = name.startswith(before) and name.endswith(f"{layer}.weight")
            if inside and bias not in names:
                return f"expected {bias}, because config.json has {key}: true, got none"
    return None


def _other_rows(source: Source, config: Json) -> str | None:
    """Return a message if ``vocab_size`` is not the number of rows of the token embedding."""
    rows = embedding_rows(source)
    size = config.get("vocab_size")
    # with embeddings of several sizes it is unclear which one the config describes
    if not isinstance(size, int) or len(rows) != 1 or size in rows:
        return None
    # in other families, the embedding may have rows for images or for several codebooks
    if max(rows) > size and config.get("model_type") not in LLAMA_LIKE:
        return None
    return (
        f"expected a token embedding with {size} rows, the vocab_size in config.json, got "
        f"{max(rows)} rows"
    )


def _missing_head(source: Source, config: Json) -> str | None:
    """Return a message if a causal model's head is missing and not tied to the embedding."""
    named = source.config.get("architectures")
    causal = isinstance(named, list) and any("ForCausalLM" in str(name) for name in named)
    has_head = any(HEAD.search(name) or _OTHER_HEAD.search(name) for name in source.tensors)
    # the default for other families is not known here, so only an explicit false counts
    kind = config.get("model_type")
    default = config.get("tie_word_embeddings", kind in TIED or kind not in LLAMA_LIKE)
    tied = source.config.get("tie_word_embeddings", default)
    if not causal or tied is not False or has_head or not embedding_rows(source):
        return None
    return (
        "expected a head such as lm_head.weight, because config.json does not tie the head to the "
        "embedding, got none"
    )


class _Promise(NamedTuple):
    """A size that a config promises, along one axis, for all tensors with a given name ending."""

    setting: str
    ending: str
    axis: int
    size: int


def _other_sizes(source: Source, config: Json, before: str) -> Iterator[str]:
    """Yield a message for each setting of a config that contradicts the tensors' shapes."""
    for setting, ending, axis, size in _promises(config, before):
        for name, info in source.tensors.items():
            # the embedding is the only tensor outside the layers, and `ending` is its whole name
            inside = name.startswith(before) or name == ending
            if not inside or not name.endswith(ending) or len(info.shape) != 2:
                continue
            if info.shape[axis] != size:
                unit = "columns" if axis else "rows"
                yield (
                    f"expected {name} with {size} {unit}, the {setting} in config.json, got "
                    f"{info.shape[axis]}"
                )
                break


def _promises(config: Json, before: str) -> Iterator[_Promise]:
    """Yield each size that the config of a `LLAMA_LIKE` model promises."""
    if config.get("model_type") not in LLAMA_LIKE:
        return
    numbers = {key: value for key, value in config.items() if is_whole(value)}
    if "hidden_size" in numbers:
        embedding = f"{before.removesuffix('layers.')}embed_tokens.weight"
        yield _Promise("hidden_size", embedding, 1, numbers["hidden_size"])
    if "intermediate_size" in numbers:
        yield _Promise("intermediate_size", ".mlp.up_proj.weight", 0, numbers["intermediate_size"])
    if "head_dim" not in numbers:  # the default differs between families
        return
    for setting, layer in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
        if setting in numbers:
            size = numbers[setting] * numbers["head_dim"]
            yield _Promise(f"{setting} times head_dim", f".self_attn.{layer}.weight", 0, size)
