"""Reports and plots of a thinker's accuracy by steps, latents and length."""

from .evaluation import accuracies, evaluate_grid, evaluate_steps
from .results import Accuracy, Curves, Grid

__all__ = [
    "Accuracy",
    "Curves",
    "Grid",
    "accuracies",
    "evaluate_grid",
    "evaluate_steps",
]
