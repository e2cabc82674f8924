"""Load peft's files, and write checkpoints with merged adapters."""
