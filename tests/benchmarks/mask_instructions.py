"""Two LoRA specialists of a real model, merged by every way there is, by
`examples/train_masks_on_instructions.py`.

The example keeps what is done in ``--out``, so that this goes on where it was stopped; several may
share the work by ``--only``. Then the rows are collected, and the guide's table is written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, put, today

FOUND, GUIDE = RESULTS / "mask_instructions.json", ROOT / "docs" / "masks.md"
WORK = Path(__file__).parent / "work" / "mask_instructions"
ORDER = (
    "base",
    "specialist edit",
    "specialist compose",
    "average",
    "slerp",
    "task_arithmetic",
    "ties",
    "dare_ties",
    "regmean",
    "regmean++",
    "masks, evidence",
    "masks, labels",
    "masks, element",
    "masks, whole weights",
    "masks, whole weights, sum to one",
    "all weights",
)


def write_table() -> None:
    """The guide's table."""
    if not FOUND.exists():
        return
    told = json.loads(FOUND.read_text(encoding="utf-8"))
    by_name: dict[str, list[dict]] = {}
    for row in told["rows"]:
        by_name.setdefault(row["name"].partition(", seed ")[0], []).append(row)
    kinds = list(told["kinds"])
    lines = [
        f"| merge | {' | '.join(kinds)} | mean | seeds | spread | CPU s |",
        "|---" * (len(kinds) + 5) + "|",
    ]
    for name in sorted(by_name, key=ORDER.index):
        rows = by_name[name]
        columns = [
            statistics.mean(column) for column in zip(*(row["losses"] for row in rows), strict=True)
        ]
        means = [statistics.mean(row["losses"]) for row in rows]
        seeds = str(len(rows)) if "seed" in rows[0]["name"] else ""
        spread = f"{max(means) - min(means):.4f}" if len(rows) > 1 else ""
        seconds = statistics.median(row["cpu_seconds"] for row in rows)
        values = " | ".join(f"{v:.4f}" for v in [*columns, statistics.mean(means)])
        lines.append(f"| {name} | {values} | {seeds} | {spread} | {seconds:.0f} |")
    counts = " and ".join(str(count) for count in told["settings"]["examples"])
    lines += [
        "",
        f"{counts} training examples, {told['settings']['steps']} steps of 8; {told['hardware']}, "
        f"one thread a process; {told['date']}, {told['commit']}.",
    ]
    put(GUIDE, lines, "real")


def main(arguments: list[str] | None = None) -> None:
    """Run the example, collect its rows, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cpu", help="not looked at: what is measured are losses"
    )
    parser.add_argument("--out", type=Path, default=WORK, help="folder of what is done")
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "real" / "smollm2")
    parser.add_argument(
        "--collect", action="store_true", help="run nothing: take the rows that are there"
    )
    options = parser.parse_args(arguments)
    if not options.collect:
        run(options)
    rows = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((options.out / "rows").glob("*.json"))
    ]
    if not rows:
        print("no rows: the model or the data are absent")
        return
    kept = [{key: row[key] for key in ("name", "losses", "cpu_seconds")} for row in rows]
    told = {
        "date": today(),
        "commit": commit(),
        "hardware": hardware("cpu"),
        "settings": rows[0]["settings"],
    }
    told |= {"kinds": ["edit", "compose"], "rows": kept}
    FOUND.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    write_table()


def run(options: argparse.Namespace) -> None:
    """The example's own command."""
    data = os.environ.get("MODEL_COMPONENTS_DATA", str(ROOT.parent / "shared" / "data"))
    command = [sys.executable, str(ROOT / "examples" / "train_masks_on_instructions.py")]
    command += ["--out", str(options.out), "--model", str(options.model), "--data", data]
    subprocess.run(
        command, check=True, cwd=ROOT / "examples", env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


if __name__ == "__main__":
    main()
