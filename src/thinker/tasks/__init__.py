"""Tasks, which draw batches of inputs and answers, and their registry.

Importing this package registers the built-in tasks.
"""

from . import arithmetic, puzzles, sequences  # noqa: F401
from .at_tokens import AtTokens
from .rows import RowsTask
from .sequences import SequenceTask
from .sudoku import sudoku_fill, sudoku_puzzles, sudoku_shuffle
from .task import TASKS, Sample, Task, make_task, register_task
from .tensors import TensorTask

__all__ = [
    "TASKS",
    "AtTokens",
    "RowsTask",
    "Sample",
    "SequenceTask",
    "Task",
    "TensorTask",
    "make_task",
    "register_task",
    "sudoku_fill",
    "sudoku_puzzles",
    "sudoku_shuffle",
]
