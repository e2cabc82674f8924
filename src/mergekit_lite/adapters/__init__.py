"""LoRA adapters: extracted from tuned models, and merged with each other."""
