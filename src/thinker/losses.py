"""Which steps are supervised, and how much each counts.

Shapes: B batch, O answer length, V symbols, S supervised steps, T steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ThinkerConfig
from .flow import FlowPlan
from .state import ThinkerOutput


@dataclass(frozen=True)
class Pass:
    """One forward pass that a loss asks for.

    Args:
        n_step: Steps.
        output_steps: Supervised ones, counted from 1.
        grad_steps: Only the last so many have gradients; none: all.
        share: Of the whole loss.
    """

    n_step: int
    output_steps: tuple[int, ...]
    grad_steps: int | None = None
    share: float = 1.0


class StepLoss(nn.Module, ABC):
    """Cross-entropy of answers, weighted by step; a mean over answered symbols."""

    def check(self, config: ThinkerConfig) -> None:
        """Refuse a model that this loss cannot train."""

    @abstractmethod
    def passes(self, n_step: int, plan: FlowPlan, generator: torch.Generator) -> list[Pass]:
        """The forward passes of a batch that thinks ``n_step`` steps; ``generator`` lives on the CPU."""

    @abstractmethod
    def weights(self, output: ThinkerOutput, steps: Sequence[int]) -> Tensor | Sequence[float]:
        """(S,) or (S, B), how much each step counts."""

    def penalty(self, output: ThinkerOutput) -> Tensor | float:
        """What is added, a mean over rows."""
        return 0.0

    def forward(
        self,
        output: ThinkerOutput,
        labels: Tensor,  # (B, O), -100 counts nowhere
    ) -> Tensor:
        """Σ_s w_s Σ cross-entropy of step s, over the number of answers, plus the penalty."""
        assert output.step_logits is not None
        assert output.output_steps is not None
        flat = labels.flatten()
        errors = torch.stack([
            F.cross_entropy(logits.flatten(0, 1).float(), flat, reduction="none").view_as(labels).sum(1)
            for logits in output.step_logits
        ])  # (S, B)  # fmt: skip
        weights = self.weights(output, output.output_steps)
        if not isinstance(weights, Tensor):
            weights = torch.tensor(weights, device=errors.device, dtype=errors.dtype)
        if weights.dim() == 1:
            weights = weights[:, None]
        count = (labels != -100).sum().clamp(min=1)
        return (weights.to(errors.dtype) * errors).sum() / count + self.penalty(output)


class LastAndRandom(StepLoss):
    """The last step, and one random earlier one: all that is needed, at the cost of two read-outs. The default.

    Args:
        last: Weight of the last.
        random: Weight of the other; the last has both where there is no other.
    """

    def __init__(self, last: float = 0.7, random: float = 0.3):
        super().__init__()
        if last <= 0 or random < 0:
            raise ValueError(f"LastAndRandom: last {last}, random {random}; needed above 0, and 0 or more")
        self.last, self.random = last, random

    def passes(self, n_step: int, plan: FlowPlan, generator: torch.Generator) -> list[Pass]:
        """One."""
        *earlier, last = plan.output_steps(n_step)
        if not earlier or not self.random:
            return [Pass(n_step, (last,))]
        chosen = earlier[int(torch.randint(len(earlier), (), generator=generator))]
        return [Pass(n_step, (chosen, last))]

    def weights(self, output: ThinkerOutput, steps: Sequence[int]) -> Sequence[float]:
        """The two."""
        return [self.random, self.last] if len(steps) == 2 else [self.last + self.random]


class AllSteps(StepLoss):
    """Every step that outputs, alike."""

    def passes(self, n_step: int, plan: FlowPlan, generator: torch.Generator) -> list[Pass]:
        """One."""
        return [Pass(n_step, plan.output_steps(n_step))]

    def weights(self, output: ThinkerOutput, steps: Sequence[int]) -> Tensor | Sequence[float]:
        """1 / S."""
        return [1 / len(steps)] * len(steps)


class LinearWeights(AllSteps):
    """Every step that outputs, in proportion to its number."""

    def weights(self, output: ThinkerOutput, steps: Sequence[int]) -> Sequence[float]:
        """S / Σ s."""
        return [s / sum(steps) for s in steps]


class LearnedWeights(AllSteps):
    """Every step that outputs, by learned weights that never fall from one step to the next.

    Weights are cumulative sums of a softmax, scaled to add up to 1, so that no step can be silenced in favour of an
    earlier one.

    Args:
        max_steps: Most that there will be.
    """

    def __init__(self, max_steps: int = 64):
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(max_steps))

    def weights(self, output: ThinkerOutput, steps: Sequence[int]) -> Tensor:
        """Cumulative."""
        if steps[-1] > len(self.scores):
            raise ValueError(f"LearnedWeights: step {steps[-1]}; needed at most max_steps, {len(self.scores)}")
        grown = self.scores[: steps[-1]].softmax(0).cumsum(0)[torch.tensor(steps, device=self.scores.device) - 1]
        return grown / grown.sum()


class ProgressiveLoss(StepLoss):
    """Deep thinking (Bansal et al. 2022): besides the whole run, go on from where steps without gradients had come.

    Of a batch of M steps, n ~ U{0 .. M-1} are without and k ~ U{1 .. M-n} with gradients. It keeps a model from relying
    on how many steps there were.

    Args:
        alpha: Share of the second part.
    """

    def __init__(self, alpha: float = 0.5):
        super().__init__()
        if not 0 <= alpha <= 1:
            raise ValueError(f"ProgressiveLoss: alpha is {alpha}; needed 0 to 1")
        self.alpha = alpha

    def passes(self, n_step: int, plan: FlowPlan, generator: torch.Generator) -> list[Pass]:
        """The whole run, and the other."""
        made = []
        if self.alpha < 1:
            made.append(Pass(n_step, plan.output_steps(n_step)[-1:], share=1 - self.alpha))
        if self.alpha:
            first = int(torch.randint(n_step, (), generator=generator))
            rest = 1 + int(torch.randint(n_step - first, (), generator=generator))
            steps = plan.num_steps(first + rest)
            made.append(Pass(steps, plan.output_steps(steps)[-1:], grad_steps=rest, share=self.alpha))
        return made

    def weights(self, output: ThinkerOutput, steps: Sequence[int]) -> Sequence[float]:
        """One step."""
        return [1.0]


class Ponder(AllSteps):
    """PonderNet (Banino et al. 2021): errors weighted by the chance of stopping there, towards a geometric prior.

    Args:
        prior: Chance of stopping at each step.
        weight: Of KL(chances ‖ prior).
    """

    def __init__(self, prior: float = 0.2, weight: float = 0.01):
        super().__init__()
        if not 0 < prior < 1 or weight < 0:
            raise ValueError(f"Ponder: prior {prior}, weight {weight}; needed between 0 and 1, and 0 or more")
        self.prior, self.weight = prior, weight

    def check(self, config: ThinkerConfig) -> None:
        """It needs the head."""
        if not config.halting:
            raise ValueError("Ponder: the model has no halting head; needed ThinkerConfig(halting=True)")

    @staticmethod
    def log_chances(halt_logits: Tensor) -> Tensor:  # (B, T) to (B, T)
        """Log p_t = log λ_t + Σ_{s<t} log(1 - λ_s); the last step takes what is left.

        >>> Ponder.log_chances(torch.zeros(1, 3)).exp()
        tensor([[0.5000, 0.2500, 0.2500]])
        """
        logits = halt_logits.float()
        going = F.logsigmoid(-logits).cumsum(1)
        before = F.pad(going[:, :-1], (1, 0))
        stop = F.logsigmoid(logits)
        return torch.cat([(before + stop)[:, :-1], before[:, -1:]], 1)

    def weights(self, output: ThinkerOutput, steps: Sequence[int]) -> Tensor:
        """(S, B), of the steps that output; scaled to add up to 1."""
        assert output.halt_logits is not None
        index = torch.tensor(steps, device=output.halt_logits.device) - 1
        return self.log_chances(output.halt_logits)[:, index].softmax(1).T

    def penalty(self, output: ThinkerOutput) -> Tensor:
        """KL towards the geometric distribution, cut where the steps end."""
        assert output.halt_logits is not None
        chances = self.log_chances(output.halt_logits)
        place = torch.arange(chances.shape[1], device=chances.device)
        prior = (place * torch.log1p(torch.tensor(-self.prior)) + torch.log(torch.tensor(self.prior))).log_softmax(0)
        return self.weight * (chances.exp() * (chances - prior)).sum(1).mean()
