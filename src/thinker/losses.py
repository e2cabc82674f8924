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


def labels_of_steps(
    labels: Tensor,  # (B, O), or (B, T, O)
    steps: Sequence[int],  # counted from 1
) -> list[Tensor]:  # (B, O) each
    """The answers that each step is asked for; those after the last that has its own are asked for that one's."""
    if labels.dim() == 2:
        return [labels] * len(steps)
    return [labels[:, min(step, labels.shape[1]) - 1] for step in steps]


def num_answers(labels: Tensor, steps: Sequence[int]) -> Tensor:
    """How many answers a loss is a mean over: those of one step, on average."""
    return torch.stack([(answers != -100).sum() for answers in labels_of_steps(labels, steps)]).sum() / len(steps)


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

    @property
    def counts_from_start(self) -> bool:
        """What a step is worth depends on how many there were since the input was first read."""
        return False

    def check(self, config: ThinkerConfig) -> None:
        """Refuse a model that this loss cannot train."""

    @abstractmethod
    def passes(self, n_step: int, plan: FlowPlan, generator: torch.Generator) -> list[Pass]:
        """The forward passes of a batch that thinks ``n_step`` steps; ``generator`` lives on the CPU."""

    @abstractmethod
    def weights(
        self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None
    ) -> Tensor | Sequence[float]:
        """(S,), (S, B) or (S, B, O): how much each step, row and answer counts."""

    def penalty(self, output: ThinkerOutput, labels: Tensor) -> Tensor | float:
        """What is added, a mean over rows."""
        return 0.0

    def forward(
        self,
        output: ThinkerOutput,
        labels: Tensor,  # (B, O), or (B, T, O) of each step; -100 counts nowhere
        distance: Tensor | None = None,  # (B, O), see `Sample`
    ) -> Tensor:
        """Σ_s w_s Σ cross-entropy of step s, over the number of answers, plus the penalty."""
        assert output.step_logits is not None
        assert output.output_steps is not None
        steps = output.output_steps
        errors = torch.stack([
            F.cross_entropy(logits.flatten(0, 1).float(), answers.flatten(), reduction="none").view_as(answers)
            for logits, answers in zip(output.step_logits, labels_of_steps(labels, steps), strict=True)
        ])  # (S, B, O)  # fmt: skip
        weights = self.weights(output, steps, distance)
        if not isinstance(weights, Tensor):
            weights = torch.tensor(weights, device=errors.device, dtype=errors.dtype)
        weights = weights.to(errors.dtype).reshape(*weights.shape, *[1] * (3 - weights.dim()))
        return (weights * errors).sum() / num_answers(labels, steps).clamp(min=1) + self.penalty(output, labels)


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

    def weights(self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None) -> Sequence[float]:
        """The two."""
        return [self.random, self.last] if len(steps) == 2 else [self.last + self.random]


class AllSteps(StepLoss):
    """Every step that outputs, alike."""

    def passes(self, n_step: int, plan: FlowPlan, generator: torch.Generator) -> list[Pass]:
        """One."""
        return [Pass(n_step, plan.output_steps(n_step))]

    def weights(
        self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None
    ) -> Tensor | Sequence[float]:
        """1 / S."""
        return [1 / len(steps)] * len(steps)


class LinearWeights(AllSteps):
    """Every step that outputs, in proportion to its number."""

    def weights(self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None) -> Sequence[float]:
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

    def weights(self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None) -> Tensor:
        """Cumulative."""
        if steps[-1] > len(self.scores):
            raise ValueError(f"LearnedWeights: step {steps[-1]}; needed at most max_steps, {len(self.scores)}")
        grown = self.scores[: steps[-1]].softmax(0).cumsum(0)[torch.tensor(steps, device=self.scores.device) - 1]
        return grown / grown.sum()


