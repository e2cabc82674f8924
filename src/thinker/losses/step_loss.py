"""The base class of losses, which select the steps to supervise and the weight of each.

Shapes: B batch, O answer length, V symbols, S supervised steps, T steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ThinkerConfig
from ..flow import FlowPlan
from ..state import ThinkerOutput


def labels_of_steps(
    labels: Tensor,  # (B, O), or (B, T, O)
    steps: Sequence[int],  # counted from 1
) -> list[Tensor]:  # (B, O) each
    """Return the labels of each step.

    Steps after the last one with its own labels repeat that step's labels.
    """
    if labels.dim() == 2:
        return [labels] * len(steps)
    return [labels[:, min(step, labels.shape[1]) - 1] for step in steps]


def num_answers(labels: Tensor, steps: Sequence[int]) -> Tensor:
    """Return the mean number of answers per step, by which a loss is divided."""
    return torch.stack(
        [(answers != -100).sum() for answers in labels_of_steps(labels, steps)]
    ).sum() / len(steps)


class StepLoss(nn.Module, ABC):
    """The base class of losses: cross-entropy of answers, weighted by step.

    A loss is a mean over the symbols of the answers. ``grad_steps`` is the number of steps at
    the end through which gradients flow; None: all.
    """

    grad_steps: int | None = None

    @property
    def counts_from_start(self) -> bool:
        """Return whether a step's weight depends on the steps since the input was read."""
        return False

    def settings(self) -> dict[str, Any]:
        """Return the loss's class and numeric attributes, which a resume must not change."""
        numbers = {}
        for name, value in vars(self).items():
            if name != "training" and isinstance(value, int | float):
                numbers[name] = value
        return {"class": type(self).__name__} | numbers

    def check(self, config: ThinkerConfig) -> None:
        """Raise an error if this loss cannot train the model."""

    @abstractmethod
    def supervised(
        self, n_step: int, plan: FlowPlan, generator: torch.Generator
    ) -> tuple[int, ...]:
        """Return the supervised steps, counted from 1, of a batch that thinks ``n_step`` steps.

        ``generator`` is on the CPU.
        """

    @abstractmethod
    def weights(
        self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None
    ) -> Tensor | Sequence[float]:
        """Return weights by step, (S,), by step and row, (S, B), or also by answer, (S, B, O)."""

    def forward(
        self,
        output: ThinkerOutput,
        labels: Tensor,  # (B, O), or (B, T, O) with labels for each step; -100 is ignored
        distance: Tensor | None = None,  # (B, O), see `Sample`
    ) -> Tensor:
        """Return the weighted sum of the steps' cross-entropies, divided by `num_answers`."""
        assert output.step_logits is not None
        assert output.output_steps is not None
        steps = output.output_steps
        # (S, B, O)
        errors = torch.stack(
            [
                F.cross_entropy(
                    logits.flatten(0, 1).float(), answers.flatten(), reduction="none"
                ).view_as(answers)
                for logits, answers in zip(
                    output.step_logits, labels_of_steps(labels, steps), strict=True
                )
            ]
        )
        weights = self.weights(output, steps, distance)
        if not isinstance(weights, Tensor):
            weights = torch.tensor(weights, device=errors.device, dtype=errors.dtype)
        # (S,) and (S, B) get trailing axes of size 1, to broadcast with (S, B, O)
        weights = weights.to(errors.dtype).reshape(*weights.shape, *[1] * (3 - weights.dim()))
        # without any answer the loss is 0, not 0 / 0
        return (weights * errors).sum() / num_answers(labels, steps).clamp(min=1)
