"""LoRA with peft's configs, layers and files.

The package has a leaner forward, exact interchange with peft, and fine-tuning with reports.

The classes of returned reports are in submodules, such as ``heads.lora.report`` and
``heads.lora.storage``.
"""

from model_components._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
