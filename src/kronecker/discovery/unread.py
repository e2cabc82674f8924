"""Find the smallest stock model that computes the same function as a given model.

The smallest model drops the hidden neurons that no weight reads. A stock config has one size for
all layers, so the layer that needs the most neurons sets the size, and the other layers are padded
with zeros.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from model_components._layers import is_conv1d

from ..layers.experts import GROUPED, experts_layout
from .finding import prefixed
from .mlps import LAYOUTS, Mlp
from .stock import empty, parameter_shapes, stock_config


@dataclass(frozen=True)
class _Hidden:
    """The parameters that write or read hidden neurons, each with the dimension of the neurons."""

    writes: tuple[tuple[str, int], ...]
    reads: tuple[str, int]
    layout: str
    unit: int = 1  # the number of neurons must be a multiple of this

    def read_neurons(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the neurons whose column in the reading weight is not zero, in their order."""
        name, dim = self.reads
        # all experts of a stack have one size, so a neuron counts as read if any expert reads it
        return torch.nonzero(state[name].movedim(dim, 0).flatten(1).any(1)).flatten()

    def count(self, tensors: Mapping[str, Tensor] | Mapping[str, torch.Size]) -> int:
        """Return the number of hidden neurons."""
        name, dim = self.reads
        weight = tensors[name]
        return (weight.shape if isinstance(weight, Tensor) else weight)[dim]

    def resized(self, state: Mapping[str, Tensor], keep: int) -> dict[str, Tensor]:
        """Return the parameters resized to ``keep`` hidden neurons.

        All neurons that are read are kept. If there are fewer than ``keep``, other neurons are kept
        too, all in their old order. If there are still fewer, zeros are added at the end.
        """
        count = self.count(state)
        read = self.read_neurons(state)
        unread = torch.ones(count, dtype=torch.bool, device=read.device)
        unread[read] = False
        spare = torch.nonzero(unread).flatten()[: max(0, keep - len(read))]
        # in their old order, so that a model that loses no neuron keeps its weights unchanged
        neurons = torch.cat([read, spare]).sort().values
        # neuron 0 stands in for missing neurons, and its copies are set to zero below
        filled = torch.cat([neurons, neurons.new_zeros(keep - len(neurons))])
        zeros = torch.arange(len(neurons), keep, device=read.device)

        def taken(name: str, dim: int, layout: str) -> Tensor:
            rows = LAYOUTS[layout](filled, count)
            blank = LAYOUTS[layout](zeros, keep)
            return state[name].index_select(dim, rows).index_fill(dim, blank, 0)

        resized = {}
        for name, dim in self.writes:
            resized[name] = taken(name, dim, self.layout)
        name, dim = self.reads
        resized[name] = taken(name, dim, "plain")
        return resized


def smallest_stock(
    model: PreTrainedModel, mlps: Sequence[Mlp], state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], PretrainedConfig]:
    """Return the state dict and config of the smallest stock model with the same function.

    Args:
        model: The model. Its layers may be smaller than its config describes.
        mlps: The model's MLPs.
        state: The model's dense weights, by their names in a stock model.

    Raises:
        ValueError: A layer that is in none of the MLPs is smaller than the config describes.
    """
    stock_model = empty(type(model), model.config)
    stock = parameter_shapes(stock_model)
    hidden = [*(_of_mlp(stock_model, mlp) for mlp in mlps), *_of_experts(model)]
    sizes = _smallest_sizes(hidden, stock, state)
    smaller = {before: keep for before, keep in sizes.items() if keep < before}
    config = copy.deepcopy(model.config)
    if smaller:
        shapes = dict(stock)
        for part in hidden:
            for name, tensor in part.resized(state, sizes[part.count(stock)]).items():
                shapes[name] = tensor.shape
        try:
            config = stock_config(type(model), model.config, shapes, smaller)
        except ValueError:  # the config has no field for this size
            # such as Bloom, whose hidden size is always 4 times the width: pad its layers instead
            sizes = dict(zip(sizes, sizes, strict=True))
    for part in hidden:
        state = {**state, **part.resized(state, sizes[part.count(stock)])}
    if config.to_dict() == model.config.to_dict():
        shapes = stock
    else:
        shapes = parameter_shapes(empty(type(model), config))
    if wrong := next((n for n, s in shapes.items() if n in state and state[n].shape != s), None):
        raise ValueError(
            f"fold: {wrong} belongs to a pruned MLP that can be found only by running the model; "
            f"expected batch= with arguments to run {type(model).__name__}"
        )
    return dict(state), config


def _smallest_sizes(
    hidden: Sequence[_Hidden], stock: Mapping[str, torch.Size], state: Mapping[str, Tensor]
) -> dict[int, int]:
    """Map each hidden size of the stock model to the smallest size that all its layers can have."""
    sizes: dict[int, int] = {}
    for before in {part.count(stock) for part in hidden}:  # layers of one size share a config field
        alike = [part for part in hidden if part.count(stock) == before]
        unit = math.lcm(*(part.unit for part in alike))
        needed = max(1, *(len(part.read_neurons(state)) for part in alike))
        sizes[before] = min(before, -(-needed // unit) * unit)
    return sizes


def _of_mlp(model: nn.Module, mlp: Mlp) -> _Hidden:
    # the dimension of a weight that holds its outputs: GPT-2's Conv1D stores (in, out)
    def rows(name: str) -> int:
        if is_conv1d(model.get_submodule(name)):
            return 1
        return 0

    writes = []
    for name in mlp.ups:
        writes.append((f"{name}.weight", rows(name)))
        if getattr(model.get_submodule(name), "bias", None) is not None:
            writes.append((f"{name}.bias", 0))
    return _Hidden(tuple(writes), (f"{mlp.down}.weight", 1 - rows(mlp.down)), mlp.layout)


def _of_experts(model: nn.Module) -> list[_Hidden]:
    hidden = []
    for name, module in model.named_modules():
        if layout := experts_layout(module):
            dims = prefixed(name, layout.neuron_dims.items())
            read = f"{name}.down_proj", dims.pop(f"{name}.down_proj")
            hidden.append(_Hidden(tuple(dims.items()), read, layout.rows, GROUPED))
    return hidden
