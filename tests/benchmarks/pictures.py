"""How the pictures of the guides are drawn and saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Cells = Mapping[str, Mapping[str, float]]
"""Values by row and series."""


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure as SVG: the same bytes for the same rows."""
    import matplotlib

    path.parent.mkdir(exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})
    lines = path.read_text(encoding="utf-8").split("\n")
    path.write_text("\n".join(line.rstrip() for line in lines), encoding="utf-8")


def dot_plot(
    path: Path, panels: Mapping[str, Cells], *, line: float | None = None, log: bool = False
) -> None:
    """Draw one panel for each label of an x axis: a line for each row, a dot for each series.

    ``line`` is a value to compare with, drawn in every panel.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    rows = list(dict.fromkeys(row for cells in panels.values() for row in cells))
    names = dict.fromkeys(
        name for cells in panels.values() for found in cells.values() for name in found
    )
    figure = Figure((9, 1.3 + 0.26 * len(rows)), layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (label, cells) in zip(every, panels.items(), strict=True):
        for number, name in enumerate(names):
            known = {row: cells[row][name] for row in rows if name in cells.get(row, {})}
            heights = [-rows.index(row) for row in known]
            axes.plot(list(known.values()), heights, "o", color=f"C{number}", ms=6, label=name)
        if line is not None:
            axes.axvline(line, color="0.5", linewidth=1, linestyle=":")
        axes.set(xlabel=label, xscale="log" if log else "linear")
        if log:
            axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    every[0].set_ylim(0.5 - len(rows), 0.5)
    every[0].set_yticks([-height for height in range(len(rows))], rows)
    figure.legend(
        *every[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=len(names),
        frameon=False,
    )
    save_picture(figure, path)
