"""Heads and adapters for models that exist: `heads.lora`, peft's LoRA with a fused forward, and instruction tuning."""

from model_components import __version__ as __version__
