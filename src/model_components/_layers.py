"""Tell layers of transformers without importing it."""

from __future__ import annotations

import sys


def is_conv1d(module: object) -> bool:
    """Return whether a module is transformers' `Conv1D`, a linear layer whose weight is (I, O).

    Importing transformers takes longer than most of what is done with one layer. A module can only
    be a `Conv1D` if that class was imported before.
    """
    loaded = sys.modules.get("transformers.pytorch_utils")
    return loaded is not None and isinstance(module, loaded.Conv1D)
