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

RESULTS = Path(os.environ.get("MODEL_COMPONENTS_RESULTS", Path(__file__).parent / "results"))
ROOT = Path(__file__).parents[2]
PAGE, GUIDE, README = ROOT / "docs" / "performance.md", ROOT / "docs" / "masks.md", ROOT / "README.md"
KRONECKER_GUIDE = ROOT / "docs" / "kronecker.md"


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
            *place, *percentiles(cpus), *percentiles(walls), peak, str(saved), hardware(device), versions(*packages)
        )


def commit() -> str:
    """The commit being measured, with a mark when the tree differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "src")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def versions(*packages: str) -> str:
    """Python's and those of packages."""
    return ", ".join([f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)])


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
            tuple(r[k] for k in ("op", "impl", "mode", "dtype", "shape", "hardware")): r for r in csv.DictReader(handle)
        }
    return list(held.values())


@dataclass(frozen=True)
class Table:
    """How one file of results is shown: times are divided by those of ``baseline``."""

    title: str
    baseline: tuple[str, str]  # implementation and mode; "" for any mode
    clock: str
    text: str


TABLES = {
    "merge_models": Table(
        "merge_models", ("mergekit_lite", "1 thread"), "cpu",
        "CPU seconds of whole processes, imports and hashes included; in turn, a fresh process each. `ratio` is "
        "against mergekit_lite with one thread. Cold is the first merge on a machine, which compiles kernels; eager "
        "runs torch functions in their place. The floor is the copy and `import numba`. Spectral methods have no "
        "kernel; the dense script loads both models whole and calls `torch.linalg.svd`.",
    ),
    "masked_linear": Table(
        "masked_linear", ("nn.Linear", ""), "wall",
        "Wall seconds; all in turn in one process. `ratio` is against a trainable `nn.Linear` of the same size, which "
        "is the floor (three products). `plain` is `F.linear(x, m[0] * W[0] + m[1] * W[1])`. `saved` is what autograd "
        "keeps until backward beyond what is resident; peaks are of processes of their own.",
    ),
    "masked_kl": Table(
        "masked_kl", ("plain", ""), "wall",
        "Wall seconds; in turn in one process. `ratio` is against the plain way: whole logits, `log_softmax`, "
        "`kl_div`. Peaks are of processes of their own.",
    ),
    "mask_training_step": Table(
        "One training step of masks", ("plain", ""), "wall",
        "Wall seconds of a first, cold step, one run in a process of its own. Peaks are what it adds to two resident "
        "models; the plain way has every merged weight and whole logits in the graph. The rows at context 2048 were "
        "taken with one thread on a machine busy with other work: read their peaks, not their times.",
    ),
    "mask_depth": Table(
        "Learning masks over deeper models", ("Merger", ""), "wall",
        "Wall seconds and peak of a whole job in a process of its own, from two models' files to the merged model's, "
        "one step of learning (a block, or all). Peaks are what it adds to the imports; the machine was busy with "
        "other work: read them, not the times.",
    ),
    "kron_linear": Table(
        "kron_linear", ("nn.Linear", ""), "cpu",
        "CPU seconds, one thread; in turn in one process. `ratio` is against a dense `nn.Linear`. One token goes "
        "through twelve layers with weights of their own, as in decoding. `saved` is what autograd keeps beyond "
        "the parameters, x included. tensorly-torch: its factorised block tensor train, the same sum of Kronecker "
        "products.",
    ),
    "kron_model": Table(
        "GPT-2 124M, dense and compressed", ("dense", ""), "wall",
        "Wall seconds; in turn in one process. A training step is forward, backward and fused AdamW; generation is "
        "greedy, with a cache. The sequential start is one run.",
    ),
    "lora_step": Table(
        "Whole models with LoRA", ("peft", ""), "cpu",
        "CPU seconds, one thread; in turn in one process; a step is forward, loss, backward, AdamW. `ratio` is against "
        "peft with adapters in the model's dtype. Peaks are what a step adds to the resident model, in processes of "
        "their own.",
    ),
    "thinker": Table(
        "thinker", ("nn.TransformerDecoderLayer", ""), "cpu",
        "CPU seconds, one thread; in turn in one process. `think` is eight steps and one read-out, with the same "
        "widths and read-out; `ratio` is against torch's decoder layer as the shared block. perceiver-pytorch is its "
        "weight-tied Perceiver, which reads out a mean. `saved` is what autograd keeps beyond the parameters.",
    ),
}  # fmt: skip


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def write_page() -> None:
    """docs/performance.md from the newest rows of every file."""
    lines = [
        "# Performance",
        "",
        "Generated from `tests/benchmarks/results/*.csv` by `make bench`; every row was written by a benchmark script "
        "that ran all implementations in turn. The machines are shared and noisy: read the ratios. An operation is "
        "only timed after its equivalence tests have passed.",
        "",
    ]
    everything = [r for name in TABLES for r in latest(f"{name}.csv")]
    if all("CPU" in r["hardware"] for r in everything):
        lines += ["CUDA: not measured on a GPU yet.", ""]
    for name, table in TABLES.items():
        rows = latest(f"{name}.csv")
        if not rows:
            continue
        lines += [f"## {table.title}", "", f"{table.text} {rows[-1]['hardware']}; {rows[-1]['versions']}.", ""]
        saved = any(r["saved_bytes"] for r in rows)
        columns = [
            "shape",
            "op",
            "implementation",
            "mode",
            "dtype",
            f"{table.clock} p20 / p50 / p80",
            "ratio",
            "peak MB",
        ]
        columns += [*(["saved MB"] if saved else []), "runs", "measured"]
        lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for r in rows:
            key = [r[k] for k in ("op", "shape", "dtype", "hardware")]
            impl, mode = table.baseline
            base = next(
                (
                    float(b[f"{table.clock}_p50"])
                    for b in rows
                    if [b[k] for k in ("op", "shape", "dtype", "hardware")] == key
                    and (b["impl"], b["mode"]) == (impl, mode or r["mode"])
                ),
                None,
            )
            own = float(r[f"{table.clock}_p50"])
            times = " / ".join(_time(float(r[f"{table.clock}_{p}"])) for p in ("p20", "p50", "p80"))
            peak = f"{int(r['peak_bytes']) / 1e6:.0f}" if int(r["peak_bytes"]) else ""
            cells = [r["shape"], r["op"], r["impl"], r["mode"], r["dtype"], times]
            cells += [f"{own / base:.2f}" if base else "", peak]
            cells += [f"{int(r['saved_bytes']) / 1e6:.2f}" if r["saved_bytes"] else ""] if saved else []
            lines.append("| " + " | ".join([*cells, r["runs"], f"{r['date']} {r['commit']}"]) + " |")
        lines.append("")
    PAGE.write_text("\n".join(lines), encoding="utf-8")


