"""What masks became: a table, and a heat map."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskRow:
    """One weight's masks: the components' means and standard deviations, and the share of places each is largest at."""

    name: str
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...]
    wins: tuple[float, ...]

    @property
    def winner(self) -> int:
        """The component whose mask is the largest at most places."""
        return max(range(len(self.wins)), key=self.wins.__getitem__)


@dataclass(frozen=True)
class MaskReport:
    """Every weight's masks. ``str(report)`` is a table; `plot` draws the means as a heat map."""

    labels: tuple[str, ...]
    rows: tuple[MaskRow, ...]

    @classmethod
    def of(cls, masks: Mapping[str, Tensor], labels: Sequence[str]) -> Self:
        """From masks (K, ...) by name.

        >>> print(MaskReport.of({"w": torch.tensor([[1.0, 0.0], [0.0, 1.0]])}, ["a", "b"]).rows[0].wins)
        (0.5, 0.5)
        """
        rows = []
        for name, mask in masks.items():
            flat = mask.detach().float().flatten(1).cpu()
            top = flat == flat.amax(0)  # a tie is shared
            wins = (top / top.sum(0)).mean(1)
            spread = flat.std(1, correction=0)
            values = (tuple(round(float(v), 6) for v in t) for t in (flat.mean(1), spread, wins))
            rows.append(MaskRow(name, tuple(mask.shape[1:]), *values))
        return cls(tuple(labels), tuple(rows))

    def __str__(self) -> str:
        width = max([len(r.name) for r in self.rows] + [6])
        lines = [f"component {k}: {label}" for k, label in enumerate(self.labels)]
        lines.append(f"{'weight':{width}s}  {'means':>{7 * len(self.labels)}s}  {'spread':>7s}  {'wins':>14s}")
        for r in self.rows:
            means = " ".join(f"{m:6.3f}" for m in r.mean)
            wins = f"{r.winner} at {r.wins[r.winner]:.0%}" if max(r.wins) > min(r.wins) else "none"
            lines.append(f"{r.name:{width}s}  {means:>{7 * len(self.labels)}s}  {max(r.spread):7.3f}  {wins:>14s}")
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the masks' means, a panel a component, a line a layer, a column a weight; needs the extra ``plot``.

        Args:
            path: Image file; its ending says the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib import colormaps
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("MaskReport.plot: needs matplotlib; pip install 'model-components[plot]'") from error
        cells = [_cell(r.name) for r in self.rows]
        layers, columns = (list(dict.fromkeys(c[i] for c in cells)) for i in (0, 1))
        grid = torch.full((len(self.labels), len(layers), len(columns)), torch.nan)
        for row, (layer, column) in zip(self.rows, cells, strict=True):
            grid[:, layers.index(layer), columns.index(column)] = torch.tensor(row.mean)
        count = len(self.labels)
        figure = Figure(
            figsize=(1.5 + count * (1.0 + 0.32 * len(columns)), 2.2 + 0.26 * len(layers)), layout="constrained"
        )
        even = 1 / count  # where all components count alike: the middle of the scale
        reach = max(0.05, float((grid[~grid.isnan()] - even).abs().max()))
        colours = colormaps["RdBu_r"].with_extremes(bad="0.92")
        axes = figure.subplots(1, count, sharey=True, squeeze=False)[0]
        for k, axis in enumerate(axes):
            image = axis.imshow(grid[k].numpy(), vmin=even - reach, vmax=even + reach, cmap=colours, aspect="auto")
            axis.set_title(f"{k}: {Path(self.labels[k]).name}", fontsize=9)
            axis.set_xticks(range(len(columns)), columns, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)
            axis.set_yticks(range(len(layers)), layers, fontsize=7)
        figure.colorbar(image, ax=list(axes), label=f"mean mask (white: {even:.2g})", shrink=0.8)
        figure.savefig(path, dpi=150)
        return Path(path)


def _cell(name: str) -> tuple[str, str]:
    """A weight's line and column in the heat map: its layer's number, and what is left of its name.

    >>> _cell("model.layers.3.mlp.up_proj.weight"), _cell("lm_head.weight")
    (('3', 'mlp.up_proj'), ('other', 'lm_head'))
    """
    match = re.search(r"(?:^|\.)(\d+)\.", name)
    rest = (name[match.end() :] if match else name).removesuffix(".weight")
    return (match[1] if match else "other"), rest.removeprefix("model.").removeprefix("transformer.")
