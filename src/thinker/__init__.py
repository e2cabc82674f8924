"""Small models that read an input once, think for n steps and answer.

Each call says how many steps.

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

from .config import ThinkerConfig
from .curriculum import CurriculumDataset
from .exits import ExitRule
from .flow import FlowPlan
from .losses import AllSteps, Reach
from .model import LatentThinker
from .report import evaluate_grid, evaluate_steps, plot_training
from .schedules import Frontier
from .tasks import TASKS, AtTokens, SequenceTask, Task, make_task, register_task
from .training import RewindOnPeak, ThinkerTrainer, parameter_groups, thinker_arguments

__all__ = [
    "TASKS",
    "AllSteps",
    "AtTokens",
    "CurriculumDataset",
    "ExitRule",
    "FlowPlan",
    "Frontier",
    "LatentThinker",
    "Reach",
    "RewindOnPeak",
    "SequenceTask",
    "Task",
    "ThinkerConfig",
    "ThinkerTrainer",
    "evaluate_grid",
    "evaluate_steps",
    "make_task",
    "parameter_groups",
    "plot_training",
    "register_task",
    "thinker_arguments",
]
