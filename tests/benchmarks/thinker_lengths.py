"""Trained on short inputs, tested on long ones: the tasks of `examples/think_longer.py` by its own
command, five seeds.

Beside it, on the tasks that are scans, what others would use (`thinker_anchors`): three seeds, as
many iterations, and as many as fit into the same CPU seconds, tested at as many steps as symbols,
eight more, and twice as many, of which the best counts. For pointers the score of answering the start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import thinker as th
import thinker.report
import thinker.schedules
from tests.benchmarks import thinker_anchors
from tests.benchmarks.examples import load_example, run_example
from tests.benchmarks.pictures import save_picture
from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, put, today

FOUND = RESULTS / "thinker_lengths.json"
GUIDE, PLOT = ROOT / "docs" / "thinker_measured.md", ROOT / "docs" / "thinker_lengths.svg"
SEEDS, TIMES = (11, 12, 13, 14, 15), (2, 4, 10, 20)
SCANS = ("parity", "sums", "depth", "add10")
WORDS = {
    "parity": "parity of every prefix",
    "sums": "sums modulo 5 of every prefix",
    "depth": "depth of brackets",
    "add2": "addition in base 2",
    "add10": "addition in base 10",
    "add16": "addition in base 16",
    "copy": "copy",
    "reverse": "reverse",
    "sort": "sort",
    "hops": "hops through a permutation",
    "pointers": "pointers that may meet",
}


AS_MANY = {"anchors": "iterations", "anchors_of_equal_seconds": "CPU seconds"}


def anchors(
    recipe: dict[str, Any], lengths: list[int], iterations: dict[str, int]
) -> dict[str, list[dict[str, Any]]]:
    """What others would use, each with its number of iterations, three seeds."""
    options = {
        k: v for k, v in recipe.items() if k not in ("length", "iterations", "preset", "task")
    }
    made = th.make_task(recipe["task"], **options)
    numbers = {"trained": recipe["length"], "lengths": lengths}
    return {
        name: [
            thinker_anchors.run(name, made, seed=seed, iterations=count, **numbers)
            for seed in SEEDS[:3]
        ]
        for name, count in iterations.items()
    }


def as_long(row: dict[str, Any]) -> dict[str, int]:
    """Each anchor's number of iterations in the thinker's CPU seconds, of one run of both."""
    seconds = statistics.median(run["cpu_seconds"] for run in row["runs"])
    counts = {}
    for name, runs in row["anchors"].items():
        own = statistics.median(run["cpu_seconds"] for run in runs)
        counts[name] = round(row["iterations"] * seconds / own)
    return counts


def start_alone(task: str, recipe: dict[str, Any], lengths: list[int]) -> dict[str, float]:
    """The share of pointers that end where they start."""
    options = {
        k: v for k, v in recipe.items() if k not in ("length", "iterations", "preset", "task")
    }
    data = th.CurriculumDataset(
        th.make_task(recipe["task"], **options), th.schedules.Fixed(max_length=4), holdout=0.0
    )
    shares = {}
    for length in lengths:
        batch = data.held_out(4096, length)
        shares[str(length)] = float(
            (batch["labels"][:, -1, 0] == batch["input_ids"][:, -1]).float().mean()
        )
    return shares


def right(
    points: list[dict[str, Any]], length: int, most: int | None = None, of: str = "symbols"
) -> float:
    """The share of symbols, or of whole rows, at a length: after the most steps that are at most
    twice it, or at the most of all."""
    own = [p for p in points if p["length"] == length and p["steps"] <= (most or 2 * length + 1)]
    return max(own, key=lambda p: p["steps"])[of]


def worst(runs: list[dict[str, Any]], length: int, most: int | None = None) -> tuple[str, str]:
    """Per cent of symbols and of whole rows, of the worst seed."""
    told = []
    for of in ("symbols", "rows"):
        told.append(percent(min(right(run["points"], length, most, of) for run in runs)))
    return told[0], told[1]


def of_three(runs: list[dict[str, Any]], length: int) -> str:
    """Per cent of symbols and of whole rows at a run's best number of steps, medians."""
    best = [
        max((p for p in run["points"] if p["length"] == length), key=lambda p: p["rows"])
        for run in runs
    ]
    shares = [statistics.median(point[of] for point in best) for of in ("symbols", "rows")]
    return " / ".join(map(percent, shares))


def percent(share: float) -> str:
    """Of symbols; 100 only where every one is right."""
    return "100" if share == 1 else f"{min(99.99, 100 * share):.2f}"


