from .config import KLConfig, MaskConfig
from .constraints import constrain
from .data import CachedTeachers, MaskCollator, TaskMixture, TextExamples, cache_teachers
from .functional import blend, masked_embedding, masked_linear
from .layers import AccurateMaskedLinear, EfficientMaskedLinear, MaskedEmbedding, MaskedLayer
from .losses import mask_penalty, masked_kl
from .merger import Merger
from .report import MaskReport, MaskRow
from .training import MaskTrainer, shard_frozen_

__all__ = [
    "AccurateMaskedLinear",
    "CachedTeachers",
    "EfficientMaskedLinear",
    "KLConfig",
    "MaskCollator",
    "MaskConfig",
    "MaskReport",
    "MaskRow",
    "MaskTrainer",
    "MaskedEmbedding",
    "MaskedLayer",
    "Merger",
    "TaskMixture",
    "TextExamples",
    "blend",
    "cache_teachers",
    "constrain",
    "mask_penalty",
    "masked_embedding",
    "masked_kl",
    "masked_linear",
    "shard_frozen_",
]
