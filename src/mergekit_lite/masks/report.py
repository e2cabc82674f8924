"""Reports on masks, as a table and as a heat map."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from model_components._report import Axes, Figure, Report, Table, axes_for


@dataclass(frozen=True)
class MaskRow:
    """Statistics of one weight's masks.

    Attributes:
        name: The weight's name.
        shape: The shape of its masks, without the dimension of components.
        mean: The mean mask of each component.
        spread: The standard deviation of each component's mask.
        wins: For each component, the fraction of positions, 0 to 1, at which its mask is the
            largest. Components that tie share the position.
    """

    name: str
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...]
    wins: tuple[float, ...]

    @property
    def winner(self) -> int:
        """The index of the component whose mask is the largest at most positions."""
        return max(range(len(self.wins)), key=self.wins.__getitem__)


@dataclass(frozen=True)
class MaskReport(Report):
    """Statistics of the masks of every weight; `plot` draws their means as a heat map.

    Attributes:
        labels: The components' names.
        rows: One row per weight.
    """

    labels: tuple[str, ...]
    rows: tuple[MaskRow, ...]

    @classmethod
    def of(cls, masks: Mapping[str, Tensor], labels: Sequence[str]) -> Self:
        """Return the report on masks; ``masks`` maps weight names to tensors (K, ...).

        >>> print(
        ...     MaskReport.of({"w": torch.tensor([[1.0, 0.0], [0.0, 1.0]])}, ["a", "b"])
        ...     .rows[0]
        ...     .wins
        ... )
        (0.5, 0.5)
        """
        rows = []
        for name, mask in masks.items():
            flat = mask.detach().float().flatten(1).cpu()
            top = flat == flat.amax(0)  # components that tie share the position
            wins = (top / top.sum(0)).mean(1)
            # a mask of one value has spread 0; the usual correction would divide by 0
            spread = flat.std(1, correction=0)
            values = (tuple(round(float(v), 6) for v in t) for t in (flat.mean(1), spread, wins))
            rows.append(MaskRow(name, tuple(mask.shape[1:]), *values))
        return cls(tuple(labels), tuple(rows))

    def summary(self) -> list[str]:
        """Return a line with the index and name of each component."""
        return [f"component {k}: {label}" for k, label in enumerate(self.labels)]

    def table(self) -> Table:
        """Return a table with one row for each weight."""
        rows = []
        for r in self.rows:
            if max(r.wins) > min(r.wins):
                wins = f"{r.winner} at {r.wins[r.winner]:.0%}"
            else:
                wins = "none"
            rows.append(
                (r.name, " ".join(f"{m:6.3f}" for m in r.mean), f"{max(r.spread):.3f}", wins)
            )
        return Table(("weight", "means", "spread", "wins"), rows)

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot the masks' means as heat maps, one for each component, side by side.

        Each row of a heat map is a layer, and each column is a kind of weight. Plots need
        matplotlib, which the extra ``plot`` installs.

        Args:
            ax: The axes to plot on; default: a new figure.

        Returns:
            The figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        cells = [_cell(r.name) for r in self.rows]
        count = len(self.labels)
        layers, kinds = (list(dict.fromkeys(cell[i] for cell in cells)) for i in (0, 1))
        # a gap between components
        grid = torch.full((len(layers), count * (len(kinds) + 1) - 1), torch.nan)
        starts = [k * (len(kinds) + 1) for k in range(count)]
        for row, (layer, kind) in zip(self.rows, cells, strict=True):
            for start, mean in zip(starts, row.mean, strict=True):
                grid[layers.index(layer), start + kinds.index(kind)] = mean
        # in inches: space for names and color bar, and a fixed size for each cell
        width = 2.5 + 0.32 * grid.shape[1]
        height = 2.4 + 0.26 * len(layers)
        figure, axes = axes_for(ax, "MaskReport.plot", width=width, height=height)
        even = 1 / count  # the mask of a plain average, in the middle of the scale
        # at least 0.05, because otherwise masks that hardly changed would have the strongest colors
        reach = max(0.05, float((grid[~grid.isnan()] - even).abs().max()))
        image = axes.imshow(
            grid.numpy(), vmin=even - reach, vmax=even + reach, cmap="RdBu_r", aspect="auto"
        )
        axes.set_facecolor("0.85")  # the color of cells whose layer has no such weight
        axes.set_ylabel("layer")
        places = [start + i for start in starts for i in range(len(kinds))]
        axes.set_xticks(
            places, kinds * count, rotation=60, ha="right", rotation_mode="anchor", fontsize=7
        )
        axes.set_yticks(range(len(layers)), layers, fontsize=7)
        for start, label in zip(starts, self.labels, strict=True):
            axes.text(
                start + (len(kinds) - 1) / 2,
                # above the top row, whose cells end at -0.5
                -0.7,
                Path(label).name,
                ha="center",
                va="bottom",
                fontsize=9,
            )
        figure.colorbar(image, ax=axes, label=f"mean mask (white: {even:.2g})", shrink=0.8)
        return figure


def _cell(name: str) -> tuple[str, str]:
    """Return a weight's row and column in the heat map: layer number and rest of the name.

    >>> _cell("model.layers.3.mlp.up_proj.weight"), _cell("lm_head.weight")
    (('3', 'mlp.up_proj'), ('other', 'lm_head'))
    """
    match = re.search(r"(?:^|\.)(\d+)\.", name)
    rest = (name[match.end() :] if match else name).removesuffix(".weight")
    return (match[1] if match else "other"), rest.removeprefix("model.").removeprefix(
        "transformer."
    )
