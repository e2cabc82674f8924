"""Peak memory of one training step against context: masks, masks the plain way, the other students
of `learn_merge`, and a fine-tune of one model (GPT-2 124M).

The plain way is what a notebook does: every weight Σ m_k W_k built where it is used
(`torch.nn.utils.parametrize`), whole logits of student and teacher, `kl_div`. Ours is `Merger` with
`KLConfig()`. Both without and with gradient checkpointing. Each runs in a process of its own, in
turn. The peak is what the step adds to what is resident: two models for masks; one, with the
teachers' heads and cached states, for "lora" and "all"; one for the fine-tune.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.benchmarks.measure import run_alone
from tests.benchmarks.results import Row, append

CONTEXTS = (128, 512, 1024, 2048)
STUDENTS = {"lora": 16, "all": None}  # ranks of adapters
IMPLS = ("plain", "plain, checkpointed", "Merger", "Merger, checkpointed", *STUDENTS, "fine-tune")


def models(context: int, device: str, dtype: torch.dtype) -> list:
    """Two random GPT-2 of 124M parameters, whose positions reach 2048."""
    import transformers

    config = transformers.GPT2Config(
        n_positions=max(CONTEXTS),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        made.append(transformers.GPT2LMHeadModel(config).to(device, dtype))
    return made


class Blended(nn.Module):
    """A parametrization of the first model's weight: Σ m_k W_k, or as it is."""

    active = True

    def __init__(self, other: Tensor, mask: nn.Parameter):
        super().__init__()
        self.mask = mask
        self.others = [other]  # in a list: no parameter of this module

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that is used."""
        if not Blended.active:
            return weight
        return (self.mask[0] * weight + self.mask[1] * self.others[0]).to(weight.dtype)


def blend_plainly(pair: list[nn.Module]) -> nn.Module:
    """The first model with a mask for each input column over all its weights; a tied weight has one
    mask."""
    masks: dict[int, nn.Parameter] = {}
    twins = dict(pair[1].named_modules())
    for name, module in list(pair[0].named_modules()):
        for own, weight in list(module.named_parameters(recurse=False)):
            weight.requires_grad_(False)
            shape = (2, *([1] * (weight.dim() - 1)), weight.shape[-1])
            mask = masks.setdefault(
                id(weight), nn.Parameter(torch.full(shape, 0.5, device=weight.device))
            )
            other = getattr(twins[name], own).detach()
            parametrize.register_parametrization(module, own, Blended(other, mask), unsafe=True)
    return pair[0]


def prepare(impl: str, context: int, device: str, dtype: torch.dtype) -> Callable[[], object]:
    """One step, forward and backward, of one example of ``context`` tokens of the first task."""
    pair = models(context, device, dtype)
    ids = torch.randint(50257, (1, context), generator=torch.Generator().manual_seed(0)).to(device)
    if impl.startswith("plain"):
        model = blend_plainly(pair)
        _checkpoint(model, impl)
        model.train()

        def step() -> object:
            Blended.active = False
            with torch.no_grad():
                teacher = model(input_ids=ids, use_cache=False).logits[0, :-1]
            Blended.active = True
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            student, target = (F.log_softmax(x.float(), -1) for x in (logits, teacher))
            F.kl_div(student, target, log_target=True, reduction="batchmean").backward()

        return step
    if impl == "fine-tune":
        model = pair[0].train()
        return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    from mergekit_lite.learning.student import Student
    from mergekit_lite.masks import KLConfig, Merger

    task = torch.zeros(1, dtype=torch.long, device=device)
    if impl in STUDENTS:
        heads = [model.lm_head.weight.detach().clone() for model in pair]
        student = Student(pair[0], heads, STUDENTS[impl]).train()
        known = torch.randn(context - 1, 1, heads[0].shape[1], device=device, dtype=dtype)
        batch = {"input_ids": ids, "task": task, "teacher_hidden": known}
        return lambda: student(kl=KLConfig(), **batch).loss.backward()
    merger = Merger(pair)
    merger.output_head()
    _checkpoint(merger, impl)
    merger.train()
    return lambda: merger(kl=KLConfig(), input_ids=ids, task=task).loss.backward()


def _checkpoint(model: Any, impl: str) -> None:
    if impl.endswith("checkpointed"):
        with warnings.catch_warnings(action="ignore"):  # it has a new name since transformers 5.2x
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )


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
                held[impl].append(
                    run_alone(prepare, impl, context, options.device, dtype, device=options.device)
                )
        rows = []
        for impl, results in held.items():
            peak, times = max(r[0] for r in results), [r[1] for r in results]
            shape, packages = f"GPT-2 124M pair, context {context}", ("torch", "transformers")
            made = ("training step", impl, "forward + backward", str(dtype), shape, times, peak)
            rows.append(Row.of(*made, device=options.device, packages=packages))
            print(
                f"context {context} {impl}: peak {peak / 1e6:.0f} MB, {rows[-1].wall_p50:.2f} s",
                flush=True,
            )
        append("mask_training_step.csv", rows)


if __name__ == "__main__":
    main()
