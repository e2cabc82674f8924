"""A LoRA layer with our forward against peft's own, in turn in one process: shapes, tokens, ranks,
dtypes.

peft is timed twice, with adapters in the model's dtype and with its default, adapters in float32
under a half-precision model; ours, too. On CUDA our kernels and Unsloth's function are timed as
well, the latter where its package is there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.benchmarks.measure import interleave, saved_bytes
from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, put, today, versions

FOUND = RESULTS / "lora_linear.json"
GUIDE = ROOT / "docs" / "lora.md"
SHAPES = ((768, 768), (768, 3072), (1024, 4096), (2048, 5632))
TOKENS, RANKS = (1, 32, 256, 2048), (8, 16, 128)
MODES = ("inference", "training")
IMPLS = ("ours", "ours, float32 adapters", "peft", "peft, float32 adapters", "unsloth")


def unsloth(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The peer's autograd function on the same parameters."""
    from unsloth.kernels.fast_lora import LoRA_W

    m = next(m for m in model.modules() if hasattr(m, "lora_A"))
    a, b = m.lora_A["default"].weight, m.lora_B["default"].weight
    return lambda x: LoRA_W.apply(x, m.base_layer.weight, None, a, b, m.scaling["default"])


def prepare(
    impl: str, layer: nn.Linear, tokens: int, rank: int, dropout: float, mode: str
) -> Callable[[], object]:
    """A forward, or a forward and backward; ``step.forward`` and ``step.parameters`` serve
    `saved_bytes`.

    All adapt one layer: where its weight lies in memory makes a tenth at one token.
    """
    from peft import LoraConfig, get_peft_model

    from heads.lora import accelerate_lora_

    torch.manual_seed(0)
    (outs, ins), dtype, device = layer.weight.shape, layer.weight.dtype, layer.weight.device
    base = nn.Sequential(layer)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["0"], lora_dropout=dropout)
    model: Any = get_peft_model(base, config, autocast_adapter_dtype="float32" in impl).train(
        mode == "training"
    )
    if impl.startswith("ours"):
        accelerate_lora_(model)
    run = unsloth(model) if impl == "unsloth" else model.base_model.model
    x = torch.randn(1, tokens, ins, device=device, dtype=dtype, requires_grad=mode == "training")
    grad = torch.randn(1, tokens, outs, device=device, dtype=dtype)

    def step() -> None:
        if mode == "inference":
            with torch.no_grad():
                run(x)
            return
        run(x).backward(grad)
        x.grad = None
        for parameter in model.parameters():
            parameter.grad = None

    step.forward, step.parameters = (lambda: run(x)), list(model.parameters())
    return step


def measure(
    shape: tuple[int, int],
    tokens: int,
    rank: int,
    dropout: float,
    dtype: torch.dtype,
    mode: str,
    device: str,
) -> dict[str, Any]:
    """A row: microseconds of all implementations of one case, medians, and the bytes that training
    keeps."""
    impls = [i for i in IMPLS if "float32" not in i or dtype != torch.float32]
    if (
        device != "cuda"
        or mode == "inference"
        or dropout
        or importlib.util.find_spec("unsloth") is None
    ):
        impls.remove("unsloth")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = nn.Linear(*shape).to(device, dtype).requires_grad_(False)
        steps = {i: prepare(i, layer, tokens, rank, dropout, mode) for i in impls}
    for step in steps.values():
        step()
    begin = time.perf_counter()
    interleave(steps, 1, device)
    seconds = (time.perf_counter() - begin) / 2
    runs = int(min(300, max(7, 0.25 * len(impls) / seconds)))
    clock = 1 if device == "cuda" else 0
    times = {
        i: round(1e6 * statistics.median(t[clock] for t in held), 1)
        for i, held in interleave(steps, runs, device).items()
    }
    row: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
        "tokens": tokens,
    }
    row |= {
        "rank": rank,
        "dropout": dropout,
        "mode": mode,
        "device": device,
        "runs": runs,
        "us": times,
    }
    if mode == "training":
        row["kept"] = {i: saved_bytes(s.forward, resident=s.parameters) for i, s in steps.items()}  # pyrefly: ignore
    return row


