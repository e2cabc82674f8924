"""The eager arithmetic of `kron_linear`: two products with the factors, or one with the weight.

All paths use three sums over the small factor B and one large product with A:

- `inward`: (n, u, v), (r, q, v) → (q, n, r, u), the sum over v
- `outward`: (q, n, r, u), (r, q, v) → (n, u, v), the sum over q and r: the adjoint of `inward`
- `gram`: (q, n, r, u), (n, u, v) → (r, q, v), the sum over n and u: the small factor's gradient

"B first" is `inward`, then one product with A that also sums over r. "A first" is a product with A,
then `outward`. Per token, the large product costs r O1 I1 multiply-adds, times O2 for B first and
times I2 for A first.

Letters: n tokens; p and u index A's rows and columns; q and v index B's rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from model_components._autograd import (
    Context,
    differentiable_gradients,
    launches_directly,
    wants_graph,
)

ORDERS = ("b_first", "a_first", "rebuild")
# two products have overheads, so they must be cheaper than rebuilding the weight by this factor
_WORTH = 1.3
# building one term's weight costs about as much as the dense product of this many tokens
_REBUILD_TOKENS = 24
# products with an input or a result of up to this many elements run in the next higher precision
_SMALL = 256
_FEW = 8  # up to this many rows, products with A are fastest without a packed copy of A
_BLOCK = 256  # tokens at a time on a CPU, so that intermediate results stay in the CPU's cache


def order_of(a_shape: tuple[int, int], b_shape: tuple[int, int], rank: int, tokens: int) -> str:
    """Return the order with fewest multiply-adds: ``"b_first"``, ``"a_first"`` or ``"rebuild"``.

    >>> order_of((3072, 384), (1, 2), 1, tokens=1024), order_of((384, 3072), (2, 1), 1, tokens=1024)
    ('b_first', 'a_first')
    >>> order_of((3072, 384), (1, 2), 4, tokens=1024)
    'rebuild'
    """
    (o1, i1), (o2, i2) = a_shape, b_shape
    dense = o1 * o2 * i1 * i2
    costs = {
        "b_first": rank * (i1 * i2 * o2 + i1 * o1 * o2),
        "a_first": rank * (i1 * i2 * o1 + i2 * o1 * o2),
    }
    # on a tie, take B first, which saves fewer tensors for the backward pass
    if costs["b_first"] <= costs["a_first"]:
        order = "b_first"
    else:
        order = "a_first"
    rebuilt = dense * (tokens + _REBUILD_TOKENS * rank)
    if costs[order] * tokens * _WORTH <= rebuilt:
        return order
    return "rebuild"


def build(a: Tensor, b: Tensor) -> Tensor:
    """Build the dense weight Σ_r A_r ⊗ B_r, (O, I), from one matrix product and one copy."""
    (r, o1, i1), (_, o2, i2) = a.shape, b.shape
    flat = torch.mm(b.reshape(r, -1).T, a.reshape(r, -1))
    # row p O2 + q and column u I2 + v of the weight, as torch.kron orders them
    return flat.view(o2, i2, o1, i1).permute(2, 0, 3, 1).reshape(o1 * o2, i1 * i2)


def inward(x: Tensor, b: Tensor) -> Tensor:
    """Compute Σ_v b[r, q, v] x[n, u, v], as (q, n, r, u)."""
    n, u, v = x.shape
    r, q, _ = b.shape
    rows = x.permute(2, 0, 1).reshape(v, n * u)
    sums = torch.mm(b.transpose(0, 1).reshape(q * r, v), rows).view(q, r, n, u)
    return sums.transpose(1, 2)


def outward(t: Tensor, b: Tensor) -> Tensor:
    """Compute Σ_{q, r} b[r, q, v] t[q, n, r, u], as (n, u, v)."""
    q, n, r, u = t.shape
    v = b.shape[2]
    # a loop over columns is faster than a product, except in half precision
    if q * r == 1 and t.dtype in (torch.float32, torch.float64):
        out = t.new_empty(n, u, v)
        rows = t.reshape(n, u)
        for k in range(v):
            out[..., k] = rows * b[0, 0, k]
        return out
    if q * r <= v:
        rows = t.permute(1, 3, 2, 0).reshape(n * u, r * q)
        return torch.mm(rows, b.reshape(r * q, v)).view(n, u, v)
    columns = t.permute(0, 2, 1, 3).reshape(q * r, n * u)
    return torch.mm(b.transpose(0, 1).reshape(q * r, v).T, columns).view(v, n, u).permute(1, 2, 0)


def gram(t: Tensor, x: Tensor) -> Tensor:
    """Compute Σ_{n, u} t[q, n, r, u] x[n, u, v], as (r, q, v)."""
    q, n, r, u = t.shape
    rows = t.permute(0, 2, 1, 3).reshape(q * r, n * u)
    return _long_product(rows, x.reshape(n * u, x.shape[2])).view(q, r, -1).transpose(0, 1)


def _long_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, where each element of the result is a sum of very many terms.

    A small result is computed in the next higher precision, which costs little.
    """
    if left.shape[0] * right.shape[1] <= _SMALL:
        better = _better(left.dtype)
        return torch.mm(left.to(better), right.to(better))
    return torch.mm(left, right).to(_work(left.dtype))


