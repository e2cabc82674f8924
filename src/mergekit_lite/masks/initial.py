"""Masks that begin as a static merge: the weights of a `linear` or `task_arithmetic` recipe, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..planning import make_plan
from ..recipe import load_recipe, model_key

_METHODS = ("linear", "task_arithmetic")


def recipe_weights(path: str, labels: Sequence[str]) -> Callable[[str], Sequence[float]]:
    """From a tensor's name to each component's weight in a recipe.

    Args:
        path: YAML of a `linear` or `task_arithmetic` merge, gradients and filters included. Its models, and its base,
            are among the components.
        labels: The components, as the recipe names them.

    Raises:
        ValueError: Another method, or models that are no components.
    """
    recipe = load_recipe(path)
    if recipe.merge_method not in _METHODS:
        raise ValueError(f"{path}: masks cannot begin as {recipe.merge_method}; needed {' or '.join(_METHODS)}")
    plan = make_plan(recipe)
    keys = [model_key(label) for label in labels]
    if unknown := [s.label for s in plan.sources if model_key(s.label) not in keys]:
        raise ValueError(f"{path}: {unknown[0]} is not among the components {', '.join(labels)}")
    places = [keys.index(model_key(s.label)) for s in plan.sources]
    found: dict[str, list[float]] = {}
    for t in plan.tensors:
        if t.method is None:
            continue
        given = t.parameters["weight"]
        scale = t.parameters.get("lambda_", 1.0) / (sum(given) if t.parameters["normalize"] else 1.0)
        weights = [0.0] * len(labels)
        for source, weight in zip(t.inputs, given, strict=True):
            weights[places[source.source]] += weight * scale
        if t.base is not None:
            weights[places[t.base.source]] += 1 - sum(w * scale for w in given)
        found[t.name] = weights

    def lookup(name: str) -> Sequence[float]:
        if name not in found:
            raise ValueError(f"{path}: has no tensor {name}, whose mask was to begin from it")
        return found[name]

    return lookup
