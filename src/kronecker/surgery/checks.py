"""Checks of layers and configs, which raise errors before anything is changed."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from ..config import Config, LowRankConfig
from ..discovery.finding import COMPRESSED
from ..layers.weights import dense, is_linear


def tied_modules(model: nn.Module) -> dict[str, list[str]]:
    """Return, for each module with a shared weight, the names of the modules that also have it."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        # from _parameters, since the property `weight` of a compressed layer computes a new tensor
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
    """Raise a ValueError if a layer cannot be converted with any config."""
    if isinstance(module, COMPRESSED):
        raise ValueError(
            f"{operation}: {name} is already compressed; load the original model again and use that"
        )
    parameters = list(module.parameters())
    if any(p.is_meta for p in parameters):
        raise ValueError(f"{operation}: {name} is on the meta device, expected loaded weights")
    if (
        not all(p.is_floating_point() for p in parameters)
        # recognized by names, since packages for quantization are not imported here
        or hasattr(module, "quant_state")
        or "quant" in type(module).__module__
        or "bnb" in type(module).__module__
    ):
        raise ValueError(
            f"{operation}: {name} is a quantized {type(module).__name__}, expected float weights"
        )
    for key, p in module.named_parameters():
        # a bias may be zero; a matrix of zeros has no best approximation
        if not torch.isfinite(p).all() or not (key.endswith("bias") or p.any()):
            raise ValueError(
                f"{operation}: {name} has a weight that is all zeros or not finite, expected "
                "finite numbers that are not all zero"
            )


def check_own(operation: str, model: nn.Module, names: Collection[str]) -> None:
    """Raise a ValueError if a layer cannot be converted, or shares a weight with another layer."""
    holders: dict[int, str] = {}
    # with every name of a shared weight; by default, named_parameters lists only the first
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = holders.setdefault(id(parameter), name)
        # a tied embedding and head are allowed: only layers that change must not share weights
        if first != name and any(n.rpartition(".")[0] in names for n in (name, first)):
            raise ValueError(
                f"{operation}: {name} and {first} are the same parameter, expected layers that "
                "share no weight"
            )
    for name in names:
        check_layer(operation, name, model.get_submodule(name))


def check_config(name: str, module: nn.Module, config: Config, tied: bool) -> None:
    """Raise a ValueError if a layer cannot be converted with its config."""
    if not isinstance(config, LowRankConfig) and (tied or not is_linear(module)):
        raise ValueError(
            f"convert_: expected LowRankConfig for {name}, which is tied or an embedding table, "
            f"got {type(config).__name__}"
        )
    config.check(*dense(module).shape, operation=f"convert_: {name}")
