"""Small models that read an input once, think for n steps and answer.

Each call can set the number of steps.

>>> from thinker import FlowPlan, LatentThinker, ThinkerConfig
>>> model = LatentThinker(
...     ThinkerConfig(vocab_size=16, max_input_length=20, max_output_length=20)
... ).eval()
>>> tokens = torch.randint(16, (2, 7))
>>> model(tokens, n_step=2, out_len=7).logits.shape
torch.Size([2, 7, 16])
>>> print(FlowPlan.every_step(2, memory=False))
| step | read_input | mem_lookup | mem_write | static_mem_lookup | output |
|------|------------|------------|-----------|-------------------|--------|
| 1    | 1          | 0          | 0         | 0                 | 1      |
| 2    | 1          | 0          | 0         | 0                 | 1      |
"""

from model_components import __version__ as __version__
from model_components._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
