"""What the thinker learns with the library's defaults, by its own command: a JSON of commands to
results."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.pictures import save_picture
from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, put, today
from thinker.report import Accuracy, Grid

CONFIG, FOUND = Path(__file__).parent / "thinker_accuracy.json", RESULTS / "thinker_accuracy.json"
WORK, GUIDE = Path(__file__).parent / "work" / "thinker", ROOT / "docs" / "thinker_measured.md"
PLOT = ROOT / "docs" / "thinker_grid.svg"


def run(name: str, arguments: str, seed: int, smoke: bool) -> dict[str, Any]:
    """One run."""
    out = WORK / f"{name.replace(' ', '_').replace(',', '')}-{seed}"
    command = [
        sys.executable,
        "-m",
        "model_components",
        "think",
        "train",
        arguments.split()[0],
        str(out),
        *arguments.split()[1:],
        "--seed",
        str(seed),
    ]
    command += ["--iterations", "20", "--length", "4", "--samples", "64"] if smoke else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    found = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return {
        k: found[k]
        for k in (
            "seed",
            "iterations",
            "cpu_seconds",
            "parameters",
            "token",
            "sequence",
            "grid",
            "by_length",
        )
    }


def write_table() -> None:
    """The guide's table, from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    lines = [
        "| task | goal | held-out symbols right, by seed | whole answers | CPU seconds | "
        "iterations |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found["rows"].items():
        runs = row["runs"]
        tokens = " / ".join(f"{100 * r['token']:.2f} %" for r in runs)
        whole = " / ".join(f"{100 * r['sequence']:.1f} %" for r in runs)
        seconds = statistics.median(r["cpu_seconds"] for r in runs)
        lines.append(
            f"| {name} | {row['goal']} | {tokens} | {whole} | {seconds:.0f} | "
            f"{runs[0]['iterations']} |"
        )
    commits = ", ".join(sorted({row["commit"] for row in found["rows"].values()}))
    place = f"One thread; {found['hardware']}; measured {found['date']} at {commits}. The commands:"
    lines += ["", place, "", "```bash"]
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    for number, name in enumerate(found["rows"], 1):
        task, *flags = config[name]["arguments"].split()
        lines.append(" ".join(["model-components think train", task, f"runs/{number}", *flags]))
    put(GUIDE, [*lines, "```"], "accuracy")


def draw(found: dict[str, Any]) -> None:
    """The heat map of the first run with latents from noise."""
    row = next((r for r in found["rows"].values() if "noise" in r["arguments"]), None)
    if row is None:
        return
    found = row["runs"][0]["grid"]
    cells = []
    for tokens, sequences in zip(found["token"], found["sequence"], strict=True):
        cells.append(tuple(map(Accuracy, tokens, sequences)))
    figure = Grid(tuple(found["n_latents"]), tuple(found["n_steps"]), tuple(cells)).plot()
    figure.suptitle("copying 20 symbols; trained with 8 to 16 latents, 1 to 6 steps")
    save_picture(figure, PLOT)


def main(arguments: list[str] | None = None) -> None:
    """Run every task with every seed; write results, tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cpu", help="not looked at: the example trains on the CPU"
    )
    parser.add_argument("--only", nargs="*", help="rows whose name begins so; the others are kept")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="seconds each, to see that it works; nothing is written",
    )
    options = parser.parse_args(arguments)
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    before = json.loads(FOUND.read_text(encoding="utf-8"))["rows"] if FOUND.exists() else {}
    found: dict[str, Any] = {"date": today(), "hardware": hardware(), "rows": {}}
    for name, row in config.items():
        if options.only and not name.startswith(tuple(options.only)):
            if name in before:
                found["rows"][name] = before[name]
            continue
        runs = [
            run(name, row["arguments"], seed, options.smoke) for seed in row.get("seeds", [0, 1, 2])
        ]
        found["rows"][name] = row | {"commit": commit(), "runs": runs}
        print(name, [(r["token"], r["cpu_seconds"]) for r in runs], flush=True)
        if not options.smoke:
            FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not options.smoke:
        draw(found)
        write_table()


if __name__ == "__main__":
    main()
