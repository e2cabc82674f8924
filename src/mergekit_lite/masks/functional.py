"""`blend`, `masked_linear` and `masked_embedding`, each with an eager and a fused path.

Letters: K components, O out_features, I in_features, V vocabulary, H hidden size, *B any leading
shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from model_components._autograd import autocast_dtype, needs_plain
from model_components._checks import check_choice
from model_components._fused import takes_fused

from ._eager.blend import Blend, blend_plain, work_dtype
from ._eager.linear import AccurateLinear, accurate_plain, efficient_linear

BLEND = "masks.blend"
LINEAR = "masks.masked_linear"
IMPLS = ("eager", "fused", "auto")
# a blend costs the same for any number of tokens, while K products cost more for more tokens
FEW_TOKENS = 16
FEW_TOKENS_TRAINING = 128
"""The largest numbers of tokens for which ``mode="auto"`` uses the efficient mode, without and with
gradients (docs/performance.md)."""


def _check_weights(operation: str, weights: Sequence[Tensor], impl: str) -> None:
    """Raise an error if weights differ in shape or dtype, or are not frozen."""
    check_choice(operation, "impl", impl, IMPLS)
    shapes = {tuple(w.shape) for w in weights}
    dtypes = {w.dtype for w in weights}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise ValueError(
            f"{operation}: weights have shapes {sorted(shapes)} and dtypes {dtypes}, expected one "
            "shape and one dtype"
        )
    # backward gives weights no gradient, so a weight that requires one would stay untrained
    if any(w.requires_grad for w in weights):
        raise ValueError(
            f"{operation}: expected frozen weights, since only masks are trained, but one requires "
            "grad; call requires_grad_(False) on the components"
        )


def _check_masks(operation: str, weights: Sequence[Tensor], masks: Tensor) -> None:
    """Raise an error if masks do not broadcast over the weights."""
    shape = tuple(weights[0].shape)
    fits = masks.dim() == len(shape) + 1 and all(
        m in (1, n) for m, n in zip(masks.shape[1:], shape, strict=True)
    )
    if not fits or masks.shape[0] != len(weights):
        raise ValueError(
            f"{operation}: masks have shape {list(masks.shape)}, expected a first dimension of "
            f"{len(weights)} (one mask per weight), and other dimensions that are 1 or match the "
            f"weights' shape, {list(shape)}"
        )


def _uses_fused(impl: str, weights: Sequence[Tensor], operation: str, path: str) -> bool:
    """Return whether to use the Triton path; raise an error if ``"fused"`` cannot run."""

    def unsupported() -> str | None:
        from . import _triton

        return _triton.unsupported(list(weights))

    return takes_fused(operation, impl, path, weights[0], unsupported)


def blend(weights: Sequence[Tensor], masks: Tensor, *, impl: str = "auto") -> Tensor:
    """Return the merged weight Σ_k masks[k] * weights[k], summed in float32 and rounded once.

    The result is differentiable with respect to the masks. For backward, only references to the
    masks and the frozen weights are kept.

    Args:
        weights: K frozen tensors of one shape and dtype.
        masks: The masks, (K, then sizes that broadcast over a weight).
        impl: ``"eager"``, ``"fused"`` (Triton) or ``"auto"``. ``"auto"`` is fused if
            `model_components.measure_kernels` found the kernels correct and faster, else eager.

    Returns:
        A weight of the same shape and dtype.

    Raises:
        ValueError: Shapes or dtypes do not match, a weight requires grad, or ``"fused"`` cannot
            run.

    >>> blend([torch.ones(2, 2), torch.zeros(2, 2)], torch.tensor([[[0.25, 1.0]], [[0.5, 0.5]]]))
    tensor([[0.2500, 1.0000],
            [0.2500, 1.0000]])
    """
    _check_weights("blend", weights, impl)
    _check_masks("blend", weights, masks)
    return _blended("blend", weights, masks, impl)


def _blended(operation: str, weights: Sequence[Tensor], masks: Tensor, impl: str) -> Tensor:
    """Blend without checking the arguments again."""
    fused = _uses_fused(impl, weights, operation, BLEND)
    if not fused and needs_plain(masks):
        return blend_plain(weights, masks).to(weights[0].dtype)
    return Blend.apply(masks, fused, *weights)


def masked_linear(
    x: Tensor,  # (*B, I)
    weights: Sequence[Tensor],  # K of (O, I), or (I, O) when transposed
    masks: Tensor,  # (K, broadcasts over a weight)
    bias: Tensor | None = None,  # (O,)
    *,
    rule: Callable[[Tensor], Tensor] | None = None,
    mode: str = "accurate",
    transposed: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Apply a linear layer whose weight is a masked sum of weights: ``x @ (Σ m_k W_k).T + b``.

    For backward, x, the masks and references to the frozen weights are kept. Plain autograd would
    keep the blended weight as well.

    Args:
        x: Input, (*B, I).
        weights: The components' frozen weights, (O, I) each; (I, O) when ``transposed``.
        masks: (K, 1, 1) scalar, (K, 1, I) input, (K, O, 1) output or (K, O, I) element masks. The
            last two sizes are swapped when ``transposed``.
        bias: The merged bias, (O,).
        rule: A function, such as a constraint, from ``masks`` to the masks that multiply the
            weights. The function runs again in backward, so that its result need not be kept.
        mode: ``"accurate"``, ``"efficient"`` (``Σ (m_k x) @ W_k.T``) or ``"auto"``. ``"auto"`` uses
            the efficient mode for up to `FEW_TOKENS` tokens (`FEW_TOKENS_TRAINING` with gradients),
            where it is faster, and the accurate mode otherwise.
        transposed: Whether weights are stored as (I, O), as in GPT-2's `Conv1D`.
        impl: ``"eager"``, ``"fused"`` (Triton) or ``"auto"``. ``"auto"`` is fused if
            `model_components.measure_kernels` found the kernels correct and faster, else eager.

    Returns:
        The output, (*B, O), in the dtype of x, or of autocast if it is active.

    Raises:
        ValueError: Shapes or dtypes do not match, element masks are used in efficient mode, a
            weight requires grad, or ``"fused"`` cannot run.

    >>> weights = [torch.eye(2), 2 * torch.eye(2)]
    >>> masked_linear(
    ...     torch.tensor([[1.0, 3.0]]), weights, torch.tensor([[[1.0, 0.5]], [[0.0, 0.25]]])
    ... )
    tensor([[1., 3.]])
    """
    in_features = _check_linear(x, weights, impl, transposed)
    # with a rule, ``masks`` are the trained values, K - 1 of them for sum_to_one
    if rule is None:
        _check_masks("masked_linear", weights, masks)
    mode = _linear_mode(mode, impl, x, masks, in_features)
    # masks of efficient mode are vectors, which are cheap to keep until backward
    if rule is not None and mode == "efficient":
        masks = rule(masks)
        rule = None
    autocast = autocast_dtype(x)
    x = _in_working_dtype(x, weights[0], autocast)
    if bias is not None:
        bias = bias.to(x.dtype)
    fused = _uses_fused(impl, weights, "masked_linear", LINEAR)
    if fused and rule is not None and torch.compiler.is_compiling():
        # the graph keeps the rule's result, because it cannot run a rule again in backward
        masks = rule(masks)
        rule = None
    # x has been cast already, and autocast must not cast inside the float32 sums
    with nullcontext() if autocast is None else torch.autocast(x.device.type, enabled=False):
        if mode == "efficient":
            return efficient_linear(x, masks, bias, transposed, weights)
        if not fused and needs_plain(x):
            return accurate_plain(x, masks, bias, rule, transposed, weights)
        flat = x.reshape(-1, in_features)
        y = AccurateLinear.apply(flat, masks, bias, rule, transposed, fused, *weights)
    return y.view(*x.shape[:-1], y.shape[-1])


