"""Change a model's layers in place: inject LoRA, or switch to the lean forward."""
