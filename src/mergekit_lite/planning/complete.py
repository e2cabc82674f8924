"""Check that a model has the tensors, and tensors the sizes, that its config promises.

The checks read only names and shapes. They know the families of transformers that are listed here;
of any other model, they compare the layers with each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from model_components._checks import is_whole

from ..files import Source
from ..files.experts import StackedSource
from ..files.headers import Json
from ..vocabulary import HEAD, embedding_rows
from .configs import LAYER_KEYS, layer_count, layer_keys, text_config
from .layout import is_usual_list, layer_lists, text_lists

_SHOWN = 5  # missing layers or tensors that a message names
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
"""Model types with ``embed_tokens`` and ``norm`` next to the layers, and layers that are alike.

Their layers may differ only in being dense or having experts."""

UNTIED = ("granite", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types whose head is not tied to the embedding if the config does not say so."""

_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.+)$")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TORN = 2  # the largest number of layers that lack tensors if one file is lost


def missing_tensors(source: Source) -> list[str]:
    """Return a message for each kind of tensor that a model should have but lacks."""
    config = text_config(source.config)
    # as in the files: a stack of experts hides which matrix is missing
    names = list((source.model if isinstance(source, StackedSource) else source).tensors)
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
        *_other_sizes(source, config, before),
    ]
    return [f"{source.label}: {problem}" for problem in problems if problem is not None]


def layers_beyond(source: Source) -> list[str]:
    """Return a list that has a note if a model has more layers than its config says."""
    config = text_config(source.config)
    count = layer_count(config)
    before, layers = _names_by_layer(list(source.tensors), config)
    # layers that predict further tokens are numbered after the others
    if count is None or config.get("num_nextn_predict_layers") or max(layers, default=-1) < count:
        return []
    return [
        f"{source.label}: expected {count} layers, as in config.json, got tensors of "
        f"{before}{max(layers)}; transformers does not load layers from {count} on"
    ]


def misplaced_layer(source: Source, config: Json, names: Sequence[str]) -> str | None:
    """Return a message if slices put a layer where the output's config has another kind, or None.

    Kinds of layers differ in their tensors: for example, only some have experts. Configs say in
    different ways which layer is of which kind. If their lists (``mlp_only_layers``) decide it, the
    output's lists must fit the output's layers. Otherwise its position in ``source`` decides it.

    Args:
        source: The model whose config the output has.
        config: The output's config.
        names: The names of the output's tensors.
    """
    given = text_config(source.config)
    config = text_config(config)
    _, theirs = _names_by_layer(list(source.tensors), given)
    before, layers = _names_by_layer(names, config)
    keys = layer_keys(given)
    by_lists: dict[object, set[str]] = {}
    decided = True
    for number, tensors in theirs.items():
        decided &= by_lists.setdefault(_said(given, keys, number), tensors) == tensors
    kinds = [tensors for _, tensors in sorted(theirs.items())]
    for number, tensors in sorted(layers.items()):
        if decided:
            expected = by_lists.get(_said(config, keys, number), tensors)
        else:
            expected = _at_position(kinds, number)
        if tensors != expected:
            return (
                f"slices: expected {before}{number} to be a layer of the kind that config.json "
                f"gives this position, got another kind of {source.label}, whose tensors "
                "transformers would not load there"
            )
    return None


