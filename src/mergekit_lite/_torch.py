"""Import torch when one of its names is first used.

A merge of files that runs only compiled kernels never imports torch.

Modules of this package write ``from .._torch import Tensor, torch`` instead of importing both from
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
