"""`lora_linear` and `lora_linears`: a linear layer plus a low-rank update, that keep x and nothing else for backward.

y = x Wᵀ + b, then y += s (x Aᵀ) Bᵀ in place. Backward computes x Aᵀ again, and a dropout's mask from its seed.
Floor: the frozen layer's own two products, 4 T I O flops, and 2 T r (3 O + 4 I) for an adapter.

Letters: T tokens, I in_features, O out_features, r rank, *B any leading shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import narrow, reference

IMPLS = ("reference", "eager", "fused", "auto")
ORDERS = ("factored", "merged", "auto")
_MERGE_ABOVE = 2  # times the tokens at which both orders take as many flops: a merged weight also has to be written


class Adapter(NamedTuple):
    """One low-rank update: of which layer, how large, for which tokens."""

    layer: int
    scaling: float
    dropout_p: float = 0.0
    spans: tuple[tuple[int, int], ...] | None = None  # ranges of tokens; None: all


class Plan(NamedTuple):
    """What `_Lora` is to do, tensors aside."""

    layers: int
    adapters: tuple[Adapter, ...]
    transposed: bool
    merged: bool
    fused: bool

    def groups(self) -> list[list[int]]:
        """Adapters that share one down-projection: those that see all of x. Others are alone."""
        shared = [k for k, one in enumerate(self.adapters) if not one.dropout_p and one.spans is None]
        alone = [[k] for k in range(len(self.adapters)) if k not in shared]
        return [shared, *alone] if shared else alone


class _Tensors(NamedTuple):
    """`_Lora`'s tensors by role, in x's dtype, which is autocast's where that is on."""

    weights: list[Tensor]
    biases: list[Tensor | None]
    a: list[Tensor]
    b: list[Tensor]

    @classmethod
    def of(cls, plan: Plan, dtype: torch.dtype, tensors: Sequence[Tensor | None]) -> _Tensors:
        cast = [None if t is None else t.to(dtype) for t in tensors]
        j, k = plan.layers, len(plan.adapters)
        return cls(cast[:j], cast[j : 2 * j], cast[2 * j : 2 * j + k], cast[2 * j + k :])  # type: ignore[arg-type]

    def merged(self, plan: Plan, layer: int) -> Tensor:
        """W + Σ s B A of one layer."""
        weight = self.weights[layer]
        for k, one in enumerate(plan.adapters):
            if one.layer == layer:
                left, right = (self.a[k].T, self.b[k].T) if plan.transposed else (self.b[k], self.a[k])
                weight = torch.addmm(weight, left, right, alpha=one.scaling)
        return weight


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """The stock layers' own products, `nn.Linear`'s and transformers' `Conv1D`'s."""
    if not transposed:
        return F.linear(x, weight, bias)
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


class _Piece(NamedTuple):
    """What one call of a backend needs: adapters that share their rows of x."""

    which: list[int]
    rows: slice
    outputs: list[int]
    a: Tensor  # stacked
    bs: list[Tensor]
    scales: list[float]
    drop: narrow.Dropout | None


def _pieces(plan: Plan, t: _Tensors, seeds: Tensor | None, x: Tensor) -> Iterator[_Piece]:
    for which in plan.groups():
        adapters = [plan.adapters[k] for k in which]
        first = adapters[0]
        drop = None
        if first.dropout_p:
            assert seeds is not None
            drop = narrow.dropout(seeds[which[0]], x.shape[0], x.shape[1], first.dropout_p)
        scales = [one.scaling / (1 - one.dropout_p) for one in adapters]
        stacked = t.a[which[0]] if len(which) == 1 else torch.cat([t.a[k] for k in which])
        for start, stop in first.spans or ((None, None),):
            rows, held = slice(start, stop), drop
            if drop is not None and first.spans is not None:
                held = drop._replace(rows=drop.rows[rows])
            yield _Piece(which, rows, [one.layer for one in adapters], stacked, [t.b[k] for k in which], scales, held)


def _backend(plan: Plan) -> Any:
    if not plan.fused:
        return narrow
    from . import _triton

    return _triton


