"""Does freezing help when a compressed GPT-2 is trained back? Starts and strategies of
`examples/compress_gpt2.py` on the small GPT-2 that it trains, three seeds, 200 steps.

Beside them the original, trained on for as many steps. A seed draws the order of rows, the
calibration rows and random factors; the original is one. Not timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.results import RESULTS, ROOT, commit, put, today

FOUND = RESULTS / "kron_training.json"
PAGE = ROOT / "docs" / "what_did_not_win.md"
WORK = Path(__file__).parent / "work" / "kron_training"
EXAMPLES = ROOT / "examples"
STARTS = ("random", "van_loan", "prune")
STRATEGIES = {
    "together": "all parameters at one rate",
    "two-rates": "factors 1e-3, the rest 3e-4",
    "factors-only": "the factors alone",
    "factors-first": "the factors alone for a third of the steps, then all",
    "in-turns": "the factors alone and all, in turns of a sixth of the steps",
    "labels": "all at one rate, no teacher",
}
EVERYWHERE = ("together", "factors-first")  # the others: from prune alone
SEEDS = (0, 1, 2)
STEPS = 200


def run_example(out: Path, *words: str) -> list[dict[str, Any]]:
    """Run the example and return its rows."""
    command = [sys.executable, str(EXAMPLES / "compress_gpt2.py"), "--out", str(out), *words]
    subprocess.run(command, check=True)
    return json.loads((out / "table.json").read_text(encoding="utf-8"))


def trained_on(original: Path, seed: int) -> dict[str, Any]:
    """The original's held-out loss before and after as many more steps on the labels."""
    sys.path.insert(0, str(EXAMPLES))
    from small_gpt2 import Rows, arguments, python_text, windows
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

    from kronecker import perplexity

    model = AutoModelForCausalLM.from_pretrained(original).eval()
    rows, held = windows(AutoTokenizer.from_pretrained(original), python_text())
    before = math.log(perplexity(model, held.split(16)))
    settings = arguments(WORK / "trained_on", STEPS, 1e-3, seed=seed)
    Trainer(model, settings, train_dataset=Rows(rows)).train()
    after = math.log(perplexity(model.eval(), held.split(16)))
    return {
        "init": "original",
        "strategy": "labels",
        "seed": seed,
        "before": before,
        "after": after,
    }


def read_found() -> list[dict[str, Any]]:
    """The rows that are there already."""
    return json.loads(FOUND.read_text(encoding="utf-8"))["rows"] if FOUND.exists() else []


def keep(rows: list[dict[str, Any]]) -> None:
    """Add rows to the results."""
    for row in rows:
        row |= {"date": today(), "commit": commit()}
    FOUND.write_text(
        json.dumps({"rows": [*read_found(), *rows]}, indent=1) + "\n", encoding="utf-8"
    )


def span(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def write_table() -> None:
    """Write the page's table."""
    rows = read_found()
    if not rows:
        return
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["init"], row["strategy"]), []).append(row)
    original = groups["original", "labels"]
    lines = [f"| trained | {' | '.join(STARTS)} |", "|---" * (len(STARTS) + 1) + "|"]
    firsts = [span([row["before"] for row in groups[init, "together"]]) for init in STARTS]
    lines.append(f"| *not at all* | {' | '.join(firsts)} |")
    for strategy, words in STRATEGIES.items():
        cells = []
        for init in STARTS:
            runs = groups.get((init, strategy), [])
            cells.append(span([row["after"] for row in runs]) if runs else "")
        lines.append(f"| {words} | {' | '.join(cells)} |")
    for when in ("before", "after"):
        cells = []
        for init in STARTS:
            distances = [row[f"distance {when}"] for row in groups[init, "together"]]
            cells.append(f"{statistics.median(distances):.3f}")
        lines.append(
            f"| *distance from the original's weights {when} the first way* | {' | '.join(cells)} |"
        )
    note = (
        "Held-out nats of a GPT-2 of 4 blocks of width 128, in which every MLP has half of its "
        f"numbers (B (2, 1)): the median (and range) of {len(SEEDS)} seeds after {STEPS} steps at 1e-3, "
        f"with the original as a teacher unless a line says otherwise. The original has "
        f"{original[0]['before']:.3f}, and after {STEPS} more steps of its own "
        f"{span([row['after'] for row in original])}. Distance: the mean of ‖W - Σ A ⊗ B‖ / ‖W‖ of "
        f"all layers. Measured {max(row['date'] for row in rows)} at "
        f"{', '.join(dict.fromkeys(row['commit'] for row in rows))}."
    )
    put(PAGE, [*lines, "", note], "freezing")


def main(arguments: list[str] | None = None) -> None:
    """Run the seeds that have no rows yet; write results after each, and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options = parser.parse_args(arguments)
    os.environ["TQDM_DISABLE"] = "1"
    original = WORK / "original"
    if not original.exists():
        # a run of a single step: the example trains the original first
        run_example(WORK, "--init", "prune", "--steps", "1")
    for seed in options.seeds:
        if any(row["seed"] == seed for row in read_found()):
            continue
        more = [name for name in STRATEGIES if name not in EVERYWHERE]
        rows = [trained_on(original, seed)]
        for starts, ways in ((STARTS, EVERYWHERE), (("prune",), more)):
            words = ["--model", str(original), "--seed", str(seed), "--steps", str(STEPS)]
            words += ["--init", *starts, "--strategy", *ways]
            rows += run_example(WORK / f"seed{seed}", *words)
        for row in rows:
            row.pop("curve", None)
        keep(rows)
    write_table()


if __name__ == "__main__":
    main()
