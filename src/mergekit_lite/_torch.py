"""Import torch when something of it is first used.

A merge of files by a compiled kernel never needs it.

Modules of this package write ``from .._torch import Tensor, torch`` where others import both from
torch. ``Tensor`` is for annotations only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch"), name)

    torch = _Torch()
    Tensor = Any

__all__ = ["Tensor", "torch"]
