"""`lora_linear`: apply a linear layer with a low-rank update, saving only x for backward.

Letters: I in_features, O out_features, r rank, *B any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model_components._autograd import autocast_dtype, transforming
from model_components._checks import check_choice

from . import reference
from ._eager.autograd import Adapter, run

IMPLS = ("reference", "eager", "auto")


def check(
    operation: str,
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    bias: Tensor | None,
    transposed: bool,
) -> None:
    """Raise ValueError if shapes or dtypes do not match."""
    if weight.dim() != 2 or lora_a.dim() != 2 or lora_b.dim() != 2 or not x.dim():
        raise ValueError(
            f"{operation}: expected x, weight, lora_a and lora_b of shapes (*B, I), (O, I), (r, I) "
            f"and (O, r), got {list(x.shape)}, {list(weight.shape)}, {list(lora_a.shape)} and "
            f"{list(lora_b.shape)}"
        )
    outs, ins = weight.shape[::-1] if transposed else weight.shape
    if x.shape[-1] != ins:
        raise ValueError(
            f"{operation}: x has shape {list(x.shape)}, expected a last dimension of {ins}, the "
            "input size of the weight"
        )
    if (
        lora_a.shape[1] != ins
        or lora_b.shape[0] != outs
        or lora_a.shape[0] != lora_b.shape[1]
        or not lora_a.shape[0]
    ):
        raise ValueError(
            f"{operation}: lora_a and lora_b have shapes {list(lora_a.shape)} and "
            f"{list(lora_b.shape)}, expected (r, {ins}) and ({outs}, r) with r >= 1, because the "
            f"weight has {outs} outputs and {ins} inputs"
        )
    if bias is not None and tuple(bias.shape) != (outs,):
        raise ValueError(f"{operation}: bias has shape {list(bias.shape)}, expected [{outs}]")
    # autocast casts x and weight; the factors are always cast, so their dtypes need not match
    if autocast_dtype(x) is None and x.dtype != weight.dtype:
        raise ValueError(
            f"{operation}: x has dtype {x.dtype} and weight has dtype {weight.dtype}, expected the "
            "same dtype"
        )


def _check_options(operation: str, dropout_p: float, seed: Tensor | None, impl: str) -> None:
    check_choice(operation, "impl", impl, IMPLS)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"{operation}: dropout_p is {dropout_p}, expected at least 0 and below 1")
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1):
        raise ValueError(
            f"{operation}: the seed has {seed.numel()} elements and dtype {seed.dtype}, expected 1 "
            "element and dtype torch.int64"
        )


def lora_linear(
    x: Tensor,  # (*B, I)
    weight: Tensor,  # (O, I), or (I, O) when transposed
    lora_a: Tensor,  # (r, I)
    lora_b: Tensor,  # (O, r)
    bias: Tensor | None = None,  # (O,)
    *,
    scaling: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,  # (), int64
    transposed: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Return the output of a linear layer with a low-rank update.

    The output is ``x Wᵀ + b + scaling · (drop(x) Aᵀ) Bᵀ``, where drop is dropout. The only
    activation that is kept for backward is x; backward recomputes x Aᵀ and the dropout mask. Apart
    from the output, no tensor of its size is created, but dropout on a GPU also creates a mask and
    a masked copy of x. Factors whose dtype differs from the dtype of x are cast to the dtype of x.

    Args:
        x: Input of shape (*B, I).
        weight: Base weight of shape (O, I), frozen or trainable.
        lora_a: Down-projection of shape (r, I).
        lora_b: Up-projection of shape (O, r).
        bias: Bias of shape (O,), or None.
        scaling: peft's ``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` for rsLoRA.
        dropout_p: Probability that the update ignores an element of x; pass 0 in evaluation.
        seed: An int64 scalar on x's device that determines the dropout mask. If None, the seed is
            drawn from torch's generator.
        transposed: Whether the weight has shape (I, O), as in GPT-2's `Conv1D`.
        impl: ``"auto"`` or ``"eager"`` for the memory-saving implementation, ``"reference"`` for
            the plain one. Inside vmap, jvp and other transforms, the plain one is always used.

    Returns:
        The output of shape (*B, O), in the dtype of x or, under autocast, in autocast's dtype.

    Raises:
        ValueError: Shapes or dtypes do not match, or an option is unknown or out of range.

    Source: Hu et al., "LoRA", 2021. Order of products and saved tensors: "RunLoRA", arXiv
    2312.03415.

    >>> x, a, b = (
    ...     torch.tensor([[1.0, 2.0]]),
    ...     torch.tensor([[1.0, 1.0]]),
    ...     torch.tensor([[1.0], [0.0]]),
    ... )
    >>> lora_linear(x, torch.eye(2), a, b, scaling=2.0)
    tensor([[7., 2.]])
    """
    operation = "lora_linear"
    check(operation, x, weight, lora_a, lora_b, bias, transposed)
    _check_options(operation, dropout_p, seed, impl)
    # the autograd function in `run` does not support vmap and jvp
    if impl == "reference" or transforming():
        if dropout_p and seed is None:
            seed = torch.randint(-(2**63), 2**63 - 1, (), device=x.device)
        if autocast_dtype(x) is None:
            lora_a = lora_a.to(x.dtype)
            lora_b = lora_b.to(x.dtype)
        return reference.lora_linear(
            x,
            weight,
            lora_a,
            lora_b,
            bias,
            scaling=scaling,
            dropout_p=dropout_p,
            seed=seed,
            transposed=transposed,
        )
    y = run(
        x.reshape(-1, x.shape[-1]),
        weight,
        bias,
        (lora_a, lora_b),
        (Adapter(float(scaling), float(dropout_p)),),
        transposed=transposed,
        seeds=None if seed is None else seed.reshape(1),
    )
    return y.view(*x.shape[:-1], y.shape[-1])
