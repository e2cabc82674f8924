"""Evaluate a recipe's parameters for one tensor.

A parameter is given as a plain value, a gradient over layers, or filters by tensor name.

Its value is looked up from the most specific level to the least specific: the model or the slice's
source, the slice, the recipe. A parameter with one value for all models has no effect at the level
of a single model, as in mergekit.
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
# parameters that mergekit accepts and that do not change the result
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
        depth: The position of the tensor's layer, from 0 (first layer) to 1 (last layer), at which
            gradients are evaluated; 0 outside the layers.
        check: A function that converts a plain value to the parameter's type.

    Returns:
        The value, or ``_MISSING`` if no filter matches or ``value`` is an empty list.

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
            # raises an error if the key filter is misspelled, because every tensor would match an
            # entry without this key
            unknown_keys("parameter", as_mapping("parameter", entry), ["filter", "value"])
            if "value" not in entry:
                raise RecipeError(
                    f"parameter: expected a value in each filter entry, got {dict(entry)!r}"
                )
            if matches(entry.get("filter"), tensor_name):
                return evaluate_setting(entry["value"], tensor_name, depth, check)
        return _MISSING
    if not all(isinstance(v, _SCALARS) for v in value):
        raise RecipeError(f"parameter: expected a gradient of numbers, got {list(value)!r}")
    # check before the interpolation, because YAML reads 1e-5 as a string
    values = [check(v) for v in value]
    last = len(values) - 1
    place = depth * last
    left = int(place)
    if any(isinstance(v, (bool, str)) for v in values):  # no interpolation
        return values[left]
    right = min(left + 1, last)
    return check(values[left] + (place - left) * (values[right] - values[left]))


def matches(wanted: object, tensor_name: str) -> bool:
    """Return whether a tensor's name contains a filter's text; None and ``*`` match every name."""
    return wanted in (None, "*") or str(wanted) in tensor_name


def setting(
    levels: Iterable[Mapping[str, object]],
    name: str,
    tensor_name: str,
    depth: float,
    check: Check = _as_it_is,
) -> object:
    """Return parameter ``name`` from the first level with a value for this tensor, or None."""
    for level in levels:
        if name in level:
            value = evaluate_setting(level[name], tensor_name, depth, check)
            # null counts as missing, so the next level is looked up
            if value is not _MISSING and value is not None:
                return value
    return None


def settings_for(
    method: MergeMethod,
    name: str,
    depth: float,
    models: Sequence[tuple[Mapping[str, object], str, str]],
    common: Sequence[Mapping[str, object]],
) -> dict[str, object]:
    """Return a method's arguments for one tensor.

    Args:
        method: The method.
        name: The output tensor's name.
        depth: The position of the tensor's layer, from 0 to 1.
        models: Each model's own parameters, the name that the tensor has in that model, and the
            model's name for messages.
        common: The parameters of the slice, if any, and then the recipe's parameters.

    Raises:
        ValueError: A required value is missing, or a value is invalid.
    """
    values: dict[str, object] = {}
    for key, parameter in method.parameters.items():

        def check(value: object, parameter: Parameter = parameter) -> object:
            return parameter.check(value, method.name)

        if parameter.per_model:
            values_of_models = []
            for level, tensor, label in models:
                # filters match the tensor's name in its own model, since slices renumber layers
                value = setting([level, *common], key, tensor, depth, check)
                if value is None and parameter.required:
                    raise _without_value(method, key, [level, *common], label)
                values_of_models.append(value)
            # without any value, the parameter takes its default
            if values_of_models.count(None) < len(models):
                values[key] = values_of_models
            continue
        value = setting(common, key, name, depth, check)
        if value is not None:
            values[key] = value
        elif parameter.required:
            raise _without_value(method, key, common, "the recipe")
    return method.bind(len(models), values)


def _without_value(
    method: MergeMethod, key: str, levels: Iterable[Mapping[str, object]], owner: str
) -> ValueError:
    """Return the error for a required parameter that has no value for a tensor.

    The message does not name the tensor, so that it is equal for all tensors and listed once.
    """
    what = f"{method.name}: parameter {key!r} is required, but {owner} has no value for it"
    if any(level.get(key) is not None for level in levels):
        what += " in tensors that no filter matches; add an entry without a filter"
    return ValueError(what)


def _places(recipe: MergeRecipe) -> Iterator[tuple[str, Mapping[str, object], bool]]:
    """Yield each parameter mapping of a recipe, with its name and whether it belongs to a model."""
    yield "parameters", recipe.parameters, False
    for entry in recipe.entries():
        yield f"parameters of {model_label(entry.model)}", entry.parameters, True
    for piece in recipe.slices:
        yield "parameters of a slice", piece.parameters, False


def _leaves(value: object) -> Iterator[object]:
    """Yield the plain values in a setting, including those in gradients and filter entries."""
    if isinstance(value, Mapping):
        yield from _leaves(value.get("value"))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value


def check_parameters(recipe: MergeRecipe, method: MergeMethod) -> tuple[list[str], list[str]]:
    """Check the names and values of all parameters, before any model is opened.

    Returns:
        Problems, and notes on parameters that have no effect.
    """
    problems = []
    notes = []
    elsewhere = set(_IDLE)
    for other in METHODS.values():
        elsewhere |= other.parameters.keys()
    for where, parameters, of_model in _places(recipe):
        for name, value in parameters.items():
            # published recipes contain other methods' parameters; only a misspelling is an error
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
                    f"{where}: {name} has no effect on a single model; {method.name} takes one "
                    f"{name} for all models"
                )
    return problems, notes


def _has_it_elsewhere(recipe: MergeRecipe, name: str) -> bool:
    """Return whether a parameter is also set in the recipe or a slice, so that it has an effect."""
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
                    notes.append(f"{key}: filter {wanted!r} matches no tensor's name")
    return notes
