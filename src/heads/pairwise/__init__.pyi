from .config import PairwiseConfig
from .data.collate import PairwiseCollator
from .data.rows import each_pair, read_pairs
from .functional import pairwise_loss
from .inference import predict_pairs
from .judge_config import JudgeConfig
from .layers import PairwiseHead
from .model import PairwiseModel
from .packing import check_packing
from .pairs import Pair, Turn, split_pairs
from .report.baselines import baseline_verdicts
from .report.evaluation import calibrate_, pairwise_report
from .surgery import freeze_
from .training.guard import DeadRunGuard
from .training.run import train_judge
from .training.trainer import PairwiseTrainer
from .uncertainty import fit_uncertainty_

__all__ = [
    "DeadRunGuard",
    "JudgeConfig",
    "Pair",
    "PairwiseCollator",
    "PairwiseConfig",
    "PairwiseHead",
    "PairwiseModel",
    "PairwiseTrainer",
    "Turn",
    "baseline_verdicts",
    "calibrate_",
    "check_packing",
    "each_pair",
    "fit_uncertainty_",
    "freeze_",
    "pairwise_loss",
    "pairwise_report",
    "predict_pairs",
    "read_pairs",
    "split_pairs",
    "train_judge",
]
