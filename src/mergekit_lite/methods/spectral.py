"""Methods that merge matrices by their singular vectors: tsv, iso_c, iso_cts, knots.

They hold a whole matrix and its factors; tensors that are not matrices take the mean (tsv, iso) or `ties` (knots).
Decompositions run in float64.

Notation: D_i = W_i - B, K models; svd(M) = U S V with V of shape (rank, columns).
"""

from __future__ import annotations

from .._torch import Tensor, torch
from .averaging import deltas
from .parameters import PerModel, Range
from .registry import merge_method
from .trimming import UNIT, ties

_SHARE = {"common_space_fraction": Range(0, 1)}


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin singular value decomposition in float64.

    Raises:
        ValueError: The matrix holds NaN or infinity.
    """
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("singular values: the matrix holds NaN or infinity")
    return torch.linalg.svd(matrix.double(), full_matrices=False)


def orthogonalised(matrix: Tensor) -> Tensor:
    """The orthogonal matrix nearest to ``matrix`` (Procrustes): U V of its singular value decomposition."""
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


def weighted_changes(tensors: list[Tensor], base: Tensor, weight: PerModel) -> list[Tensor]:
    """The task vectors times their weights."""
    return [change * w for change, w in zip(deltas(tensors, base), weight, strict=True)]


@merge_method("tsv", base="required", ranges={"alpha": Range()})
def tsv(tensors: list[Tensor], base: Tensor, *, weight: PerModel = 1.0, alpha: float = 1.0) -> Tensor:
    """B + α U S V of the top rank/K singular triples of every task matrix, their U and V made orthogonal together.

    Source: Task singular vectors (Gargiulo et al., arXiv 2412.00081), TSV-Merge.

    >>> tsv([torch.diag(torch.tensor([2.0, 0.0])), torch.diag(torch.tensor([0.0, 3.0]))], torch.zeros(2, 2))
    tensor([[2., 0.],
            [0., 3.]])
    """
    changes = weighted_changes(tensors, base, weight)
    if base.dim() != 2:
        return base + alpha * sum(changes) / len(changes)
    keep = max(1, min(base.shape) // len(changes))
    factors = [svd(change) for change in changes]
    u = orthogonalised(torch.cat([u[:, :keep] for u, _, _ in factors], 1))
    v = orthogonalised(torch.cat([v[:keep] for _, _, v in factors], 0))
    s = torch.cat([s[:keep] for _, s, _ in factors])
    return base + (alpha * (u * s) @ v).to(base.dtype)


@merge_method("iso_c", base="required")
def iso_c(tensors: list[Tensor], base: Tensor, *, weight: PerModel = 1.0, alpha: float = 1.0) -> Tensor:
    """B + α U mean(S) V of the summed task matrix: every direction gets the same strength.

    Source: No task left behind (Marczak et al., arXiv 2502.04959), Iso-C.

    >>> iso_c([torch.diag(torch.tensor([3.0, 1.0]))], torch.zeros(2, 2))
    tensor([[2., 0.],
            [0., 2.]])
    """
    changes = weighted_changes(tensors, base, weight)
    if base.dim() != 2:
        return base + alpha * sum(changes) / len(changes)
    u, s, v = svd(sum(changes[1:], changes[0]))
    return base + (alpha * s.mean() * u @ v).to(base.dtype)


@merge_method("iso_cts", base="required", ranges=_SHARE)
def iso_cts(
    tensors: list[Tensor],
    base: Tensor,
    *,
    weight: PerModel = 1.0,
    alpha: float = 1.0,
    common_space_fraction: float = 0.8,
) -> Tensor:
    """Iso-C with room for each task: a share of directions from the sum, the rest from what it leaves of each task.

    With r = rank: the top c = r - K ⌊(1 - fraction) r / K⌋ directions of Σ D_i are common; each task adds the top
    (r - c) / K of its D_i projected off them. All are made orthogonal together and get the mean strength.
    Source: No task left behind (arXiv 2502.04959), Iso-CTS.

    >>> iso_cts([torch.diag(torch.tensor([3.0, 1.0]))], torch.zeros(2, 2), common_space_fraction=0.5)
    tensor([[2., 0.],
            [0., 2.]])
    """
    changes = weighted_changes(tensors, base, weight)
    if base.dim() != 2:
        return base + alpha * sum(changes) / len(changes)
    rank, count = min(base.shape), len(changes)
    each = int((1 - common_space_fraction) * rank / count)
    u, s, v = svd(sum(changes[1:], changes[0]))
    common = rank - each * count
    us, ss, vs = [u[:, :common]], [s[:common]], [v[:common]]
    for change in changes:
        rest = change.double()
        own_u, own_s, own_v = svd(rest - us[0] @ (us[0].mT @ rest))
        us.append(own_u[:, :each])
        ss.append(own_s[:each])
        vs.append(own_v[:each])
    merged = torch.cat(ss).mean() * orthogonalised(torch.cat(us, 1)) @ orthogonalised(torch.cat(vs, 0))
    return base + (alpha * merged).to(base.dtype)


@merge_method("knots", base="required", ranges={"density": UNIT})
def knots(
    tensors: list[Tensor],
    base: Tensor,
    *,
    weight: PerModel = 1.0,
    density: PerModel = 1.0,
    normalize: bool = True,
    lambda_: float = 1.0,
) -> Tensor:
    """`ties` in the space that the task matrices share: svd of [D_1 … D_K], the V blocks merged, multiplied back.

    Made for LoRA-tuned models, whose task vectors are low-rank and unaligned. Singular values under 1e-4 of the
    largest are dropped.
    Source: Model merging with SVD to tie the KnOTS (Stoica et al., arXiv 2410.19735).

    >>> knots([torch.eye(2), torch.eye(2)], torch.zeros(2, 2)).round(decimals=4).abs()
    tensor([[1., 0.],
            [0., 1.]])
    """
    changes = deltas(tensors, base)
    if base.dim() != 2:
        zero = torch.zeros_like(base)
        return base + ties(changes, zero, weight=weight, density=density, normalize=normalize, lambda_=lambda_)
    u, s, v = svd(torch.cat(changes, 1))
    significant = s > 1e-4 * s[0] if s.numel() and s[0] > 0 else torch.zeros_like(s, dtype=torch.bool)
    if not bool(significant.any()):
        return base.clone()
    shared = u[:, significant] * s[significant]
    blocks = [block.contiguous() for block in v[significant].chunk(len(changes), 1)]
    zero = torch.zeros_like(blocks[0])
    merged = ties(blocks, zero, weight=weight, density=density, normalize=normalize, lambda_=lambda_)
    return base + (shared @ merged).to(base.dtype)
