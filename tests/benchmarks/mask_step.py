"""One training step of masks over a pair of GPT-2 124M: peak memory against context, ours and the plain way.

The plain way is what a notebook does: every weight Σ m_k W_k built in the graph (`functional_call`), whole logits of
student and teacher, `kl_div`. Ours is `Merger` with `KLConfig()`, without and with gradient checkpointing. Each runs in
a process of its own, in turn; the peak is what the step adds to the two resident models.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.benchmarks.measure import run_alone
from tests.benchmarks.results import Row, append

CONTEXTS = (128, 512, 1024, 2048)
IMPLS = ("plain", "Merger", "Merger, checkpointed")


def models(context: int, device: str, dtype: torch.dtype) -> list:
    """Two random GPT-2 of 124M parameters, whose positions reach 2048."""
    import transformers

    config = transformers.GPT2Config(
        n_positions=max(CONTEXTS), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa"
    )
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        made.append(transformers.GPT2LMHeadModel(config).to(device, dtype))
    return made


def prepare(impl: str, context: int, device: str, dtype: torch.dtype) -> Callable[[], object]:
    """One step, forward and backward, of one example of ``context`` tokens of the first task."""
    pair = models(context, device, dtype)
    ids = torch.randint(50257, (1, context), generator=torch.Generator().manual_seed(0)).to(device)
    if impl == "plain":
        states = [dict(m.named_parameters()) for m in pair]
        for parameter in (p for state in states for p in state.values()):
            parameter.requires_grad_(False)
        masks = {
            n: torch.full((2, *([1] * (w.dim() - 1)), w.shape[-1]), 0.5, device=device, requires_grad=True)
            for n, w in states[0].items()
        }

        def step() -> object:
            with torch.no_grad():
                teacher = pair[0](input_ids=ids, use_cache=False).logits[0, :-1]
            merged = {n: (m[0] * states[0][n] + m[1] * states[1][n]).to(dtype) for n, m in masks.items()}
            inputs = {"input_ids": ids, "use_cache": False}
            made = torch.func.functional_call(pair[0], merged, kwargs=inputs, tie_weights=True)
            student = F.log_softmax(made.logits[0, :-1].float(), -1)
            F.kl_div(student, F.log_softmax(teacher.float(), -1), log_target=True, reduction="batchmean").backward()

        return step
    from mergekit_lite.masks import KLConfig, Merger

    merger = Merger(pair)
    merger.output_head()
    if impl == "Merger, checkpointed":
        with warnings.catch_warnings(action="ignore"):  # it has a new name since transformers 5.2x
            merger.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    merger.train()
    task = torch.zeros(1, dtype=torch.long, device=device)
    return lambda: merger(kl=KLConfig(), input_ids=ids, task=task).loss.backward()


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    options = parser.parse_args(arguments)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    for context in options.contexts:
        held: dict[str, list[tuple[int, tuple[float, float]]]] = {impl: [] for impl in IMPLS}
        for _ in range(options.runs):
            for impl in IMPLS:
                held[impl].append(run_alone(prepare, impl, context, options.device, dtype, device=options.device))
        rows = []
        for impl, results in held.items():
            peak, times = max(r[0] for r in results), [r[1] for r in results]
            shape, packages = f"GPT-2 124M pair, context {context}", ("torch", "transformers")
            made = ("training step", impl, "forward + backward", str(dtype), shape, times, peak)
            rows.append(Row.of(*made, device=options.device, packages=packages))
            print(f"context {context} {impl}: peak {peak / 1e6:.0f} MB, {rows[-1].wall_p50:.2f} s", flush=True)
        append("mask_training_step.csv", rows)


if __name__ == "__main__":
    main()
