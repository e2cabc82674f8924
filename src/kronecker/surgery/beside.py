"""A copy of the original linear layer, which is faded out beside its replacement."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from model_components._layers import is_conv1d

from ..discovery.finding import HOOKS
from ..discovery.mlps import Mlp
from ..layers.weights import bias_of, dense


def beside(
    linear: nn.Module, name: str, mlp: Mlp | None = None, order: Tensor | None = None
) -> nn.Module:
    """Return a copy of a linear layer, without hooks, to run beside its replacement.

    The copy's hidden neurons are in the same order as the replacement's.
    """
    alone = copy.copy(linear)
    if mlp is not None and order is not None:
        # the replacement's hidden neurons may be reordered; outputs can be mixed only in one order
        rows = name != mlp.down
        alone = permuted(linear, mlp.rows(order, len(order)) if rows else order, rows=rows)
    for hooks in HOOKS:  # no hooks, since they already run on the replacement
        setattr(alone, hooks, type(getattr(linear, hooks))())
    return alone


def permuted(linear: nn.Module, order: Tensor, *, rows: bool) -> nn.Module:
    """Return a copy of a linear layer with its outputs (and bias) or inputs in another order."""
    weight = dense(linear)
    bias = bias_of(linear)
    weight = weight[order] if rows else weight[:, order]
    other = copy.copy(linear)
    # copy.copy shares this dictionary, so a new weight would also replace the original's weight
    other._parameters = dict(linear._parameters)
    other.weight = nn.Parameter((weight.T if is_conv1d(linear) else weight).contiguous())
    if bias is not None and rows:
        other.bias = nn.Parameter(bias[order])
    return other