def _at_position(kinds: Sequence[set[str]], number: int) -> set[str] | None:
    """Return the kind of a layer, also beyond the given layers if these follow a rule."""
    if number < len(kinds):
        return kinds[number]
    for period in range(1, len(kinds) // 2 + 1):
        if kinds[period:] == kinds[:-period]:
            return kinds[number % period]
    # only the first layers may differ from all others
    return kinds[-1] if kinds[-2:-1] == kinds[-1:] else None


def _said(config: Json, keys: Mapping[str, bool], number: int) -> tuple[object, ...]:
    """Return what the lists of a config say about a layer."""
    said: list[object] = []
    for key, holds_indices in keys.items():
        value = config[key]
        said.append(number in value if holds_indices else value[number])
    return tuple(said)


def _not_counts(config: Json) -> str | None:
    """Return a message if the number of layers or tokens is not a whole number."""
    for key in (*LAYER_KEYS, "vocab_size"):
        value = config.get(key)
        # some models have a number for each tower here, in a mapping
        if isinstance(value, (bool, float, str)):
            return f"expected {key} in config.json to be a whole number, got {value!r}"
    return None


def _names_by_layer(names: Sequence[str], config: Json) -> tuple[str, dict[int, set[str]]]:
    """Return the prefix of a model's layers (``model.layers.``), and the tensors of each layer."""
    # only lists with usual names, because other lists may be heads
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

    In a family that is not `LLAMA_LIKE`, there are three more:

    - There are more than four layers, to tell a rule from an exception.
    - It is not the first layer, which has no norm or no router in some models.
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
        if number == 0 and not alike:
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
        match = _EXPERT.match(name)
        if match is not None and name.startswith(before):
            layer = experts.setdefault(match[1], {})
            layer.setdefault(int(match[2]), set()).add(match[3])
    _, promised = _expert_count(config)
    for prefix, layer in experts.items():
        matrices = set().union(*layer.values())
        for number in range(max(promised or 0, 1 + max(layer))):
            missing = sorted(matrices - layer.get(number, set()))
            if missing:
                return f"expected {prefix}.{number}.{missing[0]}, got none"
    return None


def _expert_count(config: Json) -> tuple[str, int | None]:
    """Return the key and the value of the number of experts; the value is None if unknown."""
    for key in _EXPERT_COUNTS:
        value = config.get(key)
        if is_whole(value):
            return key, value
    return "", None


def _first_of(names: Sequence[str]) -> str:
    """Join the first few names for a message, and mark that others were left out."""
    more = ", ..." if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _missing_ends(config: Json, names: Sequence[str], before: str) -> str | None:
    """Return a message if a `LLAMA_LIKE` model lacks its embedding or last norm."""
    if config.get("model_type") not in LLAMA_LIKE or not before:
        return None
    model = before.removesuffix("layers.")
    ends = (f"{model}embed_tokens.weight", f"{model}norm.weight")
    missing = [end for end in ends if end not in names]
    if not missing:
        return None
    return f"expected {' and '.join(missing)}, got none"


def _missing_layers(
    config: Json, names: Sequence[str], before: str, layers: Mapping[int, set[str]]
) -> str | None:
    """Return a message that names layers that the config counts but that have no tensors, or None.

    Layers are found by the numbers in tensor names (``layers.3.``). A model whose layers all share
    one set of weights has no such numbers and is not checked. Neither are models whose config may
    count something else: models of images, or with several lists of as many layers.
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
    """Return a message if the config of a `LLAMA_LIKE` model promises biases that it lacks."""
    if config.get("model_type") not in LLAMA_LIKE:
        return None
    for key, layer in (("attention_bias", "self_attn.q_proj"), ("mlp_bias", "mlp.up_proj")):
        if config.get(key) is not True:
            continue
        for name in names:
            bias = f"{name.removesuffix('weight')}bias"
            inside = name.startswith(before) and name.endswith(f"{layer}.weight")
            if inside and bias not in names:
                return f"expected {bias}, as {key} in config.json says, got none"
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
    has_head = any(HEAD.search(name) for name in source.tensors)
    # of other families the default is not known, so only an explicit false counts
    default = config.get("tie_word_embeddings", config.get("model_type") not in UNTIED)
    tied = source.config.get("tie_word_embeddings", default)
    if not causal or tied is not False or has_head or not embedding_rows(source):
        return None
    return (
        "expected a head such as lm_head.weight, because config.json does not tie the head to the "
        "embedding, got none"
    )


def _other_sizes(source: Source, config: Json, before: str) -> Iterator[str]:
    """Yield a message for each setting of a config that contradicts the tensors' shapes."""
    key, experts = _expert_count(config)
    expected = list(_promised_sizes(config, before))
    for name, info in source.tensors.items():
        shape = info.shape
        is_stack = name.startswith(before) and ".experts." in name and len(shape) == 3
        # a stack may also hold experts that are not counted, such as those that return zeros
        if is_stack and experts is not None and shape[0] < experts:
            yield f"expected {experts} experts, the {key} in config.json, got {shape[0]} in {name}"
            experts = None  # one message is enough
        for place, (setting, ending, axis, size) in enumerate(expected):
            inside = name.startswith(before) or name == ending
            if inside and name.endswith(ending) and len(shape) == 2 and shape[axis] != size:
                what = "columns" if axis else "rows"
                yield (
                    f"expected {name} with {size} {what}, the {setting} in config.json, got "
                    f"{shape[axis]}"
                )
                del expected[place]
                break


def _promised_sizes(config: Json, before: str) -> Iterator[tuple[str, str, int, int]]:
    """Yield a setting, the ending of a tensor's name, an axis, and the size by the setting."""
    if config.get("model_type") not in LLAMA_LIKE:
        return
    numbers = {key: value for key, value in config.items() if is_whole(value)}
    if "hidden_size" in numbers:
        embedding = f"{before.removesuffix('layers.')}embed_tokens.weight"
        yield "hidden_size", embedding, 1, numbers["hidden_size"]
    if "intermediate_size" in numbers:
        yield "intermediate_size", ".mlp.up_proj.weight", 0, numbers["intermediate_size"]
    if "head_dim" not in numbers:  # the default differs between families
        return
    for setting, layer in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
        if setting in numbers:
            size = numbers[setting] * numbers["head_dim"]
            yield f"{setting} times head_dim", f".self_attn.{layer}.weight", 0, size
