"""masked_linear, forward and backward: ours, the plain way, and a trainable nn.Linear of the same
size.

The floor of one step is what a trainable linear layer does: three products, 6 T I O FLOPs. Beyond
it, accurate blends twice and reduces once: (2 K + 2 + K) I O elements to move.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

from mergekit_lite.masks import masked_linear
from tests.benchmarks.measure import interleave, run_alone, saved_bytes
from tests.benchmarks.results import Row, append

IMPLS = ("accurate", "accurate, fused", "efficient", "plain", "nn.Linear")


def prepare(
    impl: str,
    tokens: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    device: str,
    backward: bool,
) -> Callable[[], object]:
    """One step of an implementation, two components, input masks."""
    torch.manual_seed(0)
    made = {"dtype": dtype, "device": device}
    x = torch.randn(tokens, inputs, **made).requires_grad_(backward)
    gradient = torch.randn(tokens, outputs, **made)
    weights = [torch.randn(outputs, inputs, **made) * 0.02 for _ in range(2)]
    masks = torch.full((2, 1, inputs), 0.5, device=device, requires_grad=backward)
    layer = torch.nn.Linear(inputs, outputs, bias=False, **made)

    def plain() -> torch.Tensor:
        weight = masks[0] * weights[0] + masks[1] * weights[1]
        return F.linear(x, weight.to(dtype))

    forward = {
        "accurate": lambda: masked_linear(x, weights, masks, mode="accurate"),
        "accurate, fused": lambda: masked_linear(x, weights, masks, mode="accurate", impl="fused"),
        "efficient": lambda: masked_linear(x, weights, masks, mode="efficient"),
        "plain": plain,
        "nn.Linear": lambda: layer(x),
    }[impl]

    def step() -> object:
        if not backward:
            with torch.no_grad():
                return forward()
        forward().backward(gradient)
        x.grad = masks.grad = layer.weight.grad = None
        return None

    step.forward = forward
    if impl == "nn.Linear":
        step.frozen = layer.weight.nbytes
    else:
        step.frozen = sum(w.nbytes for w in weights) + masks.nbytes
    return step


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    shape = (8192, 4096, 4096) if cuda else (2048, 1024, 4096)
    dtypes = [torch.bfloat16, torch.float32] if cuda else [torch.float32, torch.bfloat16]
    cases = [(*shape, dtype, True) for dtype in dtypes]
    cases += [
        (t, *shape[1:], dtypes[0], backward)
        for backward in (False, True)
        for t in (1, 4, 8, 16, 32, 64, 128, 512)
    ]
    rows = []
    for tokens, inputs, outputs, dtype, backward in cases:
        place = (tokens, inputs, outputs, dtype, options.device, backward)
        steps = {impl: prepare(impl, *place) for impl in IMPLS if cuda or "fused" not in impl}
        saved = {i: saved_bytes(s.forward, s.frozen) if backward else "" for i, s in steps.items()}
        whole = tokens == shape[0]
        for impl, results in interleave(
            steps, options.runs if whole else 4 * options.runs, options.device
        ).items():
            peak = run_alone(prepare, impl, *place, device=options.device)[0] if whole else 0
            mode = "forward + backward" if backward else "forward"
            described = f"{tokens} tokens, {inputs} to {outputs}, 2 components, input masks"
            made = ("masked_linear", impl, mode, str(dtype), described, results, peak)
            rows.append(Row.of(*made, saved=saved[impl], device=options.device))
            append("masked_linear.csv", rows[-1:])
            text = f"{rows[-1].wall_p50 * 1e3:.2f} ms, saved {saved[impl]}"
            print(f"{described} {dtype} {mode} {impl}: {text}", flush=True)


if __name__ == "__main__":
    main()
