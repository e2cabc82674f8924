"""Tasks that the package does not have, brought as a user brings them: a list of rows and a preset.

Each is trained on short rows and tested on longer ones. Each figure is the share of rows with every
symbol right, among up to 64 rows not used in training: the median of three seeds, and the worst.
Only the preset and the training length differ between tasks.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import set_seed

import thinker as th
from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, put, today

FOUND = RESULTS / "thinker_rows.json"
GUIDE = ROOT / "docs" / "thinker_measured.md"
SEEDS = (0, 1, 2)
TIMES = (1, 2, 4, 10)  # lengths that are tested, in multiples of the longest in training
ROWS = 400  # of each length in training, repeats included
TESTED = 64  # of each longer length
Row = tuple[list[Any], list[Any]]


def sums(draw: random.Random, n: int) -> Row:
    """Sums modulo 7 of every prefix."""
    symbols = [draw.randrange(7) for _ in range(n)]
    return symbols, [sum(symbols[: i + 1]) % 7 for i in range(n)]


def twice(draw: random.Random, n: int) -> Row:
    """The input, twice."""
    symbols = [draw.choice("abcd") for _ in range(n)]
    return symbols, symbols * 2


def times_three(draw: random.Random, n: int) -> Row:
    """A number times 3, smallest digits first; the last digit is 0, room for the carry."""
    digits = [*(draw.randrange(10) for _ in range(n - 1)), 0]
    answer = []
    carry = 0
    for digit in digits:
        carry, rest = divmod(3 * digit + carry, 10)
        answer.append(rest)
    return digits, answer


def run_lengths(draw: random.Random, n: int) -> Row:
    """How often each symbol has come in a row, up to 9."""
    symbols = [draw.choice("ab") for _ in range(n)]
    answer = []
    for i, symbol in enumerate(symbols):
        same = i > 0 and symbol == symbols[i - 1]
        answer.append(min(9, answer[-1] + 1) if same else 1)
    return symbols, answer


def dyck(draw: random.Random, n: int) -> Row:
    """The bracket that would close the innermost open one, "-" if none is open, of two kinds."""
    text = []
    answer = []
    stack: list[str] = []
    for _ in range(n):
        closing = bool(stack) and draw.random() < 0.5
        text.append(stack.pop() if closing else draw.choice("(["))
        if not closing:
            stack.append(")" if text[-1] == "(" else "]")
        answer.append(stack[-1] if stack else "-")
    return text, answer


def rule_110(draw: random.Random, n: int) -> Row:
    """Cells after three steps of rule 110, with 0 outside."""
    cells = [draw.randrange(2) for _ in range(n)]
    now = cells
    for _ in range(3):
        padded = [0, *now, 0]
        triples = zip(padded, padded[1:], padded[2:], strict=False)
        now = [110 >> (4 * a + 2 * b + c) & 1 for a, b, c in triples]
    return cells, now


def powers(draw: random.Random, n: int) -> Row:
    """3 to the binary number read so far, modulo 11."""
    bits = [draw.randrange(2) for _ in range(n)]
    answer = []
    value = 1
    for bit in bits:
        value = value * value * (3 if bit else 1) % 11
        answer.append(value)
    return bits, answer


def evens(draw: random.Random, n: int) -> Row:
    """The even symbols of 0 to 7 in order, after a 9, so that no answer is empty."""
    symbols = [9, *(draw.randrange(8) for _ in range(n - 1))]
    return symbols, [9, *(s for s in symbols[1:] if s % 2 == 0)]


class Foreign(NamedTuple):
    """A task: how a row is made, with which preset, and the longest row in training."""

    words: str
    make: Callable[[random.Random, int], Row]
    preset: str
    longest: int
    iterations: int = 1500


TASKS = {
    "sums": Foreign("sums modulo 7 of every prefix", sums, "scan", 5),
    "powers": Foreign("3 to the power of a binary number, modulo 11", powers, "scan", 6),
    "times3": Foreign("a number times 3", times_three, "scan", 5),
    "runs": Foreign("how often a symbol came in a row", run_lengths, "scan", 8),
    "rule110": Foreign("three steps of rule 110", rule_110, "exchange", 12),
    "dyck": Foreign("the next closing bracket, two kinds", dyck, "scan", 8),
    "twice": Foreign("the input twice", twice, "scan", 6),
    "evens": Foreign("the even symbols in order", evens, "exchange", 8),
}


def run(task: Foreign, seed: int, *, iterations: int) -> dict[str, Any]:
    """Train on short rows, and test on rows up to ten times as long."""
    draw = random.Random(seed)
    counts = dict.fromkeys(range(2, task.longest + 1), ROWS)
    counts |= dict.fromkeys([task.longest * n for n in TIMES[1:]], TESTED)
    pairs = [task.make(draw, n) for n, count in counts.items() for _ in range(count)]
    rows = th.RowsTask(pairs)
    set_seed(seed)
    preset = th.presets.PRESETS[task.preset]()
    data = preset.data(rows, max_length=task.longest, seed=seed)
    model = preset.thinker(data, longest=task.longest * TIMES[-1])
    with tempfile.TemporaryDirectory() as folder:
        trainer = preset.trainer(
            model,
            data,
            folder,
            max_steps=iterations,
            seed=seed,
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        begin = time.process_time()
        trainer.train()
        seconds = time.process_time() - begin
    lengths = [task.longest * n for n in TIMES]
    curves = th.evaluate_steps(
        model, data, lengths, n_steps=lambda n: [2 * n + 6], samples=TESTED, seed=seed
    )
    whole = {n: cells[0].sequence for n, cells in zip(lengths, curves.cells, strict=True)}
    symbols = {n: cells[0].token for n, cells in zip(lengths, curves.cells, strict=True)}
    return {"seed": seed, "cpu_seconds": round(seconds, 1), "rows": whole, "symbols": symbols}


def write_table() -> None:
    """Write the guide's table."""
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    heads = ["trained length" if n == 1 else f"{n} times" for n in TIMES]
    lines = [
        f"| rows of your own | preset | trained to | CPU s | {' | '.join(heads)} |",
        "|---" * (4 + len(TIMES)) + "|",
    ]
    for name, task in TASKS.items():
        runs = found["tasks"][name]
        # a run beside another load has no CPU seconds
        taken = [r["cpu_seconds"] for r in runs if "cpu_seconds" in r]
        seconds = f"{statistics.median(taken):.0f}" if taken else ""
        cells = []
        for n in TIMES:
            shares = [r["rows"][str(task.longest * n)] for r in runs]
            cells.append(f"{statistics.median(shares):.0%} ({min(shares):.0%})")
        lines.append(
            f"| {task.words} | {task.preset} | {task.longest} | {seconds} | {' | '.join(cells)} |"
        )
    note = (
        f"Share of rows with every symbol right, among up to {TESTED} unseen rows: the median of "
        f"{len(SEEDS)} seeds (the worst). {found['hardware']}, one thread; measured "
        f"{found['date']} at {found['commit']}."
    )
    put(GUIDE, [*lines, "", note], "foreign")


def main(arguments: list[str] | None = None) -> None:
    """Run every task with every seed; write results and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at: it trains on the CPU")
    parser.add_argument("--only", nargs="*", choices=TASKS, help="tasks; the others are kept")
    parser.add_argument("--smoke", action="store_true", help="a few steps; nothing is written")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"date": today(), "commit": commit(), "hardware": hardware()}
    found["tasks"] = {}
    if options.only:
        before = json.loads(FOUND.read_text(encoding="utf-8"))
        # rows of several commits
        found["commit"] = f"{before['commit']}, {found['commit']}"
        found["tasks"] = before["tasks"]
    for name, task in TASKS.items():
        if options.only and name not in options.only:
            continue
        seeds = SEEDS[:1] if options.smoke else SEEDS
        iterations = 5 if options.smoke else task.iterations
        runs = [run(task, seed, iterations=iterations) for seed in seeds]
        print(name, runs, flush=True)
        found["tasks"][name] = json.loads(json.dumps(runs))
    if options.smoke:
        return
    FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_table()


if __name__ == "__main__":
    main()
