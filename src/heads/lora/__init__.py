"""LoRA with peft's configs, layers and files.

The layers have a leaner forward than peft's: fewer steps and fewer intermediate tensors. Adapters
are interchangeable with peft's in both directions. `tune` fine-tunes a model and reports on the
training.

The classes of the returned reports are in submodules, such as ``heads.lora.report.runs`` and
``heads.lora.storage.merge``.
"""

from model_components._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
