from . import presets as presets
from .config import ThinkerConfig
from .curriculum import CurriculumDataset
from .exits import ExitRule
from .flow import FlowPlan
from .losses import AllSteps, Reach
from .model import LatentThinker
from .report import evaluate_grid, evaluate_steps
from .schedules import Frontier
from .solving import solve
from .tasks import TASKS, AtTokens, RowsTask, SequenceTask, Task, make_task, register_task
from .training import RewindOnPeak, ThinkerTrainer, thinker_arguments

__version__: str

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
    "RowsTask",
    "SequenceTask",
    "Task",
    "ThinkerConfig",
    "ThinkerTrainer",
    "evaluate_grid",
    "evaluate_steps",
    "make_task",
    "presets",
    "register_task",
    "solve",
    "thinker_arguments",
]
