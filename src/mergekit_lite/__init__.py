"""Merge several checkpoints into one, by formula, one tensor at a time.

>>> import torch, mergekit_lite
>>> models = [{"w": torch.zeros(2)}, {"w": torch.ones(2)}]
>>> mergekit_lite.merge_models(models, method="linear", weight=[1, 3], progress=False)
{'w': tensor([0.7500, 0.7500])}
"""

from model_components import __version__ as __version__
from model_components._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
