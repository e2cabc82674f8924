"""What an MLP could become, and the plan that says what each does."""

from __future__ import annotations

from dataclasses import dataclass

from model_components._report import Axes, Figure, Report, Table, bars

from ..config import Config, KroneckerConfig, LowRankConfig, PruneConfig
from ..structures import structure_of


@dataclass(frozen=True)
class Choice:
    """What one MLP could become."""

    config: Config | None  # None: left dense
    parameters: int
    error: float  # relative, of its block's output: what it changes in the residual stream
    seconds: float  # that its block took for the calibration batches

    @property
    def structure(self) -> str:
        """In words."""
        if self.config is None:
            return "dense"
        if isinstance(self.config, KroneckerConfig):
            return f"kronecker {self.config.rank} x B {self.config.b_shape}"
        if isinstance(self.config, LowRankConfig) and self.config.rank is not None:
            return f"low_rank of rank {self.config.rank}"
        return f"{structure_of(self.config)} {self.config.share:.1%}"


@dataclass(frozen=True)
class Plan(Report):
    """A config for every MLP that becomes smaller, with what it was chosen by.

    Attributes:
        chosen: Of the MLPs that were measured, by the name of the layer that writes the block's width.
        options: All that was measured, by the same names.
        configs: By the names of all MLPs' layers: what `convert_` takes.
        parameters: Of the model when it has been converted.
        budget: Parameters that it was to keep within; None where a share was asked for.
        mlps: How many MLPs could become smaller.
    """

    chosen: dict[str, Choice]
    options: dict[str, tuple[Choice, ...]]
    configs: dict[str, Config]
    parameters: int
    budget: int | None
    mlps: int

    @property
    def prune(self) -> PruneConfig | None:
        """What `prune_` takes, where all MLPs lose the same share of their neurons: the result is a stock model."""
        chosen, given = {c.config for c in self.chosen.values()}, list(self.configs.values())
        return given[0] if len(chosen) == 1 and given and isinstance(given[0], PruneConfig) else None

    @property
    def seconds(self) -> float:
        """Of the chosen blocks, for the calibration batches."""
        return sum(c.seconds for c in self.chosen.values())

    def summary(self) -> list[str]:
        """Parameters, budget and time."""
        dense = sum(choices[0].seconds for choices in self.options.values())
        wanted = "" if self.budget is None else f" for a budget of {self.budget:,}"
        error = (sum(c.error**2 for c in self.chosen.values()) / max(1, len(self.chosen))) ** 0.5
        return [
            f"{self.parameters:,} parameters{wanted}, error {error:.3f}; blocks take "
            f"{self.seconds / max(dense, 1e-9):.0%} of the time"
        ]

    def table(self) -> Table:
        """A row for each MLP, by the layer that writes the block's width."""
        rows = [
            (name, c.structure, f"{c.parameters:,}", f"{c.error:.3f}", f"{c.seconds / self._dense(name):.2f}")
            for name, c in self.chosen.items()
        ]
        return Table(("MLP", "choice", "parameters", "error", "time"), rows)

    def remarks(self) -> list[str]:
        """What every structure would cost everywhere, where all MLPs can have it; and how many MLPs were measured."""
        by_structure: dict[str, list[Choice]] = {}
        for choices in self.options.values():
            for choice in choices[1:]:
                by_structure.setdefault(choice.structure, []).append(choice)
        remarks = [
            f"{name} everywhere: error {(sum(c.error**2 for c in choices) / len(choices)) ** 0.5:.3f}, "
            f"{sum(c.seconds for c in choices) / sum(map(self._dense, self.options)):.0%} of the time"
            for name, choices in by_structure.items()
            if len(choices) == len(self.options)
        ]
        sampled = len(self.options) < self.mlps
        return [*remarks, *([f"measured on {len(self.options)} of {self.mlps} MLPs"] if sampled else [])]

    def _dense(self, name: str) -> float:
        return max(1e-9, self.options[name][0].seconds)

    def plot(self, ax: Axes | None = None) -> Figure:
        """The parameters that each MLP gets (extra ``plot``), on ``ax`` or in a new figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return bars(ax, "Plan.plot", {n: c.parameters for n, c in self.chosen.items()}, "parameters")
