"""Held-out loss of SmolLM2-135M cut to 90 %, 80 % and 70 % of its parameters, without training.

`prune_` beside the methods of `pruning_rivals`, on the same calibration text. The loss is measured
on text of the same kind and of another. Existing rows are kept; ``--only`` and ``--sizes`` select
which missing ones to measure. Skipped where the model's package or the data are absent.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kronecker import PruneConfig, num_parameters, prune_
from kronecker.data.text import text_batches
from tests.benchmarks import pruning_rivals
from tests.benchmarks.pictures import save_picture
from tests.benchmarks.results import KRONECKER_GUIDE, RESULTS, ROOT, commit, hardware, put, today
from tests.support import real

FOUND = RESULTS / "prune_model.json"
TOKENS, LARGE, HELD_OUT, CONTEXT = 12_288, 49_664, 10_240, 256
FEW = (1_536, 3_072, 6_144)
"""Two, four and eight tokens for each neuron that an MLP keeps at 70 %."""
SIZES = (0.9, 0.8, 0.7)
PLOT = ROOT / "docs" / "pruning.svg"
BEST = "prune_, best"
OURS = {
    "prune_, fast": '`"fast"`',
    BEST: '`"best"`',
    "prune_, blocks": '`"blocks"`',
    "prune_, fast, influence": '`"fast"`, influence',
    "prune_, best, influence": '`"best"`, influence',
}
"""Our methods, and their titles in the guide's small table."""


def pruned(method: str, allocate: str = "uniform") -> Callable[..., None]:
    """Return `prune_` by a method."""

    def run(model: Any, batches: Sequence[Tensor], size: float) -> None:
        config = PruneConfig.from_dict({"size": size, "method": method, "allocate": allocate})
        prune_(model, config, calibration=batches, progress=False)

    return run


METHODS: dict[str, Callable[..., None]] = {
    BEST: pruned("best"),
    "prune_, fast": pruned("fast"),
    "prune_, blocks": pruned("blocks"),
    "prune_, fast, influence": pruned("fast", "influence"),
    "prune_, best, influence": pruned("best", "influence"),
    "MoDeGPT (MLPs)": pruning_rivals.modegpt,
    "MoDeGPT (MLPs), uniform": pruning_rivals.modegpt_uniform,
    "Minitron's activations (MLPs)": pruning_rivals.minitron,
    "blocks, least squares": pruning_rivals.fitted_depth,
    "ShortGPT": pruning_rivals.shortgpt,
}
RUNS = [(name, size, TOKENS) for size in SIZES for name in METHODS]
RUNS += [(name, 0.7, LARGE) for name in (BEST, "prune_, best, influence")]
RUNS += [(BEST, 0.7, tokens) for tokens in FEW]


def texts() -> dict[str, str]:
    """Return the calibration text, held-out text of its kind, and text of another kind."""
    rows = real.alpaca(5000)
    parts = {"calibration": rows[:1000], "in_domain": rows[4000:4200]}
    found = {
        name: "\n\n".join(
            "\n".join(filter(None, (row["instruction"], row["input"], row["output"])))
            for row in part
        )
        for name, part in parts.items()
    }
    with gzip.open(
        real.data("hh-rlhf_harmless-base_test.jsonl.gz"), "rt", encoding="utf-8"
    ) as file:
        found["out_of_domain"] = "\n\n".join(
            json.loads(line)["chosen"] for line in islice(file, 200)
        )
    return found


@torch.no_grad()
def losses_of(model: Any, batches: Sequence[Tensor]) -> list[float]:
    """Return the mean loss of each row of tokens, in nats a token."""
    found: list[float] = []
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
        labels = batch[:, 1:]
        each = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
        found += [round(loss, 4) for loss in each.view(labels.shape).mean(1).tolist()]
    return found


def difference(row: dict[str, Any], other: dict[str, Any], text: str) -> str:
    """Return the mean difference in loss between two results, and its standard error over rows of
    text."""
    each = [a - b for a, b in zip(row[text], other[text], strict=True)]
    error = statistics.stdev(each) / len(each) ** 0.5
    return f"{statistics.mean(each):+.3f} ± {error:.3f}"


def write_sizes(found: dict[str, Any]) -> None:
    """Write the guide's small table: our methods and the best rival at each size."""
    names = " | ".join(OURS.values())
    lines = [f"| parameters | {names} | best other method |", "|---" * (2 + len(OURS)) + "|"]
    for size in SIZES:
        rows = [r for r in found["rows"] if (r["size"], r["tokens"]) == (size, TOKENS)]
        by_method = {row["method"]: row for row in rows}
        if by_method.keys() != METHODS.keys():
            continue
        rival = min((r for r in rows if r["method"] not in OURS), key=lambda r: sum(r["in_domain"]))
        cells = [_short(by_method[name]) for name in OURS]
        lines.append(f"| {size:.0%} | {' | '.join(cells)} | {_short(rival)}: {rival['method']} |")
    about = (
        "Held-out loss in nats a token on text of the same kind as the calibration set, and CPU "
        "seconds. Whole blocks leave somewhat fewer parameters. The original: "
        f"{statistics.mean(found['original']['in_domain']):.3f}. SmolLM2-135M-Instruct, before any "
        "training; [all methods](#compared-with-other-methods)."
    )
    put(KRONECKER_GUIDE, [*lines, "", about], "sizes")


def _short(row: dict[str, Any]) -> str:
    return f"{statistics.mean(row['in_domain']):.3f} ({row['cpu_seconds']:.0f} s)"


