"""Reports about a thinker: accuracy by steps, latents and length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_components._report import Axes, Figure, Report, Table, axes_for, plain


@dataclass(frozen=True)
class Accuracy(Report):
    """The shares of correct symbols and of fully correct rows.

    Args:
        token: The share of symbols that are correct.
        sequence: The share of rows in which every symbol is correct.
        rows: The number of rows; 0 if unknown.
    """

    token: float
    sequence: float
    rows: int = 0

    def summary(self) -> list[str]:
        """Return one line: the shares of correct symbols and of fully correct rows."""
        return [f"symbols {self.token:.3f}, rows {self.sequence:.3f}"]


@dataclass(frozen=True)
class Grid(Report):
    """Accuracy by number of latents (rows) and steps (columns)."""

    n_latents: tuple[int, ...]
    n_steps: tuple[int, ...]
    cells: tuple[tuple[Accuracy, ...], ...]

    def token(self) -> Tensor:
        """Return the shares of correct symbols, (latents, steps)."""
        return torch.tensor([[cell.token for cell in row] for row in self.cells])

    def to_dict(self) -> dict[str, object]:
        """Return both shares of each cell, rounded to 4 digits, as a dict for JSON."""
        parts = {
            name: [[round(getattr(c, name), 4) for c in row] for row in self.cells]
            for name in ("token", "sequence")
        }
        return plain({"n_latents": self.n_latents, "n_steps": self.n_steps, **parts})

    def table(self) -> Table:
        """Return the accuracy per symbol for each number of latents and steps."""
        rows = [
            [str(n), *(f"{c.token:.3f}" for c in row)]
            for n, row in zip(self.n_latents, self.cells, strict=True)
        ]
        return Table(["latents \\ steps", *map(str, self.n_steps)], rows)

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot a heat map of the shares of correct symbols, on ``ax`` or in a new figure.

        A new figure also has the step curves. Plotting needs the extra ``plot``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        width = 0.6 * len(self.n_steps) + 2.5
        height = max(3.4, 0.45 * len(self.n_latents) + 1.6)
        figure, axes = axes_for(ax, "Grid.plot", width=width + (0 if ax else 5), height=height)
        values = self.token()
        low = float(values.min())
        image = axes.imshow(
            values.tolist(), cmap="viridis", aspect="auto", origin="lower", vmin=low, vmax=1.0
        )
        for i, row in enumerate(values.tolist()):
            for j, value in enumerate(row):
                shown = f"{value:.3f}".removeprefix("0")
                # viridis is dark in its lower half
                color = "white" if value < (low + 1) / 2 else "black"
                axes.text(j, i, shown, ha="center", va="center", fontsize=7, color=color)
        axes.set_xticks(range(len(self.n_steps)), [str(n) for n in self.n_steps])
        axes.set_yticks(range(len(self.n_latents)), [str(n) for n in self.n_latents])
        axes.set(xlabel="steps", ylabel="latents")
        figure.colorbar(image, ax=axes, label="token accuracy")
        if ax is None:
            left, right = figure.add_gridspec(1, 2, width_ratios=[width, 5])
            axes.set_subplotspec(left)
            names = [f"{n} latents" for n in self.n_latents]
            _step_curves(
                figure.add_subplot(right), names, [self.n_steps] * len(names), values.tolist()
            )
        return figure


_FALL = 0.05
"""The smallest drop in the share of correct rows that `Curves.remarks` reports."""

_FEW = 100
"""`Curves.remarks` reports lengths with fewer rows, of which one row is more than 1%."""


def _fall(rows: int) -> float:
    """Return the smallest drop in accuracy on ``rows`` rows that is unlikely to be chance."""
    # two standard errors of a share near one half, but no less than the floor
    return max(_FALL, 1 / math.sqrt(rows)) if rows else _FALL


@dataclass(frozen=True)
class Curves(Report):
    """Accuracy by number of steps, with a curve for each length.

    Remarks list the lengths with few rows, and the lengths at which more steps made fewer rows
    correct.
    """

    lengths: tuple[int, ...]
    n_steps: tuple[tuple[int, ...], ...]  # of each length
    cells: tuple[tuple[Accuracy, ...], ...]

    def rows(self) -> list[dict[str, float]]:
        """Return a dict per point: length, steps, shares of correct symbols and of correct rows."""
        return [
            {"length": length, "steps": step, "symbols": cell.token, "rows": cell.sequence}
            for length, steps, cells in zip(self.lengths, self.n_steps, self.cells, strict=True)
            for step, cell in zip(steps, cells, strict=True)
        ]

    def to_dict(self) -> dict[str, object]:
        """Return the points as a dict for JSON."""
        return plain({"points": self.rows()})

    def table(self) -> Table:
        """Return the percentages of correct symbols and of fully correct rows.

        If all lengths have the same numbers of steps, each number is a column; otherwise each point
        is a row.
        """
        if len(set(self.n_steps)) > 1:
            points = [
                (
                    str(point["length"]),
                    str(point["steps"]),
                    _percent(point["symbols"]),
                    _percent(point["rows"]),
                )
                for point in self.rows()
            ]
            return Table(["length", "steps", "% of symbols", "% of rows"], points)
        rows = []
        for length, cells in zip(self.lengths, self.cells, strict=True):
            shares = [f"{_percent(cell.token)}/{_percent(cell.sequence)}" for cell in cells]
            rows.append([str(length), *shares])
        return Table(["length \\ steps", *map(str, self.n_steps[0])], rows)

    def summary(self) -> list[str]:
        """Return a line that explains the cells of the table."""
        if len(set(self.n_steps)) > 1:
            return ["% of right symbols, and % of rows with every symbol right"]
        return ["% of right symbols / % of rows with every symbol right"]

    def remarks(self) -> list[str]:
        """List lengths with few rows, and lengths at which fewer steps give better accuracy."""
        lines = []
        few = {}
        for length, cells in zip(self.lengths, self.cells, strict=True):
            if 0 < cells[0].rows < _FEW:
                few[length] = cells[0].rows
        if few:
            counts = ", ".join(f"{rows} at length {length}" for length, rows in few.items())
            lines.append(f"few rows, so the percentages are imprecise: {counts}")
        for length, steps, cells in zip(self.lengths, self.n_steps, self.cells, strict=True):
            best = max(range(len(cells)), key=lambda i: cells[i].sequence)
            if cells[best].sequence - cells[-1].sequence > _fall(cells[best].rows):
                lines.append(
                    f"length {length}: {cells[-1].sequence:.1%} of rows are right after "
                    f"{steps[-1]} steps, but {cells[best].sequence:.1%} after {steps[best]}. Use "
                    f"n_step={steps[best]}, train with more steps, or try an ExitRule with a "
                    "higher threshold"
                )
        return lines

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot shares of correct symbols by steps, on ``ax`` or in a new figure.

        Plotting needs the extra ``plot``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure, axes = axes_for(ax, "Curves.plot", width=6, height=3.4)
        names = [f"length {n}" for n in self.lengths]
        _step_curves(axes, names, self.n_steps, [[c.token for c in cells] for cells in self.cells])
        return figure


def _percent(share: float) -> str:
    """Return a share in percent, at most 99.99 unless it is exactly 1.

    >>> _percent(1.0), _percent(0.99999), _percent(0.5)
    ('100', '99.99', '50')
    """
    if share == 1:
        return "100"
    return f"{min(100 * share, 99.99):.4g}"


def _step_curves(
    axes: Axes,
    names: Sequence[str],
    n_steps: Sequence[Sequence[int]],
    values: Sequence[Sequence[float]],
) -> None:
    """Plot shares of correct symbols against steps, with a curve for each name."""
    for number, (name, steps, shares) in enumerate(zip(names, n_steps, values, strict=True)):
        shade = 0.85 * number / max(1, len(names) - 1)
        color = (0.1 + shade * 0.9, 0.2 + shade * 0.4, 0.7 - shade * 0.6)
        axes.plot(steps, shares, marker="o", ms=3, color=color, label=name)
    axes.set(xlabel="steps", ylabel="right symbols", xscale="log")
    powers = [2**k for k in range(16) if 2**k <= max(map(max, n_steps))]
    # at most eight labels have room
    ticks = powers[:: 1 + len(powers) // 8]
    axes.minorticks_off()
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.set_ylim(top=1.02)
    axes.legend(fontsize=8)
