"""LoRA adapters: extracted from tuned models, and merged with each other."""

from .combination import merge_adapters
from .extraction import extract_lora
from .report import AdapterModule, AdapterReport

__all__ = ["AdapterModule", "AdapterReport", "extract_lora", "merge_adapters"]
