"""Which steps are supervised, and how much each counts."""

from .halting import ExactHalt, Ponder, exact
from .step_loss import Pass, StepLoss, labels_of_steps, num_answers
from .steps import AllSteps, LastAndRandom, LearnedWeights, LinearWeights, ProgressiveLoss, Reach

__all__ = [
    "AllSteps",
    "ExactHalt",
    "LastAndRandom",
    "LearnedWeights",
    "LinearWeights",
    "Pass",
    "Ponder",
    "ProgressiveLoss",
    "Reach",
    "StepLoss",
    "exact",
    "labels_of_steps",
    "num_answers",
]
