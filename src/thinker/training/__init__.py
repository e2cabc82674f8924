"""`ThinkerTrainer`, its callbacks, and its default arguments."""

from .arguments import thinker_arguments
from .callbacks import CurriculumCallback, RewindOnPeak, ThinkerCallback
from .parameters import parameter_groups
from .trainer import ThinkerTrainer

__all__ = [
    "CurriculumCallback",
    "RewindOnPeak",
    "ThinkerCallback",
    "ThinkerTrainer",
    "parameter_groups",
    "thinker_arguments",
]
