"""Pairs of models, merged by `learn_merge` with each student and start.

Three pairs, all made of SmolLM2-135M-Instruct:

- chain: the model itself, asked for answers to Alpaca's instructions, and the same model after
  training on German manual pages;
- siblings: that German model, and one trained whole on Python sources; they share a base;
- adapters: LoRA adapters for German and for Python, merged into the base; they lie close.

What a merge recovers is its share of the gap between the average of the two models (0 %) and each
model on its own task (100 %). Searched methods and learning rates are chosen on rows that no other
run reads. Needs SmolLM2, the folder of real data, and Debian's German manual pages. On a GPU it
takes minutes, and several runs share it. `--modules` trains masks of one more pair, with and without
those of the embedding and the head.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.far_apart_pairs import (
    ABLATED,
    LONG,
    MODULES,
    MORE,
    PAIRS,
    STEPS,
    closed_form,
    learned,
    pair_of,
    read_found,
    train_second,
    write_data,
    write_found,
)
from tests.benchmarks.far_apart_table import write_tables
from tests.benchmarks.results import hardware
from tests.support import real

STUDENTS = ("masks", "lora", "all")
STARTS = ("regmean", "average")
SEARCHED = "chain-0"  # the pair on which learning rates are chosen
RATES = {
    "masks": (1e-2, 3e-2, 1e-1, 3e-1),
    "lora": (1e-3, 2e-3, 4e-3, 8e-3),
    "all": (5e-5, 1e-4, 2e-4, 5e-4),
}
Job = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the settings that identify a row, without its results."""
    # the second models of a pair are trained, which gives others on other hardware
    chosen = ("hardware", "pair", "merge", "start", "steps", "seed", "rows", "search")
    more = ("granularity", "coefficients", "temperature", *(["rate"] if row.get("search") else []))
    settings = [str(row.get(name)) for name in (*chosen, *more)]
    return (*settings, str(row.get("all_modules", False)))


def key_of_job(job: Callable[..., Any], arguments: tuple, named: dict[str, Any]) -> Any:
    """Return the key of the row that a job will return."""
    if job is train_second:
        return None
    here = {"hardware": hardware("cuda" if torch.cuda.is_available() else "cpu")}
    if job is closed_form:
        return key_of({**here, "pair": arguments[0], "merge": arguments[1]})
    pair, start, train = arguments
    chosen = {**here, "seed": 0, "rows": 1.0, "search": False, **named}
    return key_of({"pair": pair, "start": start, "merge": train, **chosen})


class Runner:
    """Runs jobs in processes until the time is up, and writes each row as it comes.

    Args:
        workers: Processes at once.
        minutes: Minutes after which no job begins.
    """

    def __init__(self, workers: int, minutes: float):
        self.workers = workers
        self.deadline = time.time() + 60 * minutes
        self.pool: Any = None

    def all(self, jobs: Sequence[Job]) -> None:
        """Run jobs whose rows are not there yet; write the rows that they return."""
        self.finish(self.begin(jobs))

    def begin(self, jobs: Sequence[Job]) -> list[Any]:
        """Begin jobs whose rows are not there yet; return their futures."""
        made = {key_of(row) for row in read_found()}
        jobs = [job for job in jobs if key_of_job(*job) not in made]
        if self.pool is None:
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(self.workers, mp_context=context)
        return [
            self.pool.submit(_in_time, self.deadline, job, arguments, named)
            for job, arguments, named in jobs
        ]

    def finish(self, futures: Sequence[Any]) -> None:
        """Write the rows that jobs return, as they come."""
        for future in as_completed(futures):
            try:
                row = future.result()
            except Exception as error:  # the others go on
                print(f"failed: {type(error).__name__}: {error}", flush=True)
                continue
            if row is not None:
                write_found([old for old in read_found() if key_of(old) != key_of(row)] + [row])
                left = self.deadline - time.time()
                print(f"{left:.0f} s left: {' '.join(key_of(row))} {row['losses']}", flush=True)


def _in_time(deadline: float, job: Callable[..., Any], arguments: tuple, named: Any) -> Any:
    torch.set_num_threads(1)
    return job(*arguments, **named) if time.time() < deadline else None


def best_rates() -> dict[tuple[str, str, int], float]:
    """Return by start, student and steps the rate with the lowest loss of the searches."""
    found: dict[tuple[str, str, int], dict[float, float]] = {}
    for row in read_found():
        if row.get("search") and not row.get("all_modules"):
            place = (row["start"], row["merge"], row["steps"])
            found.setdefault(place, {})[row["rate"]] = sum(row["losses"])
    return {place: min(tried, key=lambda rate: tried[rate]) for place, tried in found.items()}


