"""`lora_linear`: a linear layer with a low-rank update that saves only x for backward.

Letters: I in_features, O out_features, r rank, *B any leading shape.
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
    """Raise if shapes or dtypes do not match."""
    if weight.dim() != 2 or lora_a.dim() != 2 or lora_b.dim() != 2 or not x.dim():
        raise ValueError(
            f"{operation}: x is {list(x.shape)}, weight {list(weight.shape)}, lora_a "
            f"{list(lora_a.shape)} and lora_b {list(lora_b.shape)}; expected (*B, I), (O, I), (r, "
            "I) and (O, r)"
        )
    outs, ins = weight.shape[::-1] if transposed else weight.shape
    if x.shape[-1] != ins:
        raise ValueError(
            f"{operation}: last dim of x {list(x.shape)} must be {ins}, the weight's input"
        )
    if (
        lora_a.shape[1] != ins
        or lora_b.shape[0] != outs
        or lora_a.shape[0] != lora_b.shape[1]
        or not lora_a.shape[0]
    ):
        raise ValueError(
            f"{operation}: lora_a is {list(lora_a.shape)} and lora_b {list(lora_b.shape)}, but the "
            f"weight {outs} x {ins} needs (r, {ins}) and ({outs}, r), r >= 1"
        )
    if bias is not None and tuple(bias.shape) != (outs,):
        raise ValueError(f"{operation}: bias has shape {list(bias.shape)}, expected ({outs},)")
    # autocast casts both; the factors are cast to x's dtype and need not match
    if autocast_dtype(x) is None and x.dtype != weight.dtype:
        raise ValueError(
            f"{operation}: x is {x.dtype} and the weight is {weight.dtype}, expected one dtype"
        )


def _check_options(operation: str, dropout_p: float, seed: Tensor | None, impl: str) -> None:
    check_choice(operation, "impl", impl, IMPLS)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"{operation}: dropout_p is {dropout_p}, expected at least 0 and below 1")
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1):
        raise ValueError(
            f"{operation}: seed has {seed.numel()} elements of {seed.dtype}, expected 1 of "
            "torch.int64"
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

    It is ``x Wᵀ + b + scaling · (drop(x) Aᵀ) Bᵀ``. Only x is kept until backward, which computes
    x Aᵀ and the dropout mask again. No tensor of the output's size is created but the output. The
    factors may have another dtype than x: they are cast, x is not.

    Args:
        x: Input, (*B, I).
        weight: The base weight, (O, I), frozen or trainable.
        lora_a: Down-projection, (r, I).
        lora_b: Up-projection, (O, r).
        bias: (O,) or None.
        scaling: peft's ``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` for rsLoRA.
        dropout_p: Probability that the update ignores an element of x; pass 0 in evaluation.
        seed: A scalar of int64 on x's device that determines the dropout mask; None draws one from
            torch's generator.
        transposed: The weight is stored (I, O), as GPT-2's `Conv1D` does.
        impl: ``"reference"`` (always used inside vmap, jvp and the like) or ``"eager"``, which
            ``"auto"`` selects.

    Returns:
        (*B, O), in x's dtype, or autocast's.

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
    # the autograd function of `run` has no rules for vmap and jvp
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
