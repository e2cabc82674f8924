"""Losses that teach a halting head when to stop.

Shapes: B batch, S supervised steps, T steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ThinkerConfig
from ..flow import FlowPlan
from ..state import ThinkerOutput
from .step_loss import Pass, StepLoss
from .steps import AllSteps, LastAndRandom


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

    Raises:
        ValueError: A weight that is not above 0.
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
