"""Learned masks: train the coefficients of a merge, then write it as an ordinary checkpoint.

Every weight of the merged model is ``Σ_k mask_k * W_k``, and all models have one architecture. The
components are frozen, and the masks are trained by KL divergence towards the components' own
logits. A training step takes about as much memory as in a plain fine-tune.

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
