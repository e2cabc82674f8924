"""LoRA with peft's configs, layers and files: a lean forward, exact interchange, stable instruction tuning."""

from .accelerate import AccelerationReport, accelerate_lora_, restore_lora_
from .functional import lora_linear
from .instruct import (
    InstructionCollator,
    InstructionDataset,
    InstructionReport,
    check_packing,
)
from .interchange import export_lora, load_lora
from .judging import (
    Judge,
    ModelLikelihood,
    ReferenceOverlap,
    Run,
    append_run,
    generate_answers,
    judge_answers,
    plot_runs,
    read_runs,
)
from .linear import LoraLinear
from .merge import MergedLayer, MergeReport, merge_lora
from .prepare import prepare_lora
from .report import AdapterRow, LoraReport, lora_report
from .rows import ChatTemplate, alpaca_template, read_rows
from .split import SplitQKV, join_fused_qkv_, split_fused_qkv_
from .tuning import InstructionTrainer, answer_loss, instruction_arguments

__all__ = [
    "AccelerationReport",
    "AdapterRow",
    "ChatTemplate",
    "InstructionCollator",
    "InstructionDataset",
    "InstructionReport",
    "InstructionTrainer",
    "Judge",
    "LoraLinear",
    "LoraReport",
    "MergeReport",
    "MergedLayer",
    "ModelLikelihood",
    "ReferenceOverlap",
    "Run",
    "SplitQKV",
    "accelerate_lora_",
    "alpaca_template",
    "answer_loss",
    "append_run",
    "check_packing",
    "export_lora",
    "generate_answers",
    "instruction_arguments",
    "join_fused_qkv_",
    "judge_answers",
    "load_lora",
    "lora_linear",
    "lora_report",
    "merge_lora",
    "plot_runs",
    "prepare_lora",
    "read_rows",
    "read_runs",
    "restore_lora_",
    "split_fused_qkv_",
]
