"""LoRA with peft's configs, layers and files: a lean forward, exact interchange, stable instruction tuning."""

from .accelerate import AccelerationReport, accelerate_lora_, restore_lora_
from .functional import lora_linear, lora_linears
from .interchange import export_lora, load_lora
from .linear import LoraLinear
from .merge import MergedLayer, MergeReport, merge_lora
from .prepare import prepare_lora
from .split import SplitQKV, join_fused_qkv_, split_fused_qkv_

__all__ = [
    "AccelerationReport",
    "LoraLinear",
    "MergeReport",
    "MergedLayer",
    "SplitQKV",
    "accelerate_lora_",
    "export_lora",
    "join_fused_qkv_",
    "load_lora",
    "lora_linear",
    "lora_linears",
    "merge_lora",
    "prepare_lora",
    "restore_lora_",
    "split_fused_qkv_",
]