def put(path: Path, lines: Sequence[str], name: str = "results") -> None:
    """Replace what stands between a page's markers."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    head, rest = path.read_text(encoding="utf-8").split(begin)
    path.write_text(head + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1], encoding="utf-8")


def write_memory_account() -> None:
    """The guide's table of a training step's memory against context."""
    rows = [r for r in latest("mask_training_step.csv") if "CPU" in r["hardware"]]
    if not rows:
        return
    impls = sorted({r["impl"] for r in rows}, key=lambda impl: ("plain" not in impl, impl))
    contexts = list(dict.fromkeys(int(r["shape"].rsplit(" ", 1)[1]) for r in rows))
    peaks = {(r["impl"], int(r["shape"].rsplit(" ", 1)[1])): int(r["peak_bytes"]) / 1e6 for r in rows}
    place = f"{rows[0]['dtype']}; {rows[0]['hardware']}"
    lines = [
        f"Peak MB that one step adds to two resident GPT-2 of 124M parameters ({place}):",
        "",
        f"| context | {' | '.join(impls)} |",
        "|---" * (len(impls) + 1) + "|",
    ]
    lines += [f"| {c} | {' | '.join(f'{peaks[i, c]:.0f}' for i in impls)} |" for c in contexts]
    first, last = contexts[-2:]  # where every activation is a block of its own, which the allocator gives back at once
    slopes = [(peaks[i, last] - peaks[i, first]) / (last - first) for i in impls]
    lines.append(f"| MB a token, {first} to {last} | {' | '.join(f'{s:.2f}' for s in slopes)} |")
    plain = {impl.endswith("checkpointed"): s for impl, s in zip(impls, slopes, strict=True) if "plain" in impl}
    ratios = [plain[impl.endswith("checkpointed")] / s for impl, s in zip(impls, slopes, strict=True)]
    lines.append(f"| slope, plain with or without checkpoints ÷ this | {' | '.join(f'{r:.1f}' for r in ratios)} |")
    put(GUIDE, lines)


def write_depth_account() -> None:
    """The guide's table of a whole job's memory against the model's depth."""
    rows = [r for r in latest("mask_depth.csv") if "CPU" in r["hardware"]]
    if not rows:
        return
    impls = list(dict.fromkeys(r["impl"] for r in rows))
    depths = list(dict.fromkeys(int(r["shape"].split()[-2]) for r in rows))
    peaks = {(r["impl"], int(r["shape"].split()[-2])): int(r["peak_bytes"]) / 1e6 for r in rows}
    lines = [
        f"Peak MB of a whole job over two Llamas of so many blocks ({rows[0]['hardware']}; {rows[0]['date']}, "
        f"{rows[0]['commit']}):",
        "",
        f"| blocks | {' | '.join(impls)} |",
        "|---" * (len(impls) + 1) + "|",
        *(f"| {d} | {' | '.join(f'{peaks[i, d]:.0f}' for i in impls)} |" for d in depths),
    ]
    put(GUIDE, lines, "depth")


