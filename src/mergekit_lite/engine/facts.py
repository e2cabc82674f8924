"""Parts that both engines share.

What they say of a tensor, where they hand its values, and when they refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..dtypes import Array
from ..planning import TensorPlan
from .hashing import hash_bytes

BLOCK = 1 << 18
"""Elements of each input that a thread of the compiled engine holds at a time, and that have a hash
of their own."""

Sink = Callable[[TensorPlan, int, Array], None]
"""Takes stored values of a tensor, from an element on; called from any thread."""


class NotFiniteError(ValueError):
    """A merge that would write NaN or infinity."""


@dataclass(frozen=True)
class TensorFact:
    """Facts of one output tensor: what was done to make it.

    Args:
        name: Its name.
        shape: Its shape.
        dtype: Its dtype.
        method: The method's name, or ``"copy"``.
        passes: How often the inputs were read; 0 for an empty tensor.
        inputs: Hashes of the inputs' stored values, the base's last; empty where a state dict is
            made.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    method: str
    passes: int
    inputs: tuple[str, ...] = ()


def fact(t: TensorPlan, passes: int, inputs: Sequence[str] = ()) -> TensorFact:
    """Return what the report says of a tensor.

    ``inputs`` are hashes of the values that were read, the base's last.
    """
    return TensorFact(
        t.name, t.shape, t.dtype.name, t.method.name if t.method else "copy", passes, tuple(inputs)
    )


def hash_inputs(t: TensorPlan, blocks: Sequence[Sequence[str]]) -> list[str]:
    """From the hashes of every input's blocks, a list for each block, one hash for each input."""
    return [
        hash_bytes("".join(block[i] for block in blocks).encode()) for i in range(len(t.everything))
    ]


def not_finite(t: TensorPlan) -> NotFiniteError:
    """The error for a tensor whose result is not finite."""
    method = t.method.name if t.method else "the copy"
    return NotFiniteError(
        f"{t.name}: the merge gives NaN or infinity in {t.dtype}: the inputs hold such values, or "
        f"{method} overflows or divides by zero there"
    )
