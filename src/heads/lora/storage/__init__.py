"""peft's files in and out, and checkpoints with adapters merged in."""
