"""`sweep`: many runs of `tune`, in one table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from model_components._folders import make_folder
from model_components._trainer import DeadRunError

from .config import TuneConfig
from .report.runs import SweepReport, TuneReport
from .training import JudgeMaker, tune

Grid = Mapping[str, Any]
"""Settings of `TuneConfig`, each with a value or a list of values."""


def sweep(
    model: str | Path,
    rows: str | Path | Iterable[object],
    grid: Grid | Sequence[Grid],
    *,
    out: str | Path,
    eval_rows: str | Path | Iterable[object] | None = None,
    judge: Literal["likelihood"] | JudgeMaker | None = "likelihood",
    progress: bool = True,
    **settings: Any,
) -> SweepReport:
    """Tune a model with every combination of settings, and compare the runs.

    After each run ``out`` has ``runs.csv``, ``table.md`` and, with matplotlib installed,
    ``sweep.png``; the run itself is in a folder of its name. The same call continues an interrupted
    sweep, and adds the runs of a larger grid. A run whose loss becomes NaN or infinite is reported,
    and the next one starts.

    Args:
        model: Folder or hub id of a causal language model.
        rows: Rows to train, as for `tune`.
        grid: Fields of `TuneConfig`, each with a value or a list of values; a run is made for every
            combination. Several grids are made one after the other.
        out: Output folder: new, empty, or of the same sweep.
        eval_rows: Held-out rows, as for `tune`.
        judge: A judge of answers, as for `tune`. A loss that falls does not say that the answers
            are better.
        progress: Show progress bars.
        **settings: Fields of `TuneConfig` that all runs share. Here ``merge`` is False by default.

    Returns:
        The settings, losses, scores, times and peaks of all runs.

    Raises:
        ValueError: A setting is not as expected, two runs are the same, or what `tune` raises.
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
    """Return the settings of each run by its name, which has what differs between runs."""
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
    names = list(dict.fromkeys(name for run in runs for name in run))
    differing = [n for n in names if len({str(run.get(n)) for run in runs}) > 1]
    named: dict[str, dict[str, Any]] = {}
    for run in runs:
        parts = [f"{n}-{run[n]}" for n in differing or names if n in run]
        name = ",".join(parts).replace("/", "_") or "default"
        if name in named:
            raise ValueError(f"sweep: expected different runs, got two of {name}")
        named[name] = run
    return named
