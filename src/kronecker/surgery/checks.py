"""Checks that refuse layers and configs before anything is changed."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from ..config import Config, KroneckerConfig, PruneConfig
from ..discovery.finding import COMPRESSED
from ..layers.experts import is_experts
from ..layers.weights import dense, is_linear


def tied_modules(model: nn.Module) -> dict[str, list[str]]:
    """Return, for each module with a shared weight, the names of the others that share it."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        # from _parameters: `weight` of a compressed layer is computed, and new each time
        weight = module._parameters.get("weight")
        if weight is not None:
            holders.setdefault(id(weight), []).append(name)
    tied: dict[str, list[str]] = {}
    for names in holders.values():
        if len(names) > 1:
            for name in names:
                tied[name] = [n for n in names if n != name]
    return tied


def check_layer(operation: str, name: str, module: nn.Module) -> None:
    """Refuse a layer that cannot be converted."""
    if isinstance(module, COMPRESSED):
        raise ValueError(
            f"{operation}: {name} is compressed already; expected the original model, loaded again"
        )
    parameters = list(module.parameters())
    if any(p.is_meta for p in parameters):
        raise ValueError(f"{operation}: {name} is on the meta device, expected loaded weights")
    if (
        not all(p.is_floating_point() for p in parameters)
        # by names, since the packages that quantize are not imported here
        or hasattr(module, "quant_state")
        or "quant" in type(module).__module__
        or "bnb" in type(module).__module__
    ):
        raise ValueError(
            f"{operation}: {name} is a quantized {type(module).__name__}, expected float weights"
        )
    for p in parameters:
        # a bias may be zero; a matrix of zeros has no best approximation
        if not torch.isfinite(p).all() or (p.dim() > 1 and not p.any()):
            raise ValueError(
                f"{operation}: {name} has a weight that is zero or not finite, expected finite "
                "numbers that are not all zero"
            )


def check_own(operation: str, model: nn.Module, names: Collection[str]) -> None:
    """Refuse layers that cannot be converted, or that share a weight."""
    holders: dict[int, str] = {}
    # every name of a shared weight; by default named_parameters lists only the first
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = holders.setdefault(id(parameter), name)
        # a tied embedding and head are fine: only layers that change must not share weights
        if first != name and any(n.rpartition(".")[0] in names for n in (name, first)):
            raise ValueError(
                f"{operation}: {name} and {first} are one weight; expected layers that share no "
                "weight"
            )
    for name in names:
        check_layer(operation, name, model.get_submodule(name))


def check_config(name: str, module: nn.Module, config: Config, tied: bool) -> None:
    """Refuse a layer that cannot be converted with its config."""
    if is_experts(module) and not isinstance(config, PruneConfig):
        raise ValueError(
            f"convert_: expected PruneConfig for {name}, a stack of experts, got "
            f"{type(config).__name__}"
        )
    if isinstance(config, PruneConfig):
        if tied or not (is_linear(module) or is_experts(module)):
            raise ValueError(
                f"convert_: {name} is tied or not a linear layer; expected PruneConfig for all "
                "layers of an MLP, or a stack of experts"
            )
        if config.chosen_method != "best" or config.size is not None:
            raise ValueError(
                f"convert_: PruneConfig has method {config.chosen_method!r} and size "
                f"{config.size}, expected method 'best' and no size; prune_ takes the others"
            )
        if config.allocate != "uniform":
            raise ValueError(
                f"convert_: allocate is {config.allocate!r}, expected 'uniform'; prune_ allocates "
                "by influence"
            )
        return
    if isinstance(config, KroneckerConfig) and (tied or not is_linear(module)):
        raise ValueError(
            f"convert_: {name}: expected LowRankConfig for a tied layer or an embedding table, got "
            "KroneckerConfig"
        )
    if isinstance(config, KroneckerConfig):
        config.shapes(*dense(module).shape, operation=f"convert_: {name}")
    else:
        config.rank_of(*dense(module).shape, operation=f"convert_: {name}")