def _in_working_dtype(x: Tensor, weight: Tensor, autocast: torch.dtype | None) -> Tensor:
    """Return x in the dtype of autocast; without autocast, check that it has the weights' dtype."""
    if autocast is not None:
        return x.to(autocast)
    if x.dtype != weight.dtype:
        raise ValueError(
            f"masked_linear: x has dtype {x.dtype} and the weights have dtype {weight.dtype}, "
            "expected one dtype"
        )
    return x


def _check_linear(x: Tensor, weights: Sequence[Tensor], impl: str, transposed: bool) -> int:
    """Check the shapes of weights and input, and return the number of input features."""
    _check_weights("masked_linear", weights, impl)
    if weights[0].dim() != 2:
        raise ValueError(
            f"masked_linear: weights have shape {list(weights[0].shape)}, expected matrices"
        )
    in_features = weights[0].shape[0 if transposed else 1]
    if not x.dim() or x.shape[-1] != in_features:
        raise ValueError(
            f"masked_linear: expected x with a last dimension of {in_features}, the weights' "
            f"number of input features, got shape {list(x.shape)}"
        )
    return in_features


def _linear_mode(mode: str, impl: str, x: Tensor, masks: Tensor, in_features: int) -> str:
    """Return the mode to use; raise an error if it is unknown or does not support the masks."""
    if impl == "fused" and mode == "efficient":
        raise ValueError(
            "masked_linear: impl 'fused' does not support mode 'efficient', which has no kernel; "
            "expected mode 'accurate' or 'auto'"
        )
    if impl == "fused" and mode == "auto":
        return "accurate"
    element = masks.shape[1] > 1 and masks.shape[2] > 1
    if mode == "auto":
        # when traced, the mode must suit any number of tokens, because the graph may be reused
        if not element and not needs_plain(x) and _is_few(x, masks, in_features):
            return "efficient"
        return "accurate"
    if mode not in ("accurate", "efficient"):
        raise ValueError(f"masked_linear: mode is {mode!r}, expected accurate, efficient or auto")
    if mode == "efficient" and element:
        raise ValueError(
            "masked_linear: mode 'efficient' does not support element masks; expected mode "
            "'accurate'"
        )
    return mode


