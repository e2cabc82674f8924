"""Whole models with LoRA on every projection: peft's own forward and ours, in training steps and in
single forwards.

A step is forward, loss, backward and AdamW; in turn in one process; peaks are of processes of their
own. GPT-2 medium has LoRA on its head, too. Weights are random, which changes no time.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.benchmarks.measure import interleave, run_alone
from tests.benchmarks.results import ROOT, Row, append, latest, put

IMPLS = ("ours", "ours, float32 adapters", "peft", "peft, float32 adapters")
GUIDE = ROOT / "docs" / "lora.md"
SMALL, SMOLLM2, GPT2 = "Llama of 4 layers, width 128", "SmolLM2-135M", "GPT-2 medium"
CASES: list[tuple[str, int, float, str]] = [  # model, tokens, dropout, mode
    *((SMALL, tokens, 0.0, mode) for tokens in (1, 8, 64) for mode in ("forward", "training step")),
    *((SMOLLM2, tokens, 0.0, "forward") for tokens in (1, 256)),
    *((SMOLLM2, 256, dropout, "training step") for dropout in (0.0, 0.05)),
    *((GPT2, 256, dropout, "training step") for dropout in (0.0, 0.05)),
]
RANK = 16


def base_model(name: str) -> Any:
    """A model of the size that the name says, and what LoRA goes on."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == GPT2:
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(n_embd=1024, n_layer=24, n_head=16, tie_word_embeddings=False, **drop)
        return GPT2LMHeadModel(config), ["c_attn", "c_proj", "c_fc", "lm_head"]
    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
    }
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    if name == SMALL:
        sizes = {
            "hidden_size": 128,
            "intermediate_size": 344,
            "num_hidden_layers": 4,
            "vocab_size": 1000,
        }
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)), "all-linear"


def prepare(
    impl: str,
    name: str,
    batch: int,
    context: int,
    dropout: float,
    mode: str,
    dtype: torch.dtype,
    device: str,
) -> Callable[[], object]:
    """A step, or a forward."""
    from peft import LoraConfig

    from heads.lora import prepare_lora

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    base, targets = base_model(name)
    torch.set_default_dtype(torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=dropout, target_modules=targets)
    model = prepare_lora(
        base.to(device),
        config,
        accelerate=impl.startswith("ours"),
        autocast_adapter_dtype="float32" in impl,
    ).train(mode != "forward")
    ids = torch.randint(0, base.config.vocab_size, (batch, context), device=device)
    if mode == "forward":

        @torch.no_grad()
        def forward() -> None:
            model(input_ids=ids, use_cache=False)

        return forward
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True
    )

    def step() -> None:
        logits = model(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's moments
    return step


def measure(place: tuple, runs: int) -> list[Row]:
    """Rows of all implementations of one case, in turn."""
    name, batch, context, dropout, mode, dtype, device = place
    impls = [i for i in IMPLS if dtype != torch.float32 or "float32" not in i]
    steps = {impl: prepare(impl, *place) for impl in impls}
    times = interleave(steps, runs * (40 if name == SMALL else 1), device)
    del steps
    shape = f"{name}, {batch} x {context} tokens, r {RANK}" + (
        f", dropout {dropout}" if dropout else ""
    )
    rows = []
    for impl, results in times.items():
        peak = run_alone(prepare, impl, *place, device=device)[0] if name == GPT2 else 0
        rows.append(
            Row.of(
                "lora_step",
                impl,
                mode,
                str(dtype),
                shape,
                results,
                peak,
                device=device,
                packages=("torch", "peft", "transformers"),
            )
        )
    base = next(r for r in rows if r.impl == "peft")
    print(
        shape, mode, dtype, {r.impl: round(r.cpu_p50 / base.cpu_p50, 3) for r in rows}, flush=True
    )
    return rows


def write_table() -> None:
    """The guide's table, from the newest rows on CPU."""
    rows = [r for r in latest("lora_step.csv") if "CPU" in r["hardware"] and r["impl"] in IMPLS]
    if not rows:
        return
    found = {(r["shape"], r["mode"], r["dtype"], r["impl"]): r for r in rows}
    lines = [
        "| time ÷ peft's | mode | dtype | ours | ours, float32 adapters | peft, float32 adapters | "
        "peak ÷ peft's |"
    ]
    lines.append("|---" * 7 + "|")
    for shape, mode, dtype in dict.fromkeys(key[:3] for key in found):
        theirs = found[shape, mode, dtype, "peft"]
        held = [found.get((shape, mode, dtype, i)) for i in IMPLS if i != "peft"]
        cells = [f"{float(r['cpu_p50']) / float(theirs['cpu_p50']):.2f}" if r else "" for r in held]
        ours, default = held[1] or held[0], held[2] or theirs
        assert ours is not None
        peaks = int(ours["peak_bytes"]), int(default["peak_bytes"])
        cells.append(f"{peaks[0] / peaks[1]:.2f}" if all(peaks) else "")
        lines.append(f"| {shape} | {mode} | {dtype} | {' | '.join(cells)} |")
    some = rows[0]
    lines += [
        "",
        "LoRA on every projection, in GPT-2 on the head, too; CPU seconds of one thread, medians, "
        "against peft with adapters in the model's dtype; what a step adds to the resident model, "
        f"against peft's default, float32 adapters. {some['hardware']}; {some['date']} at "
        f"{', '.join(dict.fromkeys(r['commit'] for r in rows))}.",
    ]
    put(GUIDE, lines, "step")


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--only", nargs="+", default=[], help="words that a case's name must all have"
    )
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    threads = torch.get_num_threads()
    try:
        for dtype in (torch.bfloat16,) if cuda else (torch.bfloat16, torch.float32):
            for name, context, dropout, mode in CASES:
                if not all(
                    word in f"{name} {context} dropout {dropout} {mode} {dtype}"
                    for word in options.only
                ):
                    continue
                size = (8, 1024) if cuda and name == GPT2 else (1, context)
                append(
                    "lora_step.csv",
                    measure((name, *size, dropout, mode, dtype, options.device), options.runs),
                )
    finally:
        torch.set_num_threads(threads)
    write_table()


if __name__ == "__main__":
    main()
