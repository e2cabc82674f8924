"""`revert_`: turn compressed layers into dense layers again."""

from __future__ import annotations

import torch
from torch import nn

from ..discovery.finding import put
from ..layers.linear import SmallerLinear
from ..storage.checkpoints import compressed, dense_again, own_saving_


@torch.no_grad()
def revert_(model: nn.Module) -> list[str]:
    """Replace compressed layers by stock dense layers that compute the same function, in place.

    This does not restore the original weights. Tied layers stay tied.

    Args:
        model: A model with compressed layers.

    Returns:
        The names of the replaced layers.

    Raises:
        ValueError: No layer is compressed, or the model itself is a compressed layer.

    >>> from kronecker import KroneckerConfig, convert_
    >>> model = nn.Sequential(nn.Linear(4, 6))
    >>> config = KroneckerConfig(b_shape=(2, 1), init="van_loan")
    >>> _ = convert_(model, config, filter_fn=lambda module, name: True)
    >>> revert_(model), model[0]
    (['0'], Linear(in_features=4, out_features=6, bias=True))
    """
    layers = compressed(model)
    if not layers:
        raise ValueError(
            f"revert_: expected a model with compressed layers, got none in {type(model).__name__}"
        )
    if "" in layers:
        raise ValueError(
            f"revert_: the model is a single {type(model).__name__}, expected a model that "
            "contains the layer; for one layer, call its to_linear or to_embedding"
        )
    for name, layer in dense_again(layers):
        old = layers[name]
        layer.train(old.training)
        if isinstance(old, SmallerLinear):
            # the bias itself and not a copy, since BERT ties its decoder's bias to another module's
            layer.register_parameter("bias", old.bias)
        factors = [p for n, p in old.named_parameters(recurse=False) if n != "bias"]
        trains = any(factor.requires_grad for factor in factors)
        layer.get_parameter("weight").requires_grad_(trains)
        put(model, name, layer)
    own_saving_(model)
    return list(layers)
