"""Additions to existing models: `heads.lora` and `heads.pairwise`.

`heads.lora` fine-tunes language models with peft's LoRA layers and a leaner forward.
`heads.pairwise` predicts which of two answers is better.
"""

from model_components import __version__ as __version__
