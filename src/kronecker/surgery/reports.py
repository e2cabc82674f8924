"""`PruneReport` and `ConversionReport`: the results of `prune_` and `convert_`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from model_components._report import Axes, Figure, Report, Table, bars


@dataclass(frozen=True)
class PrunedLayer:
    """A layer that became smaller or was fitted to compensate for others, or a dropped block.

    Attributes:
        name: The name of the layer or block.
        unit: The unit of both counts: neurons or, for a dropped block, parameters.
        before: The count before pruning.
        after: The count after pruning; 0 for a dropped block.
        error: Relative error of the layer's outputs on calibration tokens; None for a dropped
            block.
        influence: The influence of the dropped block or of the layer's block, or None if it was not
            measured. It is 1 minus the mean cosine similarity, over tokens, of the hidden states
            before and after the block.
    """

    name: str
    unit: str
    before: int
    after: int
    error: float | None
    influence: float | None = None


@dataclass(frozen=True)
class PruneReport(Report):
    """A report of the changes that `prune_` made.

    Attributes:
        layers: The layers that became smaller or were fitted, and the blocks that were dropped.
        before: Number of parameters of the model before pruning.
        after: Number of parameters of the model after pruning.
        notes: Notes for the user.
    """

    layers: tuple[PrunedLayer, ...]
    before: int
    after: int
    notes: tuple[str, ...] = ()

    def summary(self) -> list[str]:
        """Return a line with the number of parameters before and after pruning."""
        share = f"{self.after / self.before:.1%}"
        return [
            f"{self.before:,} to {self.after:,} parameters ({share}), {len(self.layers)} layers"
        ]

    def table(self) -> Table:
        """Return a table with a row for each layer and dropped block."""
        columns = ["layer", "unit", "before", "after", "error"]
        has_influences = any(layer.influence is not None for layer in self.layers)
        if has_influences:
            columns.append("influence")
        rows = []
        for one in self.layers:
            row = [one.name, one.unit, f"{one.before:,}", f"{one.after:,}", _told(one.error)]
            if has_influences:
                row.append(_told(one.influence))
            rows.append(row)
        return Table(columns, rows)

    def remarks(self) -> list[str]:
        """Return the notes for the user."""
        return list(self.notes)

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot each layer's relative error as a bar, on ``ax`` or in a new figure.

        The plot needs the extra ``plot``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        errors = {one.name: one.error for one in self.layers if one.error is not None}
        return bars(ax, "PruneReport.plot", errors, "relative error")


def _told(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


@dataclass(frozen=True)
class LayerReport:
    """A layer that was converted.

    Attributes:
        name: The name of the layer.
        structure: The number and shapes of the layer's factors.
        before: Number of parameters before the conversion.
        after: Number of parameters after the conversion.
        init: The initializer that was used.
        error: Relative error of the weight or, if it was fitted to data, of the outputs of the
            layer or of its MLP.
    """

    name: str
    structure: str
    before: int
    after: int
    init: str
    error: float


@dataclass(frozen=True)
class ConversionReport(Report):
    """A report of the layers that `convert_` replaced or skipped.

    Attributes:
        layers: The layers that were converted.
        skipped: The reason why each other convertible layer, and each stack of experts, was
            skipped, by name.
        before: Number of parameters of the model before the conversion.
        after: Number of parameters of the model after the conversion.
        notes: Notes for the user.
    """

    layers: tuple[LayerReport, ...]
    skipped: Mapping[str, str]
    before: int
    after: int
    notes: tuple[str, ...] = ()

    def summary(self) -> list[str]:
        """Return a line with the number of parameters before and after the conversion."""
        share = f"{self.after / self.before:.1%}"
        return [
            f"{self.before:,} to {self.after:,} parameters ({share}), {len(self.layers)} layers"
        ]

    def table(self) -> Table:
        """Return a table with a row for each converted layer."""
        rows = []
        for row in self.layers:
            size = f"{row.after / row.before:.1%}"
            rows.append((row.name, row.structure, size, row.init, f"{row.error:.3f}"))
        return Table(("layer", "structure", "size", "init", "error"), rows)

    def remarks(self) -> list[str]:
        """Return notes, a warning about layers that became larger, and the skipped layers."""
        larger = [r.name for r in self.layers if r.after > r.before]
        lines = list(self.notes)
        if larger:
            lines.append(f"{len(larger)} layers are larger than before, such as {larger[0]}")
        for why, count in Counter(self.skipped.values()).items():
            lines.append(f"layers not converted, {why}: {count}")
        return lines

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot each layer's relative error as a bar, on ``ax`` or in a new figure.

        The plot needs the extra ``plot``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return bars(
            ax, "ConversionReport.plot", {r.name: r.error for r in self.layers}, "relative error"
        )
