"""Reference implementations: dense, slow and simple, in any float dtype.

Letters: r terms; A is (r, O1, I1), B is (r, O2, I2); out_features O = O1 O2, in_features I = I1 I2;
*B any leading dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


def kron_weight(a: Tensor, b: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return the dense weight Σ_r s_r A_r ⊗ B_r, (O, I)."""
    terms = [torch.kron(one, other) for one, other in zip(a, b, strict=True)]
    if scales is not None:
        terms = [s * term for s, term in zip(scales, terms, strict=True)]
    return torch.stack(terms).sum(0)


def kron_linear(
    x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:  # (*B, I) to (*B, O)
    """Compute ``x @ (Σ_r s_r A_r ⊗ B_r).T + bias``."""
    return F.linear(x, kron_weight(a, b, scales), bias)


def rearranged(weight: Tensor, b_shape: tuple[int, int]) -> Tensor:
    """Return the rearranged weight R(W), (O1 I1, O2 I2).

    Its row (p, u) is the flattened block (p, u) of W. In A ⊗ B, this block is A[p, u] B, so
    R(A ⊗ B) has rank one.
    """
    o2, i2 = b_shape
    return rearrange(weight, "(p o2) (u i2) -> (p u) (o2 i2)", o2=o2, i2=i2)


def van_loan(weight: Tensor, b_shape: tuple[int, int], rank: int) -> Tensor:
    """Return the sum of ``rank`` Kronecker products nearest to a weight, as a dense weight.

    Source: Van Loan and Pitsianis 1993.
    """
    (o2, i2), (o, i) = b_shape, weight.shape
    u, s, v = torch.linalg.svd(rearranged(weight, b_shape), full_matrices=False)
    # each pair of singular vectors of R(W) is one term: the left vector is A, the right one is B
    a = (u[:, :rank] * s[:rank]).T.reshape(rank, o // o2, i // i2)
    return kron_weight(a, v[:rank].reshape(rank, o2, i2))


def prune(weight: Tensor, b_shape: tuple[int, int], keep: tuple[int, int]) -> Tensor:
    """Keep one of every ``b_shape[0]`` rows and one of every ``b_shape[1]`` columns; zero the rest.

    ``keep`` is the position (row, column) of the kept element within each block of ``b_shape``.
    """
    pruned = torch.zeros_like(weight)
    rows = slice(keep[0], None, b_shape[0])
    columns = slice(keep[1], None, b_shape[1])
    pruned[rows, columns] = weight[rows, columns]
    return pruned


def als(cross: Tensor, moment: Tensor, a: Tensor, b: Tensor, rounds: int) -> Tensor:
    """Return the dense weight after alternating least squares on ‖(W - Σ A ⊗ B) C^½‖.

    ``cross`` is W C, and ``moment`` is C. The weight is linear in A for a given B, and linear in B
    for a given A. Each half of a round builds the design matrix of one of these linear maps and
    solves its normal equations.
    """
    for _ in range(rounds):
        for which in (0, 1):
            free = (a, b)[which]
            basis = []
            for k in range(free.numel()):
                unit = torch.zeros_like(free).reshape(-1)
                unit[k] = 1
                unit = unit.reshape(free.shape)
                basis.append(kron_weight(unit, b) if which == 0 else kron_weight(a, unit))
            design = torch.stack(basis)  # (unknowns, O, I)
            normal = torch.einsum("koi,ij,loj->kl", design, moment, design)
            target = torch.einsum("koi,oi->k", design, cross)
            solved = torch.linalg.solve(normal, target).reshape(free.shape)
            a, b = (solved, b) if which == 0 else (a, solved)
    return kron_weight(a, b)
