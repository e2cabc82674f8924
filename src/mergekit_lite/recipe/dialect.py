"""`load_recipe`: read YAML recipes as mergekit reads them.

Keys that have no effect in mergekit have none here either, and cause a note. Unsupported keys that
would change the result raise an error.
"""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_components._yaml import read_yaml

from ..methods import METHODS
from .recipe import (
    MergeRecipe,
    ModelEntry,
    RecipeError,
    Slice,
    TokenizerSpec,
    TokenRule,
    as_list,
    as_mapping,
    model_key,
    unknown_keys,
)

# all keys of a recipe
RECIPE_KEYS = [
    "merge_method",
    "models",
    "slices",
    "modules",
    "base_model",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer",
    "tokenizer_source",
    "chat_template",
    "name",
]
_TEXTS = ("dtype", "out_dtype", "chat_template")  # keys without which a recipe can be planned
_ALIKE = 0.8  # lowest similarity at which a name counts as a misspelling of another
_IDLE = {
    "random_seed": (
        "recipe: random_seed has no effect; pass the seed as merge_models(seed=...) or --seed"
    ),
}


ModelOf = Callable[[str], object]
"""A function that maps a model's name to the model or stage that the name stands for."""


def _load_yaml(text: str) -> list[object]:
    try:
        return read_yaml(text)
    except ValueError as error:
        raise RecipeError(f"recipe: expected valid YAML, got an error: {error}") from error


def load_recipe(path_or_text: str | os.PathLike[str]) -> MergeRecipe:
    r"""Read a recipe from a YAML file, or from YAML text.

    If the YAML has several documents, each document is a stage. A document with a name is merged
    before the documents that list this name as a model. The result of the merge is the document
    without a name, or the last document if all have names.

    Args:
        path_or_text: The path of a YAML file, or YAML text.

    Returns:
        The checked recipe. No model is opened for the checks.

    Raises:
        RecipeError: The file does not exist or is not YAML, or the recipe is invalid.

    >>> load_recipe("merge_method: linear\nmodels: [a, b]\nparameters: {weight: 0.5}").merge_method
    'linear'
    """
    text = path = os.fspath(path_or_text)
    # a path has one line; a recipe can also have one line if it is JSON, which begins with a brace
    if "\n" not in text and not text.lstrip().startswith("{"):
        if not os.path.isfile(text):  # unlike Path.is_file, it takes a string of any length
            raise RecipeError(f"recipe {text}: expected a file, but there is no such file")
        try:
            text = Path(text).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RecipeError(f"recipe {text}: expected UTF-8 text, got {error}") from error
        try:
            return _of_text(text)
        except RecipeError as error:
            named = []
            for problem in error.problems:
                named.append(f"recipe {path}: {problem.removeprefix('recipe: ')}")
            raise RecipeError(*named, partial=error.partial) from error
    return _of_text(text)


def _of_text(text: str) -> MergeRecipe:
    documents = [as_mapping("recipe", data) for data in _load_yaml(text)]
    if not documents:
        raise RecipeError("recipe: expected a mapping of keys to values, got an empty text")
    return _final_stage(documents)


def _final_stage(documents: list[dict[str, object]]) -> MergeRecipe:
    """Return the recipe that one or more documents define together."""
    if len(documents) == 1:
        return parse_recipe(documents[0])
    names = [data.get("name") for data in documents]
    _check_names(names)
    by_name = dict(zip(names, documents, strict=True))
    finished: dict[object, MergeRecipe] = {}
    under_way: list[object] = []

    def stage(name: object) -> MergeRecipe:
        if name in under_way:
            raise RecipeError(
                "recipe: expected stages that do not depend on each other in a cycle, got the "
                f"stages {', '.join(map(str, under_way))}"
            )
        if name not in finished:
            under_way.append(name)
            try:
                finished[name] = parse_recipe(
                    by_name[name], lambda text: stage(text) if text in by_name else text
                )
            finally:
                # after an error, too: a second mention of the stage must not look like a cycle
                under_way.pop()
        return finished[name]

    result = stage(None if None in by_name else names[-1])
    idle = [name for name in by_name if name not in finished]
    if idle:
        raise RecipeError(
            f"recipe: expected the result to use every stage, but it does not use {idle[0]!r}; "
            "move this stage to a separate recipe"
        )
    return result


