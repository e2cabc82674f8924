"""Make pretrained models smaller: fewer neurons, low rank or Kronecker sums.

The smaller weights are fitted to calibration data and can then be trained.

`prune_` drops hidden neurons and fits the remaining ones to compensate. The result is a stock
model: an ordinary transformers model of the same family. `convert_` replaces weights by products of
two thin matrices or by sums of Kronecker products, ``Σ_r s_r A_r ⊗ B_r``. `KroneckerTrainer` trains
smaller models. `fold` writes a stock checkpoint.

>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> from kronecker import PruneConfig, prune_
>>> model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1))
>>> report = prune_(
...     model, PruneConfig(keep=0.5), calibration=[torch.tensor([[1, 2, 3]])], progress=False
... )
>>> model.config.n_inner, report.after < report.before
(8, True)
"""

from model_components import __version__ as __version__
from model_components._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
