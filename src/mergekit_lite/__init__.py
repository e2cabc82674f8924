"""Merge several checkpoints into one: by formula, streaming, in constant memory.

>>> import torch, mergekit_lite
>>> models = [{"w": torch.zeros(2)}, {"w": torch.ones(2)}]
>>> mergekit_lite.merge_models(models, method="linear", weight=[1, 3], progress=False)
{'w': tensor([0.7500, 0.7500])}
"""

import lazy_loader

from model_components import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
