"""Modules that hold smaller weights in a dense layer's place."""

from torch import nn

from ..config import KroneckerConfig, LowRankConfig
from .embedding import KroneckerEmbedding, LowRankEmbedding
from .linear import KroneckerLinear, LowRankLinear


def empty_layer(module: nn.Module, config: KroneckerConfig | LowRankConfig) -> nn.Module:
    """The smaller layer that a config makes of a stock one, without its weights.

    A linear layer's bias goes with it.
    """
    is_kronecker = isinstance(config, KroneckerConfig)
    if isinstance(module, nn.Embedding):
        return (KroneckerEmbedding if is_kronecker else LowRankEmbedding).like(module, config)
    return (KroneckerLinear if is_kronecker else LowRankLinear).like(module, config)
