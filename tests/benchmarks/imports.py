"""What importing one layer costs against ``import torch``, and what ``--help`` of each command
does."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from model_components._cli import GROUP
from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, put, today, versions

FILE, PAGE = RESULTS / "imports.json", ROOT / "docs" / "commands.md"
IMPORTS = (
    "import torch",
    "from kronecker import KroneckerLinear",
    "from kronecker import LowRankLinear",
    "from mergekit_lite import AccurateMaskedLinear",
    "from heads.pairwise import PairwiseHead",
    "from mergekit_lite import merge_models",
    "from transformers import PreTrainedModel",
    "from thinker import LatentThinker",
    "from peft.tuners.lora import Linear",
    "from heads.lora import LoraLinear",
)
PEERS = (("trl", "--help"), ("mergekit-yaml", "--help"), ("accelerate", "--help"))


def cost_of(command: list[str]) -> tuple[float, float]:
    """CPU seconds and MB of one process, from its start to its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def commands() -> dict[str, list[str]]:
    """What is timed, by its name: imports, ours, and peers that are installed."""
    found = {statement: [sys.executable, "-c", statement] for statement in IMPORTS}
    bins = Path(sys.executable).parent
    for name in sorted(entry.name.replace(".", " ") for entry in entry_points(group=GROUP)):
        words = [*name.split(), "--help"]
        found[f"model-components {' '.join(words)}"] = [str(bins / "model-components"), *words]
    for program, flag in PEERS:
        if path := shutil.which(program, path=bins):
            found[f"{program} {flag}"] = [path, flag]
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run all in turn, several times, and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_known_args(arguments)[0].runs
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in commands()}
    for run in range(runs + 1):
        for name, command in commands().items():
            cost = cost_of(command)
            if run:  # the first run reads files that the others find in memory
                costs[name].append(cost)
    rows = []
    for name, found in costs.items():
        seconds = sorted(cpu for cpu, _ in found)
        rows.append(
            {
                "name": name,
                "cpu_seconds": round(statistics.median(seconds), 3),
                "least": round(seconds[0], 3),
                "most": round(seconds[-1], 3),
                "megabytes": round(statistics.median(size for _, size in found), 1),
            }
        )
    measured = {
        "date": today(),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions("torch", "transformers", "peft", "trl"),
        "runs": runs,
        "rows": rows,
    }
    FILE.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    write_table(measured)


def write_table(measured: dict[str, Any]) -> None:
    """Write the table into the page."""
    base = measured["rows"][0]
    lines = [
        f"CPU seconds and peak memory of whole processes, medians of {measured['runs']} runs "
        f"that alternate; {measured['hardware']}; {measured['versions']}; {measured['date']} at "
        f"{measured['commit']}. Commands were run with `--help`.",
        "",
        "| process | CPU s | least to most | against `import torch` | MB |",
        "|---|---|---|---|---|",
    ]
    for row in measured["rows"]:
        ratio = row["cpu_seconds"] / base["cpu_seconds"]
        lines.append(
            f"| `{row['name']}` | {row['cpu_seconds']:.2f} | {row['least']:.2f} to "
            f"{row['most']:.2f} | {ratio:.2f} | {row['megabytes']:.0f} |"
        )
    put(PAGE, lines, "imports")


if __name__ == "__main__":
    main()
