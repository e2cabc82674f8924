"""Change a model's layers in place: add LoRA layers, or switch to the lean forward."""
