"""The whole of `examples/shrink_model.py` on SmolLM2, as a user calls it: shrink_example.json to
results.

``--python`` names the interpreter of another environment, such as a clean clone's.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.results import (
    KRONECKER_GUIDE,
    RESULTS,
    ROOT,
    commit,
    hardware,
    put,
    today,
    versions,
)
from tests.support import real

FOUND = RESULTS / "shrink_example.json"


def write_table() -> None:
    """The guide's line."""
    if not FOUND.exists():
        return
    told = json.loads(FOUND.read_text(encoding="utf-8"))
    before, after = told["models"]
    losses = [math.log(next(iter(model["perplexities"].values()))) for model in (before, after)]
    speeds = [
        [model[f"{what}_tokens_per_second"] for model in (before, after)]
        for what in ("forward", "generated")
    ]
    line = (
        f"SmolLM2-135M-Instruct, `--keep .5`, {told['tokens']:,} tokens of Alpaca: "
        f"{told['seconds'] / 60:.0f} minutes in all; loss {losses[0]:.3f} to {losses[1]:.3f} "
        f"({losses[1] - losses[0]:+.3f}) on the text that follows these tokens, {before['parameters'] / 1e6:.1f} to "
        f"{after['parameters'] / 1e6:.1f} million parameters, {told['bytes'][0] / 2**20:.0f} to "
        f"{told['bytes'][1] / 2**20:.0f} MiB, forward {speeds[0][0]:.0f} to {speeds[0][1]:.0f} "
        f"tokens a second, generation {speeds[1][0]:.1f} to {speeds[1][1]:.1f}. "
        f"{told['hardware']}; {told['versions']}; {told['date']} at {told['commit']}."
    )
    put(KRONECKER_GUIDE, [line], "shrink")


def main(arguments: list[str] | None = None) -> None:
    """Run the example once and keep its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at")
    parser.add_argument("--python", default=sys.executable, help="interpreter to run it with")
    options = parser.parse_args(arguments)
    try:
        model, data = real.smollm2(), real.data("alpaca_5000.json")
    except real.AbsentError as error:
        print(f"shrink_example: skipped, {error}")
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [
            options.python,
            str(ROOT / "examples" / "shrink_model.py"),
            "--model",
            str(model),
            "--keep",
            ".5",
        ]
        command += [
            "--calibration",
            str(data),
            "--out",
            f"{folder}/smaller",
            "--json",
            str(figures),
        ]
        begin = time.perf_counter()
        subprocess.run(command, check=True, cwd=folder)
        told = {
            "seconds": round(time.perf_counter() - begin),
            **json.loads(figures.read_text(encoding="utf-8")),
        }
    told["models"][1]["name"] = "smaller"  # not a folder of this machine
    told |= {
        "date": today(),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions("torch", "transformers"),
    }
    FOUND.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    write_table()


if __name__ == "__main__":
    main()
