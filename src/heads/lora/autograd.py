"""The autograd of LoRA layers that share an input: products in place, and x alone kept for backward.

y = x Wᵀ + b, then y += s (x Aᵀ) Bᵀ in place. Backward computes x Aᵀ again, and a dropout's mask from its seed.
Floor: the frozen layer's own two products, 4 T I O flops, and 2 T r (3 O + 4 I) for an adapter.

Letters: T tokens, I in_features, O out_features, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import narrow

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
        cast: list[Any] = [None if t is None else t.to(dtype) for t in tensors]
        j, k = plan.layers, len(plan.adapters)
        return cls(cast[:j], cast[j : 2 * j], cast[2 * j : 2 * j + k], cast[2 * j + k :])

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
    if impl != "fused":  # "auto" is eager until a row measured on a GPU says that the kernels are faster there
        return False
    from . import _triton

    reason = _triton.unsupported(x)
    if reason is not None:
        raise ValueError(f"lora_linear: impl 'fused' cannot run: {reason}")
    return True
