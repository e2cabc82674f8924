from .config import KLConfig, MaskConfig
from .data import MaskCollator, TaskMixture, TextExamples, cache_teachers
from .functional import blend, masked_embedding, masked_linear
from .layers import MaskedEmbedding, MaskedLayer
from .losses import masked_kl
from .merger import Merger
from .training import MaskTrainer, shard_frozen_

__all__ = [
    "KLConfig",
    "MaskCollator",
    "MaskConfig",
    "MaskTrainer",
    "MaskedEmbedding",
    "MaskedLayer",
    "Merger",
    "TaskMixture",
    "TextExamples",
    "blend",
    "cache_teachers",
    "masked_embedding",
    "masked_kl",
    "masked_linear",
    "shard_frozen_",
]