def scaled(b: Tensor, scales: Tensor | None) -> Tensor:
    """Return the small factors B times their scales, or B itself without scales."""
    if scales is None:
        return b
    return b * scales.view(-1, 1, 1)


def small_gradients(db: Tensor, b: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of b and of the scales, from the gradient of their product.

    Both gradients are contiguous, as fused optimizers expect.
    """
    if scales is None:
        return db.to(b.dtype).contiguous(), None
    # the scales' gradients are sums over whole factors, so they are computed in float64
    db = db.double()
    d_scales = (db * b).sum((1, 2)).to(scales.dtype)
    return (db * scales.view(-1, 1, 1)).to(b.dtype).contiguous(), d_scales


def _better(dtype: torch.dtype) -> torch.dtype:
    if dtype in (torch.float32, torch.float64):
        return torch.float64
    return torch.float32


def _work(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.float64:
        return torch.float64
    return torch.float32


def _packed(a: Tensor) -> Tensor:
    """Return A reshaped to (O1, r I1), as a view if r is 1."""
    r, o1, i1 = a.shape
    return a.transpose(0, 1).reshape(o1, r * i1)


def _few(a: Tensor, rows: Tensor) -> Tensor:
    """Return Σ_r A_r rows_rᵀ, (O1, m), for a few rows (r, m, I1).

    With few rows, it is fastest to use A as the left operand, without a packed copy.
    """
    return torch.bmm(a, rows.transpose(1, 2)).sum(0, dtype=_work(rows.dtype)).to(rows.dtype)


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


def _blocks(x: Tensor, alone: int) -> Iterator[slice]:
    """Yield slices of at most `_BLOCK` tokens on a CPU.

    ``alone`` is the size of B's dimension in the intermediate result. If it is 1, or on other
    devices, yield a single slice.
    """
    tokens = x.shape[0]
    if x.device.type == "cpu" and alone > 1:
        step = _BLOCK
    else:
        step = max(1, tokens)
    for start in range(0, max(1, tokens), step):
        yield slice(start, min(start + step, tokens))


class _BFirst(torch.autograd.Function):
    """The product with B first, then with A.

    The forward pass saves x and the factors. The backward pass recomputes the intermediate result.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, a: Tensor, b: Tensor, scales: Tensor | None
    ) -> Tensor:  # (N, I) and factors to (N, O)
        ctx.save_for_backward(x, a, b, scales)
        b = scaled(b, scales)
        (r, o1, i1), (_, o2, i2) = a.shape, b.shape
        n = x.shape[0]
        if n * o2 <= _FEW:
            t = inward(x.view(n, i1, i2), b).permute(2, 0, 1, 3).reshape(r, o2 * n, i1)
            return _few(a, t).view(o1, o2, n).permute(2, 0, 1).reshape(n, o1 * o2)
        out = None
        packed = _packed(a)
        for block in _blocks(x, o2):
            part = x[block]
            t = inward(part.view(len(part), i1, i2), b).reshape(-1, r * i1)
            out = _put(
                out, block, torch.mm(t, packed.T).view(o2, len(part), o1).permute(1, 2, 0), n
            )
        return _whole(out, n, o1 * o2)

    @staticmethod
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if wants_graph():
            return _differentiable(ctx, grad, "b_first")
        x, a, b, scales = ctx.saved_tensors
        small = scaled(b, scales)
        packed = _packed(a)
        (r, o1, i1), (_, o2, i2) = a.shape, b.shape
        need_x, need_a, need_b = _needs(ctx)
        dx = None
        if need_a:
            da = torch.zeros(o1, r * i1, dtype=_work(a.dtype), device=a.device)
        else:
            da = None
        db = None
        for block in _blocks(x, o2):
            xb = x[block]
            n = xb.shape[0]
            xb = xb.view(n, i1, i2)
            g = grad[block].reshape(n, o1, o2).permute(2, 0, 1).reshape(o2 * n, o1)
            if da is not None:
                _add_product(da, g.T, inward(xb, small).reshape(o2 * n, r * i1))
            if need_x or need_b:
                dt = torch.mm(g, packed).view(o2, n, r, i1)
                if need_x:
                    dx = _put(dx, block, outward(dt, small), len(x))
                if need_b:
                    db = _plus(db, gram(dt, xb))
        if da is not None:
            da = da.view(o1, r, i1).transpose(0, 1).to(a.dtype).contiguous()
        dx = _whole(dx, *x.shape) if need_x else None
        return dx, da, *(small_gradients(db, b, scales) if db is not None else (None, None))


