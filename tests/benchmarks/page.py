"""docs/performance.md: what was timed, in short, with a picture of each file of rows and a link to
all of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks import fused_paths
from tests.benchmarks.pictures import save_picture
from tests.benchmarks.results import ROOT, latest

PAGE, PLOTS = ROOT / "docs" / "performance.md", ROOT / "docs" / "measured"


@dataclass(frozen=True)
class Table:
    """How one file of results is shown: times are divided by those of ``baseline``."""

    title: str
    baseline: tuple[str, str]  # implementation and mode; "" for any mode
    clock: str
    text: str


TABLES = {
    "merge_models": Table(
        "merge_models",
        ("mergekit_lite", "1 thread"),
        "cpu",
        "CPU seconds of whole processes, including imports and hashes. Variants run "
        "alternately, each in a new process. `ratio` is relative to mergekit_lite with one "
        'thread. "cold" is the first merge on a machine, which compiles kernels; "eager" runs '
        "torch functions instead of kernels. The lower bound is the time of the file copy and "
        "of `import numpy`. Spectral methods have no kernel; they are compared with a dense "
        "script, which loads both models completely and calls `torch.linalg.svd`.",
    ),
    "masked_linear": Table(
        "masked_linear",
        ("nn.Linear", ""),
        "wall",
        "Wall-clock seconds. All variants were timed alternately in one process. `ratio` is "
        "the time divided by the time of a trainable `nn.Linear` of the same size, which is the "
        "lower bound (three products). `plain` is `F.linear(x, m[0] * W[0] + m[1] * W[1])`. "
        "The column `saved` of the CSV file is the memory that autograd keeps until the backward "
        "pass in addition to parameters and inputs. Peaks were measured in separate processes.",
    ),
    "masked_kl": Table(
        "masked_kl",
        ("plain", ""),
        "wall",
        "Wall-clock seconds. All variants were timed alternately in one process. `ratio` is "
        "the time divided by the time of the straightforward code: full logits, `log_softmax`, "
        "`kl_div`. Peaks were measured in separate processes.",
    ),
    "mask_training_step": Table(
        "One training step of masks",
        ("plain", ""),
        "wall",
        "Wall-clock seconds of a first step without warm-up, one run in a separate process. "
        "Peaks are the memory that the step adds to the loaded models. Two models are loaded for "
        "masks, and one for a fine-tune and for the other students of `learn_merge` (lora, all), "
        "whose teachers' hidden states are cached. "
        '"plain" keeps every merged weight and the full logits in autograd\'s graph. '
        "The steps ran on one thread while other programs ran, so compare the peaks, not the "
        "times.",
    ),
    "kron_linear": Table(
        "kron_linear",
        ("nn.Linear", ""),
        "cpu",
        "CPU seconds of one thread; variants run alternately in one process. `ratio` is "
        "relative to a dense `nn.Linear`. For a single token, twelve layers with separate "
        "weights are timed, as in decoding. "
        "The column `saved` of the CSV file is the memory that autograd keeps in addition to the "
        "parameters, including x. From tensorly-torch, the factorized block tensor train was "
        "timed, which is the same sum of Kronecker products.",
    ),
    "kron_model": Table(
        "GPT-2 124M, dense and compressed",
        ("dense", ""),
        "wall",
        "Wall-clock seconds; variants run alternately in one process. A training step is "
        "forward, backward and fused AdamW; generation is greedy, with a cache. The "
        "sequential initialization was timed once.",
    ),
    "lora_step": Table(
        "Whole models with LoRA",
        ("peft", ""),
        "cpu",
        "CPU seconds of one thread; variants run alternately in one process. A step is "
        "forward, loss, backward and AdamW. `ratio` is relative to peft with adapters in the "
        "model's dtype. Peaks are the memory that a step adds to the loaded model, measured "
        "in separate processes.",
    ),
    "lora_loss": Table(
        "A step's loss without logits",
        ("peft", ""),
        "cpu",
        "CPU seconds of one thread; variants run alternately in one process. A step is "
        "forward, loss, backward and AdamW. `ratio` is relative to peft with adapters in the "
        "model's dtype. Peaks are the memory that a step adds to the loaded model, measured "
        "in separate processes.",
    ),
    "thinker": Table(
        "thinker",
        ("nn.TransformerDecoderLayer", ""),
        "cpu",
        "CPU seconds of one thread; variants run alternately in one process. In `think`, every "
        "variant takes eight steps and reads out one answer, with the same widths and the same "
        "read-out; `ratio` is relative to a model whose shared block is torch's decoder layer. "
        "From perceiver-pytorch, the weight-tied Perceiver was timed, which outputs a mean. "
        "The column `saved` of the CSV file is the memory that autograd keeps in addition to the "
        "parameters. In `gradients`, each variant takes 32 steps on 128 x 100 tokens.",
    ),
}


def ratios_of(rows: Sequence[Mapping[str, str]], table: Table) -> list[float | None]:
    """Each row's time over the baseline's of the same operation, shape, type and machine; None
    without one."""
    impl, mode = table.baseline
    times: dict[tuple[str, ...], float] = {}
    for row in rows:
        if row["impl"] == impl and (not mode or row["mode"] == mode):
            times[_place(row) + ((row["mode"],) if not mode else ())] = float(
                row[f"{table.clock}_p50"]
            )
    bases = [times.get(_place(row) + ((row["mode"],) if not mode else ())) for row in rows]
    return [
        float(r[f"{table.clock}_p50"]) / b if b else None for r, b in zip(rows, bases, strict=True)
    ]


def _place(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("op", "shape", "dtype", "hardware"))


def _grouped(rows: Sequence[Mapping[str, str]], *names: str) -> dict[tuple[str, ...], list[int]]:
    """Places of the rows that have these columns in common."""
    found: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(tuple(row[name] for name in names), []).append(number)
    return found


def summary(rows: Sequence[Mapping[str, str]], table: Table) -> list[str]:
    """A line for each way, over all shapes."""
    lines = [
        "| operation | variant | dtype | shapes | time, ratio | least to most | peak MB, at most |",
        "|---" * 7 + "|",
    ]
    ratios = ratios_of(rows, table)
    for (op, impl, mode, dtype), places in _grouped(rows, "op", "impl", "mode", "dtype").items():
        known = [ratio for n in places if (ratio := ratios[n]) is not None]
        peak = max(int(rows[n]["peak_bytes"]) for n in places) / 1e6
        middle = f"{statistics.median(known):.2f}" if known else ""
        spread = f"{min(known):.2f} to {max(known):.2f}" if len(known) > 1 else ""
        way = f"{impl}, {mode}" if mode else impl
        lines.append(
            f"| {op} | {way} | {dtype} | {len(places)} | {middle} | {spread} | "
            f"{f'{peak:.0f}' if peak else ''} |"
        )
    return lines


def draw(rows: Sequence[Mapping[str, str]], table: Table, path: Path) -> bool:
    """A dot for each row's ratio, a line of dots for each way; whether there is anything to
    compare."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    ratios = ratios_of(rows, table)
    ways = {
        f"{impl}, {mode}" if mode else impl: [
            ratio for n in places if (ratio := ratios[n]) is not None
        ]
        for (impl, mode), places in _grouped(rows, "impl", "mode").items()
    }
    ways = {way: known for way, known in ways.items() if known}
    if len(ways) < 2:
        return False
    figure = Figure((7.5, 0.9 + 0.26 * len(ways)), layout="constrained")
    axes: Any = figure.subplots()
    for height, known in enumerate(reversed(ways.values())):
        axes.plot(known, [height] * len(known), "o", markersize=4, alpha=0.5)
        axes.plot(statistics.median(known), height, "|", markersize=14, color="0.2")
    axes.axvline(1, color="0.7", linewidth=1)
    axes.set(
        xscale="log",
        xlabel="time over the baseline's; a bar is the median",
        yticks=range(len(ways)),
    )
    axes.set_yticklabels(list(reversed(ways)), fontsize=8)
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 3 * low else MaxNLocator(6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    save_picture(figure, path)
    return True


def write_page() -> None:
    """docs/performance.md from the newest rows of every file."""
    lines = [
        "# What was measured",
        "",
        "Benchmark scripts write every figure (`make bench`). They run all variants "
        "alternately. The machines are shared, so times vary: compare the ratios. An "
        "operation is timed only after its equivalence tests have passed. A table has one "
        "line for each variant, which summarizes all shapes that were timed; the linked file has "
        "every measurement, with its commit, date and versions.",
        "",
    ]
    for name, table in TABLES.items():
        found = latest(f"{name}.csv")
        # a GPU's rows are in fused_paths and in the guides
        rows = [row for row in found if "CPU" in row["hardware"]]
        if not rows:
            continue
        place = f"{rows[-1]['hardware']}; {rows[-1]['versions']}."
        lines += [
            f"## {table.title}",
            "",
            f"{table.text} {place} [All {len(found)} rows](measured/{name}.csv).",
            "",
        ]
        if draw(rows, table, PLOTS / f"{name}.svg"):
            lines += [f"![Time ratios: {table.title}](measured/{name}.svg)", ""]
        lines += [*summary(rows, table), ""]
    lines += fused_paths.section()
    PAGE.write_text("\n".join(lines), encoding="utf-8")
