"""Gradient descent on the error of one MLP, for all of its matrices together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .mlp import MlpWeights

_SIZED = 2048  # number of tokens from which step sizes are computed
_BATCH = 512  # number of tokens per step
_STEP = 0.015  # size of a step, as a fraction of a matrix's standard deviation


def descended(
    weights: MlpWeights, x: Tensor, target: Tensor, epochs: int, before: float
) -> tuple[MlpWeights, float]:
    """Return the MLP's weights after descent on |target - y|², and their squared relative error.

    If the error does not fall below ``before``, which is the error of the given weights, return the
    given weights and this error.
    """
    if not epochs:
        return weights, before
    moved = _moved(weights, x, target, epochs)
    after = moved.error(x, target)
    # if the error became NaN, the comparison is false, so the given weights are kept
    if after < before:
        return (moved, after)
    return (weights, before)


@torch.enable_grad()
def _moved(weights: MlpWeights, x: Tensor, target: Tensor, epochs: int) -> MlpWeights:
    """Train all weights of an MLP with Adam, with a rate that falls to zero, and return them.

    A step moves a matrix by a fraction of its standard deviation, and a bias by a fraction of the
    standard deviation of the outputs to which it is added, so that no learning rate has to be
    chosen for each model. The order of tokens comes from a separate generator with a fixed seed, so
    that equal calls give equal weights.
    """
    sizes = weights.sizes(x[:_SIZED])
    parameters = [t.clone().requires_grad_() for t in weights.parameters()]
    weights = weights.with_parameters(parameters)
    groups = [{"params": [t], "lr": 0.0, "size": s} for t, s in zip(parameters, sizes, strict=True)]
    # the learning rates are set in every step below, from the sizes that the groups hold;
    # fused=True, since the loop over tensors takes four times as long on a CPU
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(0)
    batch = min(_BATCH, len(x))
    chunks: list[Tensor] = []
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator).to(x.device)
        # a short last batch is left out, since its few tokens would count more than others
        chunks += order[: len(x) // batch * batch].split(batch)
    for step, rows in enumerate(chunks):
        loss = (weights(x[rows]) - target[rows]).square().mean()
        for group in optimizer.param_groups:
            group["lr"] = _STEP * group["size"] * 0.5 * (1 + math.cos(math.pi * step / len(chunks)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for t in parameters:
        t.requires_grad_(False)
    return weights
