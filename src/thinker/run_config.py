"""`RunConfig`: the flags of ``think train`` that describe a run.

This module does not import torch, so that the command shows its help quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["frontier", "uniform", "progressive", "dynamic", "fixed"]
PresetName = Literal["scan", "exchange", "pointer", "grid"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a training run.

    Args:
        preset: A combination of model, lengths, steps and loss for one kind of task: scan (answers
            are found from left to right), exchange (neighbors exchange information in both
            directions), pointer (answers are looked up) or grid (grids of one size). The preset
            replaces --schedule, --plan, --steps and the task's recipe (its own defaults).
        options: Options of the task, as NAME=VALUE, for example symbols=32.
        model: Fields of ThinkerConfig, as NAME=VALUE, for example num_heads=8. With
            latent_init=tokens there is one latent for each token.
        length: Length of the longest sequences in training. Default for a file: the length of its
            longest row. Default for a named task: the length in its recipe (without --preset), or
            20.
        schedule: Schedule of the training lengths; default: the one in the task's recipe, or
            frontier.
        plan: Operations of each step: every_step, read_once, or a file with the table of a
            FlowPlan.
        steps: Minimum and maximum number of thinking steps; default: 1 6. Not allowed with
            latent_init=tokens, which takes from 1 to length + 6 steps.
        iterations: Number of training steps; default: the number in the task's recipe (without
            --preset), 2400 with latent_init=noise, or 500.
        lengths: Lengths beyond --length that the model must support and is evaluated at; default:
            the lengths of the file's rows that are longer than --length.
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
