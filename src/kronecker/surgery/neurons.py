"""Find a model's MLPs and stacks of experts, and compute how many hidden neurons each keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from model_components._layers import is_conv1d
from model_components._walk import Batch

from ..config import PruneConfig
from ..discovery.finding import num_parameters, prefixed
from ..discovery.mlps import Mlp, find_mlps
from ..fitting.experts import experts_shapes
from ..layers.experts import GROUPED, is_experts, layout_of
from ..layers.weights import bias_of, dense
from .checks import check_own

_SMOOTHING = 0.1
"""The temperature of the softmax over influences, as in MoDeGPT."""
_MOST_GONE = 0.8
"""The largest share of its neurons that an MLP may lose, unless all MLPs together lose a larger
share. With 0.8, as in our implementation of MoDeGPT, no MLP of SmolLM2 reached this limit."""


@dataclass(frozen=True)
class PrunablePart:
    """An MLP, or a stack of experts, whose hidden neurons are dropped."""

    name: str  # of the MLP's last layer, or of the stack of experts
    modules: tuple[str, ...]
    count: int  # number of hidden neurons
    # returns the shapes of the part's parameters with a given number of hidden neurons
    shapes: Callable[[int], dict[str, torch.Size]]
    mlp: Mlp | None  # None for experts

    def parameters(self, keep: int) -> int:
        """Return the number of the part's parameters with ``keep`` hidden neurons."""
        return sum(shape.numel() for shape in self.shapes(keep).values())

    @property
    def per_neuron(self) -> int:
        """The number of parameters of one hidden neuron."""
        # a difference, since the last layer's bias does not depend on the number of neurons
        return self.parameters(2) - self.parameters(1)


def prunable_parts(model: nn.Module, data: Sequence[Batch]) -> list[PrunablePart]:
    """Return the MLPs and stacks of experts of a model.

    Raises:
        ValueError: There are none, they share weights, or their weights cannot be changed.
    """
    parts = [_mlp_part(model, mlp) for mlp in find_mlps(model, data[0])]
    for name, module in model.named_modules():
        if is_experts(module):
            parts.append(_experts_part(name, module))
    if not parts:
        raise ValueError(f"prune_: expected a model with MLPs, got none in {type(model).__name__}")
    check_own("prune_", model, set(chain.from_iterable(part.modules for part in parts)))
    return parts


def _mlp_part(model: nn.Module, mlp: Mlp) -> PrunablePart:
    count = dense(model.get_submodule(mlp.down)).shape[1]
    return PrunablePart(
        mlp.down, (*mlp.ups, mlp.down), count, lambda keep: _shapes(model, mlp, keep), mlp
    )


def _experts_part(name: str, module: nn.Module) -> PrunablePart:
    def shapes(keep: int) -> dict[str, torch.Size]:
        return prefixed(name, experts_shapes(module, keep).items())

    count = layout_of(module).neurons(module.get_parameter("down_proj").shape)
    return PrunablePart(name, (name,), count, shapes, None)


def neurons_to_keep(
    model: nn.Module, parts: Sequence[PrunablePart], config: PruneConfig
) -> dict[str, int]:
    """Return how many hidden neurons each part keeps if all keep the same fraction."""
    units = _units(parts, config)
    if config.size is None:
        return {p.name: config.neurons(p.count, units[p.name]) for p in parts}
    if config.size == 1:
        return {p.name: p.count for p in parts}
    total = num_parameters(model)
    budget = round(config.size * total)
    neurons = sum(p.per_neuron * p.count for p in parts)
    # the share of parameters that is left with one neuron in every part
    least = (total - neurons + sum(p.per_neuron for p in parts)) / total
    if config.size < least:
        raise ValueError(
            f"prune_: size is {config.size}, expected {rounded_up(least)} to 1, because only MLP "
            f"neurons can be dropped, and they hold {neurons / total:.0%} of the parameters of "
            f"this {type(model).__name__}; to shrink embeddings, call convert_ with LowRankConfig"
        )
    # only hidden neurons are dropped, and every part keeps the same share of them
    share = 1 - (total - budget) / neurons
    keep = {p.name: _rounded_down(share * p.count, p.count, units[p.name]) for p in parts}
    # no part can keep less than one unit, so the size may still be exceeded
    gone = parameters_gone(parts, keep)
    if total - gone > budget:
        least = rounded_up((total - gone) / total)
        raise ValueError(
            f"prune_: size is {config.size}, expected {least} or more, because the number of "
            "neurons is rounded to a multiple (see PruneConfig.multiple_of)"
        )
    return keep


