"""`ExitRule`: a rule that stops rows of a batch early and removes them from the batch.

Shapes: B batch, n latents, d width, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from model_components._checks import CheckedConfig, Range, Whole

from .config import ThinkerConfig
from .flow import FlowRow
from .memory import Memory
from .state import Context, ThinkerState, Thought

# dropping rows copies keys and values, which pays off once 1/8 of the rows have stopped
_CROWD = 7 / 8


@dataclass(frozen=True, kw_only=True)
class ExitRule(CheckedConfig):
    """A rule that stops rows of a batch early, in evaluation.

    Rows that stopped are removed from the batch as soon as they are an eighth of it or more.

    Args:
        threshold: Stop a row when ‖z - z'‖ / ‖z'‖ is below this value for each of its latents z,
            where z' is the latent before the step. `ThinkerOutput.residuals` has the largest of
            these ratios for each row and step, which helps to choose a threshold.
        min_steps: The first step at which a row may stop. A row stops only at a step that outputs.

    Raises:
        ValueError: A number is out of its range.

    >>> ExitRule(min_steps=4).threshold
    0.03
    """

    threshold: Annotated[float, Range(least=0)] = 0.03
    min_steps: Whole = 1


def check_exit(config: ThinkerConfig, exit_rule: object) -> None:
    """Check that an exit rule is an `ExitRule` or None, and that gradients are off with one."""
    if not isinstance(exit_rule, ExitRule | None):
        raise ValueError(f"LatentThinker: exit_rule must be an ExitRule or None, got {exit_rule!r}")
    if exit_rule is not None and torch.is_grad_enabled():
        raise ValueError(
            "LatentThinker: expected no gradients with an exit rule; use torch.no_grad()"
        )


class Exits:
    """A record of when each row stops in a call of `LatentThinker.think` with an `ExitRule`.

    Args:
        rule: The rule that decides when a row stops.
        context: The context of all rows.
        state: The state of all rows before the first step.
        num_steps: The maximum number of steps.
    """

    SAME = object()  # the batch does not change

    def __init__(self, rule: ExitRule, context: Context, state: ThinkerState, num_steps: int):
        batch = len(state.latents)
        device = state.latents.device
        self.rule = rule
        self.context = context
        self.places = context.places
        self.num_steps = num_steps
        # for each row that is still in the batch, its index in the original batch
        self.rows = torch.arange(batch, device=device)
        self.going = torch.ones(batch, dtype=torch.bool, device=device)  # which rows still run
        self.latents = state.latents.clone()
        self.steps = torch.full((batch,), num_steps, device=device)
        self.residuals = torch.zeros(batch, num_steps, device=device, dtype=torch.float32)

    def merged(self, latents: Tensor) -> Tensor:
        """Return the latents of every row of the original batch.

        Rows that stopped have the latents of their last step.
        """
        # a copy, since later steps write into `self.latents`, and kept latents must not change
        whole = self.latents.clone()
        here = self.going.nonzero()[:, 0]
        return whole.index_copy_(0, self.rows[here], latents[here])

    def step(
        self, number: int, row: FlowRow, latents: Tensor, memory: Memory | None, residual: Tensor
    ) -> Any:
        """Record a step, and find out which rows stop at it.

        Returns:
            `SAME` if the batch stays the same, None if no row remains, otherwise the context, the
            latents and the memory of the remaining rows.
        """
        self.residuals[self.rows, number - 1] = torch.where(self.going, residual.float(), 0.0)
        if number == self.num_steps:
            done = self.going
        elif number < self.rule.min_steps or not row.output:
            return self.SAME
        else:
            done = self.going & (residual < self.rule.threshold)
        # this waits for the device
        which = done.nonzero()[:, 0]
        if not len(which):
            return self.SAME
        self.steps[self.rows[which]] = number
        self.latents.index_copy_(0, self.rows[which], latents[which])
        self.going = self.going & ~done
        keep = self.going.nonzero()[:, 0]
        if not len(keep):
            return None
        if len(keep) > _CROWD * len(self.going):
            return self.SAME
        self.rows = self.rows[keep]
        self.going = self.going[keep]
        self.context = self.context.map(lambda t: t[keep])
        return (
            self.context,
            latents[keep],
            None if memory is None else memory.map(lambda t: t[keep]),
        )

    def thought(self, kept: dict[int, Tensor], asked: set[int]) -> Thought:
        """Return the result for all rows of the batch.

        The result has no memory, because rows that stopped at different steps wrote different
        amounts to it.
        """
        return Thought(
            state=ThinkerState(self.latents, None, self.places),
            kept={step: kept.get(step, self.latents) for step in asked},
            residuals=self.residuals,
            steps=self.steps,
        )
