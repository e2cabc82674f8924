"""Which of two answers is better: a head on an encoder or a language model, exactly fair, without a wasted token.

What functions return, and the definitions of links and losses, are in the modules: ``heads.pairwise.functional``, ...
"""

from .baselines import baseline_verdicts
from .collate import PairwiseCollator, PairwiseDataset
from .config import PairwiseConfig
from .freeze import freeze_, parameter_groups
from .guard import DeadRunError, DeadRunGuard
from .inference import bradley_terry, predict_pairs
from .links import PairwiseHead
from .metrics import pairwise_metrics
from .model import PairwiseModel
from .packing import check_packing
from .pairs import Pair, Turn, split_pairs
from .report import calibrate_, pairwise_report
from .reward import PairwiseForSequenceClassification
from .rows import read_pairs
from .training import PairwiseTrainer

__all__ = [
    "DeadRunError",
    "DeadRunGuard",
    "Pair",
    "PairwiseCollator",
    "PairwiseConfig",
    "PairwiseDataset",
    "PairwiseForSequenceClassification",
    "PairwiseHead",
    "PairwiseModel",
    "PairwiseTrainer",
    "Turn",
    "baseline_verdicts",
    "bradley_terry",
    "calibrate_",
    "check_packing",
    "freeze_",
    "pairwise_metrics",
    "pairwise_report",
    "parameter_groups",
    "predict_pairs",
    "read_pairs",
    "split_pairs",
]
