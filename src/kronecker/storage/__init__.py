"""Compressed models on disk, and checkpoints of Krony-PT."""
