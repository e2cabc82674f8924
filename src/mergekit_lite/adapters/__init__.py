"""Extract LoRA adapters from tuned models, and merge adapters with each other."""