def write_table() -> None:
    """The guide's tables, from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    lines = [
        "| task | trained to | 2 times as long | 4 | 10 | 20 | 20, thinking 10 steps a symbol | "
        "training, CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, row in found["tasks"].items():
        trained, runs = row["trained"], row["runs"]
        found_at = [worst(runs, trained * n) for n in TIMES]
        cells = [" / ".join(both) for both in found_at]
        longest = trained * TIMES[-1]
        most = max(p["steps"] for p in runs[0]["points"] if p["length"] == longest)
        stays = " / ".join(worst(runs, longest, most)) if most >= 10 * longest else ""
        seconds = statistics.median(r["cpu_seconds"] for r in runs)
        lines.append(
            f"| {WORDS[task]} | {trained} | {' | '.join(cells)} | {stays} | {seconds:.0f} |"
        )
    commits = ", ".join(dict.fromkeys(row["commit"] for row in found["tasks"].values()))
    place = f"{found['hardware']}, one thread; measured {found['date']} at {commits}."
    put(
        GUIDE,
        [*lines, "", f"Percent of symbols / of whole rows right, the worst of five seeds. {place}"],
        "longer",
    )
    names = list(thinker_anchors.ANCHORS)
    lines = [
        f"| task, length | the same | LatentThinker | {' | '.join(names)} |",
        f"|---|---|---|{'---|' * len(names)}",
    ]
    for task, row in found["tasks"].items():
        for n in (4, 20) if row.get("anchors") else ():
            length = row["trained"] * n
            for key, words in AS_MANY.items():
                cells = [of_three(row["runs"][:3], length)]
                cells += [of_three(row[key][name], length) for name in names]
                lines.append(f"| {WORDS[task]}, {length} | {words} | {' | '.join(cells)} |")
    put(GUIDE, [*lines, "", f"Measured {found['anchors']}."], "anchors")


def draw() -> None:
    """Right symbols against steps, a panel for each task that has curves: the first seed's."""
    from matplotlib import pyplot

    found = json.loads(FOUND.read_text(encoding="utf-8"))["tasks"]
    shown = [t for t in ("parity", "sums", "depth", "add2", "add10", "sort") if t in found]
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 5.6), layout="constrained", sharey=True)
    for task, ax in zip(shown, axes.flat, strict=False):
        points = found[task]["runs"][0]["points"]
        lengths = sorted({p["length"] for p in points})
        own = [[p for p in points if p["length"] == n] for n in lengths]
        th.report.Curves(
            tuple(lengths),
            tuple(tuple(p["steps"] for p in ps) for ps in own),
            tuple(tuple(th.report.Accuracy(p["symbols"], p["rows"]) for p in ps) for ps in own),
        ).plot(ax)
        ax.set_title(f"{WORDS[task]}, trained to {found[task]['trained']}", fontsize=9)
    save_picture(figure, PLOT)


def save(
    found: dict[str, Any], rows: dict[str, Any], tasks: dict[str, Any], *, smoke: bool
) -> None:
    """Write what there is so far, with the earlier rows of other tasks."""
    if not smoke:
        whole = {t: rows.get(t) or found["tasks"].get(t) for t in tasks}
        kept = {t: row for t, row in whole.items() if row}
        FOUND.write_text(json.dumps(found | {"tasks": kept}, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Run every task with every seed; write results, tables and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cpu", help="not looked at: the example trains on the CPU"
    )
    parser.add_argument("--only", nargs="*", help="tasks; the others are kept")
    parser.add_argument("--missing", action="store_true", help="only what has no rows yet")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="runs at a time, a thread each"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="seconds each, to see that it works; nothing is written",
    )
    options = parser.parse_args(arguments)
    tasks = load_example("think_longer").TASKS
    found: dict[str, Any] = (
        json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {"tasks": {}}
    )
    if not options.missing:
        found |= {"date": today(), "hardware": hardware()}
    rows = {}
    for task, recipe in tasks.items():
        known = options.missing and task in found["tasks"]
        if known or (options.only and task not in options.only):
            if task in found["tasks"]:
                rows[task] = found["tasks"][task]
            continue
        lengths = [recipe["length"] * n for n in ((2,) if options.smoke else TIMES)]
        seeds, more = SEEDS, ["--samples", "64"]
        if options.smoke:
            seeds, more = SEEDS[:1], ["--iterations", "20", "--samples", "16"]
        with ThreadPoolExecutor(options.jobs) as pool:
            command = ["--task", task, *more, "--lengths", *map(str, lengths)]
            runs = list(
                pool.map(lambda seed, c=command: run_example("think_longer", c, seed), seeds)
            )
        rows[task] = {
            "commit": commit(),
            "trained": recipe["length"],
            "iterations": recipe["iterations"],
            "runs": runs,
        }
        if recipe["task"] == "hops":
            rows[task]["answering the start"] = start_alone(task, recipe, lengths)
        print(
            task,
            [(r["cpu_seconds"], [right(r["points"], n) for n in lengths]) for r in runs],
            flush=True,
        )
        save(found, rows, tasks, smoke=options.smoke)
    for task in SCANS:
        if not options.only or task in options.only:
            recipe, row = tasks[task], rows[task]
            count = 20 if options.smoke else recipe["iterations"]
            lengths = [recipe["length"] * n for n in ((2,) if options.smoke else (4, 20))]
            same = dict.fromkeys(thinker_anchors.ANCHORS, count)
            if not (options.missing and "anchors" in row):
                row["anchors"] = anchors(recipe, lengths, same)
            if not (options.missing and "anchors_of_equal_seconds" in row):
                longer = same if options.smoke else as_long(row)
                row["anchors_of_equal_seconds"] = anchors(recipe, lengths, longer)
            found["anchors"] = f"{today()} at {commit()}"
            save(found, rows, tasks, smoke=options.smoke)
    if not options.smoke:
        draw()
        write_table()


if __name__ == "__main__":
    main()
