"""Schedules of the lengths of samples during training.

A schedule holds no state itself. It draws a batch's lengths from a generator, the step and a small
state vector, and computes a new state from the numbers of correct answers. `CurriculumDataset`
keeps the state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from model_components._checks import is_whole


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """The base class of schedules, which draw the lengths of a batch's samples.

    Args:
        max_length: The largest length.
        min_length: The smallest length.
    """

    max_length: int
    min_length: int = 1

    def __post_init__(self):
        both = self.min_length, self.max_length
        if not all(map(is_whole, both)) or not 1 <= self.min_length <= self.max_length:
            raise ValueError(
                f"{type(self).__name__}: expected whole numbers with 1 <= min_length <= "
                f"max_length, got min_length={both[0]!r} and max_length={both[1]!r}"
            )
        # NumPy integers become Python integers, which tasks expect
        object.__setattr__(self, "min_length", int(self.min_length))
        object.__setattr__(self, "max_length", int(self.max_length))

    def initial(self) -> list[float]:
        """Return the initial state; empty for schedules that do not use results."""
        return []

    @abstractmethod
    def lengths(self, generator: torch.Generator, batch: int, step: int, state: Tensor) -> Tensor:
        """Draw the lengths of a batch's samples, (batch,)."""

    def update(self, state: Tensor, right: Tensor, total: Tensor) -> Tensor:
        """Return the new state, given the results of some batches.

        ``right`` and ``total`` are the numbers of correct answers and of all answers by length,
        (max_length + 1,) each.
        """
        return state

    def difficulty(self, step: int, state: Tensor) -> float:
        """Return the longest length in use (for `Dynamic`, the mean length), for logs and plots."""
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
    """A schedule in which every row has the length ``max_length``."""

    def lengths(self, generator: torch.Generator, batch: int, step: int, state: Tensor) -> Tensor:
        """Return ``max_length`` for every row."""
        return torch.full((batch,), self.max_length, device=generator.device)


@dataclass(frozen=True, kw_only=True)
class Uniform(Schedule):
    """A schedule in which all lengths are equally likely."""

    def lengths(self, generator: torch.Generator, batch: int, step: int, state: Tensor) -> Tensor:
        """Draw lengths uniformly."""
        return self._uniform(generator, batch, self.max_length)


def _share(what: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"{what}: share is {share}; expected 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Frontier(Schedule):
    """The default schedule: some rows have ``max_length``, other rows have uniform lengths.

    Args:
        min_length: The smallest length.
        max_length: The largest length.
        share: The share of the rows that are set to ``max_length``.

    >>> lengths = Frontier(max_length=9).lengths(
    ...     torch.Generator().manual_seed(0), 1000, 0, torch.empty(0)
    ... )
    >>> bool(500 < (lengths == 9).sum() < 620)
    True
    """

    # without rows at the longest length, models learn later (docs/thinker_measured.md)
    share: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        _share("Frontier", self.share)

    def lengths(self, generator: torch.Generator, batch: int, step: int, state: Tensor) -> Tensor:
        """Return ``max_length`` for some rows, and uniformly drawn lengths for all other rows."""
        return self._frontier(generator, batch, self.max_length, self.share)


@dataclass(frozen=True, kw_only=True)
class Progressive(Schedule):
    """A schedule that raises the longest length at high accuracy and lowers it at low accuracy.

    The longest length in use is called the frontier. It stays the same while the accuracy at that
    length is between ``retreat`` and ``threshold``.

    Args:
        start: The first frontier; default: ``min_length``.
        threshold: The accuracy from which the frontier rises by ``grow``.
        retreat: The accuracy below which the frontier falls by one.
        grow: The number of lengths by which the frontier rises.
        share: The share of the rows that have the frontier's length.
        min_answers: The number of answers needed at a frontier before it may change.
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
                "Progressive: expected 0 <= retreat < threshold <= 1, got "
                f"retreat={self.retreat} and threshold={self.threshold}"
            )
        is_inside = is_whole(self.first) and self.min_length <= self.first <= self.max_length
        if not is_inside or not is_whole(self.grow, 1):
            raise ValueError(
                "Progressive: expected start from min_length to max_length, and grow of 1 or more, "
                f"got start={self.first} and grow={self.grow}"
            )

    @property
    def first(self) -> int:
        """The longest length at the start of training."""
        if self.start is None:
            return self.min_length
        return self.start

    def initial(self) -> list[float]:
        """Return the first frontier, and 0 for the numbers of correct and of all answers."""
        return [float(self.first), 0.0, 0.0]

    def difficulty(self, step: int, state: Tensor) -> float:
        """Return the longest length in use."""
        return float(state[0])

    def lengths(self, generator: torch.Generator, batch: int, step: int, state: Tensor) -> Tensor:
        """Return the frontier for some rows, and uniform lengths up to it for all other rows."""
        return self._frontier(generator, batch, int(state[0]), self.share)

    def update(self, state: Tensor, right: Tensor, total: Tensor) -> Tensor:
        """Raise or lower the frontier, or keep it, depending on the accuracy at its length."""
        at = int(state[0])
        good = float(state[1] + right[at])
        all_ = float(state[2] + total[at])
        # a few answers could move the frontier by chance
        if all_ < self.min_answers:
            return torch.tensor([at, good, all_], dtype=state.dtype)
        if good / all_ >= self.threshold:
            at = min(self.max_length, at + self.grow)
        elif good / all_ < self.retreat:
            at = max(self.min_length, at - 1)
        # the counts restart even if the frontier stays the same, since old answers are not from the
        # current model
        return torch.tensor([at, 0.0, 0.0], dtype=state.dtype)


@dataclass(frozen=True, kw_only=True)
class Dynamic(Schedule):
    """A schedule that draws a length more often if more of its answers are wrong.

    Args:
        floor: A number added to the error rate of every length, so that all lengths are drawn.
        momentum: The weight of earlier batches in the moving average of each error rate.
    """

    floor: float = 0.1
    momentum: float = 0.8

    def __post_init__(self):
        super().__post_init__()
        if self.floor <= 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"Dynamic: expected floor above 0 and momentum of 0 or more and below 1, got "
                f"floor={self.floor}, momentum={self.momentum}"
            )

    def initial(self) -> list[float]:
        """Return an initial error rate of 1 for each length from 0 to ``max_length``."""
        return [1.0] * (self.max_length + 1)

    def _weights(self, state: Tensor) -> Tensor:
        weights = state + self.floor
        weights[: self.min_length] = 0
        return weights

    def difficulty(self, step: int, state: Tensor) -> float:
        """Return the expected length of a row."""
        weights = self._weights(state)
        return float((weights * torch.arange(len(weights))).sum() / weights.sum())

    def lengths(self, generator: torch.Generator, batch: int, step: int, state: Tensor) -> Tensor:
        """Draw lengths in proportion to their error rates plus ``floor``."""
        weights = self._weights(state).to(generator.device)
        return torch.multinomial(weights, batch, replacement=True, generator=generator)

    def update(self, state: Tensor, right: Tensor, total: Tensor) -> Tensor:
        """Update the moving averages of the error rates of the lengths in a batch."""
        error = 1 - right / total.clamp(min=1)
        moved = self.momentum * state + (1 - self.momentum) * error.to(state.dtype)
        return torch.where(total > 0, moved, state)
