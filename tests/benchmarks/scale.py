"""What merges of large models take: planned from headers alone, and predicted from the rows that
were measured.

Writes scale.json to results, and the tables of docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from mergekit_lite import load_recipe, make_plan
from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, latest, put, today
from tests.support.headers import llama_shapes, write_headers

FOUND, PAGE = RESULTS / "scale.json", ROOT / "docs" / "scale.md"
SIZES = {  # hidden, MLP, layers, vocabulary, width of keys
    "1B": (2048, 8192, 16, 128256, 512),
    "8B": (4096, 14336, 32, 128256, 1024),
    "70B": (8192, 28672, 80, 128256, 1024),
    "405B": (16384, 53248, 126, 128256, 1024),
}
METHODS = {"linear": "parameters: {weight: 0.5}", "ties": "parameters: {weight: 0.5, density: 0.2}"}
MEASURED = {"300M": "Llama-like, 300M parameters", "1B": "Llama-like, 1B parameters"}


def planned(folder: Path, method: str) -> dict[str, Any]:
    """What the plan of a merge of two models says, and how long planning took."""
    base = "" if method == "linear" else f"base_model: {folder / 'base'}"
    models = f"[{folder / 'x'}, {folder / 'y'}]"
    begin = time.process_time()
    plan = make_plan(
        load_recipe(f"merge_method: {method}\n{base}\nmodels: {models}\n{METHODS[method]}")
    )
    seconds = time.process_time() - begin
    return {
        "parameters": plan.parameters,
        "read": plan.bytes_read,
        "written": plan.bytes_written,
        "peak": plan.peak_memory,
        "planning": round(seconds, 2),
    }


def rates() -> dict[str, tuple[float, float]]:
    """CPU seconds of one thread by method: those of a process, and those of a billion parameters."""
    rows = latest("merge_models.csv")
    found = {}
    for method in METHODS:
        seconds = [
            next(
                float(r["cpu_p50"])
                for r in rows
                if (r["op"], r["impl"], r["mode"], r["shape"])
                == (method, "mergekit_lite", "1 thread", shape)
            )
            for shape in MEASURED.values()
        ]
        slope = (seconds[1] - seconds[0]) / 0.7
        found[method] = (seconds[0] - 0.3 * slope, slope)
    return found


def write_tables() -> None:
    """The page's tables."""
    if not FOUND.exists() or not PAGE.exists():
        return
    told, of = json.loads(FOUND.read_text(encoding="utf-8")), rates()
    lines = [
        "| merge of two | method | inputs | writes | memory beyond imports | planning, CPU s | "
        "merging, CPU s |"
    ]
    lines.append("|---" * 7 + "|")
    for name, rows in told["plans"].items():
        for method, row in rows.items():
            start, slope = of[method]
            seconds = start + slope * row["parameters"] / 1e9
            lines.append(
                f"| {name} | {method} | {row['read'] / 1e9:,.0f} GB | "
                f"{row['written'] / 1e9:,.0f} GB | {row['peak'] / 1e6:,.0f} MB | "
                f"{row['planning']:.2f} | {seconds:,.0f} |"
            )
    lines += [
        "",
        f"The plans were computed from headers ({told['hardware']}, {told['date']} at "
        f"{told['commit']}). The merging times are predicted for one thread, from the measured "
        "times of 300 million and 1 billion parameters.",
    ]
    put(PAGE, lines, "merging")
    rows = [
        r
        for r in latest("merge_models.csv")
        if r["impl"] == "mergekit_lite" and r["mode"] == "1 thread"
    ]
    flat = [r for r in rows if r["op"] == "linear" and "Llama-like" in r["shape"]]
    lines = ["| linear merge of two, one thread | peak MB | CPU s |", "|---|---|---|"]
    lines += [
        f"| {r['shape'].removeprefix('Llama-like, ')} | {int(r['peak_bytes']) / 1e6:.0f} | "
        f"{float(r['cpu_p50']):.1f} |"
        for r in flat
    ]
    put(PAGE, lines, "memory")
    lines = ["| learned masks over | peak MB |", "|---|---|"]
    lines += [
        f"| {row['shape']} | {int(row['peak_bytes']) / 1e6:.0f} |"
        for row in latest("mask_depth.csv")
    ]
    put(PAGE, lines, "masks")


def main(arguments: list[str] | None = None) -> None:
    """Plan every merge, write results and tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at")
    parser.parse_args(arguments)
    plans: dict[str, dict[str, Any]] = {}
    for name, sizes in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            for model in ("base", "x", "y"):
                write_headers(Path(folder, model), llama_shapes(*sizes))
            plans[name] = {method: planned(Path(folder), method) for method in METHODS}
        print(name, plans[name], flush=True)
    found = {"plans": plans, "date": today(), "commit": commit(), "hardware": hardware()}
    FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_tables()


if __name__ == "__main__":
    main()
