"""The callback that receives the values of merged tensors, and the error for NaN."""

from __future__ import annotations

from collections.abc import Callable

from ..dtypes import Array
from ..planning import TensorPlan

Sink = Callable[[TensorPlan, int, Array], None]
"""A function of a tensor's plan, the index of the first element, and the stored values.

Both engines call it, from any thread."""


class NotFiniteError(ValueError):
    """A merge that would write NaN or infinity."""


def not_finite(t: TensorPlan) -> NotFiniteError:
    """Return the error for a tensor whose result is not finite."""
    method = t.method.name if t.method else "the copy"
    return NotFiniteError(
        f"{t.name}: the merge gives NaN or infinity in {t.dtype}: the inputs hold such values, or "
        f"{method} overflows or divides by zero there"
    )
