"""LoRA with peft's configs, layers and files: a lean forward, exact interchange, and tuning that can be watched."""

from .accelerate import AccelerationReport, accelerate_lora_, restore_lora_
from .functional import lora_linear
from .interchange import export_lora, load_lora
from .judging import Judge, LikelihoodGain, ReferenceOverlap, WinRate, judge_answers
from .linear import LoraLinear
from .merge import MergedLayer, MergeReport, merge_lora
from .packing import check_packing
from .prepare import prepare_lora
from .report import AdapterRow, LoraReport, lora_report
from .rows import RowReport, alpaca_template, chat_template, read_rows, row_report
from .split import SplitQKV, join_fused_qkv_, split_fused_qkv_
from .tuning import Spike, TuningReport, answer_loss, tuning_report

__all__ = [
    "AccelerationReport",
    "AdapterRow",
    "Judge",
    "LikelihoodGain",
    "LoraLinear",
    "LoraReport",
    "MergeReport",
    "MergedLayer",
    "ReferenceOverlap",
    "RowReport",
    "Spike",
    "SplitQKV",
    "TuningReport",
    "WinRate",
    "accelerate_lora_",
    "alpaca_template",
    "answer_loss",
    "chat_template",
    "check_packing",
    "export_lora",
    "join_fused_qkv_",
    "judge_answers",
    "load_lora",
    "lora_linear",
    "lora_report",
    "merge_lora",
    "prepare_lora",
    "read_rows",
    "restore_lora_",
    "row_report",
    "split_fused_qkv_",
    "tuning_report",
]
