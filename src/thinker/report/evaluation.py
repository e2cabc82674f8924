"""Evaluation of a thinker on held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from model_components._checks import is_whole
from model_components._modes import evaluating

from ..checks import check_layout, chosen_plan
from ..curriculum import Batch, CurriculumDataset
from ..flow import FlowPlan
from ..losses import labels_of_steps
from ..model import LatentThinker
from ..tasks.task import IGNORED
from .results import Accuracy, Curves, Grid


@torch.no_grad()
def accuracies(
    model: LatentThinker,
    batch: Batch,
    *,
    n_steps: Sequence[int],
    n_latent: int | None = None,
    plan: FlowPlan | None = None,
) -> list[Accuracy]:
    """Measure the accuracy on a batch after each number of steps.

    If the plan is only a loop that outputs in every step, the model runs once, with the largest
    number of steps. Otherwise the model runs once for each number of steps. Rows without an answer
    are ignored.

    Raises:
        ValueError: No row has an answer, or logits are not finite.
    """
    inputs = {
        "input_ids": batch["input_ids"].to(model.device),
        "attention_mask": batch["attention_mask"].to(model.device),
        "n_latent": n_latent,
    }
    labels = model.answers_of(batch["labels"].to(model.device), n_latent)
    inputs["out_len"] = labels.shape[-1]
    chosen = chosen_plan(model.config, plan)
    most = max(n_steps)
    with evaluating(model):
        if (
            chosen.loop
            and not chosen.prologue
            and not chosen.epilogue
            and all(row.output for row in chosen.loop)
        ):
            # with such a plan, a run of n steps equals the first n steps of a longer run
            steps = sorted(set(n_steps))
            out = model(**inputs, n_step=most, plan=plan, output_steps=steps)
            by_step = dict(zip(steps, out.step_logits, strict=True))
            logits_of_steps = [by_step[n] for n in n_steps]
        else:
            logits_of_steps = [model(**inputs, n_step=n, plan=plan).logits for n in n_steps]
    found_accuracies = []
    for logits, answers in zip(logits_of_steps, labels_of_steps(labels, n_steps), strict=True):
        if not bool(logits.isfinite().all()):
            raise ValueError(
                "accuracies: expected finite logits, got NaN or infinity; the model's weights may "
                "not be finite"
            )
        counts = answers != IGNORED
        right = (logits.argmax(-1) == answers) & counts
        asked = counts.any(1)
        if not bool(asked.any()):
            raise ValueError(
                f"accuracies: none of {len(asked)} rows has an answer; expected one or more"
            )
        # a row without answers has no wrong answer, but does not count as correct
        whole = (right | ~counts).all(1) & asked
        found_accuracies.append(
            Accuracy(
                float(right.sum() / counts.sum()),
                float(whole.sum() / asked.sum()),
                int(asked.sum()),
            )
        )
    return found_accuracies


def _check_data(operation: str, model: LatentThinker, data: CurriculumDataset) -> None:
    """Raise an error if the data cannot be used with the model."""
    if not isinstance(data, CurriculumDataset):
        raise ValueError(
            f"{operation}: data is a {type(data).__name__}; expected a CurriculumDataset"
        )
    check_layout(operation, model.config, data.task)


def evaluate_grid(
    model: LatentThinker,
    data: CurriculumDataset,
    *,
    n_latents: Sequence[int],
    n_steps: Sequence[int],
    length: int | None = None,
    samples: int = 512,
    plan: FlowPlan | None = None,
    seed: int = 0,
) -> Grid:
    """Measure the accuracy on held-out samples for each number of latents and steps.

    Args:
        model: The model; its mode, training or evaluation, is the same afterwards.
        data: The data set with the held-out samples.
        n_latents: Numbers of latents, one for each row of the result.
        n_steps: Numbers of steps, one for each column of the result.
        length: The length of the samples; default: the longest in training.
        samples: The number of samples.
        plan: The operations of each step; default: the model's plan.
        seed: The random seed of the samples.

    Returns:
        The accuracy by latents and steps, which prints as a table and can be plotted.

    Raises:
        ValueError: A list is empty or has a number below 1, or the model does not support so many
            latents.
    """
    if isinstance(n_latents, int) or isinstance(n_steps, int):
        raise ValueError(
            f"evaluate_grid: n_latents is {n_latents}, n_steps is {n_steps}; expected lists such "
            "as [8]"
        )
    if not n_latents or not n_steps or min(*n_latents, *n_steps, samples) < 1:
        raise ValueError(
            "evaluate_grid: expected non-empty n_latents and n_steps, and all numbers 1 or more, "
            f"got n_latents={list(n_latents)}, n_steps={list(n_steps)}, samples={samples}"
        )
    _check_data("evaluate_grid", model, data)
    longest = data.schedule.max_length if length is None else length
    batch = data.held_out(samples, longest, seed=seed, details=True)
    cells = [
        tuple(accuracies(model, batch, n_steps=n_steps, n_latent=n, plan=plan)) for n in n_latents
    ]
    return Grid(tuple(n_latents), tuple(n_steps), tuple(cells))


def evaluate_steps(
    model: LatentThinker,
    data: CurriculumDataset,
    lengths: Sequence[int],
    *,
    n_steps: Sequence[int] | Callable[[int], Sequence[int]] | None = None,
    n_latent: int | None = None,
    samples: int = 512,
    plan: FlowPlan | None = None,
    seed: int = 0,
) -> Curves:
    """Measure the accuracy on held-out samples of each length after each number of steps.

    Args:
        model: The model; its mode, training or evaluation, is the same afterwards.
        data: The data set with the held-out samples. At lengths beyond those in training, all
            samples count as held out.
        lengths: The lengths of the samples.
        n_steps: Numbers of steps, or a function that returns them for a length; default: the
            config's number, adjusted to the plan by `FlowPlan.num_steps`.
        n_latent: Number of latents; default: the config's.
        samples: The number of samples of each length.
        plan: The operations of each step; default: the model's plan.
        seed: The random seed of the samples.

    Returns:
        The accuracy by length and steps, which prints as a table and can be plotted.

    Raises:
        ValueError: A list is empty or has a number below 1, or the samples are longer than the
            model supports.
    """
    _check_data("evaluate_steps", model, data)
    if isinstance(n_steps, int) or isinstance(lengths, int):
        raise ValueError(
            f"evaluate_steps: lengths is {lengths}, n_steps is {n_steps}; expected lists such as "
            "[20] and [20, 40]"
        )
    if n_steps is None:
        n_steps = [chosen_plan(model.config, plan).num_steps(model.config.n_step)]
    steps: dict[int, list[int]] = {}
    for length in lengths:
        numbers = n_steps(length) if callable(n_steps) else n_steps
        if is_whole(numbers):
            raise ValueError(
                f"evaluate_steps: n_steps is {numbers} at length {length}; expected a list of "
                "numbers of steps"
            )
        # NumPy integers become Python integers, which seeds need
        steps[int(length)] = sorted({int(number) for number in numbers})
    if not steps or not all(steps.values()) or min(map(min, steps.values())) < 1 or samples < 1:
        raise ValueError(
            "evaluate_steps: expected one or more lengths, numbers of steps of 1 or more for each, "
            f"and samples of 1 or more, got {steps} (steps by length) and samples={samples}"
        )
    longest = data.task.input_length(max(steps))
    if longest > model.config.max_input_length:
        raise ValueError(
            f"evaluate_steps: inputs of length {max(steps)} have {longest} tokens, but the model "
            f"accepts at most {model.config.max_input_length}; expected shorter lengths, or a "
            "model made for longer ones (preset.thinker(data, longest=...))"
        )
    cells = []
    for length, numbers in steps.items():
        batch = data.held_out(samples, length, seed=seed, details=True)
        cells.append(tuple(accuracies(model, batch, n_steps=numbers, n_latent=n_latent, plan=plan)))
    return Curves(tuple(steps), tuple(map(tuple, steps.values())), tuple(cells))
