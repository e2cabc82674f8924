"""Hidden neurons that can go.

The MLPs and stacks of experts of a model, and how many of theirs stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from model_components._layers import is_conv1d
from model_components._walk import Batch

from ..config import PruneConfig
from ..discovery.mlps import Mlp, find_mlps
from ..fitting.experts import experts_shapes
from ..layers.experts import GROUPED, is_experts, layout_of
from ..layers.weights import bias_of, dense
from .checks import check_own
from .convert import num_parameters


@dataclass(frozen=True)
class PrunablePart:
    """An MLP, or a stack of experts, whose hidden neurons are dropped."""

    name: str  # of the layer that writes the block's width, or of the stack
    modules: tuple[str, ...]
    count: int  # hidden neurons
    shapes: Callable[[int], dict[str, torch.Size]]  # of its parameters, with so many
    mlp: Mlp | None  # None: experts

    def parameters(self, keep: int) -> int:
        """Count its parameters with so many hidden neurons."""
        return sum(shape.numel() for shape in self.shapes(keep).values())


def prunable_parts(model: nn.Module, data: Sequence[Batch]) -> list[PrunablePart]:
    """The MLPs and stacks of experts of a model.

    Raises:
        ValueError: There are none, or they share weights, or have such as cannot be changed.
    """
    parts = [_mlp_part(model, mlp) for mlp in find_mlps(model, data[0])]
    for name, module in model.named_modules():
        if is_experts(module):
            parts.append(_experts_part(name, module))
    if not parts:
        raise ValueError(f"prune_: no MLP is found in {type(model).__name__}")
    members = {n for p in parts for n in p.modules}
    check_own("prune_", model, members)
    return parts


def _mlp_part(model: nn.Module, mlp: Mlp) -> PrunablePart:
    count = dense(model.get_submodule(mlp.down)).shape[1]
    return PrunablePart(
        mlp.down, (*mlp.ups, mlp.down), count, lambda keep: _shapes(model, mlp, keep), mlp
    )


def _experts_part(name: str, module: nn.Module) -> PrunablePart:
    def shapes(keep: int) -> dict[str, torch.Size]:
        return {f"{name}.{n}": shape for n, shape in experts_shapes(module, keep).items()}

    count = layout_of(module).neurons(module.get_parameter("down_proj").shape)
    return PrunablePart(name, (name,), count, shapes, None)


def neurons_to_keep(
    model: nn.Module, parts: Sequence[PrunablePart], config: PruneConfig
) -> dict[str, int]:
    """Return how many hidden neurons each part keeps."""
    # layers of one size have one field in a config
    grouped = {p.count for p in parts if p.mlp is None}
    units = {
        p.name: math.lcm(config.multiple_of, GROUPED if p.count in grouped else 1) for p in parts
    }
    if config.size is None:
        return {p.name: config.neurons(p.count, units[p.name]) for p in parts}
    if config.size == 1:
        return {p.name: p.count for p in parts}
    total = num_parameters(model)
    budget = round(config.size * total)
    # a difference: biases of the block's width do not depend on the number of neurons
    per_neuron = {p.name: p.parameters(2) - p.parameters(1) for p in parts}
    neurons = sum(per_neuron[p.name] * p.count for p in parts)
    # with one neuron in every part
    least = (total - neurons + sum(per_neuron.values())) / total
    if config.size < least:
        raise ValueError(
            f"prune_: size is {config.size}, expected {rounded_up(least)} to 1 for "
            f"{type(model).__name__}"
        )
    # all that goes is hidden neurons: every part keeps the same share of them
    share = 1 - (total - budget) / neurons
    keep: dict[str, int] = {}
    for part in parts:
        unit = units[part.name]
        fewest = min(part.count, unit)
        # rounded down, so that the size holds; 1e-9 keeps a whole number that came out just below
        keep[part.name] = max(fewest, int(share * part.count / unit + 1e-9) * unit)
    # a part of one unit cannot go lower, so the size may still be missed
    gone = sum(per_neuron[p.name] * (p.count - keep[p.name]) for p in parts)
    if total - gone > budget:
        least = rounded_up((total - gone) / total)
        raise ValueError(
            f"prune_: size is {config.size}, expected {least} or more with neurons rounded as they "
            "are"
        )
    return keep


def rounded_up(share: float) -> float:
    """Return a share with three digits that is not below it.

    >>> rounded_up(0.70401)
    0.705
    """
    return math.ceil(1000 * share) / 1000


def _shapes(model: nn.Module, mlp: Mlp, keep: int) -> dict[str, torch.Size]:
    """The shapes of an MLP's parameters with ``keep`` hidden neurons."""
    shapes: dict[str, torch.Size] = {}
    rows = len(mlp.rows(torch.arange(keep), keep))
    for name in (*mlp.ups, mlp.down):
        module = model.get_submodule(name)
        outputs, inputs = dense(module).shape
        matrix = (outputs, keep) if name == mlp.down else (rows, inputs)
        shapes[f"{name}.weight"] = torch.Size(matrix[::-1] if is_conv1d(module) else matrix)
        if bias_of(module) is not None:
            shapes[f"{name}.bias"] = torch.Size(matrix[:1])
    return shapes
