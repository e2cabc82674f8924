"""`kron_linear`: a linear layer whose weight is a sum of Kronecker products.

The dense weight is built only if that is the cheapest way to compute the output.

Letters: r terms; A is (r, O1, I1), B is (r, O2, I2); out_features O = O1 O2, in_features I = I1 I2;
*B any leading dimensions.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from model_components._autograd import (
    autocast_dtype,
    needs_plain,
)
from model_components._checks import check_choice
from model_components._fused import takes_fused

from . import reference
from ._eager import (
    CONTRACTIONS,
    ORDERS,
    Balanced,
    order_of,
    plain,
)

BALANCED = "kronecker.kron_linear"
IMPLS = ("reference", "eager", "fused", "auto")
_BALANCED = 16  # factors whose sides are all at least this long count as balanced
# number of tokens for which a traced graph's order is chosen; the graph then runs on any number
_TRACED_TOKENS = 1024


def check_factors(operation: str, a: Tensor, b: Tensor, scales: Tensor | None) -> None:
    """Raise a ValueError if shapes or dtypes of the factors and scales do not match."""
    if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0] or not a.shape[0]:
        raise ValueError(
            f"{operation}: a has shape {list(a.shape)} and b has shape {list(b.shape)}, expected "
            "(r, O1, I1) and (r, O2, I2) with r >= 1"
        )
    if a.dtype != b.dtype or not a.is_floating_point():
        raise ValueError(
            f"{operation}: a has dtype {a.dtype} and b has dtype {b.dtype}, expected one "
            "floating-point dtype for both"
        )
    if scales is not None and tuple(scales.shape) != (a.shape[0],):
        raise ValueError(
            f"{operation}: scales has shape {list(scales.shape)}, expected ({a.shape[0]},), one "
            "number per term"
        )


def kron_linear(
    x: Tensor,  # (*B, I)
    a: Tensor,  # (r, O1, I1)
    b: Tensor,  # (r, O2, I2)
    bias: Tensor | None = None,  # (O,)
    scales: Tensor | None = None,  # (r,)
    *,
    order: str = "auto",
    impl: str = "auto",
) -> Tensor:
    """Apply a linear layer with the weight Σ_r s_r A_r ⊗ B_r: ``x @ (Σ s A ⊗ B).T + bias``.

    ``order`` chooses how the product is computed: ``"b_first"`` multiplies by B and then by A,
    ``"a_first"`` by A and then by B, and ``"rebuild"`` by the dense weight. These cost
    r(I O2 + I1 O), r(I O1 + I2 O) and O I multiply-adds per token. ``"auto"`` takes the cheapest
    order, and also counts the cost of building the weight.

    For the backward pass, ``"b_first"`` and ``"rebuild"`` save x and the factors, and ``"a_first"``
    also saves x Aᵀ, (tokens, r I2 O1). Plain torch operations, which save all intermediate results,
    run in three cases: if torch traces the call (`torch.compile`, `torch.export`), if it transforms
    the call (`torch.func`), and with ``order="auto"`` for one term whose A and B have 16 or more
    rows and columns. For a traced graph, ``"auto"`` chooses the order that is cheapest for many
    tokens.

    Args:
        x: Input, (*B, I1 I2).
        a: The factors A, (r, O1, I1), usually the larger ones.
        b: The factors B, (r, O2, I2). They may also be the larger ones: only the speed differs.
        bias: Bias (O1 O2,) or None.
        scales: One number for each term; None for a scale of 1.
        order: ``"b_first"``, ``"a_first"``, ``"rebuild"`` or ``"auto"``.
        impl: ``"reference"`` builds the weight with `torch.kron`. ``"eager"`` runs torch
            operations. ``"fused"`` runs a Triton kernel, which needs a GPU of compute capability
            8.0 or higher, one term, and float16 or bfloat16. A and B must have 16 to 128 rows and
            columns and, with sides rounded up to powers of 2, at most 8,192 elements each. On GPUs
            below 9.0 the backward pass is eager. ``"auto"`` is fused if
            `model_components.measure_kernels` found the kernel correct and faster on this kind of
            device, else eager.

    Returns:
        The output (*B, O1 O2), in the dtype of x, or in autocast's dtype.

    Raises:
        ValueError: Shapes or dtypes do not match, ``order`` or ``impl`` is unknown, or
            ``impl="fused"`` cannot run.

    Source: Van Loan, "The ubiquitous Kronecker product", 2000: (A ⊗ B) vec(X) = vec(B X Aᵀ).

    >>> a, b = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[1.0], [10.0]]])
    >>> kron_linear(torch.tensor([[1.0, 1.0]]), a, b)
    tensor([[ 3., 30.]])
    """
    check_factors("kron_linear", a, b, scales)
    _, o1, i1 = a.shape
    _, o2, i2 = b.shape
    _check_linear(x, a, b, bias, impl, order)
    autocast = autocast_dtype(x)
    if autocast is not None:
        x = x.to(autocast)
        a = a.to(autocast)
        b = b.to(autocast)
    elif x.dtype != a.dtype:
        raise ValueError(
            f"kron_linear: x has dtype {x.dtype} and the factors have dtype {a.dtype}, expected "
            "one dtype"
        )
    # a float32 bias would promote the output of half-precision products to float32
    if bias is not None:
        bias = bias.to(x.dtype)
    if scales is not None:
        scales = scales.to(x.dtype)
    with nullcontext() if autocast is None else torch.autocast(x.device.type, enabled=False):
        if impl == "reference":
            return reference.kron_linear(x, a, b, bias, scales)
        fused = _uses_fused(impl, order, a, b)
        flat = x.reshape(-1, i1 * i2)
        if not torch.is_grad_enabled():  # save nothing, since there is no backward pass
            flat = flat.detach()
            a = a.detach()
            b = b.detach()
            if scales is not None:
                scales = scales.detach()
        y = _product(flat, a, b, scales, order, fused)
        traced = needs_plain(x)
        if bias is not None and (traced or torch.is_grad_enabled()):
            y = y + bias
        elif bias is not None:
            y = y.add_(bias)
        shape = (*x.shape[:-1], o1 * o2)
        if traced:
            return y.reshape(shape)
        # not a view: autograd forbids in-place changes to views that custom functions return
        return torch.ops.aten._unsafe_view(y, shape)


def _product(
    x: Tensor,  # (N, I)
    a: Tensor,
    b: Tensor,
    scales: Tensor | None,
    order: str,
    fused: bool,
) -> Tensor:  # (N, O)
    """Multiply x by the weight, in the chosen order or by the fused kernel."""
    if fused:
        return Balanced.apply(x, a, b, scales)
    _, o1, i1 = a.shape
    _, o2, i2 = b.shape
    # with balanced factors, plain products are as fast as einsum (docs/performance.md)
    balanced = len(a) == 1 and min(o1, i1, o2, i2) >= _BALANCED and order == "auto"
    takes_plain = needs_plain(x) or balanced
    if order == "auto":
        tokens = _TRACED_TOKENS if takes_plain else x.shape[0]
        order = order_of((o1, i1), (o2, i2), len(a), tokens)
    if takes_plain:
        return plain(x, a, b, scales, order)
    return CONTRACTIONS[order].apply(x, a, b, scales)


def _uses_fused(impl: str, order: str, a: Tensor, b: Tensor) -> bool:
    """Return whether to run the Triton kernel; raise an error if ``impl="fused"`` cannot run."""

    def unsupported() -> str | None:
        if order not in ("auto", "a_first"):
            return f"expected order='auto' or 'a_first', got order={order!r}"
        from . import _triton

        return _triton.unsupported(len(a), (*a.shape[1:], *b.shape[1:]), a.device, a.dtype)

    return takes_fused("kron_linear", impl, BALANCED, a, unsupported)


def _check_linear(
    x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, impl: str, order: str
) -> None:
    """Raise a ValueError for an unknown impl or order, or for a wrong shape of x or the bias."""
    _, o1, i1 = a.shape
    _, o2, i2 = b.shape
    check_choice("kron_linear", "impl", impl, IMPLS)
    check_choice("kron_linear", "order", order, (*ORDERS, "auto"))
    if not x.dim() or x.shape[-1] != i1 * i2:
        raise ValueError(
            f"kron_linear: the last dimension of x is {x.shape[-1] if x.dim() else 'missing'}, but "
            f"factors of shapes {(o1, i1)} and {(o2, i2)} need {i1} * {i2} = {i1 * i2}"
        )
    if bias is not None and tuple(bias.shape) != (o1 * o2,):
        raise ValueError(f"kron_linear: bias has shape {list(bias.shape)}, expected ({o1 * o2},)")