def neurons_by_influence(
    parts: Sequence[PrunablePart],
    budget: int,
    influences: Mapping[str, float],
    config: PruneConfig,
) -> dict[str, int]:
    """Return how many hidden neurons each part keeps, with larger cuts in blocks of low influence.

    The share that a part loses is proportional to the softmax of the negative influences, up to a
    limit (MoDeGPT, arXiv 2408.09632).

    Args:
        parts: The MLPs and stacks of experts.
        budget: How many parameters to drop.
        influences: The influence of each part's block, by the part's name.
        config: The settings, of which only ``multiple_of`` is used.
    """
    units = _units(parts, config)
    sizes = torch.tensor([p.per_neuron * p.count for p in parts], dtype=torch.float64)
    most = max(_MOST_GONE, budget / float(sizes.sum()))
    weights = torch.tensor([-influences[p.name] for p in parts], dtype=torch.float64)
    weights = (weights / _SMOOTHING).softmax(0)
    full = torch.zeros(len(parts), dtype=torch.bool)  # parts that have reached the limit
    gone = torch.zeros_like(weights)
    # each round brings at least one part to the limit, or is the last round
    for _ in parts:
        left = budget - most * sizes[full].sum()
        gone = weights * left / (weights * sizes)[~full].sum()
        gone[full] = most
        if not (gone > most).any():
            break
        full |= gone > most
    wanted = {}
    for part, share in zip(parts, gone.tolist(), strict=True):
        wanted[part.name] = (1 - share) * part.count
    return _rounded_to_budget(parts, wanted, units, budget)


def _rounded_to_budget(
    parts: Sequence[PrunablePart],
    wanted: Mapping[str, float],
    units: Mapping[str, int],
    budget: int,
) -> dict[str, int]:
    """Round neuron counts so that ``budget`` parameters, or slightly more, are dropped in all."""
    found = {p.name: _rounded_down(wanted[p.name], p.count, units[p.name]) for p in parts}
    spare = parameters_gone(parts, found) - budget
    # no part can keep less than one unit, so others may have to lose more
    while spare < 0:
        fewer = {p.name: _rounded_down(found[p.name] - 1, p.count, units[p.name]) for p in parts}
        part = max(
            (p for p in parts if fewer[p.name] < found[p.name]),
            key=lambda p: found[p.name] - wanted[p.name],
        )
        found[part.name] = fewer[part.name]
        spare = parameters_gone(parts, found) - budget
    # restore neurons that were dropped beyond the budget, first in the parts that lost most by
    # rounding
    while True:
        steps = {p.name: min(units[p.name], p.count - found[p.name]) for p in parts}
        fitting = [p for p in parts if 0 < steps[p.name] * p.per_neuron <= spare]
        if not fitting:
            return found
        part = min(fitting, key=lambda p: found[p.name] - wanted[p.name])
        found[part.name] += steps[part.name]
        spare -= steps[part.name] * part.per_neuron


def parameters_gone(parts: Sequence[PrunablePart], keep: Mapping[str, int]) -> int:
    """Return how many parameters are dropped if each part keeps ``keep[name]`` neurons."""
    return sum(p.per_neuron * (p.count - keep[p.name]) for p in parts)


def _units(parts: Sequence[PrunablePart], config: PruneConfig) -> dict[str, int]:
    """Return, for each part, the number that must divide its neuron count."""
    # MLPs and experts of one size share a field of the config, so they need the same rounding
    grouped = {p.count for p in parts if p.mlp is None}
    units = {}
    for part in parts:
        step = GROUPED if part.count in grouped else 1
        units[part.name] = math.lcm(config.multiple_of, step)
    return units


def _rounded_down(neurons: float, count: int, unit: int) -> int:
    """Round down to a multiple of ``unit``, but never below ``min(count, unit)``."""
    # 1e-9 is for quotients that rounding errors put just below a whole number
    return max(min(count, unit), int(neurons / unit + 1e-9) * unit)


def rounded_up(share: float) -> float:
    """Return a share rounded up to three decimal places.

    >>> rounded_up(0.70401)
    0.705
    """
    return math.ceil(1000 * share) / 1000


def _shapes(model: nn.Module, mlp: Mlp, keep: int) -> dict[str, torch.Size]:
    """Return the shapes of an MLP's parameters with ``keep`` hidden neurons."""
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
