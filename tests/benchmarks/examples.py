"""The examples' own commands, run and read by benchmarks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.results import ROOT

EXAMPLES, WORK = ROOT / "examples", Path(__file__).parent / "work" / "thinker"


def load_example(name: str) -> Any:
    """An example as a module, for its table of recipes."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.path.append(str(EXAMPLES))  # for what the examples share
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def run_example(name: str, options: Sequence[str], seed: int) -> dict[str, Any]:
    """One run of an example of the thinker's: its CPU seconds, imports included, test not, and its
    figures."""
    WORK.mkdir(parents=True, exist_ok=True)
    file = WORK / f"{name}-{options[1]}-{seed}.json"
    command = [
        sys.executable,
        str(EXAMPLES / f"{name}.py"),
        *options,
        "--seed",
        str(seed),
        "--json",
        str(file),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        command, check=True, env=environment, capture_output=True, text=True, cwd=WORK
    )
    line = next(row for row in done.stdout.splitlines() if " parameters, " in row)
    numbers = [int(word) for word in line.replace(",", "").split() if word.isdigit()]
    points = json.loads(file.read_text(encoding="utf-8"))
    return {"seed": seed, "cpu_seconds": numbers[-1], "parameters": numbers[0], "points": points}
