"""Tasks on sequences of uniformly drawn symbols."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .task import IGNORED, Sample, Task, at_least, integers, register_task


@dataclass(frozen=True, kw_only=True)
class SequenceTask(Task):
    """The base class of tasks on uniformly drawn symbols; a subclass defines `answer`.

    Args:
        symbols: The number of symbols.
    """

    symbols: int = 16

    def __post_init__(self):
        at_least(type(self).__name__, symbols=(self.symbols, 2))

    @property
    def vocab_size(self) -> int:
        """The number of symbols."""
        return self.symbols

    def num_samples(self, length: int) -> int:
        """Return the number of sequences, symbols^length."""
        return self.symbols**length

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Draw sequences, with `answer` as the targets up to each sequence's end."""
        lengths, longest = self.checked(generator, batch, length)
        tokens = integers(generator, self.symbols, batch, longest)
        place = torch.arange(longest, device=generator.device)
        mask = place < lengths
        answer = self.answer(tokens, mask, lengths, place)
        self._check_answer(answer, batch, longest)
        if answer.shape[-1] == longest:
            answer = answer.masked_fill(~mask[:, None] if answer.dim() == 3 else ~mask, IGNORED)
        return Sample(tokens.masked_fill_(~mask, 0), mask, answer, self.distance(lengths, place))

    def _check_answer(self, answer: object, batch: int, longest: int) -> None:
        """Check the shape of the answer that a subclass computed."""
        size = self.output_length(longest)
        shape = list(answer.shape) if isinstance(answer, Tensor) else []
        if len(shape) == 2 + self.by_step and shape[0] == batch:
            width = shape[-1]
            # a task that sets the length of its answers may have narrower ones in some batches
            is_narrower = size != longest and 1 <= width <= size
            if width in (1, longest) or is_narrower:
                return
        steps = ["T"] * self.by_step
        raise ValueError(
            f"{type(self).__name__}.answer: expected a tensor of shape {[batch, *steps, size]} or "
            f"{[batch, *steps, 1]}, got {shape or type(answer).__name__}"
        )

    def distance(self, lengths: Tensor, place: Tensor) -> Tensor | None:
        """Return `Sample.distance`; None (the default) if answers may depend on every symbol."""
        return None

    @abstractmethod
    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Return the answer at every position, (B, L), or one for each sequence, (B, 1).

        With ``by_step`` it is (B, T, L). Values after a sequence's end are ignored. ``tokens`` and
        ``mask`` are (B, L), ``lengths`` (B, 1), and ``place`` is 0 to L - 1, (L,).
        """


@register_task("copy")
class Copy(SequenceTask):
    """A task of copying the input."""

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Return the symbols themselves, t_i."""
        return tokens.clone()

    def distance(self, lengths: Tensor, place: Tensor) -> Tensor:
        """Return 1, since each answer depends only on its own symbol."""
        return torch.ones_like(place).expand(len(lengths), -1)


@dataclass(frozen=True, kw_only=True)
class _Rearranged(SequenceTask):
    """A task of reordering the input, by exchanges of neighboring symbols.

    Args:
        by_step: Whether each step has its own answer: for step n, the symbols after n rounds of
            exchanges. Odd rounds exchange the first and second symbol, the third and fourth, and so
            on; even rounds the second and third, the fourth and fifth, and so on. A row of n
            symbols is in its final order after n rounds (odd-even transposition, Habermann 1972).
    """

    # pyrefly: ignore[bad-override]: set for each instance
    by_step: bool = False

    def distance(self, lengths: Tensor, place: Tensor) -> Tensor | None:
        """Return 1 if ``by_step`` (a step's answer depends only on neighbors), otherwise None."""
        if self.by_step:
            return torch.ones_like(place).expand(len(lengths), -1)
        return None

    @abstractmethod
    def exchanged(self, left: Tensor, right: Tensor) -> Tensor:
        """Return, for each pair of neighbors, whether they exchange their symbols, (B, L - 1)."""

    def rounds(self, tokens: Tensor, lengths: Tensor) -> Tensor:  # (B, T, L)
        """Return the symbols after each round; a row of n symbols has n rounds."""
        length = tokens.shape[1]
        place = torch.arange(length - 1, device=tokens.device)
        states = []
        for step in range(length):
            left = tokens[:, :-1]
            right = tokens[:, 1:]
            # pairs (0, 1), (2, 3), ... and then (1, 2), (3, 4), ...; none reaches past the end
            active = (place % 2 == step % 2) & (place + 1 < lengths) & (step < lengths)
            swap = active & self.exchanged(left, right)
            gives = F.pad(swap, (0, 1))
            takes = F.pad(swap, (1, 0))
            tokens = torch.where(
                gives, tokens.roll(-1, 1), torch.where(takes, tokens.roll(1, 1), tokens)
            )
            states.append(tokens)
        return torch.stack(states, 1)


@register_task("reverse")
@dataclass(frozen=True, kw_only=True)
class Reverse(_Rearranged):
    """A task of reversing the input.

    With ``by_step``, a row of n symbols has answers for n steps only, since further exchanges would
    undo the reversal.
    """

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Return the symbol from the other end, t_{n-1-i}."""
        if not self.by_step:
            return tokens.gather(1, (lengths - 1 - place).clamp_(min=0))
        over = place >= lengths  # `place` also counts the rounds, which are as many as positions
        return self.rounds(tokens, lengths).masked_fill(over[..., None], IGNORED)

    def exchanged(self, left: Tensor, right: Tensor) -> Tensor:
        """Return True for all pairs of neighbors."""
        return torch.ones_like(left, dtype=torch.bool)


@register_task("flip")
class Flip(SequenceTask):
    """A task of replacing each symbol s with ``symbols - 1 - s``."""

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Return symbols - 1 - t_i."""
        return self.symbols - 1 - tokens

    def distance(self, lengths: Tensor, place: Tensor) -> Tensor:
        """Return 1, since each answer depends only on its own symbol."""
        return torch.ones_like(place).expand(len(lengths), -1)


@register_task("roll")
@dataclass(frozen=True, kw_only=True)
class Roll(SequenceTask):
    """A task of rotating the input, so that its end comes to the start.

    Args:
        shift: The number of positions to shift by.
    """

    shift: int = 1

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Return the shifted symbol, t_{(i - shift) mod n}."""
        return tokens.gather(1, (place - self.shift).remainder(lengths))


@register_task("sort")
@dataclass(frozen=True, kw_only=True)
class Sort(_Rearranged):
    """A task of sorting the symbols."""

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Return the symbols in ascending order."""
        if self.by_step:
            return self.rounds(tokens, lengths)
        # larger than every symbol, so that padding stays behind
        return tokens.masked_fill(~mask, self.symbols).sort(1).values

    def exchanged(self, left: Tensor, right: Tensor) -> Tensor:
        """Return True where the larger symbol is on the left."""
        return left > right


@register_task("prefix_sum")
@dataclass(frozen=True, kw_only=True)
class PrefixSum(SequenceTask):
    """A task of summing each prefix modulo the number of symbols.

    With two symbols, the sum is the parity of the prefix.
    """

    symbols: int = 2

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Return the sum so far, (t_0 + … + t_i) mod symbols."""
        return tokens.cumsum(1).remainder(self.symbols)

    def distance(self, lengths: Tensor, place: Tensor) -> Tensor:
        """Return the distance to the start token."""
        return (place + 1).expand(len(lengths), -1)
