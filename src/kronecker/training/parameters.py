"""Parameter groups: the factors, their scales, and the other (pretrained) parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..discovery.finding import COMPRESSED

Group = dict[str, Any]
"""A parameter group of an optimizer: ``params``, ``name``, ``lr``, ``weight_decay``."""


def factor_parameters(model: nn.Module) -> set[int]:
    """Return the ``id()`` of each factor and each scale parameter."""
    ids = set()
    for module in model.modules():
        if isinstance(module, COMPRESSED):
            own = module.named_parameters(recurse=False)
            ids.update(id(p) for name, p in own if name != "bias")
    return ids


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    pretrained_learning_rate: float | None = None,
    weight_decay: float = 0.1,
) -> list[dict[str, object]]:
    """Return optimizer groups for factors, their scales and all other parameters.

    Weight decay applies to factors only.

    Args:
        model: A model. If it has no compressed layers, all parameters are in the group
            "pretrained".
        learning_rate: The learning rate of factors and scales.
        pretrained_learning_rate: The learning rate of the other parameters; default:
            ``learning_rate``. With 0, there is no group for the other parameters.
        weight_decay: The weight decay of the factors.

    Returns:
        Parameter groups for a torch optimizer, each with a ``name``. Empty groups are left out.

    >>> from kronecker import KroneckerConfig, KroneckerLinear
    >>> layer = KroneckerLinear(4, 6, b_shape=(2, 1))
    >>> [(g["name"], len(g["params"])) for g in parameter_groups(layer, learning_rate=1e-3)]
    [('factors', 2), ('pretrained', 1)]
    """
    factors = factor_parameters(model)
    groups: dict[str, Group] = {}
    for module in model.modules():
        if not isinstance(module, COMPRESSED):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in factors:
                continue
            if name.endswith("scales"):
                key = "scales"
                # a scale sets the norm of a term: decay would pull the whole term toward zero
                decay = 0.0
            else:
                key = "factors"
                decay = weight_decay
            group = groups.setdefault(
                key, {"name": key, "params": [], "lr": learning_rate, "weight_decay": decay}
            )
            # tied factors occur twice; `in` would compare values instead of identities
            if not any(parameter is p for p in group["params"]):
                group["params"].append(parameter)
    filled = list(groups.values())
    if pretrained_learning_rate is None:
        rate = learning_rate
    else:
        rate = pretrained_learning_rate
    rest = [p for p in model.parameters() if id(p) not in factors]
    if rate > 0 and rest:
        filled.append({"name": "pretrained", "params": rest, "lr": rate, "weight_decay": 0.0})
    return filled


def group_kind(group: Group) -> str:
    """Return the kind of an optimizer's group: ``factors``, ``scales`` or ``pretrained``."""
    # if the user passes an optimizer, its groups may have no names
    return group.get("name", "pretrained")
