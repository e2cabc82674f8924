"""MergeRecipe: what to merge and how, in the YAML dialect that mergekit users already have on disk.

A parameter's value may be a number, a list of numbers (a gradient over the layers, interpolated), or a list of
``{filter: text, value: ...}`` entries, of which the first whose text occurs in the tensor's name counts. It is looked
up from the most specific place to the least: the slice's source or model, the slice, the recipe.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml

FLOAT_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_UNSUPPORTED = {
    "modules": "multi-module recipes are not supported; merge each module on its own",
    "random_seed": "give the seed as merge_models(seed=...) or --seed",
}


class RecipeError(ValueError):
    """A recipe that does not say something that can be done."""


def _refuse_unknown(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in given:
        if key in _UNSUPPORTED:
            raise RecipeError(f"{what}: key {key!r}: {_UNSUPPORTED[key]}")
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise RecipeError(f"{what}: unknown key {key!r}; known are {', '.join(known)}{hint}")


def _mapping(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RecipeError(f"{what}: is {value!r}, needed a mapping of keys to values")
    return dict(value)


def _list(what: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)) or not value:
        raise RecipeError(f"{what}: is {value!r}, needed a list with at least one entry")
    return list(value)


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model: in ``models`` without a layer range, as a slice's source with one."""

    model: Any
    layer_range: tuple[int, int] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.layer_range is not None:
            first, last = self.layer_range
            if not (isinstance(first, int) and isinstance(last, int) and 0 <= first < last):
                raise RecipeError(f"layer_range of {self.model}: is {list(self.layer_range)}, needed 0 <= start < end")


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A run of layers of the output, merged from equally long runs of the sources."""

    sources: tuple[ModelEntry, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Where the output's vocabulary comes from, and rows that a user places by hand."""

    source: str = "base"
    tokens: Mapping[str, Any] = field(default_factory=dict)
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise RecipeError(f"tokenizer source: is {self.source!r}, needed base, union or a model's path")
        pad = self.pad_to_multiple_of
        if pad is not None and (not isinstance(pad, int) or isinstance(pad, bool) or pad < 1):
            raise RecipeError(f"tokenizer pad_to_multiple_of: is {pad!r}, needed a whole number above 0")
        for token, rule in self.tokens.items():
            _refuse_unknown(f"tokenizer tokens {token!r}", _mapping(f"tokens {token!r}", rule), ["source", "force"])


