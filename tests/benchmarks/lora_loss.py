"""A training step of SmolLM2-135M with LoRA, whose first half of each row is a prompt: peft with
transformers' loss, TRL's fused head, and ours.

A step is forward, loss, backward and AdamW; in turn in one process; peaks are of processes of their
own.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch

from tests.benchmarks.measure import interleave, run_alone
from tests.benchmarks.results import ROOT, Row, append, latest, put
from tests.support import real

GUIDE = ROOT / "docs" / "lora.md"
IMPLS = (
    "peft",
    "peft, float32 adapters",
    "peft, TRL's fused head",
    "peft, our loss",
    "our forward and loss",
)
SHAPES = ((8, 128), (2, 512), (1, 64))
RANK = 16


def prepare(impl: str, batch: int, context: int, dtype: torch.dtype) -> Callable[[], object]:
    """A step."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from heads.lora import fuse_cross_entropy_, prepare_lora

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    base = AutoModelForCausalLM.from_pretrained(real.smollm2(), dtype=dtype)
    options = {}
    if "TRL" in impl:
        add_fused_lm_head(base)
        options["fused_lm_head"] = True
    model = prepare_lora(
        base,
        LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"),
        accelerate=impl.startswith("our"),
        autocast_adapter_dtype="float32" in impl,
    ).train()
    if "our" in impl:
        fuse_cross_entropy_(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 40_000, (batch, context), generator=generator)
    labels = ids.clone()
    labels[:, : context // 2] = -100
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True
    )

    def step() -> None:
        model(input_ids=ids, labels=labels, use_cache=False, **options).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's moments
    return step


def write_table() -> None:
    """The guide's table, from the newest rows."""
    found = {(r["shape"], r["dtype"], r["impl"]): r for r in latest("lora_loss.csv")}
    if not found:
        return
    lines = [f"| time (peak) ÷ peft's | dtype | {' | '.join(IMPLS[1:])} |"]
    lines.append("|---" * (len(IMPLS) + 1) + "|")
    for shape, dtype in dict.fromkeys(key[:2] for key in found):
        plain = found[shape, dtype, "peft"]
        cells = []
        for impl in IMPLS[1:]:
            row = found.get((shape, dtype, impl))
            if row is None:
                cells.append("")
                continue
            time = float(row["cpu_p50"]) / float(plain["cpu_p50"])
            peak = int(row["peak_bytes"]) / int(plain["peak_bytes"])
            cells.append(f"{time:.2f} ({peak:.2f})")
        lines.append(f"| {shape} | {dtype} | {' | '.join(cells)} |")
    row = next(iter(found.values()))
    lines += [
        "",
        "SmolLM2-135M, LoRA of rank 16 on every projection, half of each row a prompt; CPU seconds of "
        "one thread, medians, in turn; what a step adds to the resident model in a process of its "
        f"own; both against peft with adapters in the model's dtype. {row['hardware']}, "
        f"{row['versions']}; {row['date']} at {row['commit']}.",
    ]
    put(GUIDE, lines, "loss")


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    try:
        real.smollm2()
    except real.AbsentError as why:
        print(f"lora_loss: {why}")
        return
    threads = torch.get_num_threads()
    try:
        for dtype in (torch.bfloat16, torch.float32):
            for batch, context in SHAPES:
                impls = [i for i in IMPLS if dtype != torch.float32 or "float32" not in i]
                place = (batch, context, dtype)
                times = interleave({i: prepare(i, *place) for i in impls}, options.runs, "cpu")
                rows = [
                    Row.of(
                        "lora_loss",
                        impl,
                        "training step",
                        str(dtype),
                        f"{batch} x {context} tokens",
                        results,
                        run_alone(prepare, impl, *place)[0],
                        packages=("torch", "peft", "transformers", "trl"),
                    )
                    for impl, results in times.items()
                ]
                append("lora_loss.csv", rows)
                print(place, {r.impl: (r.cpu_p50, r.peak_bytes) for r in rows}, flush=True)
    finally:
        torch.set_num_threads(threads)
    write_table()


if __name__ == "__main__":
    main()