class _AFirst(torch.autograd.Function):
    """The product with A first, then with B.

    The forward pass saves x, the factors and, if B or the scales need gradients, x Aᵀ, which is
    costly to recompute.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, a: Tensor, b: Tensor, scales: Tensor | None
    ) -> Tensor:  # (N, I) and factors to (N, O)
        (r, o1, i1), (_, o2, i2) = a.shape, b.shape
        n = x.shape[0]
        out = None
        saved = None
        learns = _needs(ctx)[2]
        # with few elements, rounding errors in the gradients of B and the scales do not average out
        if learns and x.numel() <= _SMALL:
            dtype = _better(x.dtype)
        else:
            dtype = x.dtype
        wide = a.to(dtype)
        flat = wide.reshape(r * o1, i1)
        turned = scaled(b, scales).transpose(1, 2)
        for block in _blocks(x, i2):
            rows = _split(x[block], i1, i2).to(dtype)
            if rows.shape[0] <= _FEW:
                columns = rows.T.expand(r, -1, -1)
                s = torch.bmm(wide, columns).view(r, o1, i2, -1).permute(2, 3, 0, 1)
            else:
                s = torch.mm(rows, flat.T).view(i2, len(rows) // i2, r, o1)
            if learns:
                saved = _put(saved, block, s.transpose(0, 1), n)
            out = _put(out, block, outward(s.to(x.dtype), turned), n)
        ctx.save_for_backward(x, a, b, scales, saved)
        return _whole(out, n, o1 * o2)

    @staticmethod
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if wants_graph():
            return _differentiable(ctx, grad, "a_first")
        x, a, b, scales, kept = ctx.saved_tensors
        (r, o1, i1), (_, o2, i2) = a.shape, b.shape
        need_x, need_a, need_b = _needs(ctx)
        dx = None
        if need_a:
            da = torch.zeros(r * o1, i1, dtype=_work(a.dtype), device=a.device)
        else:
            da = None
        db = None
        flat = a.reshape(r * o1, i1)
        turned = scaled(b, scales).transpose(1, 2)
        for block in _blocks(x, i2):
            n = x[block].shape[0]
            g = grad[block].reshape(n, o1, o2)
            if need_x or need_a:
                ds = inward(g, turned).reshape(i2 * n, r * o1)
                if need_x:
                    dx = _put(
                        dx, block, torch.mm(ds, flat).view(i2, n, i1).permute(1, 2, 0), len(x)
                    )
                if da is not None:
                    _add_product(da, ds.T, _split(x[block], i1, i2))
            if need_b:
                # the forward pass may have saved x Aᵀ in the next higher precision
                db = _plus(db, gram(kept[block].transpose(0, 1), g.to(kept.dtype)).transpose(1, 2))
        da = None if da is None else da.view(r, o1, i1).to(a.dtype)
        dx = _whole(dx, *x.shape) if need_x else None
        return dx, da, *(small_gradients(db, b, scales) if db is not None else (None, None))


class _Rebuild(torch.autograd.Function):
    """The product with the dense weight, which is built in the forward and the backward pass.

    The forward pass saves x and the factors, not the weight.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, a: Tensor, b: Tensor, scales: Tensor | None
    ) -> Tensor:  # (N, I) and factors to (N, O)
        ctx.save_for_backward(x, a, b, scales)
        return F.linear(x, build(a, scaled(b, scales)))

    @staticmethod
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if wants_graph():
            return _differentiable(ctx, grad, "rebuild")
        x, a, b, scales = ctx.saved_tensors
        small = scaled(b, scales)
        (r, o1, i1), (_, o2, i2) = a.shape, b.shape
        need_x, need_a, need_b = _needs(ctx)
        dx = torch.mm(grad, build(a, small)) if need_x else None
        da = None
        db = (None, None)
        if need_a or need_b:
            # the gradient of the weight, (O2 I2, O1 I1), in the layout where terms are outer
            # products
            dw = (
                torch.mm(grad.T, x)
                .view(o1, o2, i1, i2)
                .permute(1, 3, 0, 2)
                .reshape(o2 * i2, o1 * i1)
            )
            if need_a:
                da = torch.mm(small.reshape(r, -1), dw).view_as(a)
            if need_b:
                db = small_gradients(_long_product(a.reshape(r, -1), dw.T).view_as(b), b, scales)
        return dx, da, *db


