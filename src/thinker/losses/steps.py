"""Losses on the last step, on all steps, or on the answers that are within reach.

Shapes: B batch, O answer length, S supervised steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..config import ThinkerConfig
from ..flow import FlowPlan
from ..state import ThinkerOutput
from .step_loss import StepLoss


class LastAndRandom(StepLoss):
    """The default loss, on the last step and one random earlier step.

    Args:
        last: Weight of the last step.
        random: Weight of the earlier step. If there is no earlier step, the last step has the sum
            of both weights.
    """

    def __init__(self, last: float = 0.7, random: float = 0.3):
        super().__init__()
        # negated, because every comparison with nan is False and nan must be rejected
        if not 0 < last < math.inf or not 0 <= random < math.inf:
            raise ValueError(
                f"LastAndRandom: expected last above 0 and random of 0 or more, got last={last}, "
                f"random={random}"
            )
        self.last = last
        self.random = random

    def supervised(
        self, n_step: int, plan: FlowPlan, generator: torch.Generator
    ) -> tuple[int, ...]:
        """Return the last output step and, if ``random`` is above 0, a random earlier one."""
        *earlier, last = plan.output_steps(n_step)
        if not earlier or not self.random:
            return (last,)
        chosen = earlier[int(torch.randint(len(earlier), (), generator=generator))]
        return chosen, last

    def weights(
        self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None
    ) -> Sequence[float]:
        """Return the weights of the earlier and the last step; their sum if there is only one."""
        if len(steps) == 2:
            return [self.random, self.last]
        # so that batches with one supervised step have the same total weight as other batches
        return [self.last + self.random]


class AllSteps(StepLoss):
    """A loss on every step that outputs, with equal weights."""

    def supervised(
        self, n_step: int, plan: FlowPlan, generator: torch.Generator
    ) -> tuple[int, ...]:
        """Return all output steps."""
        return plan.output_steps(n_step)

    def weights(
        self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None
    ) -> Tensor | Sequence[float]:
        """Return equal weights, 1 / S."""
        return [1 / len(steps)] * len(steps)


class LearnedWeights(AllSteps):
    """A loss on every step that outputs, with learned weights that never decrease with the step.

    Weights are cumulative sums of a softmax, scaled to add up to 1, so that no step can have less
    weight than an earlier one.

    Args:
        max_steps: The largest number of steps.
    """

    def __init__(self, max_steps: int = 64):
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(max_steps))

    def weights(
        self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None
    ) -> Tensor:
        """Return cumulative weights, which grow from step to step."""
        if steps[-1] > len(self.scores):
            raise ValueError(
                f"LearnedWeights: got step {steps[-1]}; expected at most max_steps, "
                f"{len(self.scores)}"
            )
        grown = (
            self.scores[: steps[-1]]
            .softmax(0)
            .cumsum(0)[torch.tensor(steps, device=self.scores.device) - 1]
        )
        return grown / grown.sum()


class Reach(StepLoss):
    """A loss that ignores answers that depend on tokens which the steps so far cannot reach.

    After t steps, tokens up to t (window - 1) away are within reach. The last two output steps
    are supervised. In each row, the answers within reach share the weight of all its answers.
    (Information in fact travels ``window - 1`` tokens farther, because a latent attends to
    neighbors that have just read tokens around them.)

    Args:
        grad_steps: The number of steps at the end through which gradients flow; None: all.
        window: The model's window; information moves ``window - 1`` tokens per step.

    Raises:
        ValueError: ``grad_steps`` is below 1, or ``window`` below 2.
    """

    def __init__(self, *, grad_steps: int | None = 3, window: int = 2):
        super().__init__()
        if (grad_steps is not None and grad_steps < 1) or window < 2:
            raise ValueError(
                "Reach: expected grad_steps of 1 or more and window of 2 or more, got "
                f"grad_steps={grad_steps} and window={window}"
            )
        self.grad_steps = grad_steps
        self.window = window

    @property
    def counts_from_start(self) -> bool:
        """True, since the number of steps decides which answers are within reach."""
        return True

    def check(self, config: ThinkerConfig) -> None:
        """Raise an error if the model's window differs from the loss's window."""
        if config.window != self.window:
            raise ValueError(
                f"Reach: window is {self.window}; expected {config.window}, as in the model"
            )

    def supervised(
        self, n_step: int, plan: FlowPlan, generator: torch.Generator
    ) -> tuple[int, ...]:
        """Return the last two output steps."""
        return plan.output_steps(n_step)[-2:]

    def weights(
        self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None
    ) -> Tensor:
        """Return the weights, (S, B, O)."""
        if distance is None:
            raise ValueError("Reach: the batch has no distances; wrap the task in thinker.AtTokens")
        seen = torch.tensor(steps, device=distance.device)[:, None, None] * (self.window - 1)
        near = (distance > 0) & (distance <= seen)
        # a row with no answer within reach has weight 0, not 0 / 0
        share = (distance > 0).sum(-1) / near.sum(-1).clamp(min=1)  # (S, B)
        return near * share[..., None] / len(steps)
