"""Add-ons for models: `heads.lora`, peft's LoRA with a leaner forward.

`heads.pairwise`, which answer is better.
"""

from model_components import __version__ as __version__
