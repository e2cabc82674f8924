"""`Surgeon`: replace every module that owns parameters with a masked layer."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from model_components._layers import is_conv1d

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

_LINEAR: dict[Mode, type[MaskedLinear]] = {
    "accurate": AccurateMaskedLinear,
    "efficient": EfficientMaskedLinear,
    "auto": MaskedLinear,
}


def masked_class(module: nn.Module, mode: Mode = "accurate") -> type[MaskedLayer]:
    """Return the class of the masked layer that replaces a stock layer with parameters."""
    # compare forward methods, because a subclass that overrides forward must keep its own
    if type(module).forward is nn.Linear.forward or is_conv1d(module):
        return _LINEAR[mode]
    if isinstance(module, nn.Embedding):
        # OPT's position embedding adds an offset in forward, so its forward must be kept
        plain = type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
        # with max_norm, forward also rewrites rows, which a gather would not do
        if plain and module.max_norm is None and not module.scale_grad_by_freq:
            return MaskedEmbedding
    if isinstance(module, nn.RNNBase):
        raise ValueError(
            f"Merger: expected no recurrent layers, got {type(module).__name__}, which keeps its "
            "weights in a flat copy that masks cannot change"
        )
    return MaskedLayer


class Surgeon:
    """A tool that puts masked layers into a model and records each weight's layer and mask.

    Args:
        config: The settings of the masks.
        selection: The selection that all layers share.
        over_base: Whether the model that is changed is the base. Masks then apply to the other
            models' differences from the base.
    """

    def __init__(
        self,
        config: MaskConfig,
        selection: Selection,
        *,
        over_base: bool = False,
    ):
        self.config = config
        self.selection = selection
        self.over_base = over_base
        # one generator for all layers, because otherwise layers of one shape get the same masks
        self.generator = torch.Generator().manual_seed(config.seed)
        self.layers: dict[str, tuple[MaskedLayer, str]] = {}
        self.raw: dict[str, nn.Parameter] = {}
        # by the id of the frozen tensor, so that tied weights share a mask
        self._masks: dict[int, nn.Parameter] = {}
        self._replacements: dict[int, MaskedLayer] = {}  # by the id of the module that was replaced

    def replace(self, module: nn.Module, others: Sequence[nn.Module], prefix: str = "") -> None:
        """Replace all submodules of ``module`` that own parameters with masked layers.

        Each masked layer merges a submodule and its counterparts in ``others``.
        """
        # `named_children` would leave out the second name of a module with two names
        for name, child in list(module._modules.items()):
            if child is None:
                continue
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
        """Return whether the masks of a module are trained."""
        patterns = self.config.modules
        # fnmatch would ignore case on some systems
        return patterns is None or any(fnmatchcase(module, pattern) for pattern in patterns)

    def layer(self, first: nn.Module, others: Sequence[nn.Module], prefix: str) -> MaskedLayer:
        """Return the masked layer that merges one module and its counterparts."""
        thin = are_thin(others, first)
        kind = LowRankMaskedLinear if thin else masked_class(first, self.config.mode)
        layer = kind(
            others if self.over_base else [first, *others],
            granularity=self.config.granularity,
            constraint=self.config.constraint,
            initial=self.config.initial,
            base=first if self.over_base else None,
            generator=self.generator,
            strict=False,  # the merger has already compared the models
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
