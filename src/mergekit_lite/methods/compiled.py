"""The methods that have compiled kernels, and the tensors that kernels can merge."""

from __future__ import annotations

from .parameters import Bound
from .registry import MergeMethod

COMPILED: list[MergeMethod] = []
"""The methods with kernels; `compiled` adds to them."""

BY_ROWS: list[MergeMethod] = []
"""Methods whose kernels need whole rows; other kernels work on any range of elements."""


def compiled(method: MergeMethod) -> MergeMethod:
    """Mark a method that has a program in `engine.programs`."""
    COMPILED.append(method)
    return method


def compiled_by_rows(method: MergeMethod) -> MergeMethod:
    """Mark a method that has a program in `engine.programs`, which needs whole rows."""
    BY_ROWS.append(method)
    return compiled(method)


STRETCH = 1 << 18
"""The number of elements of each input that a thread holds at a time.

It is also the length of the longest row that a kernel can merge."""


def has_kernel(method: MergeMethod, parameters: Bound, shape: tuple[int, ...]) -> bool:
    """Return whether a kernel can merge a tensor in float32.

    Args:
        method: The method.
        parameters: The method's arguments for this tensor.
        shape: The tensor's shape.
    """
    if method not in COMPILED:
        return False
    if method in BY_ROWS:
        # a slice, because a scalar has no last dimension; () is less than any other tuple
        return shape[-1:] <= (STRETCH,)
    # an angle per row needs a dot product per row, but kernels sum over whole tensors
    return parameters.get("nuslerp_flatten", True) and not parameters.get("filter_wise")
