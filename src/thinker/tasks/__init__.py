"""Tasks: batches of inputs and answers, by name; importing this puts the package's own under their names."""

from . import arithmetic, puzzles, sequences  # noqa: F401
from .at_tokens import AtTokens
from .sequences import SequenceTask
from .task import TASKS, Sample, Task, make_task, register_task

__all__ = ["TASKS", "AtTokens", "Sample", "SequenceTask", "Task", "make_task", "register_task"]
