"""Losses, which select the steps to supervise and the weight of each step."""

from .step_loss import StepLoss, labels_of_steps, num_answers
from .steps import AllSteps, LastAndRandom, LearnedWeights, Reach

__all__ = [
    "AllSteps",
    "LastAndRandom",
    "LearnedWeights",
    "Reach",
    "StepLoss",
    "labels_of_steps",
    "num_answers",
]
