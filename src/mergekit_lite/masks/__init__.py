"""Learned masks: train how to merge models of one architecture, then bake.

It takes the memory of a plain fine-tune.

Every weight of the merged model is ``Σ_k mask_k * W_k``. The components are frozen; the masks
learn, by KL divergence towards the components' own logits.

>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> tiny = GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1)
>>> merger = Merger([GPT2LMHeadModel(tiny), GPT2LMHeadModel(tiny)])
>>> batch = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "task": torch.tensor([0, 1])}
>>> merger(kl=KLConfig(), **batch).loss.backward()
>>> all(mask.grad is not None for mask in merger.masks().values())
True
"""

from .config import KLConfig, MaskConfig
from .constraints import constrain
from .data import CachedTeachers, MaskCollator, TaskMixture, TextExamples, cache_teachers
from .functional import blend, masked_embedding, masked_linear
from .layers import MaskedEmbedding, MaskedLayer, MaskedLinear
from .losses import mask_penalty, masked_kl
from .merger import Merger
from .report import MaskReport, MaskRow
from .training import MaskTrainer, shard_frozen_

__all__ = [
    "CachedTeachers",
    "KLConfig",
    "MaskCollator",
    "MaskConfig",
    "MaskReport",
    "MaskRow",
    "MaskTrainer",
    "MaskedEmbedding",
    "MaskedLayer",
    "MaskedLinear",
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
