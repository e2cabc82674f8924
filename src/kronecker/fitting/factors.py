"""Fit one MLP's matrices together, as Kronecker sums or as products of thin matrices.

First, the matrices that read the MLP's input are initialized on their inputs in the smaller model.
Then the last matrix is initialized to give the MLP's target outputs from the hidden neurons that
the first matrices give. Finally, all matrices are fitted together by gradient descent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import init
from .._eager import build
from ..config import Config, KroneckerConfig, LowRankConfig
from ..discovery.mlps import Mlp
from ..layers.weights import start
from ..moments import Moments
from .descent import descended
from .mlp import Matrix, MlpWeights, Seen
from .neurons import most_important

Configs = Mapping[str, Config]  # by the names of an MLP's layers


def fit_factors(
    mlp: Mlp, weights: MlpWeights, seen: Seen, configs: Configs
) -> tuple[MlpWeights, float]:
    """Fit the factors of an MLP; return them and the squared relative error.

    Args:
        mlp: The MLP's layers.
        weights: The MLP's original weights, with neurons in their original order.
        seen: Statistics of the MLP on calibration tokens, with inputs and targets.
        configs: The settings of each layer by name, all of one type.
    """
    x = torch.cat(seen.inputs)
    target = torch.cat(seen.targets)
    moments = seen.moments
    order = neuron_order(mlp, weights, moments, configs)
    if order is not None:
        weights = weights.on(mlp, order)
        moments = moments.of_inputs(order)
    started = _started(mlp, weights, moments, x, target, configs, sorted_neurons=order is not None)
    # all matrices are fitted by one descent, so the largest number of epochs applies
    epochs = max(c.epochs for c in configs.values())
    if started.middle is None:
        return started, moments.error(started.down_weight, started.down_bias) ** 2
    before = started.error(x, target)
    return descended(started, x, target, epochs, before)


def _started(
    mlp: Mlp,
    weights: MlpWeights,
    seen: Moments,
    x: Tensor,
    target: Tensor,
    configs: Configs,
    *,
    sorted_neurons: bool,
) -> MlpWeights:
    """Return initial factors of each matrix; the last matrix's factors are computed last."""
    is_kronecker = any(isinstance(c, KroneckerConfig) for c in configs.values())
    small = replace(
        weights, ups=[], up_biases=[], build=build if is_kronecker else lambda a, b: b @ a
    )

    def begin(
        name: str, weight: Tensor, bias: Tensor | None, moments: Moments
    ) -> tuple[Matrix, Tensor | None]:
        centered = moments if bias is None else moments.centered()
        matrix = _factors(configs[name], weight, centered, sorted_neurons=sorted_neurons)
        return matrix, None if bias is None else init.correct_bias(
            moments, small.build(*matrix)
        ).float()

    for name, (weight,), bias in zip(mlp.ups, weights.ups, weights.up_biases, strict=True):
        matrix, bias = begin(name, weight, bias, Moments.of(x, weight, bias))
        small.ups.append(matrix)
        small.up_biases.append(bias)
    if small.middle is not None:
        seen = Moments.zeros(*seen.cross.shape, device=target.device)
        for rows, wanted in zip(x.split(2048), target.split(2048), strict=True):
            seen.add(small.hidden(rows), wanted)
    down, bias = begin(mlp.down, weights.down_weight, weights.down_bias, seen)
    return replace(small, down=down, down_bias=bias)


def _factors(config: Config, weight: Tensor, moments: Moments, *, sorted_neurons: bool) -> Matrix:
    """Return factors of a weight, fitted to the moments of its inputs and targets."""
    if isinstance(config, LowRankConfig):
        return init.low_rank(weight, config.rank_of(*weight.shape), moments)
    assert isinstance(config, KroneckerConfig)  # those with `fits_mlps`
    b_shape = config.shapes(*weight.shape)[1]
    # pruning keeps the weights of the important neurons, which come first, unchanged
    if sorted_neurons and config.rank == 1 and b_shape[1] == 1:
        return init.prune(weight, b_shape)[:2]
    return start(weight, b_shape, replace(config, keep="even"), moments)[:2]


def neuron_order(
    mlp: Mlp, weights: MlpWeights, moments: Moments, configs: Configs
) -> Tensor | None:
    """Return an order of hidden neurons with an important neuron first in each row of A.

    With this order, pruning drops the same neurons from all matrices. The order alone does not
    change the MLP's function. Return None if the matrices do not group neurons in the same way.
    """
    group = _group(mlp, weights, configs)
    if group == 1:
        return None
    count = weights.down_weight.shape[1]
    leaders = most_important(weights, moments, count // group)
    others = torch.ones(count, dtype=torch.bool, device=leaders.device)
    others[leaders] = False
    # each leader is followed by the neurons that share its row of A, in their old order
    rest = torch.arange(count, device=leaders.device)[others].view(-1, group - 1)
    return torch.cat([leaders[:, None], rest], 1).flatten()


def _group(mlp: Mlp, weights: MlpWeights, configs: Configs) -> int:
    """Return how many hidden neurons share a row (in the last matrix, a column) of A.

    Return 1 if this number is not the same in all of an MLP's matrices.
    """
    sizes: set[int] = set()
    matrices: Sequence[Tensor] = [*(w for (w,) in weights.ups), weights.down_weight]
    count = weights.down_weight.shape[1]
    for name, weight in zip((*mlp.ups, mlp.down), matrices, strict=True):
        config = configs[name]
        # if gate and up rows alternate, a row of A is shared by the two rows of one neuron
        if not isinstance(config, KroneckerConfig) or mlp.layout == "interleaved":
            return 1
        b_shape = config.shapes(*weight.shape)[1]
        # hidden neurons are columns of the last matrix and rows of the others
        sizes.add(b_shape[1] if name == mlp.down else b_shape[0])
    group = sizes.pop()
    if not sizes and count % group == 0:
        return group
    return 1
