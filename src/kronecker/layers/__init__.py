"""Modules that hold smaller weights in a dense layer's place."""

from torch import nn

from ..config import KroneckerConfig, LowRankConfig
from .embedding import LowRankEmbedding
from .linear import KroneckerLinear, LowRankLinear


def empty_layer(module: nn.Module, config: KroneckerConfig | LowRankConfig) -> nn.Module:
    """The smaller layer that a config makes of a stock one, without its weights.

    A linear layer's bias goes with it.
    """
    if isinstance(config, KroneckerConfig):
        return KroneckerLinear.like(module, config)
    if isinstance(module, nn.Embedding):
        return LowRankEmbedding.like(module, config)
    return LowRankLinear.like(module, config)
