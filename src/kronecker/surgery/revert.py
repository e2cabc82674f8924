"""`revert_`: compressed layers become dense layers again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..layers.experts import KroneckerExperts
from ..layers.linear import SmallerLinear
from ..storage import own_saving_
from .finding import COMPRESSED, put


@torch.no_grad()
def revert_(model: nn.Module) -> list[str]:
    """Replace compressed layers by dense ones of the stock kind, with the same function, in place.

    What compression lost stays lost: the originals are gone. Tied layers stay tied.

    Returns:
        The names of the layers.

    Raises:
        ValueError: There is nothing to revert.

    >>> from kronecker import KroneckerConfig, convert_
    >>> model = nn.Sequential(nn.Linear(4, 6))
    >>> config = KroneckerConfig(b_shape=(2, 1), init="van_loan")
    >>> _ = convert_(model, config, filter_fn=lambda name, module: True)
    >>> revert_(model), model[0]
    (['0'], Linear(in_features=4, out_features=6, bias=True))
    """
    compressed = {n: m for n, m in model.named_modules() if isinstance(m, COMPRESSED)}
    if not compressed:
        raise ValueError(f"revert_: {type(model).__name__} has no compressed layer")
    if any(isinstance(m, SmallerLinear) and m.original is not None for m in compressed.values()):
        raise ValueError("revert_: a layer still runs its original; train on, or end it with fade_in_(None)")
    weights: dict[int, nn.Parameter] = {}
    for name, module in compressed.items():
        if isinstance(module, KroneckerExperts):
            put(model, name, module.to_experts())
            continue
        dense_layer: Any = module.to_linear() if isinstance(module, SmallerLinear) else module.to_embedding()
        dense_layer.weight = weights.setdefault(id(module.a), dense_layer.weight)
        put(model, name, dense_layer)
    own_saving_(model)
    return list(compressed)
