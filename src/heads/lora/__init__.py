"""LoRA with peft's configs, layers and files: a lean forward, exact interchange, and tuning that can be watched."""

from .data.packing import check_packed_examples
from .data.rows import RowReport, alpaca_template, chat_template, read_rows, row_report
from .functional import lora_linear
from .judging import Judge, LikelihoodGain, ReferenceOverlap, WinRate, judge_answers
from .layers import LoraLinear
from .losses import answer_loss
from .report.adapters import AdapterRow, LoraReport, lora_report
from .report.training import Spike, TuningReport, tuning_report
from .storage.adapters import export_lora, load_lora
from .storage.merge import MergedLayer, MergeReport, merge_lora
from .surgery.accelerate import AccelerationReport, accelerate_lora_, restore_lora_
from .surgery.prepare import prepare_lora
from .surgery.split import SplitQKV, join_fused_qkv_, split_fused_qkv_

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
    "check_packed_examples",
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
