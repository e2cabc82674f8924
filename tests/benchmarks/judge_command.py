"""What `model-components judge train` prints, with AlpacaEval's pairs and a frozen MiniLM."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.benchmarks.pairwise_away import GUIDE
from tests.benchmarks.pairwise_trial import DATA
from tests.benchmarks.results import RESULTS, commit, hardware, put, today, versions
from tests.support import real

FOUND = RESULTS / "judge_command.json"


def write_text() -> None:
    """Write the beginning of the guide: the command and what it prints."""
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    note = (
        f"Printed for AlpacaEval's pairs and a frozen MiniLM, in {found['seconds'] / 60:.1f} minutes "
        f"with {found['threads']} threads ({found['cpu_seconds'] / 60:.1f} CPU minutes). "
        f"{found['hardware']}; {found['versions']}; {found['date']} at {found['commit']}."
    )
    command = "$ model-components judge train pairs.jsonl runs/judge --encoder models/encoder"
    put(GUIDE, ["```console", command, *found["printed"], "```", "", note], "command")


def main(arguments: list[str] | None = None) -> None:
    """Run the command once, and keep what it prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at")
    parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "judge"
        words = ["judge", "train", str(real.data(DATA)), str(out), "--encoder", str(real.minilm())]
        program = "import sys; from model_components._cli import main; sys.exit(main(sys.argv[1:]))"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True, check=True
        )
        wall = time.perf_counter() - begin
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        printed = done.stdout.replace(str(out), "runs/judge").rstrip().split("\n")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = {
        # as the terminal has it, without the spaces at the ends of lines
        "printed": [line.rstrip() for line in printed],
        "seconds": round(wall),
        "threads": torch.get_num_threads(),  # the command's default, too
        "cpu_seconds": round(seconds),
        "hardware": hardware(),
        "versions": versions("torch", "transformers"),
        "date": today(),
        "commit": commit(),
    }
    FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_text()


if __name__ == "__main__":
    main()
