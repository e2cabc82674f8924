"""Layers with smaller weights, which replace dense layers."""

from torch import nn

from ..config import KroneckerConfig, LowRankConfig
from .embedding import LowRankEmbedding
from .linear import KroneckerLinear, LowRankLinear


def empty_layer(module: nn.Module, config: KroneckerConfig | LowRankConfig) -> nn.Module:
    """Return the smaller layer, with uninitialized factors, that replaces a stock layer.

    A linear layer's bias is copied.
    """
    if isinstance(config, KroneckerConfig):
        return KroneckerLinear.like(module, config)
    if isinstance(module, nn.Embedding):
        return LowRankEmbedding.like(module, config)
    return LowRankLinear.like(module, config)
