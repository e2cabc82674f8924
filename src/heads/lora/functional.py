"""`lora_linear` and `lora_linears`: a linear layer plus a low-rank update, that keep x and nothing else for backward.

Letters: I in_features, O out_features, r rank, *B any leading shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .autograd import Adapter, autocast_dtype, run

IMPLS = ("reference", "eager", "fused", "auto")
ORDERS = ("factored", "merged", "auto")


def check(operation: str, x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, bias: Tensor | None,
          transposed: bool) -> None:  # fmt: skip
    """Refuse shapes and dtypes that do not belong together."""
    if weight.dim() != 2 or lora_a.dim() != 2 or lora_b.dim() != 2 or not x.dim():
        raise ValueError(
            f"{operation}: x is {list(x.shape)}, weight {list(weight.shape)}, lora_a {list(lora_a.shape)} and lora_b "
            f"{list(lora_b.shape)}; needed (*B, I), (O, I), (r, I) and (O, r)"
        )
    outs, ins = weight.shape[::-1] if transposed else weight.shape
    if x.shape[-1] != ins:
        raise ValueError(f"{operation}: last dim of x {list(x.shape)} must be {ins}, the weight's input")
    if lora_a.shape[1] != ins or lora_b.shape[0] != outs or lora_a.shape[0] != lora_b.shape[1] or not lora_a.shape[0]:
        raise ValueError(
            f"{operation}: lora_a is {list(lora_a.shape)} and lora_b {list(lora_b.shape)}, but the weight {outs} x "
            f"{ins} needs (r, {ins}) and ({outs}, r), r >= 1"
        )
    if bias is not None and tuple(bias.shape) != (outs,):
        raise ValueError(f"{operation}: bias has shape {list(bias.shape)}, needed ({outs},)")
    if autocast_dtype(x) is None and x.dtype != weight.dtype:
        raise ValueError(f"{operation}: x is {x.dtype} and the weight is {weight.dtype}, needed one dtype")


def lora_linears(
    x: Tensor,  # (*B, I)
    weights: Sequence[Tensor],  # J of (O_j, I), or (I, O_j) when transposed
    lora_as: Sequence[Tensor],  # J of (r_j, I)
    lora_bs: Sequence[Tensor],  # J of (O_j, r_j)
    biases: Sequence[Tensor | None] | None = None,  # J of (O_j,)
    *,
    scalings: Sequence[float],
    dropout_p: float = 0.0,
    seeds: Tensor | None = None,  # (J,), int64
    transposed: bool = False,
    order: str = "auto",
    impl: str = "auto",
) -> list[Tensor]:
    """`lora_linear` for several layers that read the same x, as q, k and v do: one down-projection, x saved once.

    Args:
        x: Input, (*B, I).
        weights: The layers' weights.
        lora_as: Their adapters' down-projections, which become one product where nothing is dropped.
        lora_bs: Their adapters' up-projections.
        biases: Their biases, or None.
        scalings: One number a layer.
        dropout_p: Each layer's adapter drops elements of x of its own.
        seeds: (J,), 64-bit numbers that name the dropout; None draws them from torch's state.
        transposed: Weights are stored (I, O), as GPT-2's `Conv1D` does.
        order: As in `lora_linear`.
        impl: As in `lora_linear`.

    Returns:
        J outputs, (*B, O_j) each, in x's dtype.

    Raises:
        ValueError: Shapes or dtypes that do not fit; an option that is not one; fused where it cannot run.

    >>> x, eye = torch.tensor([[1.0, 2.0]]), torch.eye(2)
    >>> a, b = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0], [0.0]])
    >>> lora_linears(x, [eye, 2 * eye], [a, a], [b, b], scalings=[1.0, 10.0])
    [tensor([[4., 2.]]), tensor([[32.,  4.]])]
    """
    operation, count = "lora_linears", len(weights)
    biases = [None] * count if biases is None else list(biases)
    sizes = (len(lora_as), len(lora_bs), len(biases), len(scalings))
    if not count or set(sizes) != {count}:
        raise ValueError(f"{operation}: {count} weights with {sizes} factors a, b, biases and scalings; needed as many")
    for weight, a, b, bias in zip(weights, lora_as, lora_bs, biases, strict=True):
        check(operation, x, weight, a, b, bias, transposed)
    _check_options(operation, x, dropout_p, seeds, count, order, impl)
    if impl == "reference":
        given = [None] * count if seeds is None else list(seeds)
        if dropout_p and seeds is None:
            given = list(torch.randint(-(2**63), 2**63 - 1, (count,), device=x.device))
        parts = zip(weights, lora_as, lora_bs, biases, scalings, given, strict=True)
        return [
            reference.lora_linear(x, w, a, b, c, scaling=s, dropout_p=dropout_p, seed=one, transposed=transposed)
            for w, a, b, c, s, one in parts
        ]
    adapters = [Adapter(j, float(s), float(dropout_p)) for j, s in enumerate(scalings)]
    return run(
        x, weights, biases, lora_as, lora_bs, adapters, transposed=transposed, order=order, impl=impl, seeds=seeds
    )


def _check_options(
    operation: str, x: Tensor, dropout_p: float, seeds: Tensor | None, count: int, order: str, impl: str
) -> None:
    if impl not in IMPLS:
        raise ValueError(f"{operation}: impl is {impl!r}, needed one of {', '.join(IMPLS)}")
    if order not in ORDERS:
        raise ValueError(f"{operation}: order is {order!r}, needed one of {', '.join(ORDERS)}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"{operation}: dropout_p is {dropout_p}, needed at least 0 and below 1")
    if seeds is not None and (seeds.dtype != torch.int64 or seeds.numel() != count):
        raise ValueError(f"{operation}: {seeds.numel()} seeds of {seeds.dtype}, needed {count} of torch.int64")
    working = autocast_dtype(x) or x.dtype
    if order == "merged" and (dropout_p or working.itemsize < 4):
        raise ValueError(
            f"{operation}: order 'merged' with dropout_p {dropout_p} in {working}; it needs no dropout and float32, "
            "since half precision rounds W + s B A to W where the update is small"
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
    order: str = "auto",
    impl: str = "auto",
) -> Tensor:
    """A linear layer with a low-rank update: ``x Wᵀ + b + scaling · (drop(x) Aᵀ) Bᵀ``.

    Until backward it keeps x and nothing else: x Aᵀ and the dropout's mask are computed again. Nothing of the output's
    size is made but the output. The factors may be of another dtype than x: they are cast, x is not.

    Args:
        x: Input, (*B, I).
        weight: The base weight, frozen or trainable.
        lora_a: Down-projection, (r, I).
        lora_b: Up-projection, (O, r).
        bias: (O,) or None.
        scaling: peft's ``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` for rsLoRA.
        dropout_p: Share of x's elements that the update does not see; pass 0 in evaluation.
        seed: A 64-bit number that names the dropout, as a tensor on x's device; None draws one from torch's state.
        transposed: The weight is stored (I, O), as GPT-2's `Conv1D` does.
        order: ``"factored"``, ``"merged"`` or ``"auto"``. Merged is ``x (W + s B A)ᵀ``: fewer flops above I O / (I + O)
            tokens at the price of one more weight in memory. It is for float32 and without dropout only, since bfloat16
            loses most of an update of a thousandth of W. Auto takes it there from twice those tokens on, on CPU.
        impl: ``"reference"``, ``"eager"``, ``"fused"`` (Triton for all narrow products) or ``"auto"``: eager, as
            no row measured on a GPU says yet that the kernels are faster.

    Returns:
        (*B, O), in x's dtype, or autocast's.

    Raises:
        ValueError: Shapes or dtypes that do not fit; an option that is not one; fused where it cannot run.

    Second derivatives are refused; ``impl="reference"`` has them.

    Source: Hu et al., "LoRA", 2021. Order of products and what to save: "RunLoRA", arXiv 2312.03415.

    >>> x, a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0], [0.0]])
    >>> lora_linear(x, torch.eye(2), a, b, scaling=2.0)
    tensor([[7., 2.]])
    """
    operation = "lora_linear"
    check(operation, x, weight, lora_a, lora_b, bias, transposed)
    seeds = None if seed is None else seed.reshape(1)
    _check_options(operation, x, dropout_p, seeds, 1, order, impl)
    return lora_linears(
        x, [weight], [lora_a], [lora_b], [bias], scalings=[scaling], dropout_p=dropout_p, seeds=seeds,
        transposed=transposed, order=order, impl=impl,
    )[0]  # fmt: skip
