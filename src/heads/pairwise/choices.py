"""The classes of a verdict, and the names that settings choose from.

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import Literal

CLASSES = ("A", "B", "tie")

Link = Literal["davidson", "antisymmetric", "concat"]
Pooling = Literal["mean", "first", "last"]
Surface = Literal["length", "style", "overlap"]
