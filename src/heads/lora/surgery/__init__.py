"""Changing a model's layers in place: injection, the lean forward, GPT-2's fused projection split."""
