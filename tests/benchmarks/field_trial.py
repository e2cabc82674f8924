"""The field trial (`examples/field_trial/run.py`), its figures as field_trial.json to results, and
the page's tables. Beside our pruning, MoDeGPT's (`pruning_rivals`), trained back in the same way.

The scripts keep what is done in ``--out``, so that this goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.pruning_rivals import modegpt
from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, put, today

FOUND, PAGE = RESULTS / "field_trial.json", ROOT / "docs" / "field_trial.md"
WORK = Path(__file__).parent / "work" / "field_trial"
RIVAL = "MoDeGPT (MLPs)"
CHAPTERS = {  # rows of losses, in their order
    "tune": ("base", "specialist edit", "specialist compose"),
    "merge": (
        "average",
        "task_arithmetic",
        "ties",
        "regmean",
        "learn_merge",
    ),
    "shrink": ("merged", "pruned", RIVAL, "pruned, trained back", f"{RIVAL}, trained back"),
}


def rival(given: argparse.Namespace) -> None:
    """Prune the merge by MoDeGPT's method, on the same examples, and train it back."""
    sys.path.insert(0, str(ROOT / "examples" / "field_trial"))
    from shrink import SIZE, calibration, merged, trained_back  # pyrefly: ignore[missing-import]
    from story import Story  # pyrefly: ignore[missing-import]

    story = Story(given)

    def pruned() -> Any:
        model = merged(story)
        rows = []
        for batch in calibration(story):
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
                rows.append(ids[mask.bool()][None])
        # without gradients, or the graphs of all calibration batches would be kept
        with torch.no_grad():
            modegpt(model, rows, SIZE)
        return model

    story.row(RIVAL, pruned)
    story.row(f"{RIVAL}, trained back", lambda: trained_back(story, pruned()))


def collected(out: Path) -> dict[str, Any]:
    """What a run has kept."""
    rows = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((out / "rows").glob("*.json"))
    ]
    figures: dict[str, dict[str, Any]] = {}
    for path in sorted((out / "figures").glob("*/*.json")):
        if path.parent.name != "answers":
            held = json.loads(path.read_text(encoding="utf-8"))
            held.pop("settings")
            figures.setdefault(path.parent.name, {})[path.stem] = held
    kept = {row["name"]: {key: row[key] for key in ("losses", "cpu_seconds")} for row in rows}
    return {"rows": kept, "figures": figures, "settings": rows[0]["settings"] if rows else {}}


def losses(rows: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """A table of held-out losses."""
    lines = ["| | edit | compose | mean | CPU s |", "|---|---|---|---|---|"]
    for name in names:
        if row := rows.get(name):
            values = " | ".join(
                f"{value:.3f}" for value in [*row["losses"], statistics.mean(row["losses"])]
            )
            lines.append(f"| {name} | {values} | {row['cpu_seconds']:.0f} |")
    return lines


def listed(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Tables of other figures, whose names are the columns: one for all that have the same."""
    lines: list[str] = []
    for columns in dict.fromkeys(tuple(row) for row in figures.values()):
        names = " | ".join(columns).replace("cpu_seconds", "CPU s")
        lines += ["", f"| | {names} |", "|---" * (len(columns) + 1) + "|"]
        for name, row in figures.items():
            if tuple(row) == columns:
                cells = (
                    f"{cell:,.4g}" if isinstance(cell, float) else f"{cell:,}"
                    for cell in row.values()
                )
                lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines[1:]


def write_table() -> None:
    """The page's tables."""
    if not FOUND.exists() or not PAGE.exists():
        return
    told = json.loads(FOUND.read_text(encoding="utf-8"))
    for chapter, names in CHAPTERS.items():
        lines = (
            losses(told["rows"], names)
            if any(name in told["rows"] for name in names[1:])
            else ["To come."]
        )
        if figures := told["figures"].get(chapter):
            lines += ["", *listed(figures)]
        put(PAGE, lines, chapter)
    for chapter in ("judge", "think"):
        put(PAGE, listed(told["figures"].get(chapter, {})), chapter)
    counts = " and ".join(str(count) for count in told["settings"]["examples"])
    put(
        PAGE,
        [
            f"{counts} training examples; CPU seconds on {told['hardware']}, while other "
            f"programs ran; collected {told['date']} at {told['commit']}."
        ],
        "about",
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the scripts, collect their figures, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at")
    parser.add_argument("--out", type=Path, default=WORK, help="folder of what is done")
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "real" / "smollm2")
    parser.add_argument("--collect", action="store_true", help="run nothing: take what is there")
    options = parser.parse_args(arguments)
    if not options.collect:
        data = os.environ.get("MODEL_COMPONENTS_DATA", str(ROOT.parent / "shared" / "data"))
        command = [
            sys.executable,
            str(ROOT / "examples" / "field_trial" / "run.py"),
            "--data",
            data,
        ]
        subprocess.run(
            [*command, "--out", str(options.out), "--model", str(options.model)], check=True
        )
        if (options.out / "models" / "merged").is_dir():
            given = {"data": Path(data), "seeds": 1, "only": ["*"], "smoke": False}
            rival(argparse.Namespace(**given, model=options.model, out=options.out))
    found = collected(options.out)
    if not found["rows"]:
        print("field_trial: skipped, there are no rows: the model or the data are absent")
        return
    found |= {"date": today(), "commit": commit(), "hardware": hardware()}
    FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_table()


if __name__ == "__main__":
    main()
