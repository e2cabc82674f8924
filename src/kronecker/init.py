"""Initial factors, from a weight alone or from a layer's inputs and target outputs.

`random`, `van_loan`, `prune` and `als` return `Factors` with their error. `van_loan` and `prune`
use the weight alone. `als` uses inputs and target outputs (`Moments`), because a model's quality
depends on the error of the outputs, not on the error of the weight.

Letters: r terms; p and u index A's rows and columns; q and v index B's rows and columns;
O = O1 O2, I = I1 I2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._eager import build
from .moments import Moments, positive


class Factors(NamedTuple):
    """The factors of a weight, and their relative error."""

    a: Tensor  # (r, O1, I1)
    b: Tensor  # (r, O2, I2)
    error: float  # relative error of the weight or, from `als`, of the outputs

    def weight(self) -> Tensor:
        """Return the dense weight."""
        return build(self.a, self.b)


def relative_error(weight: Tensor, built: Tensor) -> float:
    """Return the relative error ‖W - Ŵ‖ / ‖W‖, where W is ``weight`` and Ŵ is ``built``."""
    w = weight.double()
    return float((built.double() - w).norm() / w.norm().clamp_min(1e-300))


def _blocks(weight: Tensor, b_shape: tuple[int, int]) -> tuple[int, int, int, int]:
    (o2, i2), (o, i) = b_shape, weight.shape
    if o % o2 or i % i2:
        raise ValueError(
            f"kronecker.init: b_shape {b_shape} does not divide a weight of shape "
            f"{tuple(weight.shape)}"
        )
    return o // o2, i // i2, o2, i2


def _check(operation: str, weight: Tensor, rank: int, most: int) -> None:
    if not torch.isfinite(weight).all() or not weight.any():
        raise ValueError(
            f"{operation}: the weight of shape {list(weight.shape)} is all zeros or not finite, "
            "expected finite numbers that are not all zero"
        )
    if not 1 <= rank <= most:
        raise ValueError(f"{operation}: rank is {rank}, expected 1 to {most}")


def random(
    shape: tuple[int, int],
    b_shape: tuple[int, int],
    rank: int = 1,
    *,
    dtype: torch.dtype = torch.float32,
) -> Factors:
    """Draw factors from normal distributions that keep a layer's outputs at its inputs' scale.

    The factors A (k = 1) and B (k = 2) have the standard deviation min(1, √(O_k / I_k)) / √I_k. B
    is then divided by √r, so that the sum over r terms has the standard deviation of one term
    ("Compute Better Spent", arXiv 2406.06248, section 3).

    Args:
        shape: The weight's shape (O, I).
        b_shape: The shape (O2, I2) of every B.
        rank: Number of terms, r.
        dtype: The dtype of the factors.

    >>> random((8, 6), (2, 3), 2).a.shape
    torch.Size([2, 4, 2])
    """
    o1, i1, o2, i2 = _blocks(torch.empty(shape, device="meta"), b_shape)

    def draw(o: int, i: int) -> Tensor:
        std = min(1.0, (o / i) ** 0.5) / i**0.5
        return torch.randn(rank, o, i, dtype=torch.float32) * std

    a = draw(o1, i1)
    b = draw(o2, i2) / rank**0.5
    return Factors(a.to(dtype), b.to(dtype), float("nan"))


def van_loan(weight: Tensor, b_shape: tuple[int, int], rank: int = 1) -> Factors:
    """Return the sum of ``rank`` Kronecker products that is nearest to a weight.

    The sum is the truncated SVD of the rearranged weight, computed in float64 from the eigenvectors
    of the smaller Gram matrix. For a B of shape (1, 2) this matrix is 2 x 2, whatever the weight's
    size.

    Args:
        weight: The weight W, (O, I).
        b_shape: The shape (O2, I2) of every B.
        rank: Number of terms, at most the number of elements of the smaller factor. With that many
            terms, the result is exact.

    Raises:
        ValueError: ``b_shape`` does not divide the weight's shape, ``rank`` is out of range, or the
            weight is all zeros or not finite.

    Source: Van Loan and Pitsianis, "Approximation with Kronecker products", 1993.

    >>> w = torch.kron(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]]))
    >>> van_loan(w, (2, 1)).error < 1e-6
    True
    """
    o1, i1, o2, i2 = _blocks(weight, b_shape)
    _check("van_loan", weight, rank, min(o1 * i1, o2 * i2))
    rows = (
        weight.detach().double().view(o1, o2, i1, i2).permute(0, 2, 1, 3).reshape(o1 * i1, o2 * i2)
    )
    # eigh sorts eigenvalues in ascending order, so flip(1) puts the largest first; eigenvectors
    # have norm 1, so the other factor carries the scale
    if o2 * i2 <= o1 * i1:
        b = torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :rank]
        a = rows @ b
    else:
        a = torch.linalg.eigh(rows @ rows.T).eigenvectors.flip(1)[:, :rank]
        b = rows.T @ a
    a = a.T.reshape(rank, o1, i1)
    b = b.T.reshape(rank, o2, i2)
    # an eigenvector's sign is arbitrary: make B's largest entry positive, so that all machines give
    # the same factors
    sign = torch.where(
        b.flatten(1).gather(1, b.flatten(1).abs().argmax(1, True)) < 0, -1.0, 1.0
    ).view(-1, 1, 1)
    a = a * sign
    b = b * sign
    return Factors(a.to(weight.dtype), b.to(weight.dtype), relative_error(weight, build(a, b)))


def prune(
    weight: Tensor, b_shape: tuple[int, int], *, keep: str | tuple[int, int] = "even"
) -> Factors:
    """Return factors that keep one of every O2 rows and one of every I2 columns of a weight.

    A has the kept entries, and B is zero except for a single 1. If I2 is 1, the kept outputs are
    exact.

    Args:
        weight: The weight, (O, I).
        b_shape: The shape (O2, I2) of B.
        keep: ``"even"`` keeps the first row and column of each group, and ``"odd"`` the second.
            ``"energy"`` keeps the position with the largest sum of squares. A pair is a position
            (row, column) within B.

    Raises:
        ValueError: ``b_shape`` does not divide the weight's shape, the weight is all zeros or not
            finite, or the position is outside B.

    >>> prune(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), (2, 1), keep="odd").a
    tensor([[[2.],
             [4.]]])
    """
    o1, i1, o2, i2 = _blocks(weight, b_shape)
    _check("prune", weight, 1, 1)
    # the weight's row p O2 + q and column u I2 + v have the position (q, v) within B
    parts = weight.detach().view(o1, o2, i1, i2)
    if keep == "energy":
        q, v = divmod(int(parts.double().square().sum((0, 2)).argmax()), i2)
    else:
        q, v = (
            {"even": (0, 0), "odd": (min(1, o2 - 1), min(1, i2 - 1))}[keep]
            if isinstance(keep, str)
            else keep
        )
    if not (0 <= q < o2 and 0 <= v < i2):
        raise ValueError(
            f"prune: keep is {(q, v)}, expected a position (row, column) within B of shape "
            f"{b_shape}"
        )
    a = parts[:, q, :, v].clone()[None]
    b = torch.zeros(1, o2, i2, dtype=weight.dtype, device=weight.device)
    b[0, q, v] = 1
    return Factors(a, b, relative_error(weight, build(a, b)))


def als(moments: Moments, start: Factors, *, rounds: int = 10) -> Factors:
    """Return factors fitted to target outputs on calibration tokens, by alternating least squares.

    The factors minimize Σ |Σ_r (A_r ⊗ B_r) x - y|² over the inputs x and target outputs y of all
    tokens. For a given B, the best A takes one linear solve with r I1 unknowns, shared by all rows
    of A. For a given A, the best B takes one linear solve with r I2 unknowns. For target outputs
    y = W x, the factors minimize ‖(W - Σ A ⊗ B) C^½‖, where C is the inputs' second moment.

    Args:
        moments: The moments of the layer's inputs and target outputs.
        start: The initial factors, which also set the number of terms.
        rounds: The number of rounds. Each round updates A once and B once.

    Returns:
        Factors in the dtype of ``start``, whose ``error`` is the relative error of the outputs.

    Raises:
        ValueError: The moments hold no tokens, or their shapes do not match the initial factors.

    >>> x, w = torch.randn(50, 4), torch.randn(6, 4)
    >>> start = van_loan(w, (2, 1))
    >>> moments = Moments.of(x, w)
    >>> als(moments, start).error <= moments.error(start.weight()) + 1e-3
    True
    """
    (r, o1, i1), (_, o2, i2) = start.a.shape, start.b.shape
    if not moments.count:
        raise ValueError("als: expected moments of one or more tokens, got no calibration tokens")
    if tuple(moments.cross.shape) != (o1 * o2, i1 * i2):
        raise ValueError(
            f"als: expected moments for a weight of shape {[o1 * o2, i1 * i2]}, got moments for a "
            f"weight of shape {list(moments.cross.shape)}"
        )
    damped = moments.damped()
    begin = Factors(start.a.double(), start.b.double(), start.error)
    ridge = damped - moments.inputs
    # the ridge pulls toward the initial factors, not toward zero
    wanted = (moments.cross + begin.weight() @ ridge).view(o1, o2, i1, i2)
    # [u, v, x, w]: the second moments of input columns u I2 + v and x I2 + w
    seen = damped.view(i1, i2, i1, i2)
    solved = None
    if i2 == 1:  # A's normal equations are then the same in every round
        solved = _solve(damped, wanted.reshape(o1 * o2, i1).T).T.view(o1, o2, i1)
    a = begin.a
    b = begin.b
    for _ in range(rounds):
        if solved is not None:
            mixed = torch.einsum("rq,pqu->rpu", b[:, :, 0], solved)
            a = _solve(b[:, :, 0] @ b[:, :, 0].T, mixed.reshape(r, -1)).view(r, o1, i1)
        else:
            small = torch.einsum("rqv,sqw->rvsw", b, b)
            normal = torch.einsum("rvsw,uvxw->rusx", small, seen).reshape(r * i1, r * i1)
            right = torch.einsum("rqv,pquv->rup", b, wanted).reshape(r * i1, o1)
            a = _solve(normal, right).view(r, i1, o1).transpose(1, 2)
        flat = a.transpose(1, 2).reshape(r * i1, o1)
        large = (flat @ flat.T).view(r, i1, r, i1)
        normal = torch.einsum("rusx,uvxw->rvsw", large, seen).reshape(r * i2, r * i2)
        right = torch.einsum("rpu,pquv->rvq", a, wanted).reshape(r * i2, o2)
        b = _solve(normal, right).view(r, i2, o2).transpose(1, 2)
        # only the product of the norms of A and B is determined, so B is rescaled to norm 1
        norm = b.flatten(1).norm(dim=1).clamp_min(1e-30).view(-1, 1, 1)
        a = a * norm
        b = b / norm
    error = moments.error(build(a, b))
    return Factors(a.to(start.a).contiguous(), b.to(start.b).contiguous(), error)


def _solve(normal: Tensor, right: Tensor) -> Tensor:
    """Solve a symmetric positive (semi)definite system.

    A tiny multiple of the identity is added, so that the system can be solved if terms are linearly
    dependent.
    """
    scale = normal.diagonal().mean().clamp_min(1e-300)
    factor, info = torch.linalg.cholesky_ex(
        normal + 1e-10 * scale * torch.eye(len(normal), dtype=normal.dtype, device=normal.device)
    )
    if int(info):
        # gelsd also solves singular systems, but on a GPU torch has only gels
        return torch.linalg.lstsq(
            normal, right, driver="gelsd" if normal.device.type == "cpu" else "gels"
        ).solution
    return torch.cholesky_solve(right, factor)


def correct_bias(moments: Moments, weight: Tensor) -> Tensor:
    """Return the bias with which outputs and targets have the same mean: E[y] - Ŵ E[x]."""
    n = max(1, moments.count)
    return (moments.sum_y - weight.double() @ moments.sum_x) / n


def low_rank(weight: Tensor, rank: int, moments: Moments | None = None) -> tuple[Tensor, Tensor]:
    """Return the best approximation of a weight by two factors of rank r.

    Without ``moments``, the result is the truncated SVD of the weight. With ``moments``, the
    approximation minimizes the error of the outputs on calibration data. It is then the truncated
    SVD of W L, multiplied by L⁻¹ from the right, where W is the best full weight and L Lᵀ = C is
    the inputs' second moment.

    Args:
        weight: The weight, (O, I).
        rank: The rank r.
        moments: The moments of the layer's inputs and target outputs.

    Returns:
        A (r, I) and B (O, r) in the weight's dtype, for the weight B A.

    Source: SVD-LLM (arXiv 2403.07378), section 3. For target outputs other than W x, this is
    reduced-rank regression.

    >>> a, b = low_rank(torch.eye(4), 2)
    >>> a.shape, b.shape
    (torch.Size([2, 4]), torch.Size([4, 2]))
    """
    _check("low_rank", weight, rank, min(weight.shape))
    wanted = weight.double()
    root = None
    if moments is not None:
        moment, root = positive(moments.damped())
        wanted = (
            torch.cholesky_solve((moments.cross + wanted @ (moment - moments.inputs)).T, root).T
            @ root
        )
    u, s, v = torch.linalg.svd(wanted, full_matrices=False)
    b = u[:, :rank] * s[:rank].sqrt()
    a = s[:rank, None].sqrt() * v[:rank]
    if root is not None:
        a = torch.linalg.solve_triangular(root, a, upper=False, left=False)
    return a.to(weight.dtype), b.to(weight.dtype)