def _check_names(names: Sequence[object]) -> None:
    """Check that document names are unique, plain file names, and that at most one is missing."""
    if names.count(None) > 1:
        raise RecipeError(
            "recipe: expected a name in every document except the one that defines the result, "
            f"got {names.count(None)} documents without a name"
        )
    for name in names:
        if name is None:
            continue
        # a stage is written into a folder of this name
        # no leading dot: Path("..").name is "..", and hidden folders hold unfinished work
        if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
            raise RecipeError(
                "recipe: expected the name of a stage to be a file name without a folder or a "
                f"leading dot, got {name!r}"
            )
        if names.count(name) > 1:
            raise RecipeError(
                f"recipe: expected documents with different names, got {name!r} more than once"
            )


def parse_recipe(data: Mapping[str, object], model_of: ModelOf = str) -> MergeRecipe:
    """Build a recipe from parsed YAML.

    Args:
        data: The mapping that the YAML holds.
        model_of: A function that maps a model's name to the model or stage that the name stands
            for; default: the name itself.

    Raises:
        RecipeError: Keys are misplaced or have invalid values. The error lists all problems.
    """
    parser = _Parser(model_of)
    recipe = None
    try:
        recipe = parser.recipe(dict(data))
    except RecipeError as error:
        parser.problems += error.problems
    if recipe is None or parser.problems:
        # a problem may have been found twice
        raise RecipeError(*dict.fromkeys(parser.problems), partial=recipe)
    return recipe


_LOST: Any = object()
"""A placeholder for a model that could not be read."""


