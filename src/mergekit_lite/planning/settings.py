"""A method's arguments for one tensor.

They come from a recipe's values, gradients over layers and filters by name.

A value is looked up from the most specific level to the least: the slice's source or model, the
slice, the recipe. A parameter that has one value for all models is not looked up at a single model:
as in mergekit, it has no effect there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..methods import METHODS, MergeMethod, Parameter
from ..recipe import MergeRecipe, RecipeError, model_label
from ..recipe.recipe import as_mapping, unknown_keys

Check = Callable[[object], Any]
"""A function that converts a plain value to the parameter's type."""

_MISSING = object()
_SCALARS = (bool, int, float, str)
# parameters that mergekit takes and that change no result
_IDLE = {"int8_mask"}


def _as_it_is(value: object) -> object:
    return value


def evaluate_setting(
    value: object, tensor_name: str, depth: float, check: Check = _as_it_is
) -> Any:
    """Return a parameter's value for one tensor.

    Args:
        value: A plain value, a gradient, or filter entries.
        tensor_name: The name that filters match.
        depth: The tensor's position in its slice, 0 (first layer) to 1 (last), for gradients; 0
            outside the layers.
        check: A function that converts a plain value to the parameter's type.

    Returns:
        The value, or ``_MISSING`` if no filter matches.

    >>> evaluate_setting([0.0, 1.0, 0.0], "model.layers.3.mlp.up_proj.weight", 0.25)
    0.5
    >>> evaluate_setting(
    ...     [{"filter": "mlp", "value": 0.7}, {"value": 0.1}], "layers.0.mlp.weight", 0.0
    ... )
    0.7
    """
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value if value is None else check(value)
    if not value:
        return _MISSING
    if isinstance(value[0], Mapping):
        for entry in value:
            # this raises if the key filter is misspelled, which would match every tensor
            unknown_keys("parameter", as_mapping("parameter", entry), ["filter", "value"])
            if "value" not in entry:
                raise RecipeError(f"a parameter's filter entry {dict(entry)!r} has no value")
            if matches(entry.get("filter"), tensor_name):
                return evaluate_setting(entry["value"], tensor_name, depth, check)
        return _MISSING
    if not all(isinstance(v, _SCALARS) for v in value):
        raise RecipeError(f"a parameter's gradient is {list(value)!r}, expected numbers")
    # before interpolation, because YAML reads 1e-5 as text
    values = [check(v) for v in value]
    last = len(values) - 1
    place = depth * last
    left = int(place)
    if any(isinstance(v, (bool, str)) for v in values):  # no interpolation
        return values[left]
    right = min(left + 1, last)
    return check(values[left] + (place - left) * (values[right] - values[left]))


def matches(wanted: object, tensor_name: str) -> bool:
    """Return whether a filter's text is in a tensor's name; None and ``*`` match every name."""
    return wanted in (None, "*") or str(wanted) in tensor_name


def setting(
    levels: Iterable[Mapping[str, object]],
    name: str,
    tensor_name: str,
    depth: float,
    check: Check = _as_it_is,
) -> object:
    """Return parameter ``name`` at the first level that has one for this tensor, else None."""
    for level in levels:
        if name in level:
            value = evaluate_setting(level[name], tensor_name, depth, check)
            # null counts as missing: the next level is looked up
            if value is not _MISSING and value is not None:
                return value
    return None


def settings_for(
    method: MergeMethod,
    name: str,
    depth: float,
    models: Sequence[tuple[Mapping[str, object], str]],
    common: Sequence[Mapping[str, object]],
) -> dict[str, object]:
    """Return a method's arguments for one tensor.

    Args:
        method: The method.
        name: The output tensor's name.
        depth: The tensor's position in the layers, 0 to 1.
        models: Each model's own parameters, and the name that the tensor has there.
        common: Parameters of the slice and of the recipe.

    Raises:
        ValueError: A required value is missing, or one is out of range.
    """
    values: dict[str, object] = {}
    for key, parameter in method.parameters.items():

        def check(value: object, parameter: Parameter = parameter) -> object:
            return parameter.check(value, method.name)

        if parameter.per_model:
            values_of_models = []
            for level, tensor in models:
                # filters match the tensor's name in its own model, since slices renumber layers
                values_of_models.append(setting([level, *common], key, tensor, depth, check))
            # a required parameter is passed without values, too, so that `bind` names the model;
            # any other takes its default
            if parameter.required or values_of_models.count(None) < len(models):
                values[key] = values_of_models
            continue
        value = setting(common, key, name, depth, check)
        if value is not None:
            values[key] = value
    return method.bind(len(models), values)


def _places(recipe: MergeRecipe) -> Iterator[tuple[str, Mapping[str, object], bool]]:
    """Yield a name for each level with parameters, the parameters, and whether it is a model."""
    yield "parameters", recipe.parameters, False
    for entry in recipe.entries():
        yield f"parameters of {model_label(entry.model)}", entry.parameters, True
    for piece in recipe.slices:
        yield "parameters of a slice", piece.parameters, False


def _leaves(value: object) -> Iterator[object]:
    """Yield the plain values in a setting, also those in gradients and filter entries."""
    if isinstance(value, Mapping):
        yield from _leaves(value.get("value"))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value


def check_parameters(recipe: MergeRecipe, method: MergeMethod) -> tuple[list[str], list[str]]:
    """Check the names of all parameters, and all their numbers, before any model is opened.

    Returns:
        Problems, and notes on what has no effect.
    """
    problems = []
    notes = []
    elsewhere = set(_IDLE)
    for other in METHODS.values():
        elsewhere |= other.parameters.keys()
    for where, parameters, of_model in _places(recipe):
        for name, value in parameters.items():
            # published recipes contain other methods' parameters; only a near miss is an error
            if name not in method.parameters and (name in elsewhere or not method.near(name)):
                notes.append(f"{where}: {name} has no effect on {method.name}")
                continue
            try:
                parameter = method.parameter(name)
                for leaf in _leaves(value):
                    parameter.check(leaf, method.name)
            except ValueError as error:
                problems.append(f"{where}: {error}")
                continue
            if of_model and not parameter.per_model:
                lost = parameter.required and not _has_it_elsewhere(recipe, name)
                (problems if lost else notes).append(
                    f"{where}: {name} has no effect at a model; {method.name} takes one {name} for "
                    "all"
                )
    return problems, notes


def _has_it_elsewhere(recipe: MergeRecipe, name: str) -> bool:
    """Return whether a parameter is set in the recipe or a slice, where it has an effect."""
    return any(name in parameters for _, parameters, of_model in _places(recipe) if not of_model)


def idle_filters(recipe: MergeRecipe, names: Collection[str]) -> list[str]:
    """Return a note for each filter that matches no tensor, in the output or in any model."""
    notes = []
    for _, parameters, _ in _places(recipe):
        for key, value in parameters.items():
            for entry in value if isinstance(value, (list, tuple)) else [value]:
                if not isinstance(entry, Mapping):
                    continue
                wanted = entry.get("filter")
                if not any(matches(wanted, name) for name in names):
                    notes.append(f"{key}: filter {wanted!r} is in no tensor's name")
    return notes
