"""Learned masks: train how to merge models of one architecture, then bake.

It takes the memory of a plain fine-tune.

Every weight of the merged model is ``Σ_k mask_k * W_k``. The components are frozen; the masks
learn, by KL divergence towards the components' own logits.

>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> from mergekit_lite.masks import KLConfig, Merger
>>> tiny = GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1)
>>> merger = Merger([GPT2LMHeadModel(tiny), GPT2LMHeadModel(tiny)])
>>> batch = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "task": torch.tensor([0, 1])}
>>> merger(kl=KLConfig(), **batch).loss.backward()
>>> all(mask.grad is not None for mask in merger.masks().values())
True
"""

from model_components._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