class _Parser:
    def __init__(self, model_of: ModelOf):
        self._model_of = model_of
        self.notes: list[str] = []
        self.problems: list[str] = []

    def _read(self, read: Callable[..., Any], *arguments: object, otherwise: Any = _LOST) -> Any:
        """Call ``read``; on a `RecipeError`, keep its problems and return ``otherwise``."""
        try:
            return read(*arguments)
        except RecipeError as error:
            self.problems += error.problems
            return otherwise

    def _read_all(
        self, where: str, values: object, read: Callable[[object], Any]
    ) -> tuple[Any, ...]:
        # a recipe that only adds an adapter to its base may list no models: models: []
        if values is None or values == []:
            return ()
        listed = self._read(as_list, where, values, otherwise=None)
        if listed is None:
            # a placeholder, because an empty list would be reported as a second problem
            return (_LOST,)
        return tuple(self._read(read, value) for value in listed)

    def _known(self, where: str, data: Mapping[str, object], known: list[str]) -> None:
        self.notes += self._read(unknown_keys, where, data, known, otherwise=[])

    def _parameters(self, where: str, value: object) -> dict[str, object]:
        return self._read(_parameters, where, value, otherwise={})

    def recipe(self, data: dict[str, Any]) -> MergeRecipe:
        settings = self._settings(data)
        base = settings["base_model"]
        pieces = settings["slices"]
        if _LOST in (*settings["models"], *pieces, base):
            raise RecipeError()  # the problems are already in self.problems
        alone = _is_alone(base, settings["models"], settings["merge_method"])
        if base is not None and not pieces and alone:
            self.notes.append(
                "recipe: no model is listed except the base, so the result is a copy of the base"
            )
            settings |= {"merge_method": "passthrough", "parameters": {}, "base_model": None}
            settings["models"] = (ModelEntry(model=base),)
        settings["notes"] = tuple(self.notes)
        try:
            return MergeRecipe(**settings)
        except RecipeError as error:
            self.problems += error.problems
        # without these keys the recipe may be valid, so that planning it finds further problems
        for key in _TEXTS:
            settings.pop(key, None)
        return MergeRecipe(**settings)

    def _settings(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the recipe, with `_LOST` for models that cannot be read."""
        if "experts" in data or "gate_mode" in data:
            raise RecipeError(
                "recipe: expected merge_method, and models or slices, got a mixture of experts for "
                "mergekit-moe, which is not supported"
            )
        for key, note in _IDLE.items():
            if key in data:
                self.notes.append(note)
                del data[key]
        self._known("recipe", data, RECIPE_KEYS)
        data = {key: value for key, value in data.items() if key in RECIPE_KEYS}
        if data.get("merge_method") is None:
            raise RecipeError("recipe: expected merge_method, got none")
        # before the modules are opened, because their parameters override these
        data["parameters"] = self._parameters("parameters", data.get("parameters"))
        if data.get("modules") is not None:
            self._open_modules(data)
        source = data.pop("tokenizer_source", None)
        tokenizer = self._read(self._tokenizer, source, data.pop("tokenizer", None), otherwise=None)
        data.pop("modules", None)
        for key in ("dtype", "out_dtype"):
            if isinstance(data.get(key), str):
                # mergekit takes both spellings, bfloat16 and torch.bfloat16
                data[key] = data[key].removeprefix("torch.")
        # a key without a value is null in YAML, and counts as missing
        settings = {key: value for key, value in data.items() if value is not None}
        models = data.get("models")
        settings["models"] = self._read_all("models", models, lambda m: self._entry("models", m))
        settings["slices"] = self._read_all("slices", data.get("slices"), self._slice)
        settings["tokenizer"] = tokenizer
        base = data.get("base_model")
        if base is not None:
            base = self._read(self._model, "base_model", base)
        settings["base_model"] = base
        return settings

    def _open_modules(self, data: dict[str, Any]) -> None:
        """Replace ``modules``, which must have one entry, with the entry's keys, in place."""
        modules = as_mapping("modules", data["modules"])
        if len(modules) != 1:
            raise RecipeError(
                f"recipe: expected one entry in modules, got {len(modules)}; merge each module "
                "with a recipe of its own"
            )
        ((name, module),) = modules.items()
        module = as_mapping(f"modules {name}", module)
        self._known(f"modules {name}", module, ["models", "slices", "parameters"])
        if data.get("models") or data.get("slices"):
            raise RecipeError("recipe: expected either models, slices or modules, got several")
        inner = self._parameters(f"modules {name} parameters", module.get("parameters"))
        data |= {"models": module.get("models"), "slices": module.get("slices")}
        data["parameters"] = {**data["parameters"], **inner}

    def _model(self, where: str, value: object) -> object:
        """Return the model or stage that a name stands for.

        A mapping of path, revision and adapter, as mergekit takes it, is first turned into a name.
        """
        return self._model_of(_reference(where, value))

    def _entry(self, where: str, value: object, *, in_slice: bool = False) -> ModelEntry:
        if isinstance(value, str):
            return ModelEntry(model=self._model(where, value))
        data = as_mapping(where, value)
        known = ["model", "parameters"]
        if in_slice:
            known.append("layer_range")
        self._take_misplaced(where, data)
        self._known(where, data, known)
        if "model" not in data:
            raise RecipeError(f"{where}: expected a model in each entry, got an entry without one")
        layers = None
        if in_slice and data.get("layer_range") is not None:
            layers = _layers(where, data["layer_range"])
        return ModelEntry(
            model=self._model(f"{where} model", data["model"]),
            layer_range=layers,
            parameters=self._parameters(f"{where} parameters", data.get("parameters")),
        )

    def _take_misplaced(self, where: str, data: dict[str, object]) -> None:
        """Remove and report keys that belong under ``parameters``, even if they are misspelled."""
        parameters: set[str] = set()
        for method in METHODS.values():
            parameters |= method.parameters.keys()
        for key in sorted(data.keys() - {"model", "parameters", "layer_range"}):
            # mergekit ignores such a key, and so uses another value than the user intended
            near = difflib.get_close_matches(key, parameters, n=1, cutoff=_ALIKE)
            if near:
                del data[key]
                self.problems.append(
                    f"{where}: expected {near[0]} under parameters, got {key} next to model"
                )

    def _slice(self, value: object) -> Slice:
        data = as_mapping("slices", value)
        self._known("slices", data, ["sources", "base_model", "parameters", "residual_weight"])
        if data.get("residual_weight") is not None:
            # mergekit's schema has this key, too, but mergekit never reads it
            self.notes.append("slices: residual_weight has no effect")
        base = data.get("base_model")
        if base is not None:
            base = self._model("slices base_model", base)
        sources = []
        for source in as_list("slices sources", data.get("sources")):
            sources.append(self._entry("slices sources", source, in_slice=True))
        return Slice(
            sources=tuple(sources),
            base_model=base,
            parameters=self._parameters("slices parameters", data.get("parameters")),
        )

    def _tokenizer(self, source: object, tokenizer: object) -> TokenizerSpec | None:
        if source is not None and tokenizer is not None:
            raise RecipeError("recipe: expected either tokenizer or tokenizer_source, got both")
        if source is not None:
            return TokenizerSpec(source=self._tokenizer_source("tokenizer_source", source))
        if tokenizer is None:
            return None
        data = as_mapping("tokenizer", tokenizer)
        self._known("tokenizer", data, ["source", "tokens", "pad_to_multiple_of"])
        rules = {}
        for token, rule in as_mapping("tokenizer tokens", data.get("tokens") or {}).items():
            rules[token] = self._token_rule(f"tokenizer tokens {token!r}", rule)
        multiple: Any = data.get("pad_to_multiple_of")  # `TokenizerSpec` checks the value
        return TokenizerSpec(
            source=self._tokenizer_source("tokenizer source", data.get("source") or "union"),
            tokens=rules,
            pad_to_multiple_of=multiple,
        )

    def _tokenizer_source(self, where: str, value: object) -> Any:
        if value in ("union", "base"):
            return value
        return self._model(where, value)

    def _token_rule(self, where: str, value: object) -> TokenRule:
        data = as_mapping(where, value)
        self._known(where, data, ["source", "force"])
        source = data.get("source")
        force = data.get("force") or False
        if not isinstance(force, bool):
            raise RecipeError(f"{where}: force must be true or false, got {force!r}")
        if source is None:
            return TokenRule(force=force)
        if not isinstance(source, Mapping) or source.get("kind") is None:
            return TokenRule(model=self._model(f"{where} source", source), force=force)
        kind = source["kind"]
        if kind == "zero":
            return TokenRule(zero=True, force=force)
        if kind != "model_token":
            raise RecipeError(
                f"{where}: expected a model's name, or a source of kind model_token or zero, got "
                f"kind {kind!r}"
            )
        self._known(f"{where} source", source, ["kind", "model", "token", "token_id"])
        token = source.get("token")
        row = source.get("token_id")
        if (token is None) == (row is None) or "model" not in source:
            raise RecipeError(
                f"{where}: expected model, and either token or token_id, in a source of kind "
                f"model_token, got {', '.join(map(str, source))}"
            )
        if token is not None and not isinstance(token, str):
            raise RecipeError(f"{where}: token must be text, got {token!r}; put it in quotes")
        if row is not None and (type(row) is not int or row < 0):
            raise RecipeError(f"{where}: expected token_id as an integer of 0 or more, got {row!r}")
        return TokenRule(
            model=self._model(f"{where} model", source["model"]),
            token=token,
            token_id=row,
            force=force,
        )


def _is_alone(base: object, entries: Sequence[ModelEntry], method: object) -> bool:
    """Return whether the recipe has no model to merge other than the base."""
    chosen = METHODS.get(str(method))
    if entries and (chosen is None or chosen.base == "unused"):
        return False
    return all(model_key(entry.model) == model_key(base) for entry in entries)


def _layers(where: str, value: object) -> tuple[Any, Any]:
    """Read a layer_range. `ModelEntry` checks that both values are whole numbers."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise RecipeError(f"{where}: expected layer_range as [start, end], got {value!r}")
    return _whole(value[0]), _whole(value[1])


def _whole(value: Any) -> Any:
    """Return the integer that a value such as ``"3"`` or ``3.0`` stands for.

    Any other value is returned unchanged, and `ModelEntry` then raises an error for it.
    """
    try:
        # mergekit accepts "3" and 3.0; the first test keeps true from becoming layer 1
        if not isinstance(value, bool) and float(value) == int(float(value)):
            return int(value)
        return value
    except (TypeError, ValueError, OverflowError):
        return value


def _parameters(where: str, value: object) -> dict[str, object]:
    return as_mapping(where, {} if value is None else value)


def _reference(where: str, value: object, *, plain: bool = False) -> str:
    """Return the string that names a model, such as ``PATH@REVISION`` or ``PATH+ADAPTER``.

    If ``plain`` is True, a mapping with an adapter raises an error.
    """
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Mapping) and "model" in value and not plain:
        base = _reference(where, value["model"], plain=True)
        if value.get("lora") is None:
            return base
        return f"{base}+{_reference(where, value['lora'], plain=True)}"
    if isinstance(value, Mapping) and isinstance(value.get("path"), str):
        if value.get("revision") is None:
            return value["path"]
        return f"{value['path']}@{value['revision']}"
    raise RecipeError(
        f"{where}: expected a path, a hub id or MODEL+ADAPTER, as one string, got "
        f"{reprlib.repr(value)}"
    )
