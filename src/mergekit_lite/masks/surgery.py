"""`Surgeon`: masked layers in the place of every module that owns parameters.

Masks may begin as a recipe says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from model_components._layers import is_conv1d

from ..planning import make_plan
from ..recipe import load_recipe, model_key
from .config import MaskConfig, Mode
from .layers import (
    AccurateMaskedLinear,
    EfficientMaskedLinear,
    MaskedEmbedding,
    MaskedLayer,
    MaskedLinear,
    Selection,
)
from .low_rank import LowRankMaskedLinear, are_thin

_METHODS = ("linear", "task_arithmetic")


_LINEAR: dict[Mode, type[MaskedLinear]] = {
    "accurate": AccurateMaskedLinear,
    "efficient": EfficientMaskedLinear,
    "auto": MaskedLinear,
}


def masked_class(module: nn.Module, mode: Mode = "accurate") -> type[MaskedLayer]:
    """Return the class of masked layers for a stock layer that owns parameters."""
    if type(module).forward is nn.Linear.forward or is_conv1d(module):
        return _LINEAR[mode]
    if isinstance(module, nn.Embedding):
        plain = type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
        if plain and module.max_norm is None and not module.scale_grad_by_freq:
            return MaskedEmbedding
    if isinstance(module, nn.RNNBase):
        raise ValueError(
            f"Merger: {type(module).__name__} keeps its weights in a flat copy, which masks cannot "
            "reach"
        )
    return MaskedLayer


class Surgeon:
    """Puts masked layers into a model and remembers whose masks are whose.

    Args:
        config: Of the masks.
        selection: Shared by all layers.
        weights: Initial masks by tensor name, where a recipe gives them.
        over_base: Masks lie over differences from the model that is changed, which is no component.
    """

    def __init__(
        self,
        config: MaskConfig,
        selection: Selection,
        weights: Callable[[str], Sequence[float]] | None = None,
        *,
        over_base: bool = False,
    ):
        self.config = config
        self.selection = selection
        self.weights = weights
        self.over_base = over_base
        self.generator = torch.Generator().manual_seed(config.seed)
        self.layers: dict[str, tuple[MaskedLayer, str]] = {}
        self.raw: dict[str, nn.Parameter] = {}
        # by the id of the frozen tensor: tied weights share a mask
        self._masks: dict[int, nn.Parameter] = {}
        self._replacements: dict[int, MaskedLayer] = {}  # by the id of the module that was replaced

    def replace(self, module: nn.Module, others: Sequence[nn.Module], prefix: str = "") -> None:
        """Replace the children of ``module``, whose counterparts are the children of ``others``."""
        for name, child in list(module.named_children()):
            pairs = [getattr(o, name) for o in others]
            if id(child) in self._replacements:
                setattr(module, name, self._replacements[id(child)])
                continue
            path = f"{prefix}{name}."
            self.replace(child, pairs, path)
            if next(child.named_parameters(recurse=False), None) is not None:
                self._replacements[id(child)] = self.layer(child, pairs, path)
                setattr(module, name, self._replacements[id(child)])

    def trains(self, module: str) -> bool:
        """Return whether the masks over a module are trained."""
        patterns = self.config.modules
        return patterns is None or any(fnmatchcase(module, pattern) for pattern in patterns)

    def layer(self, first: nn.Module, others: Sequence[nn.Module], prefix: str) -> MaskedLayer:
        """Return the masked layer over one module and its counterparts."""
        initial: Any = self.config.initial
        if self.weights is not None:
            names = [name for name, _ in first.named_parameters(recurse=False)]
            initial = {name: self.weights(prefix + name) for name in names}
        thin = are_thin(others, first)
        kind = LowRankMaskedLinear if thin else masked_class(first, self.config.mode)
        layer = kind(
            others if self.over_base else [first, *others],
            granularity=self.config.granularity,
            constraint=self.config.constraint,
            initial=initial,
            base=first if self.over_base else None,
            generator=self.generator,
            strict=False,  # the merger has compared the models
        )
        layer.selection = self.selection
        if not self.trains(prefix.removesuffix(".")):
            layer.masks.requires_grad_(False)
        for name, parameter in first.named_parameters(recurse=False):
            known = self._masks.setdefault(id(parameter), layer.masks[name])
            if known is layer.masks[name]:
                self.raw[prefix + name] = known
                self.layers[prefix + name] = layer, name
            else:
                layer.masks[name] = known  # a tied weight
        return layer


def recipe_weights(
    path: str, labels: Sequence[str], *, over_base: bool = False
) -> Callable[[str], Sequence[float]]:
    """From a tensor's name to each component's weight in a recipe.

    Args:
        path: YAML of a `linear` or `task_arithmetic` merge, gradients and filters included. Its
            models, and its base, are among the components.
        labels: The components, as the recipe names them.
        over_base: The last label is the base; its weight must be 1 minus the sum of the others, and
            is left out.

    Raises:
        ValueError: Another method, or models that are no components.
    """
    recipe = load_recipe(path)
    if recipe.merge_method not in _METHODS:
        raise ValueError(
            f"{path}: masks cannot begin as {recipe.merge_method}; expected {' or '.join(_METHODS)}"
        )
    plan = make_plan(recipe)
    keys = [model_key(label) for label in labels]
    if unknown := [s.label for s in plan.sources if model_key(s.label) not in keys]:
        raise ValueError(f"{path}: {unknown[0]} is not among the components {', '.join(labels)}")
    places = [keys.index(model_key(s.label)) for s in plan.sources]
    weights_of: dict[str, list[float]] = {}
    for t in plan.tensors:
        if t.method is None:
            continue
        entry_weights = t.parameters["weight"]
        scale = t.parameters.get("lambda_", 1.0) / (
            sum(entry_weights) if t.parameters["normalize"] else 1.0
        )
        weights = [0.0] * len(labels)
        for source, weight in zip(t.inputs, entry_weights, strict=True):
            weights[places[source.source]] += weight * scale
        if t.base is not None:
            weights[places[t.base.source]] += 1 - sum(w * scale for w in entry_weights)
        weights_of[t.name] = weights

    def lookup(name: str) -> Sequence[float]:
        if name not in weights_of:
            raise ValueError(f"{path}: has no tensor {name}, whose mask was to begin from it")
        weights = weights_of[name]
        if over_base and abs(sum(weights) - 1) > 1e-6:
            raise ValueError(
                f"{path}: weights of {name} sum to {sum(weights):g}; over a base expected 1, the "
                "base's included"
            )
        return weights[:-1] if over_base else weights

    return lookup
