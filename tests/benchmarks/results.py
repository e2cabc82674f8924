"""The rows that benchmarks append, and the page that is generated from them."""

from __future__ import annotations

import csv
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
_BEGIN, _END = "<!-- results:begin -->\n", "<!-- results:end -->"


@dataclass(frozen=True)
class Row:
    """One implementation of one operation, timed. Seconds; bytes; empty where a column does not apply."""

    date: str
    commit: str
    op: str
    impl: str
    mode: str
    dtype: str
    shape: str
    runs: int
    cpu_p20: float
    cpu_p50: float
    cpu_p80: float
    wall_p20: float
    wall_p50: float
    wall_p80: float
    peak_bytes: int
    saved_bytes: str
    hardware: str
    versions: str


def commit() -> str:
    """The commit being measured, with a mark when the tree differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "src")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def hardware(device: str = "cpu") -> str:
    """What ran it."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    import os

    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return round(cuts[1], 4), round(statistics.median(values), 4), round(cuts[7], 4)


def today() -> str:
    """The date of a row."""
    return date.today().isoformat()


def append(file: str, rows: Sequence[Row]) -> Path:
    """Add rows to a file of results."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / file
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, [f.name for f in fields(Row)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(asdict(r) for r in rows)
    return path


def latest(file: str) -> list[dict[str, str]]:
    """For each op, impl, mode, dtype, shape and hardware the newest row."""
    path = RESULTS / file
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as handle:
        held = {
            tuple(r[k] for k in ("op", "impl", "mode", "dtype", "shape", "hardware")): r for r in csv.DictReader(handle)
        }
    return list(held.values())


def write_page() -> None:
    """docs/performance.md from the newest rows of every file."""
    lines = [
        "# Performance",
        "",
        "Generated from `tests/benchmarks/results/*.csv` by `make bench`; every row was written by a benchmark script "
        "that ran all implementations in turn, in fresh processes. The machines are shared and noisy: read the ratios. "
        "An operation is only timed after its equivalence tests have passed.",
        "",
    ]
    everything = [r for file in sorted(RESULTS.glob("*.csv")) for r in latest(file.name)]
    if all("CPU" in r["hardware"] for r in everything):
        lines += ["CUDA: not measured on a GPU yet.", ""]
    for file in sorted(RESULTS.glob("*.csv")):
        rows = latest(file.name)
        for shape in dict.fromkeys(r["shape"] for r in rows):
            group = [r for r in rows if r["shape"] == shape]
            lines += [
                f"## {file.stem.replace('_', ' ')}: {shape}",
                "",
                f"{group[-1]['hardware']}; {group[-1]['versions']}; runs of each: {group[-1]['runs']}. `CPU ratio` is "
                "the peer's CPU seconds divided by ours with one thread (imports included on both sides).",
                "",
                "| op | implementation | mode | CPU s (p20 / p50 / p80) | wall s | peak MB | CPU ratio | measured |",
                "|---|---|---|---|---|---|---|---|",
            ]
            ours = {
                r["op"]: float(r["cpu_p50"]) for r in group if r["impl"] == "mergekit_lite" and r["mode"] == "1 thread"
            }
            for r in sorted(group, key=lambda r: (r["op"], r["impl"] != "mergekit_lite", r["impl"], r["mode"])):
                peer = r["impl"].startswith("mergekit ") and r["op"] in ours
                ratio = f"{float(r['cpu_p50']) / ours[r['op']]:.1f}" if peer else ""
                cpu = " / ".join(f"{float(r[k]):.2f}" for k in ("cpu_p20", "cpu_p50", "cpu_p80"))
                lines.append(
                    f"| {r['op']} | {r['impl']} | {r['mode']} | {cpu} | {float(r['wall_p50']):.2f} | "
                    f"{int(r['peak_bytes']) / 1e6:.0f} | {ratio} | {r['date']} {r['commit']} |"
                )
            lines.append("")
    PAGE.write_text("\n".join(lines), encoding="utf-8")


def write_readme_table() -> None:
    """The README's table: file merges of the first size, ours with one thread beside the peer and the floors."""
    rows = [r for r in latest("merge_models.csv") if "CPU" in r["hardware"]]
    shape = next((r["shape"] for r in rows), None)
    rows = [r for r in rows if r["shape"] == shape]
    lines = [
        f"Merging {shape} ({rows[0]['dtype']}; {rows[0]['hardware']}), whole process with imports, one thread:",
        "median CPU seconds / peak resident MB, written by `make bench`:",
        "",
        "| method | mergekit_lite | mergekit 0.1.5 | CPU ratio | memory ratio | plain file copy | `import torch` |",
        "|---|---|---|---|---|---|---|",
    ]
    for op in dict.fromkeys(r["op"] for r in rows):
        found = {r["impl"].split()[0]: r for r in rows if r["op"] == op and not r["mode"].endswith("threads")}
        ours, peer = found["mergekit_lite"], found.get("mergekit")

        def cell(r: dict[str, str] | None) -> str:
            return f"{float(r['cpu_p50']):.1f} s / {int(r['peak_bytes']) / 1e6:.0f} MB" if r else ""

        cpu = f"{float(peer['cpu_p50']) / float(ours['cpu_p50']):.1f}" if peer else ""
        memory = f"{int(peer['peak_bytes']) / int(ours['peak_bytes']):.1f}" if peer else ""
        floors = [cell(found.get("copy")), cell(found.get("import"))]
        lines.append(f"| {op} | {cell(ours)} | {cell(peer)} | {cpu} | {memory} | {floors[0]} | {floors[1]} |")
    text = README.read_text(encoding="utf-8")
    head, rest = text.split(_BEGIN)
    tail = rest.split(_END)[1]
    README.write_text(head + _BEGIN + "\n".join(lines) + "\n" + _END + tail, encoding="utf-8")
