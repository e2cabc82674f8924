"""`sweep`: many runs of `tune`, in one table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from model_components._folders import make_folder
from model_components._trainer import DeadRunError

from .config import TuneConfig
from .report.runs import SweepReport, TuneReport
from .training import JudgeMaker, tune

Grid = Mapping[str, Any]
"""Settings of `TuneConfig`. A list holds alternatives; a value that is a list stands in another."""


def sweep(
    model: str | Path,
    rows: str | Path | Iterable[object],
    grid: Grid | Sequence[Grid],
    *,
    out: str | Path,
    eval_rows: str | Path | Iterable[object] | None = None,
    judge: Literal["likelihood_gain"] | JudgeMaker | None = "likelihood_gain",
    progress: bool = True,
    **settings: Any,
) -> SweepReport:
    """Tune a model with every combination of settings, and compare the runs.

    Each run has its own folder in ``out``, beside ``runs.csv``, ``table.md`` and, with matplotlib
    installed, ``sweep.png``, which are written anew after each run. The same call continues an
    interrupted sweep, and a larger grid keeps the runs that are there. A run whose loss becomes NaN
    or infinite is reported, and the next one starts.

    Args:
        model: Folder or hub id of a causal language model.
        rows: Rows to train, as for `tune`.
        grid: Fields of `TuneConfig`, each with a value or a list of values; a run is made for every
            combination. A list of grids is run in order.
        out: Output folder. The folder of a run must be new, or belong to the same run.
        eval_rows: Held-out rows, as for `tune`.
        judge: A judge of answers, as for `tune`; there is one by default, because a lower loss does
            not prove better answers.
        progress: Show progress bars.
        **settings: Fields of `TuneConfig` that all runs share. Here ``merge`` is False by default.

    Returns:
        The settings, losses, scores, times and peaks of all runs.

    Raises:
        ValueError: A setting is invalid, two runs are the same, or `tune` raises it.
    """
    grids = [grid] if isinstance(grid, Mapping) else list(grid)
    shared = {"merge": False, **settings}
    varied = _runs_of(grids)
    for one in varied.values():
        TuneConfig.from_dict({**shared, **one})
    if not isinstance(rows, (str, Path)):
        rows = list(rows)
    if eval_rows is not None and not isinstance(eval_rows, (str, Path)):
        eval_rows = list(eval_rows)
    folder = make_folder(out, "sweep")
    finished: dict[str, TuneReport] = {}
    failures: dict[str, str] = {}
    for number, (name, one) in enumerate(varied.items(), 1):
        if progress:
            print(f"sweep: {name}, {number} of {len(varied)}")
        try:
            finished[name] = tune(
                model,
                rows,
                out=folder / name,
                eval_rows=eval_rows,
                judge=judge,
                progress=progress,
                **{**shared, **one},
            )
        except DeadRunError as error:
            failures[name] = str(error)
        report = SweepReport(varied, finished, failures)
        report.write(folder)
    return report


def _runs_of(grids: Sequence[Grid]) -> dict[str, dict[str, Any]]:
    """Return the settings of each run by run name, which lists all settings of the grid."""
    runs = []
    for grid in grids:
        if not isinstance(grid, Mapping) or not grid:
            raise ValueError(f"sweep: expected a grid of settings with values, got {grid!r:.60}")
        lists = {k: v if isinstance(v, list) else [v] for k, v in grid.items()}
        runs += [
            dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())
        ]
    if not runs:
        raise ValueError("sweep: expected a grid of settings with values, got none")
    named: dict[str, dict[str, Any]] = {}
    for run in runs:
        parts = [f"{setting}-{value}" for setting, value in run.items()]
        name = re.sub(r"[^\w.,+-]+", "_", ",".join(parts))  # as the name of a folder
        if name in named:
            raise ValueError(f"sweep: expected different runs, got two of {name}")
        named[name] = run
    return named