class Balanced(torch.autograd.Function):
    """The product with a single Kronecker term in one kernel (`_triton`).

    The forward pass saves x and the factors.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, a: Tensor, b: Tensor, scales: Tensor | None
    ) -> Tensor:  # (N, I) and factors of one term to (N, O)
        from . import _triton

        ctx.save_for_backward(x, a, b, scales)
        run = _triton.launch_forward if launches_directly(x) else _triton.forward
        return run(x, a[0], scaled(b, scales)[0])

    @staticmethod
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if wants_graph():
            return _differentiable(ctx, grad, "b_first")
        from . import _triton

        if not _triton.has_backward(grad):
            with torch.enable_grad():
                gradients = _differentiable(ctx, grad, "a_first")
            return tuple(None if g is None else g.detach() for g in gradients)
        x, a, b, scales = ctx.saved_tensors
        run = _triton.launch_backward if launches_directly(grad) else _triton.backward
        dx, da, db = run(grad, x, a[0], scaled(b, scales)[0])
        return dx, da[None], *small_gradients(db[None], b, scales)


def plain(
    x: Tensor, a: Tensor, b: Tensor, scales: Tensor | None, order: str
) -> Tensor:  # (N, I) to (N, O)
    """Compute `kron_linear` in plain torch operations, which torch can trace and transform.

    The choice of operations does not depend on the number of tokens.
    """
    b = scaled(b, scales)
    (r, o1, i1), (_, o2, i2) = a.shape, b.shape
    if order == "rebuild":
        return F.linear(x, build(a, b))
    rows = x.reshape(-1, i1, i2)
    if order == "b_first":
        t = rows @ b.permute(2, 1, 0).reshape(i2, o2 * r)  # (N, I1, O2 r)
        t = t.reshape(-1, i1, o2, r).permute(0, 2, 3, 1).reshape(-1, o2, r * i1)
        return (t @ _packed(a).T).transpose(1, 2).reshape(-1, o1 * o2)
    s = rows.transpose(1, 2) @ a.reshape(r * o1, i1).T  # (N, I2, r O1)
    s = s.reshape(-1, i2, r, o1).permute(0, 3, 2, 1).reshape(-1, o1, r * i2)
    return (s @ b.permute(0, 2, 1).reshape(r * i2, o2)).reshape(-1, o1 * o2)


def _differentiable(ctx: Context, grad: Tensor, order: str) -> tuple[Tensor | None, ...]:
    """Return gradients that can be differentiated again, by differentiating `plain`."""

    def formula(x: Tensor, a: Tensor, b: Tensor, scales: Tensor | None) -> Tensor:
        return plain(x, a, b, scales, order)

    return differentiable_gradients(formula, ctx.saved_tensors[:4], ctx.needs_input_grad, grad)


def _needs(ctx: Context) -> tuple[bool, bool, bool]:
    """Return whether x needs a gradient, whether A does, and whether B or the scales do."""
    x, a, b, scales = ctx.needs_input_grad
    return x, a, b or scales


def _put(out: Tensor | None, block: slice, rows: Tensor, n: int) -> Tensor:
    """Write a block's rows into a result of ``n`` rows, and return the result.

    If the block is the whole result, return its rows without a copy.
    """
    if out is None:
        if len(rows) == n:
            return rows
        # the blocks together fill all rows, so the memory needs no initial values
        out = rows.new_empty(n, *rows.shape[1:])
    out[block] = rows
    return out


def _whole(out: Tensor | None, rows: int, columns: int) -> Tensor:
    assert out is not None
    return out.reshape(rows, columns)


def _split(x: Tensor, i1: int, i2: int) -> Tensor:
    """Return x (n, I) as rows of A's inputs, (v n, u)."""
    return x.view(len(x), i1, i2).permute(2, 0, 1).reshape(-1, i1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to ``total``, in place and in the dtype of ``total``."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right)


CONTRACTIONS: dict[str, type[torch.autograd.Function]] = {
    "b_first": _BFirst,
    "a_first": _AFirst,
    "rebuild": _Rebuild,
}
