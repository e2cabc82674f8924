"""Reports of `tune` and `sweep`."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from model_components._folders import names_in, new_file, write_json
from model_components._report import Axes, Figure, Report, Table, axes_for

from .training import TuningReport, perplexity, tuning_report

REPORT = "report.json"
LOG = "log.json"
CURVES = "curves.png"
TABLES = ("runs.csv", "table.md", "sweep.png")


@dataclass(frozen=True)
class TuneReport(Report):
    """The result of `tune`.

    Attributes:
        out: The output folder.
        model: Folder or hub id of the model that was tuned.
        train_rows: Number of training examples.
        held_out_rows: Number of held-out examples.
        trained_parameters: Number of trained parameters.
        parameters: Number of all parameters.
        steps: Number of optimizer steps.
        learning_rate: Peak learning rate.
        loss_before: Mean loss on all held-out rows before tuning, in nats per supervised token.
        loss: The same loss after tuning.
        score_before: Mean score of the answers before tuning, in the judge's unit; None without a
            judge.
        score: The same score after tuning.
        seconds: Wall time of the training steps, without evaluations. If the run was interrupted,
            only the steps since the last checkpoint are counted.
        peak_mb: Peak memory during training, in MiB: the allocated GPU memory, or the resident
            memory of the process if there is no GPU.
        notes: Remarks on rows and files.
        log: The entries of the trainer's log.
    """

    out: Path
    model: str
    train_rows: int
    held_out_rows: int
    trained_parameters: int
    parameters: int
    steps: int
    learning_rate: float
    loss_before: float
    loss: float
    score_before: float | None
    score: float | None
    seconds: float
    peak_mb: float
    notes: tuple[str, ...]
    log: tuple[Mapping[str, Any], ...]

    @cached_property
    def curves(self) -> TuningReport:
        """The report on the loss curves, with the verdict."""
        return tuning_report(self.log)

    @property
    def verdict(self) -> str:
        """The verdict on the curves; see `tuning_report`."""
        return self.curves.verdict

    def summary(self) -> list[str]:
        """Return a line with the numbers of rows, steps and parameters, and the learning rate."""
        return [
            f"{self.train_rows} rows in {self.steps} steps, {self.held_out_rows} rows held out; "
            f"{self.trained_parameters:,} of {self.parameters:,} parameters trained, learning rate "
            f"{self.learning_rate:g}"
        ]

    def table(self) -> Table:
        """Return a table of the held-out metrics before and after tuning."""
        columns: dict[str, tuple[str, str]] = {
            "held-out loss (all rows)": (f"{self.loss_before:.4f}", f"{self.loss:.4f}"),
            "perplexity": (f"{perplexity(self.loss_before):.2f}", f"{perplexity(self.loss):.2f}"),
        }
        if self.score is not None and self.score_before is not None:
            columns["judge"] = (f"{self.score_before:.2f}", f"{self.score:.2f}")
        before, after = zip(*columns.values(), strict=True)
        return Table(("", *columns), [("before", *before), ("after", *after)])

    def remarks(self) -> list[str]:
        """Return the verdict, the cost, the notes, and the names of the written files."""
        cost = (
            f"training: {self.seconds:.0f} s without evaluations, peak memory "
            f"{self.peak_mb:,.0f} MiB"
        )
        lines = [*self.curves.summary(), *self.curves.remarks(), cost, *self.notes]
        if files := names_in(self.out):
            written = f"in {self.out}: {', '.join(files)}"
            if CURVES not in files:
                written += f" ({CURVES} needs matplotlib: pip install 'model-components[plot]')"
            lines.append(written)
        return lines

    def to_dict(self) -> dict[str, object]:
        """Return all fields, and the verdict."""
        return super().to_dict() | {"verdict": self.verdict}

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot the losses by step.

        Plotting requires the extra ``plot``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return self.curves.plot(ax)

    def write(self) -> None:
        """Write the plot, the log, and last the report, which marks the run as finished."""
        save_plot(self, self.out / CURVES)
        values = self.to_dict()
        del values["out"]
        write_json(self.out / LOG, values.pop("log"), "tune")
        write_json(self.out / REPORT, values, "tune")


def read_report(out: Path) -> TuneReport:
    """Return the report in the folder of a finished run.

    Raises:
        ValueError: The report or the log cannot be read.
    """
    try:
        values = json.loads((out / REPORT).read_text(encoding="utf-8"))
        log = json.loads((out / LOG).read_text(encoding="utf-8"))
        values["notes"] = tuple(values["notes"])
        values.pop("verdict", None)  # the verdict is computed from the log
        return TuneReport(out=out, log=tuple(log), **values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"tune: {REPORT} or {LOG} in {out} cannot be read: {error}; restore these files, or "
            "choose another output folder"
        ) from error


def save_plot(report: Any, path: Path) -> None:
    """Save the plot of a report as a PNG file, if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    with new_file(path, "tune") as temporary:
        # matplotlib cannot infer the format from the temporary name, which ends in .partial
        report.plot().savefig(temporary, format="png")


