"""Which steps are supervised, and how much each counts."""

from .step_loss import Pass, StepLoss, labels_of_steps, num_answers
from .steps import AllSteps, LastAndRandom, LearnedWeights, ProgressiveLoss, Reach

__all__ = [
    "AllSteps",
    "LastAndRandom",
    "LearnedWeights",
    "Pass",
    "ProgressiveLoss",
    "Reach",
    "StepLoss",
    "labels_of_steps",
    "num_answers",
]
