"""The classes of a verdict, and the allowed values of some settings.

Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import Literal

CLASSES = ("A", "B", "tie")

Link = Literal["davidson", "antisymmetric", "concat"]
Pooling = Literal["mean", "first", "last"]
Surface = Literal["length", "style", "overlap"]
