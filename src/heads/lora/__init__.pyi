from .data.packing import check_packed_examples
from .data.rows import alpaca_template, chat_template, read_rows, row_report
from .functional import lora_linear
from .judging import Judge, LikelihoodGain, ReferenceOverlap, WinRate, judge_answers
from .layers import LoraLinear
from .losses import answer_loss, fuse_cross_entropy_
from .report.adapters import lora_report
from .report.training import tuning_report
from .storage.adapters import load_lora
from .storage.merge import merge_lora
from .surgery.accelerate import accelerate_lora_, restore_lora_
from .surgery.inject import inject_lora_
from .surgery.prepare import prepare_lora

__all__ = [
    "Judge",
    "LikelihoodGain",
    "LoraLinear",
    "ReferenceOverlap",
    "WinRate",
    "accelerate_lora_",
    "alpaca_template",
    "answer_loss",
    "chat_template",
    "check_packed_examples",
    "fuse_cross_entropy_",
    "inject_lora_",
    "judge_answers",
    "load_lora",
    "lora_linear",
    "lora_report",
    "merge_lora",
    "prepare_lora",
    "read_rows",
    "restore_lora_",
    "row_report",
    "tuning_report",
]