class _Lora(torch.autograd.Function):
    """Layers that share x (T, I), each with its adapters. Saves x, the parameters and 8 bytes a dropout.

    Tensors after the seeds: the layers' weights, their biases or None, the adapters' A, the adapters' B.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, seeds: Tensor | None, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.plan = plan
        ctx.save_for_backward(x, seeds, *tensors)
        t = _Tensors.of(plan, x.dtype, tensors)
        weights = [t.merged(plan, j) for j in range(plan.layers)] if plan.merged else t.weights
        ys = tuple(_linear(x, w, b, plan.transposed) for w, b in zip(weights, t.biases, strict=True))
        for piece in () if plan.merged else _pieces(plan, t, seeds, x):
            outputs = [ys[j][piece.rows] for j in piece.outputs]
            _backend(plan).add_(outputs, x[piece.rows], piece.a, piece.bs, piece.scales, piece.drop)
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyrefly: ignore
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            raise RuntimeError(
                "lora_linear: second derivatives were asked for, and it has none; needed impl='reference', or "
                "restore_lora_(model)"
            )
        plan = ctx.plan
        x, seeds, *tensors = ctx.saved_tensors
        need_x, _, _, *needs = ctx.needs_input_grad
        t = _Tensors.of(plan, x.dtype, tensors)
        merged_dx = plan.merged and x.shape[0] > grads[0].shape[1]  # fewer flops than adding g A
        first_a = 2 * plan.layers
        first_b = first_a + len(plan.adapters)
        dx: Tensor | None = None
        found: list[Tensor | None] = [None] * len(tensors)

        def found_(at: int, part: Tensor) -> None:
            held = found[at]
            found[at] = part if held is None else held + part

        for j, grad in enumerate(grads):
            if need_x:
                weight = t.merged(plan, j) if merged_dx else t.weights[j]
                weight = weight.T if plan.transposed else weight
                dx = grad @ weight if dx is None else dx.addmm_(grad, weight)
            if needs[j]:
                found_(j, x.T @ grad if plan.transposed else grad.T @ x)
            if needs[plan.layers + j]:
                found_(plan.layers + j, grad.sum(0))
        for piece in _pieces(plan, t, seeds, x):
            part_of_dx = None if dx is None or merged_dx else dx[piece.rows]
            da, dbs = _backend(plan).gradients(
                [grads[j][piece.rows] for j in piece.outputs], x[piece.rows], piece.a, piece.bs, piece.scales,
                piece.drop, part_of_dx, any(needs[first_a + k] for k in piece.which),
                any(needs[first_b + k] for k in piece.which),
            )  # fmt: skip
            if da is not None:
                for k, part in zip(piece.which, da.split([b.shape[1] for b in piece.bs]), strict=True):
                    found_(first_a + k, part)
            for k, part in zip(piece.which, dbs or (), strict=dbs is not None):
                found_(first_b + k, part)
        own = [
            f.to(tensor.dtype) if need and f is not None else None
            for f, tensor, need in zip(found, tensors, needs, strict=True)
        ]
        return dx, None, None, *own


def run(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    lora_as: Sequence[Tensor],
    lora_bs: Sequence[Tensor],
    adapters: Sequence[Adapter],
    *,
    transposed: bool = False,
    order: str = "auto",
    impl: str = "auto",
    seeds: Tensor | None = None,
) -> list[Tensor]:
    """Layers that share x, each with any adapters: `lora_linears` without its checks. Used by `LoraLinear`."""
    adapters, autocast = tuple(adapters), autocast_dtype(x)
    if autocast is not None:
        x = x.to(autocast)
    flat = x.reshape(-1, x.shape[-1])
    merged = order == "merged" or (order == "auto" and _merges(flat, weights, adapters))
    if seeds is None and any(one.dropout_p for one in adapters):
        seeds = torch.randint(-(2**63), 2**63 - 1, (len(adapters),), device=x.device, dtype=torch.int64)
    fused = _uses_fused(impl, x)
    plan = Plan(len(weights), adapters, transposed, merged, fused)
    with nullcontext() if autocast is None else torch.autocast(x.device.type, enabled=False):
        ys = _Lora.apply(flat, plan, seeds, *weights, *biases, *lora_as, *lora_bs)
    return [y.view(*x.shape[:-1], y.shape[-1]) for y in ys]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast asks for; None where it is off. It leaves float64 alone, and does not know the meta device."""
    device = x.device.type
    if x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def _merges(x: Tensor, weights: Sequence[Tensor], adapters: Sequence[Adapter]) -> bool:
    """Whether the merged order loses nothing and is the cheaper one: half precision would round the update away."""
    if x.dtype.itemsize < 4 or x.is_cuda or any(one.dropout_p or one.spans is not None for one in adapters):
        return False
    elements, sides = (sum(f(weights[one.layer].shape) for one in adapters) for f in (math.prod, sum))
    return x.shape[0] * sides > _MERGE_ABOVE * elements


def _uses_fused(impl: str, x: Tensor) -> bool:
    """Whether the Triton path runs; an explicit choice that cannot run raises."""
    if impl != "fused" and (impl != "auto" or not x.is_cuda):
        return False
    from . import _triton

    reason = _triton.unsupported(x)
    if reason is not None and impl == "fused":
        raise ValueError(f"lora_linear: impl 'fused' cannot run: {reason}")
    return reason is None


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
            loses 79 % of an update of a thousandth of W. Auto takes it there from twice those tokens on, on CPU.
        impl: ``"reference"``, ``"eager"``, ``"fused"`` (Triton for all narrow products) or ``"auto"``: fused on CUDA
            where the case is supported, else eager.

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
