"""Methods that merge matrices by their singular vectors: tsv, iso_c.

`tsv` decomposes the change of every model, and holds the factors of all models in memory. `iso_c`
decomposes only the sum of the changes. For tensors that are not matrices, both methods average the
changes. Decompositions run in float64.

Notation: D_i = W_i - B, K models; svd(M) = U S V with V of shape (rank, columns).
"""

from __future__ import annotations

from .._torch import Tensor, torch
from .averaging import deltas
from .parameters import PerModel
from .registry import merge_method


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reduced singular value decomposition of a matrix, in float64.

    Raises:
        ValueError: The matrix holds NaN or infinity.
    """
    # torch's error is not a ValueError, and the engine adds the tensor's name only to ValueErrors
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(
            "singular value decomposition: expected finite values, got NaN or infinity"
        )
    return torch.linalg.svd(matrix.double(), full_matrices=False)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return the orthogonal matrix nearest to ``matrix`` (Procrustes).

    It is U V, where U S V is the singular value decomposition of ``matrix``.
    """
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


def weighted_changes(tensors: list[Tensor], base: Tensor, weight: PerModel) -> list[Tensor]:
    """Return the task vectors multiplied by their weights."""
    return [change * w for change, w in zip(deltas(tensors, base), weight, strict=True)]


@merge_method("tsv", base="required")
def tsv(
    tensors: list[Tensor], base: Tensor, *, weight: PerModel = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return B + α U S V, where U, S, V hold the top rank/K singular triples of every w_i D_i.

    The singular vectors of all models are first made orthogonal to each other.

    Source: Task singular vectors (Gargiulo et al., arXiv 2412.00081), TSV-Merge.

    >>> tsv(
    ...     [torch.diag(torch.tensor([2.0, 0.0])), torch.diag(torch.tensor([0.0, 3.0]))],
    ...     torch.zeros(2, 2),
    ... )
    tensor([[2., 0.],
            [0., 3.]])
    """
    changes = weighted_changes(tensors, base, weight)
    if base.dim() != 2:
        return base + alpha * sum(changes) / len(changes)
    # no more than the rank in total, but at least one per model
    keep = max(1, min(base.shape) // len(changes))
    factors = [svd(change) for change in changes]
    u = orthogonalized(torch.cat([u[:, :keep] for u, _, _ in factors], 1))
    v = orthogonalized(torch.cat([v[:keep] for _, _, v in factors], 0))
    s = torch.cat([s[:keep] for _, s, _ in factors])
    return base + (alpha * (u * s) @ v).to(base.dtype)


@merge_method("iso_c", base="required")
def iso_c(
    tensors: list[Tensor], base: Tensor, *, weight: PerModel = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return B + α mean(S) U V, where U S V is the decomposition of Σ w_i D_i.

    This makes all singular values of the summed change equal.
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
