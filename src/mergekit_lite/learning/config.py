"""`LearnConfig`: the settings of a learned merge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from model_components._checks import CheckedConfig, Range, Whole

from ..masks.config import Granularity

OPERATION = "learn"  # the prefix of messages of `learn_merge` and of its command

RATES = {"masks": 3e-2, "lora": 2e-3, "all": 1e-4}
"""The default learning rate by ``train``, from a search on SmolLM2-135M (docs/masks.md)."""


@dataclass(frozen=True, kw_only=True)
class LearnConfig(CheckedConfig):
    """Settings of `learn_merge`.

    Args:
        start: The merge that training begins from: ``"average"``, ``"regmean"``, ``"regmean++"``,
            any other method of `merge_models` that needs no parameters, or a model's folder.
        train: What to train: ``"masks"`` (by default one number for each row of each component's
            weights), ``"lora"`` (adapters on the merge in ``start``) or ``"all"`` (all its
            weights). The embedding and the head are never trained.
        granularity: With ``train="masks"``, one mask value for each weight matrix (``"scalar"``),
            input column (``"input"``), output row (``"output"``) or element (``"element"``).
        rank: Rank of the adapters with ``train="lora"``.
        learning_rate: Peak learning rate; default: 0.03 for masks, 2e-3 for adapters, 1e-4 for all
            weights.
        max_steps: Number of training steps.
        batch_size: Number of examples per device and step.
        max_length: Maximum number of tokens of an example. Longer examples are truncated. If the
            models have learned positions, like GPT-2, it is limited to the number of positions.
        coefficients: The share of each component as a teacher. ``"task"``: only the component whose
            data the example comes from is the teacher. ``"evidence"``: the share is proportional to
            the probability that the component assigns to the example. ``"confidence"``: the share
            is larger for a component whose prediction has a lower entropy.
        temperature: The number that the logits of student and teachers are divided by.
        compare: Methods of `merge_models` to compare with in the final table; default: linear,
            regmean and, with a base, task_arithmetic.
        held_out: Fraction of each task's examples to hold out for the comparison, at most 200
            examples per task.
        dtype: Dtype of the components; default: the dtype of their files.
        seed: Seed for training. Held-out examples do not depend on the seed.

    Raises:
        ValueError: A value has the wrong type or is out of range.
    """

    start: str = "regmean"
    train: Literal["masks", "lora", "all"] = "masks"
    granularity: Granularity = "output"
    rank: Whole = 16
    learning_rate: Annotated[float | None, Range(above=0)] = None
    max_steps: Whole = 60
    batch_size: Whole = 8
    max_length: Annotated[int, Range(least=2)] = 512
    coefficients: Literal["task", "evidence", "confidence"] = "task"
    temperature: Annotated[float, Range(least=1e-6)] = 1.0
    compare: tuple[str, ...] | None = None
    held_out: Annotated[float, Range(above=0, below=1)] = 0.1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    seed: Annotated[int, Range(least=0, below=1 << 32)] = 0  # as numpy requires

    def problems(self) -> Iterator[str]:
        """Yield a message if ``start`` is empty."""
        if not self.start:
            yield "start is '', expected average, a method of merge_models or a folder"
