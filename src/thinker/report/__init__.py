"""Reports of how right a thinker is: by steps, latents and length; and the plots of it."""

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
