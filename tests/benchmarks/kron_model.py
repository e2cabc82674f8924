"""A whole GPT-2 124M, dense and compressed: a training step, generation of 32 tokens, and the
sequential start."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kronecker import PRESETS, KroneckerConfig, KroneckerLinear, convert_
from tests.benchmarks.measure import interleave
from tests.benchmarks.results import Row, append

HALF = "B (2, 1)"
NAMES = (HALF, "gpt2-96m-model-dim", "gpt2-82m", "gpt2-80m")
CONTEXT, NEW = 512, 32


def model(name: str, device: str) -> GPT2LMHeadModel:
    """Dense, or compressed by a preset, or with half of the hidden neurons; random weights."""
    torch.manual_seed(0)
    config = GPT2Config(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
    )
    made = GPT2LMHeadModel(config)
    if name != "dense":
        half = KroneckerConfig(b_shape=(2, 1), init="prune")
        layers = (
            {} if name == HALF else {n: replace(c, init="prune") for n, c in PRESETS[name].items()}
        )
        convert_(made, layers or half)
    return made.to(device)


def training(made: GPT2LMHeadModel, device: str) -> Callable[[], object]:
    """Forward, backward and AdamW on one row of tokens."""
    ids = torch.randint(0, 50257, (1, CONTEXT), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        made.train()
        made(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def generating(made: GPT2LMHeadModel, device: str) -> Callable[[], object]:
    """Greedy decoding with a cache."""
    ids = torch.arange(8, device=device)[None]

    def step() -> object:
        made.eval()
        return made.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )

    return step


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    device, rows = options.device, []
    models = {name: model(name, device) for name in ("dense", *NAMES)}
    jobs = (
        ("training step", training, f"1 x {CONTEXT} tokens"),
        ("generate", generating, f"{NEW} tokens, batch 1"),
    )
    for mode, prepare, shape in jobs:
        steps = {name: prepare(made, device) for name, made in models.items()}
        if mode == "generate":
            for made in models.values():
                made.eval()
        for name, results in interleave(steps, options.runs, device).items():
            rows.append(
                Row.of(
                    "GPT-2 124M",
                    name,
                    mode,
                    "float32",
                    shape,
                    results,
                    0,
                    device=device,
                    packages=("torch", "transformers"),
                )
            )
            print(mode, name, round(rows[-1].wall_p50 * 1e3), "ms", flush=True)
    for name in models:
        models[name].eval()
    dense = models["dense"]
    calibration = (
        torch.randint(0, 50257, (24, CONTEXT), generator=torch.Generator().manual_seed(1))
        .to(device)
        .split(4)
    )
    cpu, wall = time.process_time(), time.perf_counter()
    convert_(dense, KroneckerConfig(b_shape=(2, 1)), calibration=calibration)
    times = [(time.process_time() - cpu, time.perf_counter() - wall)]
    assert isinstance(dense.transformer.h[0].mlp.c_fc, KroneckerLinear)
    rows.append(
        Row.of(
            "GPT-2 124M",
            HALF,
            "sequential start",
            "float32",
            f"{24 * CONTEXT} tokens",
            times,
            0,
            device=device,
            packages=("torch", "transformers"),
        )
    )
    print("sequential start", round(times[0][1]), "s", flush=True)
    append("kron_model.csv", rows)


if __name__ == "__main__":
    main()
