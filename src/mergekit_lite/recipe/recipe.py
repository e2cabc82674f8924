"""`MergeRecipe`: which models to merge, and how.

A recipe checks its own fields. It can be written to YAML and read back.
"""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import yaml

from ..dtypes import FLOATS

_LARGEST_MULTIPLE = 1 << 16  # a larger multiple must be a mistake, and could use up all memory


class RecipeError(ValueError):
    """The error for an invalid recipe.

    Args:
        problems: Every problem that was found.
        partial: The recipe without its invalid parts, if it can be planned to find further
            problems; otherwise None.
    """

    def __init__(self, *problems: str, partial: MergeRecipe | None = None):
        listed = "\n".join(f"- {problem}" for problem in problems)
        text = problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n{listed}"
        super().__init__(text)
        self.problems = problems
        self.partial = partial


def unknown_keys(where: str, data: Mapping[str, object], known: Sequence[str]) -> list[str]:
    """Return notes on unknown keys.

    Raises:
        RecipeError: A key looks like a misspelling of a known key.
    """
    notes = []
    problems = []
    for key in data:
        if key in known:
            continue
        # a key unlike all known keys, such as x: &anchor, is probably intended, so only note it
        near = difflib.get_close_matches(str(key), known, n=3, cutoff=0.7)
        if near:
            problems.append(f"{where}: unknown key {key!r}; did you mean {' or '.join(near)}?")
        else:
            notes.append(f"{where}: the key {key!r} is unknown and has no effect")
    if problems:
        raise RecipeError(*problems)
    return notes


