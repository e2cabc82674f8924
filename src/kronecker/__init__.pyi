from .config import KroneckerConfig, LowRankConfig, PruneConfig
from .data.text import text_batches, text_of
from .discovery.finding import num_parameters
from .functional import kron_linear
from .layers.embedding import LowRankEmbedding
from .layers.linear import KroneckerLinear, LowRankLinear
from .losses import DistillConfig
from .presets import PRESETS
from .report import compare, perplexity
from .storage.checkpoints import fold, from_pretrained, save_pretrained
from .surgery.convert import convert_
from .surgery.prune import prune_
from .surgery.revert import revert_
from .training.callbacks import FreezePretrained
from .training.trainer import KroneckerTrainer

__version__: str

__all__ = [
    "PRESETS",
    "DistillConfig",
    "FreezePretrained",
    "KroneckerConfig",
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
    "kron_linear",
    "num_parameters",
    "perplexity",
    "prune_",
    "revert_",
    "save_pretrained",
    "text_batches",
    "text_of",
]
