"""Add-ons for models: `heads.lora` and `heads.pairwise`.

The first is peft's LoRA with a leaner forward; the second says which answer is better.
"""

from model_components import __version__ as __version__
