"""Make pretrained models smaller: fewer neurons, low rank or Kronecker sums.

They are fitted to data, then trained back.

`prune_` drops hidden neurons, fits the rest to make up for them and leaves a stock model. With
`convert_` weights become products of thin matrices, or ``Σ_r s_r A_r ⊗ B_r``, sums of Kronecker
products. `KroneckerTrainer` trains smaller models back; `fold` writes a stock checkpoint.

>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1))
>>> report = prune_(
...     model, PruneConfig(keep=0.5), calibration=[torch.tensor([[1, 2, 3]])], progress=False
... )
>>> model.config.n_inner, report.after < report.before
(8, True)
"""

from model_components import __version__ as __version__

from .config import KroneckerConfig, LowRankConfig, PruneConfig
from .data.text import strided, text_batches, text_of
from .functional import kron_embedding, kron_linear
from .layers.embedding import KroneckerEmbedding, LowRankEmbedding
from .layers.linear import KroneckerLinear, LowRankLinear
from .losses import DistillConfig
from .presets import PRESETS
from .report import compare, perplexity
from .storage.checkpoints import fold, from_pretrained, save_pretrained
from .surgery.convert import convert_, num_parameters
from .surgery.prune import prune_
from .surgery.revert import revert_
from .training.callbacks import FadeIn, FreezePretrained
from .training.parameters import parameter_groups
from .training.trainer import KroneckerTrainer

__all__ = [
    "PRESETS",
    "DistillConfig",
    "FadeIn",
    "FreezePretrained",
    "KroneckerConfig",
    "KroneckerEmbedding",
    "KroneckerLinear",
    "KroneckerTrainer",
    "LowRankConfig",
    "LowRankEmbedding",
    "LowRankLinear",
    "PruneConfig",
    "compare",
    "convert_",
    "fold",
    "from_pretrained",
    "kron_embedding",
    "kron_linear",
    "num_parameters",
    "parameter_groups",
    "perplexity",
    "prune_",
    "revert_",
    "save_pretrained",
    "strided",
    "text_batches",
    "text_of",
]