def as_mapping(where: str, value: object) -> dict[str, object]:
    """Return a mapping with string keys as a dict; raise a `RecipeError` for anything else."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise RecipeError(
            # shortened: a text file that is not a recipe may be one long value
            f"{where}: expected a mapping of names to values, got {reprlib.repr(value)}"
        )
    return dict(value)


def as_list(where: str, value: object) -> list[object]:
    """Return a list with at least one entry; raise a `RecipeError` for anything else."""
    if not isinstance(value, (list, tuple)) or not value:
        raise RecipeError(
            f"{where}: expected a list with at least one entry, got {reprlib.repr(value)}"
        )
    return list(value)


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model: an entry of ``models`` or, with a layer range, a source of a slice.

    Args:
        model: A model in any form that `merge_models` takes.
        layer_range: The indices of the first layer and of the layer after the last; None for the
            whole model.
        parameters: The method's parameters for this model, as numbers, gradients or filters.

    Raises:
        RecipeError: The layer range is not a pair of integers with 0 <= start < end.
    """

    model: object
    layer_range: tuple[int, int] | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.layer_range is not None:
            first, last = self.layer_range
            # `type`, because for isinstance true is an int, and would be layer 1
            if not (type(first) is int and type(last) is int and 0 <= first < last):
                raise RecipeError(
                    f"layer_range of {model_label(self.model)}: expected [start, end] with "
                    f"integers 0 <= start < end, got {list(self.layer_range)}"
                )


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A range of the output's layers, merged from layer ranges of the same length in the sources.

    A slice may have a base of its own.

    Args:
        sources: One entry per model, with the layer range in that model.
        base_model: The slice's base; None for the recipe's base.
        parameters: The method's parameters for these layers.

    Raises:
        RecipeError: There are no sources, a source has no layer range, or the layer ranges have
            different lengths.
    """

    sources: tuple[ModelEntry, ...]
    base_model: object = None
    parameters: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.sources:
            raise RecipeError("slice: expected one or more sources, got none")
        lengths = set()
        for source in self.sources:
            if source.layer_range is None:
                raise RecipeError(
                    "slice: expected layer_range: [start, end] in every source, got none for "
                    f"{model_label(source.model)}"
                )
            first, end = source.layer_range
            lengths.add(end - first)
        if len(lengths) > 1:
            raise RecipeError(
                "slice: expected the same number of layers in every source, got "
                f"{' and '.join(map(str, sorted(lengths)))}"
            )


@dataclass(frozen=True, kw_only=True)
class TokenRule:
    """A rule for the embedding row of one token of the output.

    Args:
        model: The model to take the row from; None if the rule names no model.
        token: The token in ``model`` whose row to take; None for the same token.
        token_id: The index of the row in ``model`` to take, instead of a token's row.
        zero: Whether to use a row of zeros.
        force: Whether the rule also applies to models that have the token.
    """

    model: object = None
    token: str | None = None
    token_id: int | None = None
    zero: bool = False
    force: bool = False

    def to_dict(self) -> dict[str, object]:
        """Return the rule as a mapping, as in a YAML recipe."""
        data: dict[str, object] = {}
        if self.zero:
            data["source"] = {"kind": "zero"}
        elif self.model is not None:
            label = model_label(self.model)
            data["source"] = label
            if self.token is not None:
                data["source"] = {"kind": "model_token", "model": label, "token": self.token}
            if self.token_id is not None:
                data["source"] = {"kind": "model_token", "model": label, "token_id": self.token_id}
        if self.force:
            data["force"] = True
        return data


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """The source of the output's vocabulary, and rules for the rows of some tokens.

    Args:
        source: ``"union"`` for the tokens of all models, ``"base"`` for the tokens of the base, the
            path or hub id of a model or tokenizer, or a stage among the models.
        tokens: Rules for the embedding rows of tokens, by token.
        pad_to_multiple_of: Pad the number of embedding rows to a multiple of this number; None for
            no padding.

    Raises:
        RecipeError: ``source`` is neither a string nor a recipe, or ``pad_to_multiple_of`` is not
            an integer from 1 to 65536.
    """

    source: str | MergeRecipe = "union"
    tokens: Mapping[str, TokenRule] = field(default_factory=dict)
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.source, (str, MergeRecipe)):
            raise RecipeError(
                "tokenizer source: expected base, union, or the path or hub id of a model, got "
                f"{self.source!r}"
            )
        pad = self.pad_to_multiple_of
        if pad is not None and (type(pad) is not int or pad < 1):
            raise RecipeError(
                f"tokenizer pad_to_multiple_of: expected an integer above 0, got {pad!r}"
            )
        if pad is not None and pad > _LARGEST_MULTIPLE:
            raise RecipeError(
                f"tokenizer pad_to_multiple_of: expected at most {_LARGEST_MULTIPLE}, got {pad!r}"
            )


@dataclass(frozen=True, kw_only=True)
class MergeRecipe:
    """Everything that defines a merge.

    `load_recipe` builds a recipe from YAML, and `merge_models` builds one from its arguments.

    Args:
        merge_method: The name of a merge method.
        models: Whole models. A recipe has either ``models`` or ``slices``.
        slices: Ranges of layers, in the order in which the output has them.
        base_model: The base, for methods that use one. Other methods merge it as one more model.
        parameters: The method's parameters for all models and layers that do not set their own.
        dtype: Dtype of the output. With float64, the merge also computes in float64. Inputs and
            intermediate values are never rounded to this dtype.
        out_dtype: Dtype of the output if it differs from ``dtype``.
        tokenizer: Vocabulary of the output; None to merge embedding rows by index.
        chat_template: ``"auto"`` for the template that most models have, the name of a template,
            Jinja text, or the path of a file with Jinja text.
        notes: Notes on keys of the YAML that have no effect.
        name: The name under which other recipes list the result of this recipe as a model.

    A model may be a `MergeRecipe` itself: a stage, which is merged first.

    Raises:
        RecipeError: There are neither models nor slices, or both. A value is invalid. A model or
            the name of a stage occurs more than once.

    >>> recipe = MergeRecipe(
    ...     merge_method="linear", models=[ModelEntry(model="a"), ModelEntry(model="b")]
    ... )
    >>> recipe.to_dict()["models"]
    [{'model': 'a'}, {'model': 'b'}]
    """

    merge_method: str
    models: tuple[ModelEntry, ...] = ()
    slices: tuple[Slice, ...] = ()
    base_model: object = None
    parameters: Mapping[str, object] = field(default_factory=dict)
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer: TokenizerSpec | None = None
    chat_template: str | None = None
    # not compared: a recipe that was read back from YAML has no notes, but is the same
    notes: tuple[str, ...] = field(default=(), compare=False)
    name: str | None = None

    def __post_init__(self) -> None:
        # callers may pass lists; plain assignment fails because the class is frozen
        object.__setattr__(self, "models", tuple(self.models))
        object.__setattr__(self, "slices", tuple(self.slices))
        problems = []
        if not isinstance(self.merge_method, str):
            problems.append(
                f"recipe merge_method: expected the name of a method, got {self.merge_method!r}"
            )
        if bool(self.models) == bool(self.slices):
            problems.append(
                "recipe: expected either models or slices, got "
                f"{'both' if self.models else 'neither'}"
            )
        for key in ("dtype", "out_dtype"):
            value = getattr(self, key)
            # the type is checked first, because a list cannot be looked up
            if value is not None and (not isinstance(value, str) or value not in FLOATS):
                problems.append(f"recipe {key}: expected one of {', '.join(FLOATS)}, got {value!r}")
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            problems.append(f"recipe chat_template: expected a string, got {self.chat_template!r}")
        problems += self._repeated_names()
        if problems:
            raise RecipeError(*problems)

    def _repeated_names(self) -> list[str]:
        """Return a problem for each stage name or model that occurs more than once."""
        problems = []
        # a stage is written into a folder of this name
        labels = [model_label(stage) for stage in self.stages()]
        for label in dict.fromkeys(labels):
            if labels.count(label) > 1:
                problems.append(
                    f"recipe: expected stages with different names, got {label!r} more than once"
                )
        for models in [self.models, *(piece.sources for piece in self.slices)]:
            seen: set[str | int] = set()
            for entry in models:
                key = model_key(entry.model)
                if key in seen:
                    problems.append(
                        f"models: expected each model once, got {model_label(entry.model)} twice"
                    )
                seen.add(key)
        return problems

    def entries(self) -> list[ModelEntry]:
        """Return every model entry, in order of first mention."""
        entries = list(self.models)
        for piece in self.slices:
            entries += piece.sources
        return entries

    def mentions(self) -> list[object]:
        """Return all models that the recipe names, including bases, without duplicates.

        The models are in the order of first mention.
        """
        everyone = [entry.model for entry in self.entries()]
        everyone.append(self.base_model)
        everyone += [piece.base_model for piece in self.slices]
        models: dict[str | int, object] = {}
        for model in everyone:
            if model is not None:
                models.setdefault(model_key(model), model)
        return list(models.values())

    def stages(self) -> list[MergeRecipe]:
        """Return the stages: the recipes whose results this recipe merges."""
        return [model for model in self.mentions() if isinstance(model, MergeRecipe)]

    def to_dict(self) -> dict[str, object]:
        """Return the recipe as a dict, as in YAML, with labels for stages and models in memory."""
        first = {} if self.name is None else {"name": self.name}
        return first | _written(self)

    def to_yaml(self) -> str:
        """Return the recipe as YAML text: one document per stage, then the recipe itself."""
        documents = [stage.to_yaml() for stage in self.stages()]
        documents.append(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))
        return "---\n".join(documents)


def _written(part: ModelEntry | Slice | TokenizerSpec | MergeRecipe) -> dict[str, object]:
    """Return the fields that are set, in types that YAML supports, with a label for each model."""
    data: dict[str, object] = {}
    for one in fields(part):
        name = one.name
        value = getattr(part, name)
        if name == "notes" or value in (None, (), {}):
            continue
        is_model = name in ("model", "base_model", "source")
        data[name] = model_label(value) if is_model else _plain(value)
    return data


def _plain(value: object) -> object:
    """Return a value in types that YAML supports."""
    if isinstance(value, TokenRule):
        return value.to_dict()
    if isinstance(value, (ModelEntry, Slice, TokenizerSpec)):
        return _written(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    for kind in (bool, int, float, str):  # numpy's numbers are subclasses that YAML does not know
        if isinstance(value, kind):
            return kind(value)
    return value


def model_label(model: object) -> str:
    """Return a model's name for messages and recipes."""
    if isinstance(model, (str, os.PathLike)):
        return os.fspath(model)
    if isinstance(model, MergeRecipe):
        return model.name or f"<{model.merge_method} merge>"
    return str(getattr(model, "label", f"<{type(model).__name__} in memory>"))


def model_key(model: object) -> str | int:
    """Return a key that is equal for two references to the same model."""
    if not isinstance(model, (str, os.PathLike)):
        # the object itself: state dicts cannot be compared by ==, nor hashed
        return id(model)
    text = os.path.expanduser(os.fspath(model))  # `~` is expanded when files are opened, too
    # a folder may have several paths, but a model has only one hub id
    if os.path.isdir(text):
        return os.path.realpath(text)
    return text
