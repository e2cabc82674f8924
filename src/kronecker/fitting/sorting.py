"""The hidden neurons of an MLP in another order: which matter, and both matrices permuted, which changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..config import KroneckerConfig
from ..init import Moments
from ..layers.linear import dense
from ..surgery.mlps import Mlp


def permuted(linear: nn.Module, order: Tensor, *, rows: bool) -> nn.Module:
    """A copy of a linear layer with its outputs (and bias) or its inputs in another order."""
    weight = dense(linear)
    bias = getattr(linear, "bias", None)
    weight = weight[order] if rows else weight[:, order]
    o, i = weight.shape
    if isinstance(linear, Conv1D):
        made: nn.Module = Conv1D(1, 1)
        made.nf, made.nx = o, i  # pyrefly: ignore
        weight = weight.T
    else:
        made = nn.Linear(i, o, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach()[order] if rows else bias.detach().clone())
    return made.train(linear.training)


def importance(weight: Tensor, hidden: Moments) -> Tensor:
    """What an MLP loses with each hidden neuron, when the others make up for it as well as they can.

    ‖w_j‖² / (C⁻¹)_jj: the columns of the weight (H, I) that reads the neurons, and the covariance C of the neurons
    (optimal brain surgeon; Hassibi and Stork 1993).
    """
    seen = hidden.centred()
    return weight.double().cpu().square().sum(0) / torch.linalg.inv(seen.damped() / max(1, hidden.count)).diagonal()


def neuron_order(importance: Tensor, group: int) -> Tensor:
    """An order of hidden neurons in which each group of ``group`` begins with one of the most important.

    >>> neuron_order(torch.tensor([1.0, 4.0, 3.0, 2.0]), 2)
    tensor([1, 3, 2, 0])
    """
    return importance.argsort(descending=True, stable=True).view(group, -1).T.reshape(-1)


def group_of(mlp: Mlp, configs: Mapping[str, KroneckerConfig], modules: Mapping[str, nn.Module]) -> int:
    """How many hidden neurons share a row of A, in both of an MLP's matrices; 1 where they do not agree."""
    sizes = set()
    if any(dense(modules[n]).shape[0] != dense(modules[mlp.down]).shape[1] for n in mlp.ups if n in modules):
        return 1  # gate and up in one matrix
    for name in (*mlp.ups, mlp.down):
        if name not in configs:
            return 1  # its neurons could be permuted too, but nothing would be gained
        rows, columns = dense(modules[name]).shape
        b = configs[name].shapes(rows, columns)[1]
        sizes.add(b[1] if name == mlp.down else b[0])
    return sizes.pop() if len(sizes) == 1 else 1
