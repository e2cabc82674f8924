"""`LearnConfig`: the settings of a learned merge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from model_components._checks import CheckedConfig, Range, Whole

from ..masks.config import Granularity

RATES = {"masks": 3e-2, "lora": 2e-3, "all": 1e-4}
"""Learning rates by what is trained, from a search on SmolLM2-135M (docs/masks.md)."""


@dataclass(frozen=True, kw_only=True)
class LearnConfig(CheckedConfig):
    """Settings of `learn_merge`.

    Args:
        start: The merge that training begins from: ``"average"``, ``"regmean"``, ``"regmean++"``,
            any other method of `merge_models` that needs no parameters, or a model's folder.
        train: What is trained: ``"masks"`` (one number for each row of each component's weights),
            ``"lora"`` (adapters on the start) or ``"all"`` (all weights of the start). Embeddings
            and head stay as the start has them.
        granularity: One mask value for each weight matrix (``"scalar"``), input column, output row
            or element.
        rank: Rank of the adapters of ``"lora"``.
        learning_rate: Peak of the rate; default: 0.03 for masks, 2e-3 for adapters, 1e-4 for all
            weights.
        max_steps: Number of steps.
        batch_size: Examples in a step.
        max_length: Largest number of tokens of an example; the rest is cut off.
        coefficients: Which component teaches at a token: ``"task"`` the one whose data the example
            comes from; ``"evidence"`` each by how probable it finds the example; ``"confidence"``
            each by its entropy.
        temperature: Logits are divided by it.
        compare: Other merges in the closing table, methods of `merge_models`; default: linear,
            regmean and, with a base, task_arithmetic.
        held_out: Fraction of the rows of each task that is held out, 200 rows at most.
        dtype: Dtype of the components; default: the dtype of their files.
        seed: Seed of the training. Held-out examples do not depend on it.

    Raises:
        ValueError: A value has another type or is out of range.
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
    seed: Annotated[int, Range(least=0)] = 0

    def problems(self) -> Iterator[str]:
        """Yield the problem of an empty start."""
        if not self.start:
            yield "start is '', expected average, a method of merge_models or a folder"