def _is_few(x: Tensor, masks: Tensor, in_features: int) -> bool:
    """Return whether an input has so few tokens that several products are faster than a blend."""
    training = torch.is_grad_enabled() and (x.requires_grad or masks.requires_grad)
    most = FEW_TOKENS_TRAINING if training else FEW_TOKENS
    return x.numel() <= most * in_features


def masked_embedding(
    ids: Tensor,  # (*B,)
    weights: Sequence[Tensor],  # K of (V, H)
    masks: Tensor,  # (K, broadcasts over a weight)
    *,
    impl: str = "auto",
) -> Tensor:
    """Return rows of the merged embedding Σ m_k E_k, gathered before they are blended.

    The merged (V, H) table is never built. The gathered rows are kept for backward.

    Args:
        ids: Token ids, (*B,).
        weights: The components' frozen tables, (V, H) each.
        masks: (K, 1, 1) scalar, (K, 1, H) input, (K, V, 1) output or (K, V, H) element masks.
        impl: The path, as in `blend`, which blends the gathered rows.

    Returns:
        The embeddings, (*B, H), in the tables' dtype.

    Raises:
        ValueError: Shapes or dtypes do not match, ids are not int64 or int32, a weight requires
            grad, or ``"fused"`` cannot run.

    >>> tables = [torch.zeros(3, 2), torch.ones(3, 2)]
    >>> masked_embedding(torch.tensor([2, 0]), tables, torch.tensor([[[1.0, 1.0]], [[0.5, 0.25]]]))
    tensor([[0.5000, 0.2500],
            [0.5000, 0.2500]])
    """
    _check_weights("masked_embedding", weights, impl)
    _check_masks("masked_embedding", weights, masks)
    if ids.dtype not in (torch.int64, torch.int32) or masks.dim() != 3:
        raise ValueError(
            f"masked_embedding: ids have dtype {ids.dtype} and tables have shape "
            f"{list(weights[0].shape)}; expected ids of dtype int64 or int32, and tables of shape "
            "(V, H)"
        )
    flat = ids.reshape(-1)
    rows = [F.embedding(flat, weight) for weight in weights]
    if masks.shape[1] > 1:  # one row of masks per token
        # in float32, so that backward sums the gradients of a repeated token in float32
        wide = masks.to(work_dtype(masks.dtype))
        masks = torch.stack([F.embedding(flat, mask) for mask in wide])
    # without the checks of `blend`, which fail if a compiled graph has symbolic sizes
    return _blended("masked_embedding", rows, masks, impl).view(*ids.shape, rows[0].shape[1])
