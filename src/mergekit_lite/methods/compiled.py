"""The methods that have compiled kernels, and the tensors that kernels can merge."""

from __future__ import annotations

from .averaging import linear, passthrough, task_arithmetic
from .dropping import dare_linear, dare_ties, della, della_linear
from .fusion import arcee_fusion
from .parameters import Bound
from .registry import MergeMethod
from .spherical import karcher, model_stock, multislerp, nuslerp, slerp
from .trimming import breadcrumbs, breadcrumbs_ties, sce, ties

BY_ROWS = (della, della_linear, arcee_fusion)
"""Methods whose kernels need whole rows; other kernels work on any range of elements."""

COMPILED = (
    linear,
    passthrough,
    task_arithmetic,
    slerp,
    nuslerp,
    multislerp,
    karcher,
    model_stock,
    ties,
    breadcrumbs,
    breadcrumbs_ties,
    sce,
    dare_linear,
    dare_ties,
    *BY_ROWS,
)
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
