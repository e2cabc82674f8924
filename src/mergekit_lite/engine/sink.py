"""The callback that receives merged values, and the error for values that are not finite."""

from __future__ import annotations

from collections.abc import Callable

from ..dtypes import Array
from ..planning import TensorPlan

Sink = Callable[[TensorPlan, int, Array], None]
"""A function of a tensor's plan, the index of the first element, and the values to store.

It may be called from any thread."""


class NotFiniteError(ValueError):
    """The error for a merge that would write NaN or infinity."""


def not_finite(t: TensorPlan) -> NotFiniteError:
    """Return the error for a tensor whose result is not finite."""
    method = t.method.name if t.method else "the copy"
    return NotFiniteError(
        f"{t.name}: expected finite values, got NaN or infinity in {t.dtype}: either the inputs "
        f"hold such values, or {method} overflows or divides by zero"
    )
