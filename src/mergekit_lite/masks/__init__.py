"""Learned masks: train the coefficients of a merge, then write the merged model as a checkpoint.

The models to merge, called components, have one architecture and are frozen. Every weight of the
merged model is ``Σ_k mask_k * W_k``. The masks are trained to minimize the KL divergence between
the merged model's predictions and the components' predictions. A training step takes about as much
memory as a step of plain fine-tuning.

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
