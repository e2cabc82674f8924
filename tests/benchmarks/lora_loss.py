"""A training step of SmolLM2-135M with LoRA, whose first half of each row is a prompt: peft with
transformers' loss, TRL's fused head, Liger's loss on a GPU, and ours.

A step is forward, loss, backward and AdamW; in turn in one process; peaks on a CPU are of processes
of their own. On a GPU the weights are random, of SmolLM2-135M's and Llama-3.2-1B's shapes.
"""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.benchmarks.measure import cuda_peak, interleave, run_alone
from tests.benchmarks.results import ROOT, Row, append, latest, put
from tests.support import real

GUIDE = ROOT / "docs" / "lora.md"
IMPLS = (
    "peft",
    "peft, float32 adapters",
    "peft, TRL's fused head",
    "peft, Liger's loss",
    "peft, our loss",
    "our forward and loss",
)
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
}
SHAPES = {
    "cpu": [("SmolLM2-135M", 8, 128), ("SmolLM2-135M", 2, 512), ("SmolLM2-135M", 1, 64)],
    "cuda": [("SmolLM2-135M", 8, 1024), ("Llama-3.2-1B", 4, 2048)],
}
RANK = 16


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def impls_of(device: str, dtype: torch.dtype) -> list[str]:
    """Return the ways that differ on a device and whose packages are there."""
    left_out = set()
    if dtype == torch.float32:
        left_out.add("peft, float32 adapters")
    if device == "cpu" or not _is_there("liger_kernel"):
        left_out.add("peft, Liger's loss")
    if not (_is_there("trl") and _is_there("datasets")):
        left_out.add("peft, TRL's fused head")
    return [impl for impl in IMPLS if impl not in left_out]


def prepare(
    impl: str, model: str, batch: int, context: int, dtype: torch.dtype, device: str
) -> Callable[[], object]:
    """Return a function that trains one step."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, LlamaConfig

    from heads.lora import fuse_cross_entropy_, prepare_lora

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device == "cpu":
        base = AutoModelForCausalLM.from_pretrained(real.smollm2(), dtype=dtype)
    else:
        with torch.device(device):
            base = AutoModelForCausalLM.from_config(LlamaConfig(**MODELS[model]), dtype=dtype)
    options = {}
    if "Liger" in impl:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            model=base, rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True
        )
    if "TRL" in impl:
        from trl.trainer.utils import add_fused_lm_head

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
    ids = torch.randint(100, 40_000, (batch, context), generator=generator).to(device)
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
    rows = latest("lora_loss.csv")
    if not rows:
        return
    lines: list[str] = []
    for hardware in dict.fromkeys(row["hardware"] for row in rows):
        found = {(r["shape"], r["dtype"], r["impl"]): r for r in rows if r["hardware"] == hardware}
        clock = "cpu_p50" if "CPU" in hardware else "wall_p50"
        impls = [impl for impl in IMPLS[1:] if any(key[2] == impl for key in found)]
        lines.append(f"| time (peak) ÷ peft's | dtype | {' | '.join(impls)} |")
        lines.append("|---" * (len(impls) + 2) + "|")
        for shape, dtype in dict.fromkeys(key[:2] for key in found):
            plain = found[shape, dtype, "peft"]
            cells = []
            for impl in impls:
                row = found.get((shape, dtype, impl))
                if row is None:
                    cells.append("")
                    continue
                time = float(row[clock]) / float(plain[clock])
                peak = int(row["peak_bytes"]) / int(plain["peak_bytes"])
                cells.append(f"{time:.2f} ({peak:.2f})")
            lines.append(f"| {shape} | {dtype} | {' | '.join(cells)} |")
        row = next(iter(found.values()))
        which = (
            "CPU seconds of one thread" if clock == "cpu_p50" else "wall seconds, random weights"
        )
        lines += [
            "",
            "SmolLM2-135M unless a row names another model, LoRA of rank 16 on every projection, "
            f"half of each row a prompt. Median time ({which}), with the variants run alternately, "
            "and in parentheses the memory that a step adds to the loaded model; both relative to "
            f"peft with adapters in the model's dtype. {hardware}, "
            f"{row['versions']}; {row['date']} at {row['commit']}.",
            "",
        ]
    put(GUIDE, lines[:-1], "loss")


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    device = options.device
    if device == "cpu":
        try:
            real.smollm2()
        except real.AbsentError as why:
            print(f"lora_loss: {why}")
            return
    threads = torch.get_num_threads()
    try:
        for dtype in [torch.bfloat16] if device == "cuda" else [torch.bfloat16, torch.float32]:
            for place in SHAPES[device]:
                impls = impls_of(device, dtype)
                steps = {impl: prepare(impl, *place, dtype, device) for impl in impls}
                times = interleave(steps, options.runs, device)
                rows = []
                for impl, results in times.items():
                    if device == "cuda":
                        peak = cuda_peak(steps[impl])
                    else:
                        peak = run_alone(prepare, impl, *place, dtype, device)[0]
                    rows.append(
                        Row.of(
                            "lora_loss",
                            impl,
                            "training step",
                            str(dtype),
                            _shape(*place),
                            results,
                            peak,
                            device=device,
                            packages=("torch", "peft", "transformers", *_rivals(impls)),
                        )
                    )
                append("lora_loss.csv", rows)
                print(place, {r.impl: (r.wall_p50, r.peak_bytes) for r in rows}, flush=True)
    finally:
        torch.set_num_threads(threads)
    write_table()


def _shape(model: str, batch: int, context: int) -> str:
    return f"{batch} x {context} tokens" + ("" if "SmolLM2" in model else f", {model}")


def _rivals(impls: list[str]) -> list[str]:
    packages = {"peft, TRL's fused head": "trl", "peft, Liger's loss": "liger-kernel"}
    return [packages[impl] for impl in impls if impl in packages]


if __name__ == "__main__":
    main()
