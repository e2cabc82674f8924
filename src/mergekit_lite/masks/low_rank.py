"""One base and K adapters: a component's linear layer is the base's and two thin factors, and no weight of its own.

A masked layer over such components costs the base's product and K thin ones, forward and backward, in the memory of one
model.
"""

from __future__ import annotations

import copy
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..files.adapter import Adapter, Pair
from .layers import MaskedLayer


class LowRankLinear(nn.Module):
    """``x @ (W + scale * up @ down).T + bias``, by the base's W and the factors.

    Args:
        base: Whose weight and bias are shared.
        down: (r, I).
        up: (O, r).
        scale: Of their product.

    >>> layer = LowRankLinear(nn.Linear(4, 3), torch.ones(1, 4), torch.ones(3, 1), 0.5)
    >>> torch.equal(layer.weight, layer.base_weight + 0.5)
    True
    """

    def __init__(self, base: nn.Linear, down: Tensor, up: Tensor, scale: float):
        super().__init__()
        self.base_weight, self.bias, self.scale = base.weight, base.bias, scale
        self.down = nn.Parameter(down.to(base.weight), requires_grad=False)
        self.up = nn.Parameter(up.to(base.weight), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The whole weight, built anew."""
        return torch.addmm(self.base_weight, self.up, self.down, alpha=self.scale).detach()

    def change(self, x: Tensor) -> Tensor:  # (*B, I) → (*B, O)
        """What the adapter adds to the base's product."""
        return F.linear(F.linear(x, self.down), self.up) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """The component's own layer."""
        return F.linear(x, self.base_weight, self.bias) + self.change(x)


class LowRankMaskedLinear(MaskedLayer):
    """A base `nn.Linear`, K `LowRankLinear` over it, and masks over their changes: ``x @ W.T + Σ change_k(m_k x)``.

    Output and scalar masks multiply what a change gives. Equal to `AccurateMaskedLinear` but for rounding.

    >>> base = nn.Linear(4, 3)
    >>> adapted = LowRankLinear(base, torch.ones(1, 4), torch.ones(3, 1), 0.5)
    >>> LowRankMaskedLinear([adapted], base=base)(torch.zeros(5, 4)).shape
    torch.Size([5, 3])
    """

    def run(self, x: Tensor) -> Tensor:
        """The base's product, and the masked changes."""
        total, masks = self.plain(x), self.mask("weight").to(x.dtype)
        for k, component in enumerate(self.components[:-1]):
            if not isinstance(component, LowRankLinear):
                continue  # an adapter that leaves this layer alone
            mask = masks[k]
            if mask.shape[0] > 1:
                total = total + component.change(x) * mask[:, 0]
            else:
                total = total + component.change(x * mask[0])
        return total


def adapted_layers(model: PreTrainedModel, adapter: Adapter) -> dict[str, Pair] | None:
    """The factors of an adapter by the model's names of modules; None where it changes more than `nn.Linear` weights.

    Args:
        model: What it is an adapter of.
        adapter: Its factors.
    """
    prefix, modules, found = f"{model.base_model_prefix}.", dict(model.named_modules()), {}
    for name, pair in adapter.pairs.items():
        own = next((n for n in (name, f"{prefix}{name}", name.removeprefix(prefix)) if n in modules), None)
        layer = modules.get(own or "")
        if own is None or type(layer) is not nn.Linear or pair.embedding:
            return None
        if (pair.up.shape[0], pair.down.shape[1]) != tuple(layer.weight.shape):
            return None  # who folds it in says so
        found[own] = pair
    return None if adapter.replaced else found


def with_adapter(base: PreTrainedModel, adapter: Adapter) -> PreTrainedModel | None:
    """The base's weights, shared, in a model whose adapted layers are `LowRankLinear`; None as `adapted_layers`.

    Args:
        base: The model.
        adapter: Of it.
    """
    pairs = adapted_layers(base, adapter)
    if pairs is None:
        return None
    model = copy.deepcopy(base, {id(t): t for t in chain(base.parameters(), base.buffers())})
    for name, pair in pairs.items():
        parent, _, last = name.rpartition(".")
        layer, factors = model.get_submodule(name), (torch.from_numpy(pair.down), torch.from_numpy(pair.up))
        assert isinstance(layer, nn.Linear)
        setattr(model.get_submodule(parent), last, LowRankLinear(layer, *factors, pair.scale))
    return model


def has_factors(model: nn.Module) -> bool:
    """Whether a model is a base with an adapter's factors beside it."""
    return any(isinstance(module, LowRankLinear) for module in model.modules())