def write_table() -> None:
    """The guide's table: our time against peft's, the middle and the worst of shapes and ranks."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    rows = [r for r in found["rows"] if r["device"] == "cpu"]
    names = "ours | ours, float32 adapters | peft, float32 adapters"
    lines = [f"| time ÷ peft's | tokens | dtype | {names} | bytes kept ÷ peft's |"]
    lines.append("|---" * 7 + "|")
    for mode in MODES:
        for dropout in (0.0, 0.05):
            for tokens in TOKENS:
                for dtype in ("bfloat16", "float32"):
                    key = (mode, dropout, tokens, dtype)
                    same = [
                        r for r in rows if (r["mode"], r["dropout"], r["tokens"], r["dtype"]) == key
                    ]
                    if same:
                        lines.append(
                            _line(
                                same,
                                mode + (f", dropout {dropout}" if dropout else ""),
                                tokens,
                                dtype,
                            )
                        )
    lines += [
        "",
        f"Medians over layers of {', '.join(f'{i} to {o}' for i, o in SHAPES)} and ranks "
        f"{', '.join(map(str, RANKS))}, and the worst of them; time against peft with adapters in "
        "the model's dtype, what is kept against peft's default, float32 adapters. One thread, "
        f"CPU seconds, all alternately in one process. {found['hardware']}; {found['versions']}; "
        f"{found['date']} at {found['commit']}.",
    ]
    put(GUIDE, lines, "speed")


def _line(same: list[dict[str, Any]], what: str, tokens: int, dtype: str) -> str:
    cells = []
    for impl in ("ours", "ours, float32 adapters", "peft, float32 adapters"):
        ratios = [r["us"][impl] / r["us"]["peft"] for r in same if impl in r["us"]]
        cells.append(f"{statistics.median(ratios):.2f}, {max(ratios):.2f}" if ratios else "")
    ours, theirs = (i if dtype == "float32" else f"{i}, float32 adapters" for i in ("ours", "peft"))
    kept = [r["kept"][ours] / r["kept"][theirs] for r in same if "kept" in r]
    cells.append(f"{statistics.median(kept):.2f}" if kept else "")
    return f"| {what} | {tokens} | {dtype} | {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    """Measure the grid anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    device = options.device
    dtypes = (torch.bfloat16,) if device == "cuda" else (torch.bfloat16, torch.float32)
    found: dict[str, Any] = {"rows": []}
    if FOUND.exists():
        found = json.loads(FOUND.read_text(encoding="utf-8"))
    rows = [r for r in found["rows"] if r["device"] != device]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype in dtypes:
            for shape in SHAPES:
                for tokens in TOKENS:
                    for rank in RANKS:
                        for mode in MODES:
                            rows.append(measure(shape, tokens, rank, 0.0, dtype, mode, device))
                        if rank == 16 and tokens >= 256:
                            rows.append(
                                measure(shape, tokens, rank, 0.05, dtype, "training", device)
                            )
                    us = rows[-1]["us"]
                    print(
                        dtype,
                        shape,
                        tokens,
                        {i: round(t / us["peft"], 3) for i, t in us.items()},
                        flush=True,
                    )
    finally:
        torch.set_num_threads(threads)
    found = {
        "date": today(),
        "commit": commit(),
        "hardware": hardware(device),
        "versions": versions("torch", "peft"),
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = json.dumps(found | {"rows": []}, indent=1).replace(
        '"rows": []', f'"rows": [\n{lines}\n]'
    )
    FOUND.write_text(text + "\n", encoding="utf-8")
    write_table()


if __name__ == "__main__":
    main()