@dataclass(frozen=True)
class SweepReport(Report):
    """The result of `sweep`.

    Attributes:
        settings: For each run, by name, the settings that the table shows.
        runs: The reports of the finished runs, by name of the run.
        failures: The error messages of the failed runs, by name of the run.
    """

    settings: Mapping[str, Mapping[str, Any]]
    runs: Mapping[str, TuneReport]
    failures: Mapping[str, str]

    def rows(self) -> list[dict[str, Any]]:
        """Return a dictionary for each run: its name, settings and, if finished, its results."""
        rows = []
        for name, settings in self.settings.items():
            row: dict[str, Any] = {"run": name, **settings}
            report = self.runs.get(name)
            if report is not None:
                # the setting is None if the run used the default learning rate
                row["learning_rate"] = report.learning_rate
                row |= {
                    "loss": round(report.loss, 4),
                    "perplexity": round(perplexity(report.loss), 3),
                    "judge": None if report.score is None else round(report.score, 3),
                    "verdict": report.verdict,
                    "spikes": len(report.curves.spikes),
                    "seconds": round(report.seconds, 1),
                    "peak_mb": round(report.peak_mb),
                }
            elif name in self.failures:
                row["verdict"] = "failed"
            rows.append(row)
        return rows

    @property
    def exit_status(self) -> int:
        """The exit status of a command that prints this report: 1 if a run failed, else 0."""
        return 1 if self.failures else 0

    def whole_table(self) -> Table:
        """Return a table with one row per run and a column for every setting and result."""
        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        cells = [["" if row.get(n) is None else str(row[n]) for n in names] for row in rows]
        return Table(names, cells)

    def summary(self) -> list[str]:
        """Return a line with the settings that all runs share, if there are any."""
        shared = {name: value for name, value in self._shared().items() if value is not None}
        return ["all runs: " + ", ".join(f"{n} {v}" for n, v in shared.items())] if shared else []

    def table(self) -> Table:
        """Return a table with one row per run, without the settings that all runs share."""
        whole = self.whole_table()
        shared = self._shared()
        kept = [i for i, name in enumerate(whole.header) if name not in shared]
        rows = [[row[i] for i in kept] for row in whole.rows]
        return Table([whole.header[i] for i in kept], rows)

    def _shared(self) -> dict[str, Any]:
        """Return the settings that all runs share, without the learning rate.

        If there is only one run, the result is empty.
        """
        if len(self.settings) < 2:
            return {}
        first, *others = self.settings.values()
        return {
            name: value
            for name, value in first.items()
            # the table shows the learning rate even if all runs use the default
            if name != "learning_rate" and all(name in one and one[name] == value for one in others)
        }

    def remarks(self) -> list[str]:
        """Return the runs with the lowest loss and the highest score, and the failed runs."""
        lines = []
        finite = [name for name, run in self.runs.items() if math.isfinite(run.loss)]
        if finite:
            best = min(finite, key=lambda name: self.runs[name].loss)
            lines.append(f"lowest held-out loss: {best}, {self.runs[best].loss:.4f}")
        scores = {name: run.score for name, run in self.runs.items() if run.score is not None}
        if scores:
            best = max(scores, key=lambda name: scores[name])
            lines.append(f"highest score by the judge: {best}, {scores[best]:.2f}")
        for name, why in self.failures.items():
            lines.append(f"{name} failed: {why}")
        return lines

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot the held-out loss of each run by step.

        Plotting requires the extra ``plot``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure, axes = axes_for(ax, "SweepReport.plot", width=8.0)
        for name, report in self.runs.items():
            steps, losses = zip(*report.curves.held_out, strict=True)
            axes.plot(steps, losses, linewidth=1, label=f"{name}: {report.loss:.3f}")
        # the legend shows the loss on all held-out rows, but the curves only on the first 64 rows
        axes.set(xlabel="step", ylabel="loss on up to 64 held-out rows, nats per token")
        if self.runs:
            axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure

    def write(self, out: Path) -> None:
        """Write ``runs.csv``, ``table.md`` and, if matplotlib is installed, ``sweep.png``."""
        table = self.whole_table()
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([table.header, *table.rows])
        with new_file(out / "runs.csv", "sweep") as temporary:
            temporary.write_text(text.getvalue(), encoding="utf-8")
        lines = [table.header, ["---"] * len(table.header), *table.rows]
        text = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        with new_file(out / "table.md", "sweep") as temporary:
            temporary.write_text(text, encoding="utf-8")
        save_plot(self, out / "sweep.png")
