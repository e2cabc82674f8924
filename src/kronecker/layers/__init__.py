"""Layers with smaller weights, which replace dense layers."""

from torch import nn

from ..config import Config, LowRankConfig
from .embedding import LowRankEmbedding
from .linear import linear_of


def empty_layer(module: nn.Module, config: Config) -> nn.Module:
    """Return the smaller layer, with uninitialized factors, that replaces a stock layer.

    A linear layer's bias is copied.
    """
    if isinstance(module, nn.Embedding):
        assert isinstance(config, LowRankConfig)
        return LowRankEmbedding.like(module, config)
    return linear_of(config).like(module, config)