def draw(found: dict[str, Any]) -> None:
    """Draw loss against size, and against CPU seconds: ours as thick lines, rivals as thin ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_size, by_time) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    for method in METHODS:
        rows = [r for r in found["rows"] if (r["method"], r["tokens"]) == (method, TOKENS)]
        rows.sort(key=lambda row: row["parameters"])
        losses = [statistics.mean(row["in_domain"]) for row in rows]
        shares = [100 * row["parameters"] / found["original"]["parameters"] for row in rows]
        style: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.7, "marker": "."}
        if method in OURS:
            style = {"linewidth": 2.4, "marker": "o", "markersize": 4}
        by_size.plot(shares, losses, label=method, **style)
        by_time.plot([row["cpu_seconds"] for row in rows], losses, label=method, **style)
    original = statistics.mean(found["original"]["in_domain"])
    for axes in (by_size, by_time):
        axes.axhline(original, color="0.6", linewidth=0.8, linestyle=":")
        axes.set_ylim(original - 0.1, 4.7)
        axes.set_ylabel("held-out loss, nats a token")
    by_size.set_xlabel("parameters that stay, %")
    by_time.set(xlabel="CPU seconds", xscale="log")
    by_time.minorticks_off()
    seconds = (50, 100, 200, 400)
    by_time.set_xticks(seconds, labels=map(str, seconds))
    by_size.legend(frameon=False, fontsize=7)
    save_picture(figure, PLOT)
    plt.close(figure)


def write_table() -> None:
    """Write the guide's tables and picture from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    by_run = {(r["method"], r["size"], r["tokens"]): r for r in found["rows"]}
    original = found["original"]
    lines = [
        "| parameters | method | same kind of text | other text | CPU s |",
        "|---" * 5 + "|",
    ]
    for size in SIZES:
        if (BEST, size, TOKENS) not in by_run:
            continue
        best = by_run[BEST, size, TOKENS]
        rows = [row for row in found["rows"] if row["size"] == size]
        for row in sorted(rows, key=lambda row: sum(row["in_domain"])):
            cells = []
            for text in ("in_domain", "out_of_domain"):
                cell = f"{statistics.mean(row[text]):.3f}"
                if row is not best:
                    cell += f" ({difference(row, best, text)})"
                cells.append(cell)
            name = row["method"]
            if row["tokens"] != TOKENS:
                name += f", {row['tokens']:,} tokens"
            left = row["parameters"] / original["parameters"]
            lines.append(
                f"| {left:.1%} | {name} | {' | '.join(cells)} | {row['cpu_seconds']:.0f} |"
            )
    about = (
        f"SmolLM2-135M-Instruct, {TOKENS:,} calibration tokens of Alpaca; nats a token of "
        f"{HELD_OUT:,} held-out tokens each of Alpaca and of hh-rlhf's dialogs, in parentheses the "
        f"difference from `{BEST}`, ± its standard error over rows of {CONTEXT} tokens. The original: "
        f"{statistics.mean(original['in_domain']):.3f} and {statistics.mean(original['out_of_domain']):.3f}. "
        "The rivals are our implementations of the papers; of MoDeGPT and Minitron the part for MLPs. "
        f"{hardware('cpu')}, one thread; "
        f"{found['date']} at {', '.join(dict.fromkeys(r['commit'] for r in found['rows']))}."
    )
    put(KRONECKER_GUIDE, [*lines, "", about], "pruning")
    write_sizes(found)
    draw(found)


def main(arguments: list[str] | None = None) -> None:
    """Make the rows that are missing, and the guide's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at")
    parser.add_argument("--only", nargs="+", default=list(METHODS), help="methods to run")
    parser.add_argument("--sizes", nargs="+", type=float, default=SIZES)
    options = parser.parse_args(arguments)
    try:
        folder, found_texts = real.smollm2(), texts()
    except real.AbsentError as error:
        print(f"prune_model: skipped, {error}")
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    encode = AutoTokenizer.from_pretrained(folder).encode
    tests = {
        name: text_batches(found_texts[name], encode, tokens=HELD_OUT, context=CONTEXT)
        for name in ("in_domain", "out_of_domain")
    }

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def measured(model: Any) -> dict[str, Any]:
        losses = {name: losses_of(model, batches) for name, batches in tests.items()}
        return {**losses, "parameters": num_parameters(model)}

    for method, size, tokens in RUNS:
        found: dict[str, Any] = {"rows": []}
        if FOUND.exists():
            found = json.loads(FOUND.read_text(encoding="utf-8"))
        made = {(r["method"], r["size"], r["tokens"]) for r in found["rows"]}
        is_wanted = method in options.only and size in options.sizes
        if (method, size, tokens) in made or not is_wanted:
            continue
        if "original" not in found:
            found["original"] = measured(load())
        batches = text_batches(found_texts["calibration"], encode, tokens=tokens, context=CONTEXT)
        model = load()
        begin = time.process_time()
        with torch.no_grad():
            METHODS[method](model, batches, size)
        seconds = time.process_time() - begin
        row = {"method": method, "size": size, "tokens": tokens, **measured(model)}
        row |= {"cpu_seconds": round(seconds, 1), "commit": commit()}
        found["rows"].append(row)
        found["date"] = today()
        FOUND.write_text(json.dumps(found) + "\n", encoding="utf-8")
        told = [round(statistics.mean(row[name]), 3) for name in tests]
        print(method, size, tokens, *told, row["parameters"], f"{seconds:.0f} s", flush=True)
    write_table()


if __name__ == "__main__":
    main()