def write_readme_table() -> None:
    """The README's table: file merges of the first size, ours with one thread beside the peer and the floors."""
    rows = [r for r in latest("merge_models.csv") if "CPU" in r["hardware"]]
    shape = next((r["shape"] for r in rows), None)
    rows = [r for r in rows if r["shape"] == shape]
    lines = [
        f"Merging {shape} ({rows[0]['dtype']}; {rows[0]['hardware']}), whole process with imports, one thread:",
        "median CPU seconds / peak resident MB, written by `make bench`:",
        "",
        "| method | mergekit_lite | mergekit 0.1.5 | CPU ratio | memory ratio "
        "| file copy | `import numba` | `import torch` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for op in dict.fromkeys(r["op"] for r in rows):
        found = {r["impl"]: r for r in rows if r["op"] == op and "," not in r["mode"].replace(" in, 1 out", "")}
        found |= {r["impl"]: r for r in rows if r["op"] == op and r["mode"] == "1 thread"}
        ours, peer = found["mergekit_lite"], next((r for i, r in found.items() if i.startswith("mergekit ")), None)

        def cell(r: dict[str, str] | None) -> str:
            return f"{float(r['cpu_p50']):.1f} s / {int(r['peak_bytes']) / 1e6:.0f} MB" if r else ""

        cpu = f"{float(peer['cpu_p50']) / float(ours['cpu_p50']):.1f}" if peer else ""
        memory = f"{int(peer['peak_bytes']) / int(ours['peak_bytes']):.1f}" if peer else ""
        floors = [cell(found.get(name)) for name in ("copy", "import numba", "import torch")]
        lines.append(f"| {op} | {cell(ours)} | {cell(peer)} | {cpu} | {memory} | {' | '.join(floors)} |")
    put(README, lines)
