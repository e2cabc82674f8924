"""LoRA with peft's configs, layers and files.

A lean forward, exact interchange, and tuning that can be watched.

What functions return is in the modules beside them: ``heads.lora.report``, ``heads.lora.storage``,
...
"""

from model_components._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
