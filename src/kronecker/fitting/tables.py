"""Tables of embeddings of low rank.

They are fitted where they are looked up and, where a head is tied to one, read out.
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
"""For a table that is tied to a head: the weight of its rows' own error; the rest is that of the
logits."""
_ROWS = 8192  # in float64 at once


@dataclass
class TableUse:
    """Sums over what calibration tokens do with a table (V, H), in float64."""

    counts: Tensor  # (V,), how often each row is looked up
    inputs: Tensor | None  # Σ x xᵀ, (H, H), of what a tied layer multiplies with it

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
        operation: The verb, for messages.

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
                f"{operation}: {name} looked up no calibration token, expected data that it reads"
            )
    return uses


@torch.no_grad()
def low_rank_table(weight: Tensor, rank: int, use: TableUse) -> tuple[Tensor, Tensor, float]:
    """Return the best low-rank factors of a table, weighted by how often tokens occur.

    The weight of row v is the mean of its share of the tokens and 1 / V, so that rare tokens are
    not forgotten. If a tied layer multiplies x with the rows, an error e costs e · e and mostly
    (e · x)²: with that metric M = L Lᵀ and the rows' weights D the best is the truncated SVD
    of D^½ W L, times D^-½ and L⁻¹.

    Args:
        weight: W, (V, H).
        rank: r.
        use: How the tokens use the table.

    Returns:
        A (r, H) and B (V, r) in the weight's dtype, for the weight B A, and the share of that
        error.
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
    # columns of B and rows of A get one size, for an optimizer with one rate
    balance = (b.norm(dim=0) / a.norm(dim=1)).clamp_min(1e-30).sqrt()
    if rank < width:
        error = float((values[:-rank].sum() / values.sum().clamp_min(1e-300)).clamp_min(0))
    else:
        error = 0.0
    return (a * balance[:, None]).to(weight.dtype), (b / balance).to(weight.dtype), error
