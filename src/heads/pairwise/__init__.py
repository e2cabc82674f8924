"""Which of two answers is better: a head on a BERT-like encoder, exactly fair to both, without a wasted token."""

from .baselines import Rival, baseline_verdicts
from .collate import CutReport, PairwiseCollator, PairwiseDataset
from .config import PairwiseConfig
from .freeze import FreezeReport, freeze_, parameter_groups
from .functional import (
    davidson,
    log_probabilities,
    packed_attention,
    pairwise_loss,
    rao_kupper,
    swap_divergence,
    swapped,
)
from .guard import DeadRunError, DeadRunGuard
from .inference import Predictions, Ranking, bradley_terry, predict_pairs
from .links import PairwiseHead, Pool
from .metrics import PairwiseMetrics, fit_temperature, pairwise_metrics
from .model import PairwiseModel, PairwiseOutput
from .packing import PackingReport, check_packing
from .pairs import Pair, Turn
from .report import CalibrationReport, PairwiseReport, calibrate_, pairwise_report
from .rows import ReadReport, read_pairs
from .training import PairwiseTrainer

__all__ = [
    "CalibrationReport",
    "CutReport",
    "DeadRunError",
    "DeadRunGuard",
    "FreezeReport",
    "PackingReport",
    "Pair",
    "PairwiseCollator",
    "PairwiseConfig",
    "PairwiseDataset",
    "PairwiseHead",
    "PairwiseMetrics",
    "PairwiseModel",
    "PairwiseOutput",
    "PairwiseReport",
    "PairwiseTrainer",
    "Pool",
    "Predictions",
    "Ranking",
    "ReadReport",
    "Rival",
    "Turn",
    "baseline_verdicts",
    "bradley_terry",
    "calibrate_",
    "check_packing",
    "davidson",
    "fit_temperature",
    "freeze_",
    "log_probabilities",
    "packed_attention",
    "pairwise_loss",
    "pairwise_metrics",
    "pairwise_report",
    "parameter_groups",
    "predict_pairs",
    "rao_kupper",
    "read_pairs",
    "swap_divergence",
    "swapped",
]
