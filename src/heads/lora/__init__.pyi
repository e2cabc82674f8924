from .config import TuneConfig
from .data import TextExamples
from .functional import lora_linear
from .judging import LikelihoodGain, WinRate, judge_answers
from .layers import LoraLinear
from .losses import answer_loss, fuse_cross_entropy_
from .report.adapters import lora_report
from .report.training import tuning_report
from .storage.adapters import load_lora
from .storage.merge import merge_lora
from .surgery.accelerate import accelerate_lora_, restore_lora_
from .surgery.inject import inject_lora_
from .surgery.prepare import prepare_lora
from .sweep import sweep
from .training import tune

__all__ = [
    "LikelihoodGain",
    "LoraLinear",
    "TextExamples",
    "TuneConfig",
    "WinRate",
    "accelerate_lora_",
    "answer_loss",
    "fuse_cross_entropy_",
    "inject_lora_",
    "judge_answers",
    "load_lora",
    "lora_linear",
    "lora_report",
    "merge_lora",
    "prepare_lora",
    "restore_lora_",
    "sweep",
    "tune",
    "tuning_report",
]
