"""A training step of GPT-2 medium with LoRA on every projection and the head: peft's own forward and ours.

Forward, loss, backward and AdamW, in turn in one process; peaks are of processes of their own.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch

from tests.benchmarks.measure import interleave, run_alone
from tests.benchmarks.results import ROOT, Row, append, latest, put

IMPLS = ("lora_linear", "peft", "peft, float32 adapters")
GUIDE = ROOT / "docs" / "lora.md"
TARGETS = ["c_attn", "c_proj", "c_fc", "lm_head"]


def prepare(
    impl: str, batch: int, context: int, rank: int, dropout: float, dtype: torch.dtype, device: str
) -> Callable[[], object]:
    """A step of a model with random weights."""
    from peft import LoraConfig
    from transformers import GPT2Config, GPT2LMHeadModel

    from heads.lora import prepare_lora

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = GPT2Config(
        n_embd=1024, n_layer=24, n_head=16, tie_word_embeddings=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    torch.set_default_dtype(dtype)
    base = GPT2LMHeadModel(config).to(device)
    torch.set_default_dtype(torch.float32)
    # the default, adapters in float32, is also what ours runs with: it copies nothing
    model = prepare_lora(
        base, LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=dropout, target_modules=TARGETS),
        accelerate=impl == "lora_linear", autocast_adapter_dtype=impl != "peft",
    ).train()  # fmt: skip
    ids = torch.randint(0, config.vocab_size, (batch, context), device=device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's moments
    return step


def measure(place: tuple, runs: int) -> list[Row]:
    """Rows of all implementations of one case, in turn."""
    batch, context, rank, dropout, dtype, device = place
    impls = IMPLS if dtype != torch.float32 else IMPLS[:2]
    steps = {impl: prepare(impl, *place) for impl in impls}
    times = interleave(steps, runs, device)
    del steps
    shape = f"GPT-2 medium, {batch} x {context} tokens, r {rank}" + (f", dropout {dropout}" if dropout else "")
    rows = []
    for impl, results in times.items():
        peak = run_alone(prepare, impl, *place, device=device)[0]
        rows.append(Row.of("lora_step", impl, "training step", str(dtype), shape, results, peak, device=device,
                           packages=("torch", "peft", "transformers")))  # fmt: skip
    base = rows[1]
    ratios = {r.impl: (round(r.cpu_p50 / base.cpu_p50, 3), round(r.peak_bytes / base.peak_bytes, 3)) for r in rows}
    print(shape, dtype, ratios, flush=True)
    return rows


def write_table() -> None:
    """The guide's table, from the newest rows on CPU."""
    rows = [r for r in latest("lora_step.csv") if "CPU" in r["hardware"]]
    if not rows:
        return
    found = {(r["dtype"], r["shape"], r["impl"]): r for r in rows}
    lines = [
        "| training step | ours | peft | peft, float32 adapters | time ÷ peft's | peak ÷ peft's |",
        "|---" * 6 + "|",
    ]
    for dtype, shape in dict.fromkeys(key[:2] for key in found):
        held = [found.get((dtype, shape, impl)) for impl in IMPLS]
        ours, theirs = held[0], held[2] or held[1]
        assert ours is not None
        assert theirs is not None
        cells = [f"{float(r['cpu_p50']):.1f} s, {int(r['peak_bytes']) / 2**20:.0f} MB" if r else "" for r in held]
        cells += [f"{float(ours[k]) / float(theirs[k]):.2f}" for k in ("cpu_p50", "peak_bytes")]
        lines.append(f"| {shape}, {dtype} | {' | '.join(cells)} |")
    some = rows[0]
    lines += [
        "",
        "LoRA on every projection and the head; CPU seconds of one thread, medians, and what a step adds to the "
        f"resident model. The ratios are to peft's default. {some['hardware']}; {some['date']} at "
        f"{', '.join(dict.fromkeys(r['commit'] for r in rows))}.",
    ]  # fmt: skip
    put(GUIDE, lines, "step")


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    threads = torch.get_num_threads()
    try:
        for dtype in (torch.bfloat16,) if cuda else (torch.bfloat16, torch.float32):
            for dropout in (0.0, 0.05):
                place = (8, 1024, 16, dropout, dtype, options.device) if cuda else (1, 256, 16, dropout, dtype, "cpu")
                append("lora_step.csv", measure(place, options.runs))
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
