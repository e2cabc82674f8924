"""Fit low-rank embedding tables.

Rows count by how often they are looked up and, if a head is tied to the table, by the error of the
logits.
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
"""The weight of the rows' own error in a table that is tied to a head; the error of the logits has
the rest."""
_ROWS = 8192  # rows in float64 at once


@dataclass
class TableUse:
    """Statistics of a table (V, H) on calibration tokens: sums, accumulated in float64."""

    counts: Tensor  # (V,), how often each row is looked up
    inputs: Tensor | None  # Σ x xᵀ, (H, H), of the inputs x of tied layers

    @property
    def looked_up(self) -> int:
        """The number of rows that are looked up at all."""
        return int((self.counts > 0).sum())


@torch.no_grad()
def uses_of(
    model: nn.Module, tables: Mapping[str, Sequence[str]], data: Sequence[Batch], operation: str
) -> dict[str, TableUse]:
    """Measure how calibration tokens use tables: the look-ups, and the inputs of tied layers.

    Args:
        model: The model.
        tables: For each table's name, the names of the layers that share its weight.
        data: Batches of calibration tokens.
        operation: The name that error messages begin with.

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
                f"{operation}: {name} looked up no calibration token, expected token ids for it"
            )
    return uses


@torch.no_grad()
def low_rank_table(weight: Tensor, rank: int, use: TableUse) -> tuple[Tensor, Tensor, float]:
    """Return the best low-rank factors of a table, weighted by how often tokens occur.

    The weight of row v is the mean of its share of the tokens and 1 / V, so that rare tokens
    count, too. If a tied layer multiplies the rows by x, an error e of a row costs mostly
    (e · x)² and a little e · e. With this metric M = L Lᵀ and the rows' weights D, the best factors
    are the truncated SVD of D^½ W L, times D^-½ from the left and L⁻¹ from the right.

    Args:
        weight: W, (V, H).
        rank: r.
        use: How the tokens use the table.

    Returns:
        A (r, H) and B (V, r) in the weight's dtype, for the weight B A, and the squared
        relative error in this metric.
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
    # columns of B and rows of A get equal norms, for an optimizer with one learning rate
    balance = (b.norm(dim=0) / a.norm(dim=1)).clamp_min(1e-30).sqrt()
    if rank < width:
        error = float((values[:-rank].sum() / values.sum().clamp_min(1e-300)).clamp_min(0))
    else:
        error = 0.0
    return (a * balance[:, None]).to(weight.dtype), (b / balance).to(weight.dtype), error
