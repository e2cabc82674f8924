"""Masked layers over one base and K LoRA adapters.

A component's linear layer shares the base's weight and adds the product of two low-rank factors. A
masked layer over such components computes the base's product and K low-rank products, forward and
backward. All components together take about the memory of one model.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..files.adapter import Adapter, Pair
from .layers import MaskedLayer


class LowRankLinear(nn.Module):
    """A linear layer ``x @ (W + scale * up @ down).T + bias`` with the base's W and bias.

    Args:
        base: The layer whose weight and bias are shared.
        down: The factor that is applied first, (r, I).
        up: The factor that is applied second, (O, r).
        scale: The number by which the factors' product is multiplied.

    >>> layer = LowRankLinear(nn.Linear(4, 3), torch.ones(1, 4), torch.ones(3, 1), 0.5)
    >>> torch.equal(layer.weight, layer.base_weight + 0.5)
    True
    """

    def __init__(self, base: nn.Linear, down: Tensor, up: Tensor, scale: float):
        super().__init__()
        self.base_weight = base.weight
        self.bias = base.bias
        self.scale = scale
        self.down = nn.Parameter(down.to(base.weight), requires_grad=False)
        self.up = nn.Parameter(up.to(base.weight), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The full weight, which is computed on each access."""
        return (self.base_weight + self.weight_delta()).to(self.base_weight.dtype).detach()

    def weight_delta(self) -> Tensor:
        """Return the change that the adapter adds to the base's weight, in float32 or better."""
        work = torch.promote_types(self.up.dtype, torch.float32)
        return (self.up.to(work) @ self.down.to(work)) * self.scale

    def change(self, x: Tensor) -> Tensor:  # (*B, I) → (*B, O)
        """Return the change that the adapter adds to the base's output."""
        return F.linear(F.linear(x, self.down), self.up) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the base's output plus the adapter's change."""
        return F.linear(x, self.base_weight, self.bias) + self.change(x)


class LowRankMaskedLinear(MaskedLayer):
    """A base `nn.Linear` plus the changes of K `LowRankLinear`, each multiplied by a mask.

    It computes ``x @ W.T + bias + Σ change_k(m_k x)``. Output masks multiply the output of a
    change, and all other masks multiply its input. Except for rounding, the result equals the
    result of `MaskedLinear`.

    >>> base = nn.Linear(4, 3)
    >>> adapted = LowRankLinear(base, torch.ones(1, 4), torch.ones(3, 1), 0.5)
    >>> LowRankMaskedLinear([adapted], base=base)(torch.zeros(5, 4)).shape
    torch.Size([5, 3])
    """

    def _check_settings(self) -> None:
        """Skip this check, because components may have another class than the base."""

    def run(self, x: Tensor) -> Tensor:
        """Return the base's output plus the masked changes."""
        total = self.plain(x)
        masks = self.mask("weight").to(x.dtype)
        for k, component in enumerate(self.components[:-1]):
            if not isinstance(component, LowRankLinear):
                continue  # this component does not change the layer
            mask = masks[k]
            if mask.shape[0] > 1:
                total = total + component.change(x) * mask[:, 0]
            else:
                total = total + component.change(x * mask[0])
        return total

    def merged(self, name: str) -> Tensor:
        """Return a merged parameter.

        The weight is summed in float32 or better and rounded once. The full weights of the
        components are not built.
        """
        if name != "weight":
            return super().merged(name)
        masks = self.mask(name)
        total = self.plain.get_parameter(name)
        rounded = total.dtype
        total = total.to(torch.promote_types(total.dtype, torch.float32))
        # the base is the last component, and its mask is not used
        for mask, component in zip(masks, self.components[:-1], strict=False):
            if isinstance(component, LowRankLinear):
                total = total + mask * component.weight_delta()
        return total.to(rounded)


def are_thin(components: Sequence[nn.Module], base: nn.Module) -> bool:
    """Return whether each component is the base's layer or adapts it, and at least one adapts it.

    Args:
        components: The components' layers under one module name.
        base: The base's layer under the same name.
    """
    base_parameters = dict(base.named_parameters(recurse=False))
    unchanged = [
        all(getattr(c, name, None) is p for name, p in base_parameters.items()) for c in components
    ]
    adapted = [isinstance(c, LowRankLinear) for c in components]
    return any(adapted) and all(a or same for a, same in zip(adapted, unchanged, strict=True))


def adapted_layers(model: PreTrainedModel, adapter: Adapter) -> dict[str, Pair] | None:
    """Return an adapter's nonzero factors by module name, or None if it has to be folded in.

    The adapter has to be folded in if it changes anything but untied weights of `nn.Linear`.

    Args:
        model: The model that the adapter belongs to.
        adapter: The adapter.
    """
    prefix = f"{model.base_model_prefix}."
    modules = dict(model.named_modules())
    found = {}
    owners = Counter(
        id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)
    )
    for name, pair in adapter.pairs.items():
        # peft's names have the prefix only if peft wrapped the model including its head
        target = next(
            (n for n in (name, f"{prefix}{name}", name.removeprefix(prefix)) if n in modules), None
        )
        layer = modules.get(target or "")
        if (
            target is None
            or type(layer) is not nn.Linear
            or pair.embedding
            # factors of a tied head would not reach the embedding
            or owners[id(layer.weight)] > 1
        ):
            return None
        if (pair.up.shape[0], pair.down.shape[1]) != tuple(layer.weight.shape):
            return None  # folding the adapter in raises an error that names the shapes
        # B is initialized to 0, so factors that were never trained leave the layer unchanged
        if pair.up.any() and pair.down.any():
            found[target] = pair
    return None if adapter.replaced else found


def with_adapter(base: PreTrainedModel, adapter: Adapter) -> PreTrainedModel | None:
    """Return a model that shares the base's weights, with adapted layers as `LowRankLinear`.

    Return None if the adapter has to be folded in; see `adapted_layers`.

    Args:
        base: The base.
        adapter: An adapter of the base.
    """
    pairs = adapted_layers(base, adapter)
    if pairs is None:
        return None
    # with all tensors in the memo, deepcopy copies only modules
    model = copy.deepcopy(base, {id(t): t for t in chain(base.parameters(), base.buffers())})
    for name, pair in pairs.items():
        parent, _, last = name.rpartition(".")
        layer = model.get_submodule(name)
        factors = (torch.from_numpy(pair.down), torch.from_numpy(pair.up))
        assert isinstance(layer, nn.Linear)
        setattr(model.get_submodule(parent), last, LowRankLinear(layer, *factors, pair.scale))
    return model


def has_factors(model: nn.Module) -> bool:
    """Return whether a model has layers with an adapter's factors."""
    return any(isinstance(module, LowRankLinear) for module in model.modules())
