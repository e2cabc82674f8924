"""`RunConfig`: the flags of ``think train`` that describe a run; importing it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["frontier", "uniform", "progressive", "dynamic", "fixed"]
PresetName = Literal["scan", "exchange", "pointer", "grid"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a training run.

    Args:
        preset: Model, lengths, steps and loss that fit a kind of task: scan (answers from left to
            right), exchange (neighbors in both directions), pointer (lookups) or grid (grids of one
            size). Replaces --schedule, --plan, --steps and the task's own recipe.
        options: Options of the task, as NAME=VALUE, for example symbols=32.
        model: Fields of ThinkerConfig, as NAME=VALUE, for example num_heads=8. With
            latent_init=tokens there is one latent for each token.
        length: Longest sequence in training; default: the longest row of a file; otherwise the
            task's own (without --preset), or 20.
        schedule: Schedule of the training lengths; default: the task's own, or frontier.
        plan: every_step, read_once, or the path of a file with a FlowPlan table.
        steps: Fewest and most thinking steps; default: 1 6. With latent_init=tokens they follow the
            length: from 1 to length + 6.
        iterations: Number of training steps; default: the task's own (without --preset), 2400 with
            latent_init=noise, or 500.
        lengths: Lengths beyond --length that the model must support and is evaluated at; default:
            those of longer rows.
        seed: Random seed of the data and the weights.
    """

    preset: PresetName | None = None
    options: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    length: int | None = None
    schedule: Schedule | None = None
    plan: str = "every_step"
    steps: tuple[int, int] | None = None
    iterations: int | None = None
    lengths: tuple[int, ...] = ()
    seed: int = 0
