"""LoRA with peft's configs, layers and files: a lean forward, exact interchange, stable instruction tuning."""

from .accelerate import AccelerationReport, accelerate_lora_, restore_lora_
from .functional import lora_linear, lora_linears
from .linear import LoraLinear

__all__ = [
    "AccelerationReport",
    "LoraLinear",
    "accelerate_lora_",
    "lora_linear",
    "lora_linears",
    "restore_lora_",
]