class Reach(StepLoss):
    """What a flow with a window can know: after t steps, t (window - 1) tokens away.

    Only answers count that need nothing farther.

    The last step and the one before are supervised. A row's answers in reach share the weight of all its answers. (A
    latent could know of one more, for it looks at what its neighbours have read in the same step.)

    Args:
        grad_steps: Only so many steps have gradients.
        window: The model's: what a latent knows travels ``window - 1`` tokens a step.
    """

    def __init__(self, *, grad_steps: int | None = 3, window: int = 2):
        super().__init__()
        if (grad_steps is not None and grad_steps < 1) or window < 2:
            raise ValueError(f"Reach: grad_steps {grad_steps}, window {window}; needed 1 or more, and 2 or more")
        self.grad_steps, self.window = grad_steps, window

    @property
    def counts_from_start(self) -> bool:
        """By the number of steps it says what is in reach."""
        return True

    def check(self, config: ThinkerConfig) -> None:
        """It needs tokens that look so far."""
        if config.window != self.window:
            raise ValueError(f"Reach: window is {self.window}, the model's {config.window}; needed the same")

    def passes(self, n_step: int, plan: FlowPlan, generator: torch.Generator) -> list[Pass]:
        """One."""
        return [Pass(n_step, plan.output_steps(n_step)[-2:], self.grad_steps)]

    def weights(self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None) -> Tensor:
        """(S, B, O)."""
        if distance is None:
            raise ValueError("Reach: the batch has no distances; needed a task in thinker.AtTokens")
        seen = torch.tensor(steps, device=distance.device)[:, None, None] * (self.window - 1)
        near = (distance > 0) & (distance <= seen)
        share = (distance > 0).sum(-1) / near.sum(-1).clamp(min=1)  # (S, B)
        return near * share[..., None] / len(steps)


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
        passes = []
        if self.alpha < 1:
            passes.append(Pass(n_step, plan.output_steps(n_step)[-1:], share=1 - self.alpha))
        if self.alpha:
            first = int(torch.randint(n_step, (), generator=generator))
            rest = 1 + int(torch.randint(n_step - first, (), generator=generator))
            steps = plan.num_steps(first + rest)
            passes.append(Pass(steps, plan.output_steps(steps)[-1:], grad_steps=rest, share=self.alpha))
        return passes

    def weights(self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None) -> Sequence[float]:
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

    def weights(self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None) -> Tensor:
        """(S, B), of the steps that output; scaled to add up to 1."""
        assert output.halt_logits is not None
        index = torch.tensor(steps, device=output.halt_logits.device) - 1
        return self.log_chances(output.halt_logits)[:, index].softmax(1).T

    def penalty(self, output: ThinkerOutput, labels: Tensor) -> Tensor:
        """KL towards the geometric distribution, cut where the steps end."""
        assert output.halt_logits is not None
        chances = self.log_chances(output.halt_logits)
        place = torch.arange(chances.shape[1], device=chances.device)
        prior = (place * torch.log1p(torch.tensor(-self.prior)) + torch.log(torch.tensor(self.prior))).log_softmax(0)
        return self.weight * (chances.exp() * (chances - prior)).sum(1).mean()


class ExactHalt(StepLoss):
    """Another loss, and a halting head that learns whether the whole answer is right already.

    At every supervised step the head's probability is drawn towards 1 where each symbol is right and towards 0 where
    one is not, as in HRM (Wang et al. 2025) and TRM (Jolicoeur-Martineau 2025); see `evaluate_halting`.

    Args:
        step_loss: The other; default `LastAndRandom`.
        weight: Of the head's cross-entropy.
    """

    def __init__(self, step_loss: StepLoss | None = None, weight: float = 0.5):
        super().__init__()
        if not weight > 0:
            raise ValueError(f"ExactHalt: weight is {weight}; needed above 0")
        self.step_loss, self.weight = step_loss or LastAndRandom(), weight

    @property
    def counts_from_start(self) -> bool:
        """As the other."""
        return self.step_loss.counts_from_start

    def check(self, config: ThinkerConfig) -> None:
        """It needs the head, and what the other needs."""
        if not config.halting:
            raise ValueError("ExactHalt: the model has no halting head; needed ThinkerConfig(halting=True)")
        self.step_loss.check(config)

    def passes(self, n_step: int, plan: FlowPlan, generator: torch.Generator) -> list[Pass]:
        """The other's."""
        return self.step_loss.passes(n_step, plan, generator)

    def weights(
        self, output: ThinkerOutput, steps: Sequence[int], distance: Tensor | None = None
    ) -> Tensor | Sequence[float]:
        """The other's."""
        return self.step_loss.weights(output, steps, distance)

    def penalty(self, output: ThinkerOutput, labels: Tensor) -> Tensor | float:
        """The other's, and the head's cross-entropy."""
        assert output.halt_logits is not None
        assert output.output_steps is not None
        steps = torch.tensor(output.output_steps, device=labels.device) - 1
        logits = output.halt_logits[:, steps].float()
        errors = F.binary_cross_entropy_with_logits(logits, exact(output, labels).float())
        return self.weight * errors + self.step_loss.penalty(output, labels)


def exact(output: ThinkerOutput, labels: Tensor) -> Tensor:  # (B, S)
    """Whether each row's whole answer is right at each supervised step."""
    assert output.step_logits is not None
    if labels.dim() == 3:
        raise ValueError("exact: the task has an answer for each step, so none is the whole; needed labels (B, O)")
    return torch.stack([((x.argmax(-1) == labels) | (labels == -100)).all(1) for x in output.step_logits], 1)
