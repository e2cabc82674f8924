"""Heads and adapters for models that exist: `heads.lora`, peft's LoRA with a fused forward, and instruction tuning."""
