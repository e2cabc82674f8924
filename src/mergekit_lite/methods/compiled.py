"""The methods that have compiled kernels, which merge a stretch of a tensor at a time."""

from __future__ import annotations

from .averaging import linear, passthrough, task_arithmetic
from .dropping import dare_linear, dare_ties, della, della_linear
from .parameters import Bound
from .registry import MergeMethod
from .spherical import karcher, model_stock, multislerp, nuslerp, slerp
from .trimming import breadcrumbs, breadcrumbs_ties, sce, ties

BY_ROWS = (della, della_linear)
"""Methods whose kernels take whole rows; every other kernel takes a tensor that is cut anywhere."""

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
"""Elements of each input that a thread holds at a time, and the longest row of a kernel."""


def has_kernel(method: MergeMethod, parameters: Bound, shape: tuple[int, ...]) -> bool:
    """Return whether a kernel merges a tensor in float32.

    Args:
        method: The method.
        parameters: The method's arguments for this tensor.
        shape: The tensor's shape.
    """
    if method not in COMPILED:
        return False
    if method in BY_ROWS:
        # a slice, because a scalar has no last size; () compares below any other tuple
        return shape[-1:] <= (STRETCH,)
    # angles by rows need a dot product for each row; kernels sum over whole tensors
    return parameters.get("nuslerp_flatten", True) and not parameters.get("filter_wise")
