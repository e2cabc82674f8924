"""Schedules of how long samples are, as training goes on.

A schedule is pure: it draws a batch's lengths from a generator, the step and a small vector of
state, and makes a new state of what was right and wrong. `CurriculumDataset` keeps the state where
its workers see it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """Lengths up to ``max_length``.

    Args:
        max_length: The longest.
        min_length: The shortest.
    """

    max_length: int
    min_length: int = 1

    def __post_init__(self):
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(
                f"{type(self).__name__}: min_length {self.min_length}, max_length "
                f"{self.max_length}; expected 1 or more, in order"
            )

    def initial(self) -> list[float]:
        """State at the start; empty for schedules that learn nothing from results."""
        return []

    @abstractmethod
    def lengths(self, generator: torch.Generator, batch: int, step: int, state: Tensor) -> Tensor:
        """Draw lengths, (batch,)."""

    def update(self, state: Tensor, right: Tensor, total: Tensor) -> Tensor:
        """The state after results: right and all answers by length, (max_length + 1,) each."""
        return state

    def difficulty(self, step: int, state: Tensor) -> float:
        """The longest length in use, or the mean one where all are: for logs and plots."""
        return float(self.max_length)

    def _uniform(self, generator: torch.Generator, batch: int, longest: int) -> Tensor:
        low = min(self.min_length, longest)
        return torch.randint(
            low, longest + 1, (batch,), generator=generator, device=generator.device
        )

    def _frontier(
        self, generator: torch.Generator, batch: int, longest: int, share: float
    ) -> Tensor:
        drawn = self._uniform(generator, batch, longest)
        at = torch.rand(batch, generator=generator, device=generator.device) < share
        return drawn.masked_fill_(at, longest)


@dataclass(frozen=True, kw_only=True)
class Fixed(Schedule):
    """Always ``max_length``."""

    def lengths(self, generator: torch.Generator, batch: int, step: int, state: Tensor) -> Tensor:
        """Return ``max_length`` for every row."""
        return torch.full((batch,), self.max_length, device=generator.device)


@dataclass(frozen=True, kw_only=True)
class Uniform(Schedule):
    """All lengths alike."""

    def lengths(self, generator: torch.Generator, batch: int, step: int, state: Tensor) -> Tensor:
        """Draw lengths uniformly."""
        return self._uniform(generator, batch, self.max_length)


def _share(what: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"{what}: share is {share}; expected 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Frontier(Schedule):
    """Some rows at ``max_length``, the others uniform: the default.

    Args:
        min_length: Least length.
        max_length: Largest length.
        share: The share of the rows at the longest.

    >>> lengths = Frontier(max_length=9).lengths(
    ...     torch.Generator().manual_seed(0), 1000, 0, torch.empty(0)
    ... )
    >>> bool(500 < (lengths == 9).sum() < 620)
    True
    """

    # without rows at the longest it is learned later (the ablation in docs/thinker.md)
    share: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        _share("Frontier", self.share)

    def lengths(self, generator: torch.Generator, batch: int, step: int, state: Tensor) -> Tensor:
        """The mix."""
        return self._frontier(generator, batch, self.max_length, self.share)


@dataclass(frozen=True, kw_only=True)
class Progressive(Schedule):
    """A frontier that moves on when its answers are right, and back when they are not.

    Between the two thresholds it stays (hysteresis).

    Args:
        start: First frontier; default ``min_length``.
        threshold: Accuracy at the frontier from which it moves on.
        retreat: Accuracy below which it moves back by one.
        grow: The number of lengths by which it moves on.
        share: The share of the rows at the frontier.
        min_answers: The number of answers at the frontier before it moves.
    """

    start: int | None = None
    threshold: float = 0.95
    retreat: float = 0.2
    grow: int = 1
    share: float = 0.5
    min_answers: int = 64

    def __post_init__(self):
        super().__post_init__()
        _share("Progressive", self.share)
        if not 0 <= self.retreat < self.threshold <= 1:
            raise ValueError(
                f"Progressive: retreat {self.retreat}, threshold {self.threshold}; expected 0 <= "
                "retreat < threshold <= 1"
            )
        if not self.min_length <= self.first <= self.max_length or self.grow < 1:
            raise ValueError(
                f"Progressive: start {self.first}, grow {self.grow}; expected a length in range "
                "and 1 or more"
            )

    @property
    def first(self) -> int:
        """The first frontier."""
        if self.start is None:
            return self.min_length
        return self.start

    def initial(self) -> list[float]:
        """Return the frontier, and the right and all answers there since it moved."""
        return [float(self.first), 0.0, 0.0]

    def difficulty(self, step: int, state: Tensor) -> float:
        """The frontier."""
        return float(state[0])

    def lengths(self, generator: torch.Generator, batch: int, step: int, state: Tensor) -> Tensor:
        """The mix, at the present frontier."""
        return self._frontier(generator, batch, int(state[0]), self.share)

    def update(self, state: Tensor, right: Tensor, total: Tensor) -> Tensor:
        """Move on, back, or stay."""
        at = int(state[0])
        good = float(state[1] + right[at])
        all_ = float(state[2] + total[at])
        # a few answers would move it by chance
        if all_ < self.min_answers:
            return torch.tensor([at, good, all_], dtype=state.dtype)
        if good / all_ >= self.threshold:
            at = min(self.max_length, at + self.grow)
        elif good / all_ < self.retreat:
            at = max(self.min_length, at - 1)
        # also where it stays: old answers say nothing about what is known now
        return torch.tensor([at, 0.0, 0.0], dtype=state.dtype)


@dataclass(frozen=True, kw_only=True)
class Dynamic(Schedule):
    """Lengths by how often they are wrong.

    Args:
        floor: Added to every error, so that nothing is forgotten.
        momentum: The momentum of the mean error.
    """

    floor: float = 0.1
    momentum: float = 0.8

    def __post_init__(self):
        super().__post_init__()
        if self.floor <= 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"Dynamic: expected floor above 0 and momentum from 0 to below 1, got "
                f"floor={self.floor}, momentum={self.momentum}"
            )

    def initial(self) -> list[float]:
        """The mean error of each length, from 0 on."""
        return [1.0] * (self.max_length + 1)

    def _weights(self, state: Tensor) -> Tensor:
        weights = state + self.floor
        weights[: self.min_length] = 0
        return weights

    def difficulty(self, step: int, state: Tensor) -> float:
        """The mean length."""
        weights = self._weights(state)
        return float((weights * torch.arange(len(weights))).sum() / weights.sum())

    def lengths(self, generator: torch.Generator, batch: int, step: int, state: Tensor) -> Tensor:
        """Drawn by weight."""
        weights = self._weights(state).to(generator.device)
        return torch.multinomial(weights, batch, replacement=True, generator=generator)

    def update(self, state: Tensor, right: Tensor, total: Tensor) -> Tensor:
        """Move the errors of the lengths in a batch towards those observed."""
        error = 1 - right / total.clamp(min=1)
        moved = self.momentum * state + (1 - self.momentum) * error.to(state.dtype)
        return torch.where(total > 0, moved, state)