@dataclass(frozen=True, kw_only=True)
class MergeRecipe:
    """Everything that defines a merge; `load_recipe` makes one from YAML, `merge_models` from its arguments.

    Args:
        merge_method: Name in the table of methods.
        models: Whole models, or
        slices: runs of layers; exactly one of the two.
        base_model: The base, for methods that use one.
        parameters: Values for every model and layer that has none of its own.
        dtype: Dtype of the output (and float64 computes in float64); values are never rounded to it on the way.
        out_dtype: Dtype of the output where it differs from ``dtype``.
        tokenizer: Vocabulary of the output; None leaves embeddings and tokenizer as the models have them.
        chat_template: ``"auto"`` (the one most models have), Jinja text, or a path to it.

    >>> recipe = MergeRecipe(merge_method="linear", models=[ModelEntry(model="a"), ModelEntry(model="b")])
    >>> MergeRecipe.from_dict(recipe.to_dict()) == recipe
    True
    """

    merge_method: str
    models: tuple[ModelEntry, ...] = ()
    slices: tuple[Slice, ...] = ()
    base_model: Any = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer: TokenizerSpec | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", tuple(self.models))
        object.__setattr__(self, "slices", tuple(self.slices))
        if bool(self.models) == bool(self.slices):
            raise RecipeError("recipe: needs either models or slices, and not both")
        for key in ("dtype", "out_dtype"):
            value = getattr(self, key)
            if value is not None and value not in FLOAT_DTYPES:
                raise RecipeError(f"recipe {key}: is {value!r}, needed one of {', '.join(FLOAT_DTYPES)}")
        for piece in self.slices:
            lengths = {s.layer_range[1] - s.layer_range[0] for s in piece.sources if s.layer_range}
            if len(lengths) > 1:
                raise RecipeError(f"slice: its sources span {sorted(lengths)} layers, needed one length")
            if any(s.layer_range is None for s in piece.sources):
                raise RecipeError("slice: every source needs a layer_range: [start, end]")
        for models in [self.models, *(piece.sources for piece in self.slices)]:
            seen: set[Any] = set()
            for entry in models:
                name = model_key(entry.model)
                if name in seen:
                    raise RecipeError(f"models: {model_label(entry.model)} is listed twice; give each model once")
                seen.add(name)

    def entries(self) -> list[ModelEntry]:
        """Every model entry, in order of first mention."""
        return [*self.models, *(source for piece in self.slices for source in piece.sources)]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MergeRecipe:
        """A recipe from what its YAML holds.

        Raises:
            RecipeError: A key that is unknown, misplaced or not supported, by name.
        """
        known = [f.name for f in fields(cls)] + ["tokenizer_source"]
        _refuse_unknown("recipe", data, known)
        if "merge_method" not in data:
            raise RecipeError("recipe: has no merge_method")
        made: dict[str, Any] = {k: v for k, v in data.items() if k not in ("tokenizer_source", "tokenizer")}
        made["parameters"] = _mapping("parameters", data.get("parameters") or {})
        made["models"] = [_entry("models", m) for m in _list("models", data["models"])] if data.get("models") else ()
        made["slices"] = [_slice(s) for s in _list("slices", data["slices"])] if data.get("slices") else ()
        if data.get("base_model") is not None:
            made["base_model"] = _model_name("base_model", data["base_model"])
        if data.get("tokenizer_source") is not None and data.get("tokenizer") is not None:
            raise RecipeError("recipe: give tokenizer or tokenizer_source, not both")
        if data.get("tokenizer_source") is not None:
            made["tokenizer"] = TokenizerSpec(source=data["tokenizer_source"])
        elif data.get("tokenizer") is not None:
            spec = _mapping("tokenizer", data["tokenizer"])
            _refuse_unknown("tokenizer", spec, [f.name for f in fields(TokenizerSpec)])
            made["tokenizer"] = TokenizerSpec(**spec)
        return cls(**made)

    def to_dict(self) -> dict[str, Any]:
        """What its YAML would hold; models that are in memory appear by label."""

        def entry(e: ModelEntry) -> dict[str, Any]:
            held: dict[str, Any] = {"model": model_label(e.model)}
            if e.layer_range is not None:
                held["layer_range"] = list(e.layer_range)
            return held | ({"parameters": _plain(e.parameters)} if e.parameters else {})

        held: dict[str, Any] = {"merge_method": self.merge_method}
        if self.models:
            held["models"] = [entry(e) for e in self.models]
        if self.slices:
            held["slices"] = [
                {"sources": [entry(e) for e in s.sources]}
                | ({"parameters": _plain(s.parameters)} if s.parameters else {})
                for s in self.slices
            ]
        if self.base_model is not None:
            held["base_model"] = model_label(self.base_model)
        if self.parameters:
            held["parameters"] = _plain(self.parameters)
        if self.tokenizer is not None:
            spec = {f.name: _plain(getattr(self.tokenizer, f.name)) for f in fields(TokenizerSpec)}
            held["tokenizer"] = {k: v for k, v in spec.items() if v not in (None, {})}
        held |= {k: v for k in ("dtype", "out_dtype", "chat_template") if (v := getattr(self, k)) is not None}
        return held

    def to_yaml(self) -> str:
        """The recipe as YAML text."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    for kind in (bool, int, float, str):  # numpy's numbers are subclasses that YAML does not know
        if isinstance(value, kind):
            return kind(value)
    return value


def model_label(model: Any) -> str:
    """What to call a model in messages and recipes."""
    if isinstance(model, (str, os.PathLike)):
        return os.fspath(model)
    return str(getattr(model, "label", f"<{type(model).__name__} in memory>"))


def model_key(model: Any) -> Any:
    """Equal for two mentions of one model."""
    if not isinstance(model, (str, os.PathLike)):
        return id(model)
    text = os.fspath(model)
    return os.path.realpath(text) if os.path.isdir(text) else text


def _model_name(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RecipeError(f"{what}: is {value!r}, needed a path or hub id, or MODEL+ADAPTER, as one text")
    return value


def _entry(what: str, value: Any, *, in_slice: bool = False) -> ModelEntry:
    if isinstance(value, str):
        return ModelEntry(model=value)
    data = _mapping(what, value)
    _refuse_unknown(what, data, ["model", "layer_range", "parameters"] if in_slice else ["model", "parameters"])
    if "model" not in data:
        raise RecipeError(f"{what}: an entry has no model")
    layers = data.get("layer_range")
    if layers is not None and (not isinstance(layers, (list, tuple)) or len(layers) != 2):
        raise RecipeError(f"{what}: layer_range is {layers!r}, needed [start, end]")
    return ModelEntry(
        model=_model_name(f"{what} model", data["model"]),
        layer_range=None if layers is None else (layers[0], layers[1]),
        parameters=_mapping(f"{what} parameters", data.get("parameters") or {}),
    )


def _slice(value: Any) -> Slice:
    data = _mapping("slices", value)
    _refuse_unknown("slices", data, ["sources", "parameters"])
    sources = [_entry("slices sources", s, in_slice=True) for s in _list("slices sources", data.get("sources"))]
    return Slice(sources=tuple(sources), parameters=_mapping("slices parameters", data.get("parameters") or {}))


def load_recipe(path_or_text: str | os.PathLike[str]) -> MergeRecipe:
    r"""A recipe from a YAML file, or from YAML text.

    Raises:
        RecipeError: No such file, not YAML, or a recipe that `MergeRecipe.from_dict` refuses.

    >>> load_recipe("merge_method: linear\nmodels: [a, b]\nparameters: {weight: 0.5}").merge_method
    'linear'
    """
    text = os.fspath(path_or_text)
    if "\n" not in text and not text.lstrip().startswith("{"):
        if not Path(text).is_file():
            raise RecipeError(f"recipe {text}: there is no such file")
        text = Path(text).read_text(encoding="utf-8")
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe: not valid YAML ({error})") from error
    return MergeRecipe.from_dict(_mapping("recipe", data))


_MISSING = object()


def evaluate_setting(value: Any, tensor_name: str, depth: float) -> Any:
    """A parameter's value for one tensor.

    Args:
        value: A plain value, a gradient, or filter entries.
        tensor_name: What filters look into.
        depth: The tensor's place in its slice, 0 (first layer) to 1 (last), for gradients.

    Returns:
        The value, or ``_MISSING`` where no filter matches.

    >>> evaluate_setting([0.0, 1.0, 0.0], "model.layers.3.mlp.up_proj.weight", 0.25)
    0.5
    >>> evaluate_setting([{"filter": "mlp", "value": 0.7}, {"value": 0.1}], "layers.0.mlp.weight", 0.0)
    0.7
    """
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    if not value:
        raise RecipeError("a parameter is an empty list, needed numbers or filter entries")
    if isinstance(value[0], Mapping):
        for entry in value:
            _refuse_unknown("parameter", _mapping("parameter", entry), ["filter", "value"])
            if "value" not in entry:
                raise RecipeError(f"a parameter's filter entry {dict(entry)!r} has no value")
            wanted = entry.get("filter")
            if wanted in (None, "*") or str(wanted) in tensor_name:
                return evaluate_setting(entry["value"], tensor_name, depth)
        return _MISSING
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in value):
        raise RecipeError(f"a parameter's gradient is {list(value)!r}, needed numbers")
    place = depth * (len(value) - 1)
    left = min(int(place), len(value) - 1)
    right = min(left + 1, len(value) - 1)
    return value[left] + (place - left) * (value[right] - value[left])


def setting(levels: Sequence[Mapping[str, Any]], name: str, tensor_name: str, depth: float) -> Any:
    """The value of parameter ``name`` at the first level that has one for this tensor, else None."""
    for level in levels:
        value = level.get(name, level.get("lambda_", _MISSING) if name == "lambda" else _MISSING)
        if value is not _MISSING:
            value = evaluate_setting(value, tensor_name, depth)
            if value is not _MISSING and value is not None:
                return value
    return None
