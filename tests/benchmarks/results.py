"""The rows that benchmarks append, and the page that is generated from them."""

from __future__ import annotations

import csv
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from importlib.metadata import version
from pathlib import Path

from tests.benchmarks.pictures import Cells, dot_plot

RESULTS = Path(os.environ.get("MODEL_COMPONENTS_RESULTS", Path(__file__).parent / "results"))
ROOT = Path(__file__).parents[2]
GUIDE, MERGING = ROOT / "docs" / "masks.md", ROOT / "docs" / "merging.md"
OURS, MERGEKIT = "mergekit_lite", "mergekit 0.1.5"
COPIES = ("1 in, 1 out", "2 in, 1 out", "3 in, 1 out")
KRONECKER_GUIDE = ROOT / "docs" / "kronecker.md"


@dataclass(frozen=True)
class Row:
    """One implementation of one operation, timed. Seconds; bytes; empty where a column does not
    apply."""

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

    @classmethod
    def of(
        cls,
        op: str,
        impl: str,
        mode: str,
        dtype: str,
        shape: str,
        times: Sequence[tuple[float, float]],
        peak: int,
        *,
        saved: object = "",
        device: str = "cpu",
        packages: Sequence[str] = ("torch",),
    ) -> Row:
        """From (CPU, wall) seconds of every run."""
        cpus, walls = zip(*times, strict=True)
        place = (today(), commit(), op, impl, mode, dtype.removeprefix("torch."), shape, len(times))
        return cls(
            *place,
            *percentiles(cpus),
            *percentiles(walls),
            peak,
            str(saved),
            hardware(device),
            versions(*packages),
        )


def commit() -> str:
    """The commit being measured, with a mark when the tree differs from it.

    In a copy without a repository, the variable MODEL_COMPONENTS_COMMIT names it.
    """
    if "MODEL_COMPONENTS_COMMIT" in os.environ:
        return os.environ["MODEL_COMPONENTS_COMMIT"]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "src")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def versions(*packages: str) -> str:
    """Python's and those of packages."""
    return ", ".join(
        [f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)]
    )


def hardware(device: str = "cpu") -> str:
    """What ran it."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return round(cuts[1], 6), round(statistics.median(values), 6), round(cuts[7], 6)


def today() -> str:
    """The date of a row."""
    return date.today().isoformat()


def append(file: str, rows: Sequence[Row]) -> Path:
    """Add rows to a file of results; at once, so that a stop keeps what there is."""
    RESULTS.mkdir(parents=True, exist_ok=True)
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
            tuple(r[k] for k in ("op", "impl", "mode", "dtype", "shape", "hardware")): r
            for r in csv.DictReader(handle)
        }
    return list(held.values())


def put(path: Path, lines: Sequence[str], name: str = "results") -> None:
    """Replace what stands between a page's markers."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    head, rest = path.read_text(encoding="utf-8").split(begin)
    path.write_text(
        head + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1], encoding="utf-8"
    )


def write_memory_account() -> None:
    """The guide's table of a training step's memory against context."""
    rows = [r for r in latest("mask_training_step.csv") if "CPU" in r["hardware"]]
    if not rows:
        return
    impls = sorted({r["impl"] for r in rows}, key=lambda impl: ("plain" not in impl, impl))
    contexts = list(dict.fromkeys(int(r["shape"].rsplit(" ", 1)[1]) for r in rows))
    peaks = {
        (r["impl"], int(r["shape"].rsplit(" ", 1)[1])): int(r["peak_bytes"]) / 1e6 for r in rows
    }
    place = f"{rows[0]['dtype']}; {rows[0]['hardware']}"
    lines = [
        f"Peak MB that one step adds to the resident models, GPT-2 of 124M parameters ({place}):",
        "",
        f"| context | {' | '.join(impls)} |",
        "|---" * (len(impls) + 1) + "|",
    ]
    lines += [f"| {c} | {' | '.join(f'{peaks[i, c]:.0f}' for i in impls)} |" for c in contexts]
    # where every activation is a block of its own, which the allocator gives back at once
    first, last = contexts[-2:]
    slopes = [(peaks[i, last] - peaks[i, first]) / (last - first) for i in impls]
    lines.append(f"| MB a token, {first} to {last} | {' | '.join(f'{s:.2f}' for s in slopes)} |")
    plain = {
        impl.endswith("checkpointed"): s
        for impl, s in zip(impls, slopes, strict=True)
        if "plain" in impl
    }
    ratios = [
        plain[impl.endswith("checkpointed")] / s for impl, s in zip(impls, slopes, strict=True)
    ]
    lines.append(
        "| slope, plain with or without checkpoints ÷ this | "
        f"{' | '.join(f'{r:.1f}' for r in ratios)} |"
    )
    put(GUIDE, lines)


def write_merge_table() -> None:
    """Write the table and the picture of the guide to merging: file merges of the first size with
    one thread, beside mergekit and the floors."""
    rows = [r for r in latest("merge_models.csv") if "CPU" in r["hardware"]]
    shape = rows[0]["shape"]
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        if row["shape"] == shape and row["mode"] in ("", "1 thread", *COPIES):
            name = MERGEKIT if row["impl"].startswith("mergekit ") else row["impl"]
            found.setdefault(row["op"], {})[name] = row
    lines = [
        f"Models: {shape} ({rows[0]['dtype']}; {rows[0]['hardware']}). Each cell is the median of "
        "the CPU seconds and the peak",
        "resident MB of a whole process with imports, in one thread (written by `make bench`):",
        "",
        f"| method | {OURS} | {MERGEKIT} | CPU ratio | memory ratio "
        "| file copy | `import numpy` | `import torch` |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def cell(row: dict[str, str]) -> str:
        return f"{float(row['cpu_p50']):.1f} s / {int(row['peak_bytes']) / 1e6:.0f} MB"

    for op, ways in found.items():
        ours, peer = ways[OURS], ways[MERGEKIT]
        cpu = float(peer["cpu_p50"]) / float(ours["cpu_p50"])
        memory = int(peer["peak_bytes"]) / int(ours["peak_bytes"])
        cells = [op, cell(ours), cell(peer), f"{cpu:.1f}", f"{memory:.1f}"]
        for floor in ("copy", "import numpy", "import torch"):
            cells.append(cell(ways[floor]) if floor in ways else "")
        lines.append(f"| {' | '.join(cells)} |")
    put(MERGING, lines)

    def panel(column: str, unit: float) -> Cells:
        return {
            op: {name: float(ways[name][column]) / unit for name in (OURS, MERGEKIT)}
            for op, ways in found.items()
        }

    panels = {"CPU seconds": panel("cpu_p50", 1), "peak memory, MB": panel("peak_bytes", 1e6)}
    dot_plot(ROOT / "docs" / "merging.svg", panels, log=True)
