"""Tasks on sequences of uniform symbols: copy, reverse, flip, roll, sort, prefix sums."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .task import IGNORED, Sample, Task, at_least, integers, register_task


@dataclass(frozen=True, kw_only=True)
class SequenceTask(Task):
    """Uniform symbols; a subclass says what becomes of them in `answer`.

    Args:
        symbols: The number of symbols.
    """

    symbols: int = 16

    def __post_init__(self):
        at_least(type(self).__name__, symbols=(self.symbols, 2))

    @property
    def vocab_size(self) -> int:
        """The symbols."""
        return self.symbols

    def num_samples(self, length: int) -> int:
        """Return the number of sequences, symbols^length."""
        return self.symbols**length

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Draw symbols, with `answer` at the places before the end of each sequence."""
        lengths, longest = self.checked(generator, batch, length)
        tokens = integers(generator, self.symbols, batch, longest)
        place = torch.arange(longest, device=generator.device)
        mask = place < lengths
        answer = self.answer(tokens, mask, lengths, place)
        if answer.shape[-1] == longest:
            answer = answer.masked_fill(~mask[:, None] if answer.dim() == 3 else ~mask, IGNORED)
        return Sample(tokens.masked_fill_(~mask, 0), mask, answer, self.distance(lengths, place))

    def distance(self, lengths: Tensor, place: Tensor) -> Tensor | None:
        """Return `Sample.distance`; by default None: every answer may depend on every symbol."""
        return None

    @abstractmethod
    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """The answer of every position, (B, L), or of the whole, (B, 1).

        By step it is (B, T, L).

        What lies behind the end does not matter.
        """


@register_task("copy")
class Copy(SequenceTask):
    """The input itself."""

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Return the symbol itself, t_i."""
        return tokens.clone()

    def distance(self, lengths: Tensor, place: Tensor) -> Tensor:
        """Return each answer's own place."""
        return torch.ones_like(place).expand(len(lengths), -1)


@dataclass(frozen=True, kw_only=True)
class _Rearranged(SequenceTask):
    """The input in another order, which neighbors can bring about by exchanging symbols.

    Args:
        by_step: Each step's answer is how far the exchanges have come: at odd steps of the first
            and second symbol, the third and fourth, and so on, at even steps of the second and
            third, the fourth and fifth, and so on; after n steps all is in place (odd-even
            transposition, Habermann 1972).
    """

    # pyrefly: ignore[bad-override]: set for each instance
    by_step: bool = False

    def distance(self, lengths: Tensor, place: Tensor) -> Tensor | None:
        """Return 1 for a step's answer, which depends on neighbors alone; otherwise None."""
        if self.by_step:
            return torch.ones_like(place).expand(len(lengths), -1)
        return None

    @abstractmethod
    def exchanged(self, left: Tensor, right: Tensor) -> Tensor:
        """Return whether neighbors exchange their symbols, (B, L - 1)."""

    def rounds(self, tokens: Tensor, lengths: Tensor) -> Tensor:  # (B, T, L)
        """The symbols after each step; of a row that is in order, the same."""
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
    """The input from its end.

    With ``by_step`` a row of n symbols is asked for n steps: exchanges that went on would undo what
    they have done.
    """

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Return the symbol from the other end, t_{n-1-i}."""
        if not self.by_step:
            return tokens.gather(1, (lengths - 1 - place).clamp_(min=0))
        over = place >= lengths  # steps are as many as places
        return self.rounds(tokens, lengths).masked_fill(over[..., None], IGNORED)

    def exchanged(self, left: Tensor, right: Tensor) -> Tensor:
        """Return True for all neighbors."""
        return torch.ones_like(left, dtype=torch.bool)


@register_task("flip")
class Flip(SequenceTask):
    """Each symbol's mirror image: the first for the last, and so on."""

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Return symbols - 1 - t_i."""
        return self.symbols - 1 - tokens

    def distance(self, lengths: Tensor, place: Tensor) -> Tensor:
        """Return each answer's own place."""
        return torch.ones_like(place).expand(len(lengths), -1)


@register_task("roll")
@dataclass(frozen=True, kw_only=True)
class Roll(SequenceTask):
    """The input moved on, its end at the start.

    Args:
        shift: The number of places.
    """

    shift: int = 1

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Return the shifted symbol, t_{(i - shift) mod n}."""
        return tokens.gather(1, (place - self.shift).remainder(lengths))


@register_task("sort")
@dataclass(frozen=True, kw_only=True)
class Sort(_Rearranged):
    """The symbols in order."""

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Return the symbols in ascending order."""
        if self.by_step:
            return self.rounds(tokens, lengths)
        # larger than every symbol, so that padding stays behind
        return tokens.masked_fill(~mask, self.symbols).sort(1).values

    def exchanged(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the places where the larger is on the left."""
        return left > right


@register_task("prefix_sum")
@dataclass(frozen=True, kw_only=True)
class PrefixSum(SequenceTask):
    """Each prefix's sum modulo the number of symbols; of two symbols: prefix parity."""

    symbols: int = 2

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Return the sum so far, (t_0 + … + t_i) mod symbols."""
        return tokens.cumsum(1).remainder(self.symbols)

    def distance(self, lengths: Tensor, place: Tensor) -> Tensor:
        """To the start."""
        return (place + 1).expand(len(lengths), -1)
