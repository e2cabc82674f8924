"""`Surgeon`: masked layers in the place of every module that owns parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from .config import MaskConfig
from .layers import MaskedLayer, Selection, masked_class


class Surgeon:
    """Puts masked layers into a model and remembers whose masks are whose.

    Args:
        config: Of the masks.
        selection: Shared by all layers.
        weights: Initial masks by tensor name, where a recipe gives them.
    """

    def __init__(self, config: MaskConfig, selection: Selection, weights: Callable[[str], Sequence[float]] | None):
        self.config, self.selection, self.weights = config, selection, weights
        self.generator = torch.Generator().manual_seed(config.seed)
        self.layers: dict[str, tuple[MaskedLayer, str]] = {}
        self.raw: dict[str, nn.Parameter] = {}
        self._masks: dict[int, nn.Parameter] = {}  # of a frozen tensor that was met, for ties
        self._made: dict[int, MaskedLayer] = {}

    def replace(self, module: nn.Module, others: Sequence[nn.Module], prefix: str = "") -> None:
        """Replace the children of ``module``, whose counterparts are the children of ``others``."""
        for name, child in list(module.named_children()):
            pairs = [getattr(o, name) for o in others]
            if id(child) in self._made:
                setattr(module, name, self._made[id(child)])
                continue
            path = f"{prefix}{name}."
            self.replace(child, pairs, path)
            if next(child.named_parameters(recurse=False), None) is not None:
                self._made[id(child)] = self.layer(child, pairs, path)
                setattr(module, name, self._made[id(child)])

    def layer(self, first: nn.Module, others: Sequence[nn.Module], prefix: str) -> MaskedLayer:
        """The masked layer over one module and its counterparts."""
        own = dict(first.named_parameters(recurse=False))
        known = {n: self._masks[id(p)] for n, p in own.items() if id(p) in self._masks}
        weights = self.weights
        made = masked_class(first, self.config.mode)(
            [first, *others],
            self.config,
            selection=self.selection,
            masks=known,
            initial=None if weights is None else lambda name: weights(prefix + name),
            generator=self.generator,
        )
        for name, parameter in own.items():
            if name not in known:
                self._masks[id(parameter)] = self.raw[prefix + name] = made.masks[name]
                self.layers[prefix + name] = made, name
        return made
