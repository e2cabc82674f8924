"""Choose which hidden neurons of one MLP to keep, and fit their weights to replace the others.

Letters: H the model's width; I hidden neurons; O outputs.
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

# the ridge for choosing neurons; with the larger ridge of the fit, neurons that others could
# replace would be kept
_RIDGE = 1e-3


def normal_equations(weights: MlpWeights, moments: Moments, ridge: float) -> tuple[Tensor, Tensor]:
    """Return E[h hᵀ] and E[t hᵀ] of hidden neurons h and targets t, centered if there is a bias.

    Both include a ridge that pulls toward the old weight. ``ridge`` is a fraction of the mean
    second moment of the hidden neurons.
    """
    n = max(1, moments.count)
    # relative to the second moments before centering, or to 1.0 if these are 0
    ridge = ridge * (float(moments.inputs.diagonal().mean()) / n or 1.0)
    if weights.down_bias is not None:  # the bias corrects the mean
        moments = moments.centered()
    moment = moments.inputs / n
    moment.diagonal().add_(ridge)
    return moment, moments.cross / n + ridge * weights.down_weight.double()


def most_important(weights: MlpWeights, moments: Moments, keep: int) -> Tensor:
    """Return the indices of the ``keep`` most important hidden neurons, in ascending order.

    These are the neurons that the other neurons could replace least well.
    """
    moment, cross = normal_equations(weights, moments, _RIDGE)
    # measured once: twice or half as many neurons per step changed SmolLM2's loss by .003 or .012
    # nats
    return eliminate(cross, moment, keep, step=max(1, len(moment) // 24))


def fit_neurons(
    mlp: Mlp, weights: MlpWeights, seen: Seen, keep: int, config: PruneConfig
) -> tuple[MlpWeights, float]:
    """Return an MLP's weights with only the best ``keep`` hidden neurons, and its squared error.

    The error is relative to the squared targets.

    Args:
        mlp: The MLP's layers.
        weights: The MLP's original weights.
        seen: Statistics of the MLP on calibration tokens.
        keep: Number of hidden neurons to keep.
        config: The settings, of which the method, ``epochs`` and ``ridge`` are used.
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
    """Return ``small`` with its last matrix and last bias fitted in closed form."""
    # an expert that no token has reached keeps the weights of the chosen neurons unchanged
    if not moments.count:
        return small
    moment, cross = normal_equations(weights, moments, config.ridge)
    down = refitted(cross, moment, kept).float()
    bias = small.down_bias
    if bias is not None:
        bias = correct_bias(moments.of_inputs(kept), down).float()
    return replace(small, down=(down,), down_bias=bias)
