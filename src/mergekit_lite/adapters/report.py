"""Reports on adapters that were written, and on their modules."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from model_components._report import Report, Table

_SHOWN = 5  # number of modules, and of tensors that were left out, in a printed report


@dataclass(frozen=True)
class AdapterModule:
    """One module of an adapter that was written.

    Args:
        name: The module's name.
        shape: The shape of its change, (out_features, in_features).
        rank: The rank of its factors.
        error: The relative error, that is, the norm of the difference between the change and the
            product of the rounded factors, divided by the norm of the change.
    """

    name: str
    shape: tuple[int, int]
    rank: int
    error: float


@dataclass(frozen=True)
class AdapterReport(Report):
    """The report on an adapter that was written.

    Args:
        out: The adapter's folder.
        modules: The modules that it changes.
        saved: Tensors that it replaces (peft's ``modules_to_save``).
        left: The changed tensors that are not in the adapter, by name. The value is the norm of the
            change divided by the norm of the base's tensor, or infinity if that tensor is all zero.
        nbytes: Size of the adapter's tensors in bytes.
        notes: Notes for the user.
    """

    out: Path
    modules: list[AdapterModule]
    saved: list[str]
    left: dict[str, float]
    nbytes: int
    notes: list[str] = field(default_factory=list)

    def summary(self) -> list[str]:
        """Return the adapter's size, ranks and errors."""
        ranks = [m.rank for m in self.modules]
        errors = [m.error for m in self.modules]
        lines = [f"{len(self.modules)} modules, {self.nbytes / 1e6:.1f} MB at {self.out}"]
        if errors:
            spread = f"median {statistics.median(errors):.2%}, worst {max(errors):.2%}"
            lines.append(f"rank {min(ranks)} to {max(ranks)}; relative error of a change: {spread}")
        return lines

    def table(self) -> Table:
        """Return the ranks and errors of the modules with the largest errors."""
        rows = []
        for m in sorted(self.modules, key=lambda module: -module.error)[:_SHOWN]:
            rows.append((m.name, "x".join(map(str, m.shape)), str(m.rank), f"{m.error:.2%}"))
        return Table(("module", "shape", "rank", "error"), rows)

    def remarks(self) -> list[str]:
        """Return the notes, and lines on what the table and the adapter leave out."""
        lines = []
        if len(self.modules) > _SHOWN:
            lines.append(
                f"and {len(self.modules) - _SHOWN} more modules, whose errors are not larger"
            )
        lines += [f"note: {text}" for text in self.notes]
        largest = sorted(self.left.items(), key=lambda item: -item[1])
        for name, share in largest[:_SHOWN]:
            change = f"changed by {share:.2%}" if math.isfinite(share) else "changed from all zeros"
            lines.append(f"{name} {change} and is not in the adapter")
        if len(largest) > _SHOWN:
            more = len(largest) - _SHOWN
            lines.append(f"{more} more changed tensors are not in the adapter; they changed less")
        return lines
