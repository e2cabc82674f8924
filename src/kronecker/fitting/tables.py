"""Fit low-rank embedding tables.

Rows are weighted by how often they are looked up. If a head is tied to the table, the fit mostly
minimizes the error of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from model_components._walk import Batch, not_padding, tokens

from ..data.batches import without_labels
from ..discovery.finding import submodules
from ..discovery.mlps import watched
from ..layers.weights import dense

READ_IN = 0.03
"""The weight of the error of the rows in a table that is tied to a head. The error of the logits
has the remaining weight."""
_ROWS = 8192  # number of rows that are converted to float64 at a time


@dataclass
class TableUse:
    """Statistics of how calibration tokens use a table (V, H), accumulated in float64."""

    counts: Tensor  # (V,), how often each row is looked up
    inputs: Tensor | None  # Σ x xᵀ, (H, H), over the inputs x of tied layers; None without any

    @property
    def looked_up(self) -> int:
        """The number of rows that are looked up at least once."""
        return int((self.counts > 0).sum())


@torch.no_grad()
def uses_of(
    model: nn.Module, tables: Mapping[str, Sequence[str]], data: Sequence[Batch], operation: str
) -> dict[str, TableUse]:
    """Measure how calibration tokens use tables: the look-ups, and the inputs of tied layers.

    Args:
        model: The model.
        tables: The names of the layers that share each table's weight, by the table's name.
        data: Batches of calibration tokens.
        operation: The name with which error messages begin.

    Raises:
        ValueError: No calibration token is looked up in a table.
    """
    uses: dict[str, TableUse] = {}
    table_of: dict[str, str] = {}
    for name, others in tables.items():
        rows, columns = dense(model.get_submodule(name)).shape
        zeros = partial(torch.zeros, dtype=torch.float64, device=next(model.parameters()).device)
        uses[name] = TableUse(zeros(rows), zeros(columns, columns) if others else None)
        table_of |= dict.fromkeys((name, *others), name)
    keep: Tensor | None = None

    def see(name: str, given: Tensor, out: Tensor) -> None:
        use = uses[table_of[name]]
        if isinstance(model.get_submodule(name), nn.Embedding):
            ids = tokens(given.reshape(-1, 1), keep)[:, 0]
            use.counts += torch.bincount(ids, minlength=len(use.counts))
        elif use.inputs is not None:
            x = tokens(given, keep).float()
            use.inputs += x.T @ x

    with watched(submodules(model, table_of), see):
        for batch in data:
            keep = not_padding(batch)
            model(**without_labels(batch))
    for name, use in uses.items():
        if not float(use.counts.sum()):
            raise ValueError(
                f"{operation}: expected calibration data with token ids that {name} looks up, got "
                "none"
            )
    return uses


@torch.no_grad()
def low_rank_table(weight: Tensor, rank: int, use: TableUse) -> tuple[Tensor, Tensor, float]:
    """Return the best low-rank factors of a table, weighted by how often tokens occur.

    The weight of row v is the mean of its share of the tokens and 1 / V, so that rare tokens also
    count. If a tied layer multiplies the rows by inputs x, the cost of an error e of a row is
    mostly (e · x)², plus a small part e · e. In matrix form, the cost is eᵀ M e with M = L Lᵀ. With
    the rows' weights D, the best factors are the truncated SVD of D^½ W L, multiplied by D^-½ from
    the left and by L⁻¹ from the right.

    Args:
        weight: The table W, (V, H).
        rank: The rank r.
        use: How the tokens use the table.

    Returns:
        A (r, H) and B (V, r) in the weight's dtype, for the weight B A, and the squared relative
        error, weighted as above.
    """
    width = weight.shape[1]
    shares = (use.counts / use.counts.sum() + 1 / len(weight)) / 2
    root = torch.eye(width, dtype=torch.float64, device=weight.device)
    if use.inputs is not None:
        metric = use.inputs * (width / use.inputs.trace().clamp_min(1e-300))
        root = torch.linalg.cholesky(READ_IN * root + (1 - READ_IN) * metric)
    moment = torch.zeros_like(root)
    # Lᵀ Wᵀ D W L is only (H, H): no SVD of the whole table is needed
    for rows, share in zip(weight.split(_ROWS), shares.split(_ROWS), strict=True):
        moment += rows.double().T @ (rows.double() * share[:, None])
    values, vectors = torch.linalg.eigh(root.T @ moment @ root)
    kept = vectors[:, -rank:]
    a = torch.linalg.solve_triangular(root, kept.T, upper=False, left=False)
    b = torch.cat([rows.double() @ (root @ kept) for rows in weight.split(_ROWS)])
    # columns of B and rows of A get equal norms, which suits one learning rate for both
    balance = (b.norm(dim=0) / a.norm(dim=1)).clamp_min(1e-30).sqrt()
    if rank < width:
        error = float((values[:-rank].sum() / values.sum().clamp_min(1e-300)).clamp_min(0))
    else:
        error = 0.0
    return (a * balance[:, None]).to(weight.dtype), (b / balance).to(weight.dtype), error
