"""Context that torch hands to a `torch.autograd.Function`, as far as operations use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Context(Protocol):
    """Attributes that all operations use; one that sets more declares them in a subclass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors, or None, for ``saved_tensors``."""
        ...
