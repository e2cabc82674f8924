"""Fewer hidden neurons of one MLP: which stay, and the weights that make up for the others.

Letters: H the block's width; I hidden neurons; O outputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..config import PruneConfig
from ..discovery.mlps import Mlp
from ..init import correct_bias
from ..moments import Moments
from .descent import descended
from .elimination import eliminate, refitted
from .mlp import MlpWeights, Seen

# to choose neurons; with the fit's larger ridge, neurons that others could replace would be kept
_RIDGE = 1e-3


def normal_equations(weights: MlpWeights, moments: Moments, ridge: float) -> tuple[Tensor, Tensor]:
    """E[h hᵀ] and E[t hᵀ] of hidden neurons and wanted outputs, around means where there is a bias.

    With a ridge, a share of the mean second moment, that pulls towards the weight as it was.
    """
    n = max(1, moments.count)
    # by the raw size of inputs, before centring; 1.0 where no token was seen
    ridge = ridge * (float(moments.inputs.diagonal().mean()) / n or 1.0)
    if weights.down_bias is not None:  # it takes care of means
        moments = moments.centered()
    moment = moments.inputs / n
    moment.diagonal().add_(ridge)
    return moment, moments.cross / n + ridge * weights.down_weight.double()


def most_important(weights: MlpWeights, moments: Moments, keep: int) -> Tensor:
    """Return the ``keep`` hidden neurons, in their order, that matter most.

    Without them the others could not make up for the loss.
    """
    moment, cross = normal_equations(weights, moments, _RIDGE)
    # tried once: twice as many at a time, or half, moved the loss of SmolLM2 by .003 and .012 nats
    return eliminate(cross, moment, keep, step=max(1, len(moment) // 24))


def fit_neurons(
    mlp: Mlp, weights: MlpWeights, seen: Seen, keep: int, config: PruneConfig
) -> tuple[MlpWeights, float]:
    """The best ``keep`` hidden neurons and their weights.

    With them comes the relative error that they leave, squared.

    Args:
        mlp: Its layers.
        weights: Before.
        seen: Over calibration tokens.
        keep: Number of hidden neurons that stay.
        config: ``method``, ``epochs`` and ``ridge``.
    """
    chosen = most_important(weights, seen.moments, keep)
    small = _with_writing_matrix(weights.on(mlp, chosen), weights, seen.moments, chosen, config)
    error = seen.moments.of_inputs(chosen).error(small.down_weight, small.down_bias) ** 2
    if not config.descends or not seen.moments.count or small.middle is None:
        return small, error
    x, target = torch.cat(seen.inputs), torch.cat(seen.targets)
    return descended(small, x, target, config.epochs, error)


def _with_writing_matrix(
    small: MlpWeights, weights: MlpWeights, moments: Moments, kept: Tensor, config: PruneConfig
) -> MlpWeights:
    """Return the kept neurons with the best matrix and bias that read them, in closed form."""
    # an expert that no token reached keeps its largest neurons as they are
    if not moments.count:
        return small
    moment, cross = normal_equations(weights, moments, config.ridge)
    down = refitted(cross, moment, kept).float()
    bias = small.down_bias
    if bias is not None:
        bias = correct_bias(moments.of_inputs(kept), down).float()
    return replace(small, down=(down,), down_bias=bias)
