"""Two models that lie far apart, merged by `learn_merge` with each student and start.

The first is SmolLM2-135M-Instruct, asked for answers to Alpaca's instructions. The second is the
first, trained whole on German manual pages until it has forgotten them by half a nat and more.
What a merge recovers is its share of the gap between the average (0 %) and the two models (100 %).
One thread a process, CPU seconds. Needs SmolLM2, the folder of real data, and Debian's manual
pages.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import random
import re
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, put, today, versions
from tests.support import real

FOUND, GUIDE = RESULTS / "far_apart.json", ROOT / "docs" / "masks.md"
WORK = Path(__file__).parent / "work" / "far_apart"
ROWS, LENGTH, STEPS, HELD_OUT = 200, 128, 40, 0.2
SECOND_STEPS, SECOND_RATE = 60, 6e-4
MANUALS = Path("/usr/share/man/de")
CHARACTERS = 400  # of a German text: some 128 tokens
STUDENTS = ("masks", "lora", "all")
STARTS = ("average", "regmean")


def write_data() -> list[Path]:
    """Write the rows of both tasks, and what the second model is trained on; return their files."""
    files = [WORK / "alpaca.json", WORK / "german.json", WORK / "german_train.json"]
    if all(file.is_file() for file in files):
        return files
    WORK.mkdir(parents=True, exist_ok=True)
    alpaca = [row for row in real.alpaca(2000) if row["output"].strip()][:ROWS]
    texts: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
    # pages in turn: those that the second model is trained on, and those of the merges
    for number, path in enumerate(sorted(MANUALS.rglob("*.gz"))):
        text = plain_text(path)
        for start in range(0, min(len(text), 20 * CHARACTERS) - CHARACTERS, CHARACTERS):
            texts[number % 2].append({"text": text[start : start + CHARACTERS]})
    for part in texts:
        random.Random(0).shuffle(part)
    rows = (alpaca, texts[0][:ROWS], texts[1])
    for file, part in zip(files, rows, strict=True):
        file.write_text(json.dumps(part), encoding="utf-8")
    return files


def plain_text(path: Path) -> str:
    """Return the text of a manual page, without roff's requests and escapes."""
    with gzip.open(path, "rt", encoding="utf-8", errors="ignore") as file:
        lines = [line.strip() for line in file if not line.startswith((".", "'"))]
    text = re.sub(r"\\f.|\\[|&^]", "", " ".join(filter(None, lines)))
    return re.sub(r"\\(\(..|.)", lambda found: "-" if found[1] == "-" else " ", text)


def second_model(rows: Path) -> str:
    """Return the folder of the first model, trained on German."""
    from heads.lora import tune
    from mergekit_lite import merge_models

    out = WORK / "german"
    if not out.exists():
        report = tune(
            str(real.smollm2()),
            rows,
            out=WORK / "tuning",
            r=0,
            learning_rate=SECOND_RATE,
            max_steps=SECOND_STEPS,
            max_length=LENGTH,
            answers=0,
            evaluations=2,
            progress=False,
        )
        merge_models([report.out / "model"], "passthrough", dtype="bfloat16", out=out)
    return str(out)


def run(student: str, start: str, seed: int) -> dict[str, Any]:
    """Learn one merge; return the losses of all models in its table."""
    from mergekit_lite import learn_merge

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    files = write_data()
    models = [str(real.smollm2()), second_model(files[2])]
    seconds = time.process_time()
    report = learn_merge(
        models,
        files[:2],
        out=WORK / f"{student}-{start}-{seed}",
        start=start,
        train=student,
        max_steps=STEPS,
        max_length=LENGTH,
        held_out=HELD_OUT,
        dtype="bfloat16",
        compare=("linear",),
        seed=seed,
        progress=False,
    )
    seconds = time.process_time() - seconds
    losses = {name: [round(loss, 4) for loss in values] for name, values in report.losses.items()}
    average = report.mean("average" if start == "average" else "linear")
    best = sum(report.losses[name][k] for k, name in enumerate(report.components)) / 2
    return {
        "student": student,
        "start": start,
        "seed": seed,
        "losses": losses,
        "forgotten": round(losses[report.components[1]][0] - losses[report.components[0]][0], 4),
        "recovered": round((average - report.mean(report.student)) / (average - best), 4),
        "start_recovered": round((average - report.mean(start)) / (average - best), 4),
        "cpu_seconds": round(seconds, 1),
        "date": today(),
        "commit": commit(),
        "hardware": hardware("cpu"),
        "versions": versions("torch", "transformers"),
    }


def read_found() -> list[dict[str, Any]]:
    """The rows that are there already."""
    return json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else []


def write_table() -> None:
    """The guide's table, from the committed rows."""
    rows = read_found()
    if not rows:
        return
    lines = ["| start | trained | recovered, by seed | CPU s |", "|---|---|---|---|"]
    for start in STARTS:
        own = [row for row in rows if row["start"] == start]
        if not own:
            continue
        first = " / ".join(
            f"{row['start_recovered']:.0%}" for row in own if row["student"] == "masks"
        )
        lines.append(f"| {start} | nothing | {first} | |")
        for student in STUDENTS:
            runs = [row for row in own if row["student"] == student]
            if runs:
                shares = " / ".join(f"{row['recovered']:.0%}" for row in runs)
                seconds = statistics.median(row["cpu_seconds"] for row in runs)
                lines.append(f"| {start} | {student} | {shares} | {seconds:.0f} |")
    row = rows[0]
    about = (
        "SmolLM2-135M-Instruct on Alpaca's instructions, and X has forgotten {row['forgotten']:.1f} nats of the first task. Recovered: share "
        "of the gap between the average of the two (0 %) and each on its own task (100 %), in mean "
        f"held-out loss; {STEPS} steps of 8 rows of at most {LENGTH} tokens. CPU seconds of one "
        "thread, with start, teachers and evaluation. "
        f"{row['hardware']}, {row['versions']}; {row['date']} at {row['commit']}."
    )
    put(GUIDE, [*lines, "", about], "far apart")


def main(arguments: list[str] | None = None) -> None:
    """Run what is not there yet, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--students", nargs="+", default=STUDENTS)
    parser.add_argument("--starts", nargs="+", default=STARTS[::-1])
    options, _ = parser.parse_known_args(arguments)
    rows = read_found()
    made = {(row["student"], row["start"], row["seed"]) for row in rows}
    context = multiprocessing.get_context("spawn")
    for seed in range(options.seeds):
        for start in options.starts:
            for student in options.students:
                if (student, start, seed) in made:
                    continue
                with context.Pool(1) as pool:
                    row = pool.apply(run, (student, start, seed))
                rows = [*read_found(), row]  # another process may have added some
                FOUND.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                print(row, flush=True)
    write_table()


if __name__ == "__main__":
    main()
