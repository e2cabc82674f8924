"""Half of every MLP of SmolLM2-135M, before any training: what each way of making it smaller costs
on held-out text.

Rivals beside `prune_` of neurons: neurons chosen by the size of their weights, low rank whitened by
the inputs (SVD-LLM, arXiv 2403.07378), whole blocks that go until as few parameters are left. And
neurons and blocks of a fifteenth of all parameters. Rows that are there already are not made again;
``--only`` makes some of them. Skipped where the model's package or the data are absent.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kronecker import PruneConfig, num_parameters, perplexity, prune_
from kronecker.data.text import text_batches
from kronecker.discovery.mlps import find_mlps
from tests.benchmarks.results import KRONECKER_GUIDE, RESULTS, commit, put, today
from tests.support import real

FOUND = RESULTS / "prune_model.json"
SMALL, LARGE = 12_288, 49_664
HALF = 0.70403  # of all parameters: those of the model with half of every MLP
LIGHT = 0.93423


def by_magnitude(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Keep the half of each MLP's neurons whose weights are largest, as they are."""
    for mlp in find_mlps(model):
        *ups, down = (model.get_submodule(n) for n in (*mlp.ups, mlp.down))
        sizes = torch.stack([down.weight.norm(dim=0), *(u.weight.norm(dim=1) for u in ups)]).prod(0)
        gone = sizes.argsort()[: len(sizes) // 2]
        down.weight[:, gone] = 0  # what it says of a neuron that is not there


def low_rank(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Each matrix of an MLP by the product of two that have half of its numbers, best on the
    inputs' second moments."""
    moments: dict[str, Tensor] = {}
    layers = {n: model.get_submodule(n) for m in find_mlps(model) for n in (m.ups[0], m.down)}

    def see(name: str) -> Callable:
        def hook(module: nn.Module, given: tuple, out: Tensor) -> None:
            x = given[0].reshape(-1, given[0].shape[-1])
            moments[name] = moments.get(name, 0) + (x.T @ x).double()

        return hook

    handles = [layer.register_forward_hook(see(n)) for n, layer in layers.items()]
    for batch in batches:
        model(input_ids=batch)
    for handle in handles:
        handle.remove()
    for mlp in find_mlps(model):
        for name in (*mlp.ups, mlp.down):
            weight, moment = (
                model.get_submodule(name).weight,
                moments[mlp.ups[0] if name != mlp.down else name],
            )
            moment += 1e-6 * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype)
            root = torch.linalg.cholesky(moment)
            u, s, v = torch.linalg.svd(weight.double() @ root, full_matrices=False)
            rank = weight.numel() // 2 // sum(weight.shape)
            weight.copy_(
                (u[:, :rank] * s[:rank])
                @ torch.linalg.solve_triangular(root, v[:rank], upper=False, left=False)
            )


def pruned(**fields: Any) -> Callable:
    """`prune_` with these settings."""

    def run(model: nn.Module, batches: Sequence[Tensor]) -> None:
        prune_(model, PruneConfig(**fields), calibration=batches, progress=False)

    return run


METHODS: dict[str, Callable] = {
    "largest weights": by_magnitude,
    "low rank, whitened": low_rank,
    "12 of 30 blocks, all matrices": pruned(method="blocks", size=HALF),
    "prune_, one pass": pruned(method="fast"),
    "prune_, writing matrix": pruned(epochs=0),
    "prune_, all matrices, 1 epoch": pruned(epochs=1),
    "prune_, all matrices": pruned(),
    "prune_, all matrices, 6 epochs": pruned(epochs=6),
}
LIGHTER: dict[str, Callable] = {
    "11 % of neurons, one pass": pruned(size=LIGHT),
    "11 % of neurons": pruned(size=LIGHT, method="best"),
    "3 of 30 blocks": pruned(size=LIGHT, method="blocks"),
}
RUNS = [  # (method, tokens, which part of the text)
    ("prune_, all matrices", LARGE, 0),
    *((name, SMALL, 0) for name in METHODS),
    *(("prune_, all matrices", SMALL, draw) for draw in (1, 2)),
    ("prune_, writing matrix", LARGE, 0),
    ("low rank, whitened", LARGE, 0),
    *((name, SMALL, 0) for name in LIGHTER),
]


def write_table() -> None:
    """The guide's table, from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    lines: list[str] = []
    for what, methods in (
        ("half of every MLP", METHODS),
        ("6.6 % of all parameters less", LIGHTER),
    ):
        lines += [
            "",
            f"| {what} by | calibration tokens | loss | above the original | CPU s |",
            "|---" * 5 + "|",
        ]
        for row in sorted(
            (r for r in found["rows"] if r["method"] in methods), key=lambda r: -r["loss"]
        ):
            part = f" (part {row['part'] + 1} of the text)" if row["part"] else ""
            above = row["loss"] - found["original"]
            lines.append(
                f"| {row['method']}{part} | {row['tokens']:,} | {row['loss']:.3f} | {above:.3f} "
                f"| {row['cpu_seconds']:.0f} |"
            )
    text = (
        f"SmolLM2-135M-Instruct, {found['held_out']:,} held-out tokens of Alpaca, the original's "
        f"loss {found['original']:.3f}; 2 cores beside other work. Products are float32 up to "
        f"ac1d202, and bfloat16 since 1fc9f32, where neurons also go more at a time. Measured to "
        f"{found['date']} at {', '.join(dict.fromkeys(r['commit'] for r in found['rows']))}."
    )
    put(KRONECKER_GUIDE, [*lines[1:], "", text], "pruning")


def main(arguments: list[str] | None = None) -> None:
    """Make the rows that are missing, and the guide's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at")
    parser.add_argument("--only", nargs="+", help="methods to run (default: all)")
    parser.add_argument("--again", action="store_true", help="also those that have a row")
    options = parser.parse_args(arguments)
    try:
        folder, rows = real.smollm2(), real.alpaca(5000)
    except real.AbsentError as error:
        print(f"prune_model: skipped, {error}")
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    encode = AutoTokenizer.from_pretrained(folder).encode
    seen, unseen = (
        "\n\n".join(
            "\n".join(filter(None, (r["instruction"], r["input"], r["output"]))) for r in part
        )
        for part in (rows[:1000], rows[4000:4200])
    )
    held_out = text_batches(unseen, encode, tokens=10_240)

    def load() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    found: dict[str, Any] = {"rows": []}
    if FOUND.exists():
        found = json.loads(FOUND.read_text(encoding="utf-8"))
    if "original" not in found:
        loss = torch.tensor(perplexity(load(), held_out)).log()
        found |= {"original": float(loss), "held_out": sum(b.numel() for b in held_out)}
    for method, tokens, part in RUNS:
        done = any(
            (r["method"], r["tokens"], r["part"]) == (method, tokens, part) for r in found["rows"]
        )
        if (done and not options.again) or (options.only and method not in options.only):
            continue
        batches = text_batches(seen, encode, tokens=tokens, skip=part * tokens)
        model, begin = load(), time.process_time()
        with torch.no_grad():
            (METHODS | LIGHTER)[method](model, batches)
        seconds = time.process_time() - begin
        loss = float(torch.tensor(perplexity(model, held_out)).log())
        row = {"method": method, "tokens": tokens, "part": part, "loss": round(loss, 4)}
        row |= {
            "cpu_seconds": round(seconds, 1),
            "parameters": num_parameters(model),
            "commit": commit(),
        }
        place = (method, tokens, part)
        found["rows"] = [r for r in found["rows"] if (r["method"], r["tokens"], r["part"]) != place]
        found["rows"].append(row)
        found |= {"date": today()}
        print(row, flush=True)
        FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_table()


if __name__ == "__main__":
    main()
