"""When a row may stop: `ExitRule`; rows that stopped leave the batch; and the best of several rollouts.

Shapes: B batch, n latents, d width, T steps, O answer length, V symbols, K rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .checks import check_choice
from .config import ThinkerConfig, is_whole
from .flow import FlowRow
from .memory import Memory
from .state import Context, ThinkerState, Thought

ExitKind = Literal["residual", "kl", "argmax", "halt"]
Select = Literal["residual", "confidence"]

_CROWD = 7 / 8  # dropping rows copies keys and values: it pays once an eighth of them has stopped


@dataclass(frozen=True, kw_only=True)
class ExitRule:
    """When a row stops thinking, in evaluation; rows that stop leave the batch.

    Args:
        kind: ``"residual"``, ‖z - z'‖ / ‖z'‖ of the latents against the step before, of which
            `ThinkerOutput.residuals` show what is usual; ``"halt"``, the halting head's probability, which costs next
            to nothing too; ``"kl"``, mean KL(answer ‖ answer at the look before), and ``"argmax"``, the answer stayed
            the same: these read the answer off at every look.
        threshold: Stop below it (residual, kl) or above it (halt); default 0.03, 1e-3, 0.5.
        patience: How many successive looks must agree.
        min_steps: The first step at which a row may stop; earlier looks are taken only where the rule needs them.
        every: Steps from one look to the next; default 4 for ``"kl"`` and ``"argmax"``, 1 for the others. A look at a
            step that does not output waits for the next that does.

    Raises:
        ValueError: An unknown kind, or a number out of its range.

    >>> ExitRule(kind="kl").threshold
    0.001
    >>> ExitRule(kind="soon")
    Traceback (most recent call last):
    ValueError: ExitRule: kind is 'soon'; needed one of residual, kl, argmax, halt
    """

    kind: ExitKind = "residual"
    threshold: float | None = None
    patience: int = 1
    min_steps: int = 1
    every: int | None = None

    def __post_init__(self):
        if self.kind not in get_args(ExitKind):
            raise ValueError(f"ExitRule: kind is {self.kind!r}; needed one of {', '.join(get_args(ExitKind))}")
        if self.threshold is None:
            default = {"residual": 0.03, "kl": 1e-3, "argmax": 0.0, "halt": 0.5}[self.kind]
            object.__setattr__(self, "threshold", default)
        if self.every is None:
            object.__setattr__(self, "every", 4 if self.reads_answers else 1)
        for name in ("patience", "min_steps", "every"):
            value = getattr(self, name)
            if not is_whole(value) or value < 1:
                raise ValueError(f"ExitRule: {name} is {value!r}; needed a whole number, 1 or more")
        if not isinstance(self.threshold, int | float) or not self.threshold >= 0:
            raise ValueError(f"ExitRule: threshold is {self.threshold!r}; needed 0 or more")

    @property
    def reads_answers(self) -> bool:
        """Whether it compares each answer with that of the look before, and so needs one look more."""
        return self.kind in ("kl", "argmax")

    def looks_at(self, step: int) -> bool:
        """Whether this step, counted from 1, is looked at: each ``every`` steps, from the first that can matter."""
        assert self.every is not None
        first = self.min_steps - self.every * (self.patience - 1 + self.reads_answers)
        return step >= first and (step - self.min_steps) % self.every == 0


def check_exit(config: ThinkerConfig, exit_rule: object) -> None:
    """A rule, or none; without gradients."""
    if not isinstance(exit_rule, ExitRule | None):
        raise ValueError(f"LatentThinker: exit_rule is {exit_rule!r}; needed an ExitRule, as ExitRule(kind='kl')")
    if exit_rule is not None:
        check_choice(config, "an exit rule", causal=True)


class Exits:
    """Bookkeeping of one `LatentThinker.think` with an `ExitRule`.

    Args:
        rule: When a row stops.
        context: Of all rows.
        state: Where they begin.
        num_steps: At most.
        answer: (latents, state) to logits (B, O, V), for rules that look at answers.
        halting: The model has a halting head.
        at_tokens: Answers are at the input's tokens.
    """

    SAME = object()  # the batch stays as it is

    def __init__(
        self,
        rule: ExitRule,
        context: Context,
        state: ThinkerState,
        num_steps: int,
        *,
        answer: Callable[[Tensor, ThinkerState], Tensor],
        halting: bool,
        at_tokens: bool = False,
    ):
        if rule.kind == "halt" and not halting:
            raise ValueError('LatentThinker: an exit by "halt" needed ThinkerConfig(halting=True)')
        self.rule, self.context, self.answer, self.at_tokens = rule, context, answer, at_tokens
        self.due = False  # a look that waits for a step that outputs
        self.places, batch, device = context.places, len(state.latents), state.latents.device
        self.rows = torch.arange(batch, device=device)  # which row of the whole each one here is
        self.going = torch.ones(batch, dtype=torch.bool, device=device)  # of those here
        self.calm = torch.zeros(batch, dtype=torch.long, device=device)
        self.latents = state.latents.clone()
        self.steps = torch.full((batch,), num_steps, device=device)
        self.residuals = torch.zeros(batch, num_steps, device=device, dtype=torch.float32)
        self.halted = torch.zeros(batch, num_steps, device=device) if halting else None
        self.before: Tensor | None = None
        self.num_steps = num_steps

    def merged(self, latents: Tensor) -> Tensor:
        """The latents of every row: the present ones of those in the batch, the last ones of those that stopped."""
        whole, here = self.latents.clone(), self.going.nonzero()[:, 0]
        return whole.index_copy_(0, self.rows[here], latents[here])

    def step(
        self,
        number: int,
        row: FlowRow,
        latents: Tensor,
        memory: Memory | None,
        residual: Tensor,
        halted: Tensor | None,
    ) -> Any:
        """Note a step; returns `SAME`, or (context, latents, memory) of the rows that go on, or None if none does."""
        self.residuals[self.rows, number - 1] = torch.where(self.going, residual.float(), 0.0)
        if self.halted is not None and halted is not None:
            self.halted[self.rows, number - 1] = torch.where(self.going, halted.float(), 0.0)
        if number == self.num_steps:
            done = self.going
        else:
            self.due = self.due or self.rule.looks_at(number)
            if not self.due or not row.output:
                return self.SAME
            self.due = False
            self.calm = torch.where(self._calm(latents, residual, halted), self.calm + 1, 0)
            if number < self.rule.min_steps:
                return self.SAME
            done = self.going & (self.calm >= self.rule.patience)
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
        self.rows, self.calm, self.going = self.rows[keep], self.calm[keep], self.going[keep]
        self.before = None if self.before is None else self.before[keep]
        self.context = self.context.map(lambda t: t[keep])
        return self.context, latents[keep], None if memory is None else memory.map(lambda t: t[keep])

    def _calm(self, latents: Tensor, residual: Tensor, halted: Tensor | None) -> Tensor:
        """Which rows of the batch meet the threshold in this step."""
        kind, threshold = self.rule.kind, self.rule.threshold
        assert threshold is not None
        if kind == "residual":
            return residual < threshold
        if kind == "halt":
            assert halted is not None
            return halted.sigmoid() > threshold
        answer = self.answer(latents, ThinkerState(latents, None, self.places)).float()
        before = self.before
        real = None  # where answers are at tokens, those at padding tell nothing
        if self.at_tokens and self.context.mask is not None:
            real = self.context.mask[:, -answer.shape[1] :]
        if kind == "argmax":
            self.before = answer.argmax(-1)
            if before is None:
                return torch.zeros_like(self.going)
            same = self.before == before
            return (same if real is None else same | ~real).all(1)
        self.before = answer.log_softmax(-1)
        if before is None:
            return torch.zeros_like(self.going)
        divergence = (self.before.exp() * (self.before - before)).sum(-1)
        divergence = divergence.mean(1) if real is None else (divergence * real).sum(1) / real.sum(1)
        return divergence.clamp(min=0.0) < threshold  # rounding makes it negative

    def thought(self, kept: dict[int, Tensor], asked: set[int]) -> Thought:
        """What every row found, without memories: those of rows that stopped at different steps differ in length."""
        return Thought(
            state=ThinkerState(self.latents, None, self.places),
            kept={step: kept.get(step, self.latents) for step in asked},
            residuals=self.residuals,
            halt_logits=self.halted,
            steps=self.steps,
        )


def best_rollouts(
    thought: Thought,  # of K · B rows, each input's K side by side
    logits: Tensor,  # (K · B, O, V)
    rollouts: int,
    select: Select,
) -> Tensor:  # (B,)
    """Which rollout of each row to keep: the one that moved least at its end, or the one surest of its answer."""
    if select == "residual":
        score = -thought.residuals.gather(1, thought.steps[:, None] - 1)[:, 0]
    else:
        score = logits.float().log_softmax(-1).amax(-1).mean(1)
    best = score.unflatten(0, (-1, rollouts)).argmax(1)
    return best + rollouts * torch.arange(len(best), device=best.device)
