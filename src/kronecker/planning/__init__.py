"""What each MLP of a model becomes, within a budget of parameters or of time."""

from .choice import Choice, Plan
from .measuring import plan

__all__ = ["Choice", "Plan", "plan"]
