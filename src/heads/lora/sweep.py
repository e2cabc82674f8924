"""`sweep`: run `tune` with many settings, and compare the runs in one table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import xxhash

from model_components._runs import RunFolder

from .config import TuneConfig
from .evaluation import JudgeMaker
from .report.runs import TABLES, SweepReport, TuneReport
from .training import tune

_LONGEST = 100  # a longer name of a run is truncated to this length, and a hash is appended
_HIDDEN = ("merge", "answers", "answer_length", "evaluations")  # settings that the table leaves out

Grid = Mapping[str, Any]
"""A mapping from fields of `TuneConfig` to a value or a list of alternative values.

A value that is itself a list must be inside a list of alternatives.
"""


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

    Each run has its own folder in ``out``. After each run, ``runs.csv``, ``table.md`` and, with
    matplotlib installed, ``sweep.png`` are written to ``out`` again. Repeating the call continues
    an interrupted sweep. If the grid is larger than before, existing runs are reused. The tables
    list only the runs of the latest grid. If a run fails, for example because its loss becomes NaN,
    the failure is reported and the next run starts.

    Args:
        model: Folder or hub id of a causal language model.
        rows: Training rows, as for `tune`.
        grid: Fields of `TuneConfig`, each with a value or a list of values. There is one run for
            every combination of values. A list of grids is run in order.
        out: Output folder: a new path, or the folder of an earlier sweep of the same model.
        eval_rows: Held-out rows, as for `tune`.
        judge: The judge of the answers, as for `tune`. The default is not None, because a lower
            loss does not prove better answers. Runs with ``answers=0`` have no score.
        progress: Show progress bars.
        **settings: Fields of `TuneConfig` that all runs share. Unlike in `tune`, ``merge`` is False
            by default.

    Returns:
        The settings, losses, scores, times and peak memory of all runs.

    Raises:
        ValueError: A setting is invalid, two runs are the same, or ``out`` belongs to another
            sweep. If all runs fail, the error of the last run is raised, which may also be a
            RuntimeError.
    """
    grids = [grid] if isinstance(grid, Mapping) else list(grid)
    shared = {"merge": False, **settings}
    runs = _runs_of(grids, shared)
    # each run reads the rows again, but an iterator can be read only once
    rows = list(rows) if isinstance(rows, Iterator) else rows
    eval_rows = list(eval_rows) if isinstance(eval_rows, Iterator) else eval_rows
    shown = {}
    for name, one in runs.items():
        shown[name] = _columns(str(model), {**shared, **one})
    finished: dict[str, TuneReport] = {}
    failures: dict[str, str] = {}
    out = Path(out)
    with RunFolder(out, {"model": str(model)}, "sweep", results=TABLES, fresh=None):
        for number, (name, one) in enumerate(runs.items(), 1):
            if progress:
                print(f"sweep: run {number} of {len(runs)}, {name}")
            try:
                # without answers there is nothing to judge
                has_answers = TuneConfig.from_dict({**shared, **one}).answers > 0
                finished[name] = tune(
                    model,
                    rows,
                    out=out / name,
                    eval_rows=eval_rows,
                    judge=judge if has_answers else None,
                    progress=progress,
                    **{**shared, **one},
                )
            except (RuntimeError, ValueError) as error:
                # an out-of-memory error is a RuntimeError, and the next run may need less memory
                failures[name] = str(error)
                if number == len(failures) == len(runs):  # every run failed
                    raise
            report = SweepReport(shown, finished, failures)
            report.write(out)
    return report


def _runs_of(grids: Sequence[Grid], shared: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of each run, by the run's name, which lists these settings.

    Raises:
        ValueError: A grid is empty, a setting is invalid, or two runs are the same.
    """
    runs: dict[str, dict[str, Any]] = {}
    configs: list[TuneConfig] = []
    for grid in grids:
        if not isinstance(grid, Mapping) or not grid:
            raise ValueError(
                f"sweep: expected a grid that maps settings to values, got {grid!r:.60}"
            )
        lists = {}
        for setting, values in grid.items():
            lists[setting] = values if isinstance(values, list) else [values]
        for values in itertools.product(*lists.values()):
            run = dict(zip(lists, values, strict=True))
            config = TuneConfig.from_dict({**shared, **run})
            name = _name_of(run)
            # compare configs: the order of settings, or 1 in place of 1.0, changes only the name
            if config in configs:
                raise ValueError(
                    f"sweep: expected different settings in each run, got two runs with {name}"
                )
            configs.append(config)
            runs[name] = run
        if [] in lists.values():
            raise ValueError(
                f"sweep: expected one or more values for each setting, got {grid!r:.60}"
            )
    if not runs:
        raise ValueError("sweep: expected a grid that maps settings to values, got no grid")
    return runs


def _columns(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that the table shows: eight standard ones, then the others."""
    config = TuneConfig.from_dict(settings)
    usual = {
        "model": Path(model).name,
        "batch_size": config.batch_size,
        "epochs": config.epochs if config.max_steps is None else None,  # max_steps replaces epochs
        "max_steps": config.max_steps,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": config.lr_scheduler_type,
        "r": config.r,
        "lora_alpha": (config.lora_alpha or 2 * config.r) if config.r else None,
    }
    others = {name: value for name, value in settings.items() if name not in (*usual, *_HIDDEN)}
    return usual | others


def _name_of(run: Mapping[str, Any]) -> str:
    """Return the name of a run, which is also the name of its folder."""
    name = ",".join(f"{setting}-{value}" for setting, value in run.items())
    name = re.sub(r"[^\w.,+-]+", "_", name)
    if len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{xxhash.xxh3_64(name.encode()).hexdigest()[:8]}"
