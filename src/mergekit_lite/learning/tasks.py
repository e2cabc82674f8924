"""The tasks of `learn_merge`: their examples, and a model's losses on held-out examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model_components._devices import on_device
from model_components._examples import IGNORED, Example, TextExamples, split_examples
from model_components._modes import evaluating

from ..masks.data import MaskCollator
from .config import OPERATION, LearnConfig

_MOST_HELD_OUT = 200  # maximum number of held-out examples per task


@dataclass(frozen=True)
class Task:
    """One component's examples.

    Attributes:
        name: The task's name in the final table.
        first: The text of the first example, with the supervised text in brackets.
        train: The examples to train on.
        test: The held-out examples.
        hash: A hash of all rows of the data.
        notes: The numbers of examples, and of truncated or dropped examples.
    """

    name: str
    first: str
    train: list[Example]
    test: list[Example]
    hash: str
    notes: tuple[str, ...]


def read_tasks(data: Sequence[Any], tokenizer: Any, config: LearnConfig) -> list[Task]:
    """Read the examples of each component, and hold out some of them."""
    examples = []
    for number, source in enumerate(data):
        try:
            texts = TextExamples(source, tokenizer, max_length=config.max_length)
        except ValueError as error:
            if isinstance(source, (str, Path)):  # the error names the file
                raise
            raise ValueError(f"{OPERATION}: task {number}: {error}") from error
        examples.append(texts)
    splits = split_examples(examples, config.held_out, _MOST_HELD_OUT)
    tasks: list[Task] = []
    for number, source in enumerate(data):
        texts = examples[number]
        train, test = splits[number]
        name = f"task {number}"
        if isinstance(source, (str, Path)):
            name = Path(source).name.partition(".")[0]
        if name in [task.name for task in tasks]:
            name = f"{name} {number}"
        if not train:
            raise ValueError(
                f"{OPERATION}: {name} has no examples to train on: all {len(texts)} are held out, "
                "or have the same prompt as a held-out example; expected two or more different "
                "prompts, or a smaller held_out"
            )
        notes = [f"{name}: {len(train)} examples to train on, {len(test)} held out"]
        dropped = len(texts) - len(train) - len(test)
        if dropped:
            notes.append(f"{name}: {dropped} examples whose prompt is also held out were dropped")
        if texts.cut:
            notes.append(
                f"{name}: {texts.cut} examples were truncated to {config.max_length} tokens"
            )
        tasks.append(Task(name, texts.decoded(0), train, test, texts.digest, tuple(notes)))
    return tasks


def supervised_tokens(examples: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of tokens over which the loss is averaged."""
    count = 0
    for example in examples:
        # no logit predicts the first token
        count += sum(label != IGNORED for label in example["labels"][1:])
    return count


@torch.no_grad()
def held_out_losses(
    model: Any,
    tasks: Sequence[Sequence[Mapping[str, Any]]],
    collator: MaskCollator,
    *,
    batch_size: int = 8,
) -> tuple[float, ...]:
    """Return the loss of each task's examples, in nats per supervised token.

    Args:
        model: A causal language model, or a `Merger`.
        tasks: The examples of each task, with ``input_ids`` and ``labels``.
        collator: The collator that pads the examples.
        batch_size: Number of examples per forward pass.
    """
    means = []
    with evaluating(model):
        for examples in tasks:
            total = 0.0
            count = 0
            ordered = sorted(examples, key=lambda example: len(example["input_ids"]))
            for start in range(0, len(ordered), batch_size):
                batch = collator(ordered[start : start + batch_size])
                # logits at t predict token t + 1; with labels, the model would also compute a loss
                labels = batch.pop("labels")[:, 1:]
                inputs = on_device(batch, model.device)
                logits: Tensor = model(**inputs).logits[:, :-1]
                chosen = labels != IGNORED
                # a sum, because the number of supervised tokens differs between batches
                loss = F.cross_entropy(
                    logits[chosen].float(), labels[chosen].to(logits.device), reduction="sum"
                )
                total += float(loss)
                count += int(chosen.sum())
            means.append(total / max(1, count))
    return tuple(means)