def run_all(runner: Runner) -> None:
    """Make the models, the merges, the searches and the table's runs.

    A job is asked for as soon as what it needs is there, so that no worker waits.
    """
    pairs = (*PAIRS, *MORE)
    runner.all([(train_second, names, {}) for names in second_models(pairs)])
    starts: list[Job] = [(closed_form, (pair, "regmean"), {}) for pair in PAIRS]
    regmeans = runner.begin([(closed_form, (SEARCHED, "regmean-search"), {}), *starts])
    from_average = runner.begin(searches("average"))
    runner.finish(regmeans)
    from_regmean = runner.begin(searches("regmean"))
    ends: list[Job] = [
        (closed_form, (pair, merge), {})
        for merge in ("average", "first", "second", "base")
        for pair in pairs
        # the base of a chain is its first model
        if not (merge == "base" and pair.startswith("chain"))
    ]
    others = runner.begin(ends)
    runner.finish(from_average)
    long = runner.begin(long_searches())
    others += runner.begin(students(pairs, "average", STEPS))
    runner.finish(from_regmean)
    others += runner.begin(students(PAIRS, "regmean", STEPS))
    runner.finish(long)
    others += runner.begin(students(MORE, "average", LONG) + ablations())
    slow: list[Job] = [(closed_form, (pair, merge), {}) for pair in MORE for merge in rivals(pair)]
    runner.finish([*others, *runner.begin(slow)])


def searches(start: str) -> list[Job]:
    """Return a run of each student at each rate."""
    return [
        (learned, (SEARCHED, start, train), {"steps": STEPS, "rate": rate, "search": True})
        for train in STUDENTS
        for rate in RATES[train]
    ]


def students(pairs: Sequence[str], start: str, steps: int) -> list[Job]:
    """Return a run of each student on each pair."""
    rates = best_rates()
    return [
        (
            learned,
            (pair, start, train),
            {"steps": steps, "rate": rates.get((start, train, steps)), "seed": seed_of(pair)},
        )
        for pair in pairs
        for train in STUDENTS
    ]


def long_searches() -> list[Job]:
    """Return long runs at the rate that was best for short ones, and at the next lower one."""
    rates = best_rates()
    jobs: list[Job] = []
    for train in STUDENTS:
        place = RATES[train].index(rates["average", train, STEPS])
        for rate in RATES[train][max(0, place - 1) : place + 1]:
            options = {"steps": LONG, "rate": rate, "search": True}
            jobs.append((learned, (ABLATED, "average", train), options))
    return jobs


def second_models(pairs: Sequence[str]) -> list[tuple[str, str]]:
    """Return task and name of the models that pairs are made of, beside SmolLM2."""
    names: dict[tuple[str, str], None] = {}
    for pair in pairs:
        for folder in pair_of(pair)[0]:
            if folder != str(real.smollm2()):
                task, _, name = Path(folder).name.partition("-")
                names[task, name] = None
    return list(names)


def seed_of(pair: str) -> int:
    """Return the seed of a pair, which is that of its training, too."""
    return int(pair.partition("-")[2] or 0)


def rivals(pair: str) -> tuple[str, ...]:
    """Return the merges without training that stand beside the average and RegMean."""
    if pair.startswith("chain"):  # its base is its first model
        return ("regmean", "regmean++", "linear", "slerp")
    return ("regmean", "regmean++", "task_arithmetic", "ties", "slerp", "tsv", "iso_c")


def ablations() -> list[Job]:
    """Return runs of masks with other settings, and of all students with a tenth of the rows."""
    rates = best_rates()
    changed = [
        {"granularity": "input"},
        {"granularity": "element"},
        {"granularity": "scalar"},
        {"coefficients": "evidence"},
        {"coefficients": "confidence"},
        {"temperature": 2.0},
    ]
    runs = [("masks", one) for one in changed] + [(train, {"rows": 0.1}) for train in STUDENTS]
    return [
        (
            learned,
            (ABLATED, "average", train),
            {
                **one,
                "steps": STEPS,
                "rate": rates.get(("average", train, STEPS)),
                "seed": seed_of(ABLATED),
            },
        )
        for train, one in runs
    ]


def run_modules(runner: Runner) -> None:
    """Train masks of one more pair, with and without those of the embedding and the head."""
    runner.all([(train_second, names, {}) for names in second_models([MODULES])])
    closed: list[Job] = [
        (closed_form, (MODULES, merge), {}) for merge in ("average", "first", "second", "regmean")
    ]
    runner.all(closed)
    options = {"steps": STEPS, "rate": 3e-2, "seed": seed_of(MODULES)}
    runner.all(
        [
            (learned, (MODULES, start, "masks"), {**options, "all_modules": everywhere})
            for start in STARTS
            for everywhere in (False, True)
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Run what the time allows, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--modules", action="store_true", help="masks of embedding and head alone")
    parser.add_argument("--data", action="store_true", help="only write the rows")
    options, _ = parser.parse_known_args(arguments)
    write_data()
    if options.data:
        return
    runner = Runner(options.workers, options.minutes)
    if options.modules:
        run_modules(runner)
    else:
        run_all(runner)
    write_tables()


if __name__ == "__main__":
    main()
