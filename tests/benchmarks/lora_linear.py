"""lora_linear and accelerated layers against peft's own forward; the floor is a frozen `nn.Linear`.

peft is timed twice: with its default, adapters in float32 under a half-precision model, and with adapters in the
model's dtype. On CUDA Unsloth's function is timed too where its package is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.benchmarks.measure import interleave, run_alone, saved_bytes
from tests.benchmarks.results import README, ROOT, Row, append, latest, put

IMPLS = (
    "frozen nn.Linear",
    "lora_linear",
    "lora_linear, factored",
    "lora_linear, fused",
    "peft",
    "peft, float32 adapters",
    "unsloth",
)
GUIDE = ROOT / "docs" / "lora.md"
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Layers(nn.Module):
    """One Linear, or three that read the same x."""

    def __init__(self, count: int, ins: int, outs: int):
        super().__init__()
        self.names = PROJECTIONS[:count]
        for name in self.names:
            self.add_module(name, nn.Linear(ins, outs))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [getattr(self, name)(x) for name in self.names]


def unsloth(model: nn.Module) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """The peer's autograd function on the same parameters."""
    from unsloth.kernels.fast_lora import LoRA_W

    layers = [m for m in model.modules() if hasattr(m, "lora_A")]

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            LoRA_W.apply(x, m.base_layer.weight, None, m.lora_A["default"].weight, m.lora_B["default"].weight,
                         m.scaling["default"])
            for m in layers
        ]  # fmt: skip

    return forward


def prepare(
    impl: str, count: int, ins: int, outs: int, tokens: int, rank: int, dropout: float, dtype: torch.dtype, device: str
) -> Callable[[], object]:
    """A step, forward and backward; ``step.forward`` and ``step.parameters`` serve `saved_bytes`."""
    from peft import LoraConfig, get_peft_model

    from heads.lora import accelerate_lora_

    torch.manual_seed(0)
    model: Any = Layers(count, ins, outs).to(device, dtype).requires_grad_(False)
    if impl != "frozen nn.Linear":
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(PROJECTIONS[:count]), lora_dropout=dropout)
        model = get_peft_model(model, config, autocast_adapter_dtype=impl != "peft")
        if "lora_linear" in impl:
            order, path = "factored" if "factored" in impl else "auto", "fused" if "fused" in impl else "auto"
            accelerate_lora_(model, order=order, impl=path)
    run = unsloth(model) if impl == "unsloth" else model
    x = torch.randn(tokens, ins, device=device, dtype=dtype, requires_grad=True)
    grads = [torch.randn(tokens, outs, device=device, dtype=dtype) for _ in range(count)]

    def step() -> None:
        torch.autograd.backward(run(x), grads)
        x.grad = None
        for parameter in model.parameters():
            parameter.grad = None

    step.forward, step.parameters = (lambda: run(x)), list(model.parameters())
    return step


def measure(place: tuple, runs: int, peak: bool) -> list[Row]:
    """Rows of all implementations of one case, in turn."""
    count, ins, outs, tokens, rank, dropout, dtype, device = place
    impls = [i for i in IMPLS if "float32" not in i or dtype != torch.float32]
    impls = [i for i in impls if "factored" not in i or (dtype == torch.float32 and not dropout)]
    impls = [i for i in impls if "fused" not in i or device == "cuda"]
    if device != "cuda" or dropout or importlib.util.find_spec("unsloth") is None:
        impls.remove("unsloth")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = {impl: prepare(impl, *place) for impl in impls}
    layers = f"{count} x " if count > 1 else ""
    shape = f"{layers}{ins} to {outs}, {tokens} tokens, r {rank}" + (f", dropout {dropout}" if dropout else "")
    rows = []
    for impl, results in interleave(steps, runs, device).items():
        saved = saved_bytes(steps[impl].forward, resident=steps[impl].parameters)
        top = run_alone(prepare, impl, *place, device=device)[0] if peak else 0
        rows.append(Row.of("lora_linear", impl, "forward + backward", str(dtype), shape, results, top,
                           saved=saved, device=device, packages=("torch", "peft")))  # fmt: skip
    clock = "wall_p50" if device == "cuda" else "cpu_p50"
    base = getattr(rows[0], clock)
    print(shape, dtype, {r.impl: round(getattr(r, clock) / base, 3) for r in rows}, flush=True)
    return rows


def write_table() -> None:
    """The guide's and the README's tables, from the newest rows on CPU."""
    found = {(r["dtype"], r["shape"], r["impl"]): r for r in latest("lora_linear.csv") if "CPU" in r["hardware"]}
    if not found:
        return
    impls = ["lora_linear", "peft", "peft, float32 adapters"]
    lines = [
        f"| CPU seconds ÷ the frozen layer's own | {' | '.join(impls)} | ours keeps | peft keeps | peak ÷ peft's |"
    ]
    lines.append("|---" * 7 + "|")
    for dtype, shape in dict.fromkeys(key[:2] for key in found):
        base = float(found[dtype, shape, IMPLS[0]]["cpu_p50"])
        rows = [found.get((dtype, shape, impl)) for impl in impls]
        cells = [f"{float(r['cpu_p50']) / base:.2f}" if r else "" for r in rows]
        ours, theirs = rows[0], rows[2] or rows[1]
        assert ours is not None
        assert theirs is not None
        cells += [f"{int(r['saved_bytes']) / 2**20:.2f} MB" for r in (ours, theirs)]
        peaks = int(ours["peak_bytes"]), int(theirs["peak_bytes"])
        cells.append(f"{peaks[0] / peaks[1]:.2f}" if all(peaks) else "")
        lines.append(f"| {shape}, {dtype} | {' | '.join(cells)} |")
    some = next(iter(found.values()))
    lines += [
        "",
        "Forward and backward, one thread, medians, all in turn in one process. What is kept, and the peak, are "
        f"compared with peft's default, float32 adapters. {some['hardware']}; {some['versions']}; {some['date']} at "
        f"{', '.join(dict.fromkeys(r['commit'] for r in found.values()))}.",
    ]  # fmt: skip
    put(GUIDE, lines, "speed")
    put(README, [line for line in lines if "dropout" not in line and not line.startswith("| 3 x")], "lora")


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    wide, tokens, outs = (4096, 8192, 4096) if cuda else (1024, 2048, 4096)
    dtypes = (torch.bfloat16,) if cuda else (torch.bfloat16, torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype in dtypes:
            for rank in (16, 64):
                for dropout in (0.0, 0.05):
                    place = (1, wide, outs, tokens, rank, dropout, dtype, options.device)
                    append("lora_linear.csv", measure(place, options.runs, peak=not dropout))
                append(
                    "lora_linear.csv",
                    measure((3, wide, wide, tokens, rank, 0.0, dtype, options.device), options.runs, peak=False),
                )
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
