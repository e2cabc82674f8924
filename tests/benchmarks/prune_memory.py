"""Memory of `prune_` against depth: models of a 1B model's width with 4 and 16 blocks, random.

Each run is a process of its own and counts anonymous pages alone, since the system can drop those of
mapped files. Either the files in bfloat16 are mapped, with a cache on the disk, or the model is a
float32 copy in memory.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.results import (
    KRONECKER_GUIDE,
    RESULTS,
    commit,
    hardware,
    put,
    today,
    versions,
)

FOUND = RESULTS / "prune_memory.json"
TOKENS, ROW = 4096, 512
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
MAPPED, RESIDENT = "mapped files", "float32 in memory"
RUNS = [
    ("fast", 4, MAPPED),
    ("fast", 16, MAPPED),
    ("best", 4, MAPPED),
    ("fast", 4, RESIDENT),
    ("fast", 16, RESIDENT),
]


def anonymous() -> int:
    """Return the bytes of this process that are in no file."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"^RssAnon:\s*(\d+) kB", status, re.M)
    assert found is not None
    return 1024 * int(found[1])


def write_model(folder: Path, blocks: int) -> None:
    """Write a random model in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=blocks, **SHAPE))
    model.bfloat16().save_pretrained(folder)


def prune(folder: Path, method: Any, weights: str) -> dict[str, Any]:
    """Halve the MLPs of the model in a folder; return memory and seconds."""
    import torch
    from transformers import AutoModelForCausalLM

    from kronecker import PruneConfig, num_parameters, prune_

    ids = torch.randint(
        SHAPE["vocab_size"], (TOKENS // ROW, ROW), generator=torch.Generator().manual_seed(1)
    )
    peak = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], anonymous())

    before = anonymous()
    threading.Thread(target=watch, daemon=True).start()
    cpu, wall = time.process_time(), time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    size = num_parameters(model)
    if weights == RESIDENT:
        model = model.float()
    prune_(
        model,
        PruneConfig(keep=0.5, method=method),
        calibration=list(ids.split(1)),
        cache=folder / "fitted" if weights == MAPPED else None,
        progress=False,
    )
    model.save_pretrained(folder / "smaller")
    ended.set()
    return {
        "parameters": size,
        "peak_bytes": peak[0] - before,
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "wall_seconds": round(time.perf_counter() - wall, 1),
    }


def write_table() -> None:
    """Write the guide's table."""
    if not FOUND.exists():
        return
    rows = json.loads(FOUND.read_text(encoding="utf-8"))
    lines = [
        "| weights | method | blocks | parameters | peak memory, MB | minutes |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        size = f"{row['parameters'] / 1e6:,.0f} M"
        used = f"{row['peak_bytes'] / 1e6:,.0f} | {row['wall_seconds'] / 60:.1f}"
        lines.append(f"| {row['weights']} | {row['method']} | {row['blocks']} | {size} | {used} |")
    one = rows[0]
    about = (
        "Peak of memory beyond mapped files, and wall time, of halving all MLPs of random models "
        f"(width 2,048, MLPs of 8,192, bfloat16 files), {TOKENS:,} tokens. {one['hardware']}; "
        f"{one['versions']}; {one['date']} at {one['commit']}."
    )
    put(KRONECKER_GUIDE, [*lines, "", about], "memory")


def main(arguments: list[str] | None = None) -> None:
    """Measure all, each in a process of its own, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "METHOD", "WAY"))
    options, _ = parser.parse_known_args(arguments)
    if options.one:
        folder, method, weights = options.one
        print(json.dumps(prune(Path(folder), method, weights)))
        return
    rows = []
    for method, blocks, weights in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), blocks)
            command = [sys.executable, "-m", "tests.benchmarks.prune_memory", "--one"]
            done = subprocess.run(
                [*command, folder, method, weights], check=True, stdout=subprocess.PIPE, text=True
            )
        rows.append(
            {
                "method": method,
                "blocks": blocks,
                "weights": weights,
                **json.loads(done.stdout.splitlines()[-1]),
                "date": today(),
                "commit": commit(),
                "hardware": hardware("cpu"),
                "versions": versions("torch", "transformers"),
            }
        )
        print(rows[-1], flush=True)
        FOUND.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    write_table()


if __name__ == "__main__":
    main()
