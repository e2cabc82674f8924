"""Two numbers and their sum, difference or product, digit by digit; chains modulo m."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .task import IGNORED, Sample, Task, at_least, integers, register_task


@dataclass(frozen=True, kw_only=True)
class _Arithmetic(Task):
    """Two numbers of ``length`` digits, then ``=``; the answer has a fixed number of digits.

    Args:
        base: Of the digits; ids are 0 .. base - 1, then the operator, then ``=``.
        little_endian: Digits from the smallest.
        max_value: No number above it (all numbers of ``length`` digits otherwise).
        carry_heavy: Share of rows made so that most digits carry.
    """

    base: int = 16
    little_endian: bool = True
    max_value: int | None = None
    carry_heavy: float = 0.0

    def __post_init__(self):
        at_least(type(self).__name__, base=(self.base, 2), max_value=(self.max_value or 1, 1))
        if not 0 <= self.carry_heavy <= 1 or (self.carry_heavy and self.max_value is not None):
            raise ValueError(
                f"{type(self).__name__}: carry_heavy is {self.carry_heavy}; needed a share, without max_value"
            )

    @property
    def vocab_size(self) -> int:
        """Digits, operator, ``=``."""
        return self.base + 2

    @property
    def output_size(self) -> int:
        """Digits."""
        return self.base

    @property
    def separators(self) -> tuple[int, ...]:
        """Operator and ``=``."""
        return self.base, self.base + 1

    def input_length(self, length: int) -> int:
        """Two numbers and two signs."""
        return 2 * length + 2

    def num_samples(self, length: int) -> int:
        """Pairs of numbers."""
        values = self.base**length
        return (values if self.max_value is None else min(values, self.max_value + 1)) ** 2

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Digits of both numbers, smallest first, then laid out."""
        lengths, longest = self.checked(generator, batch, length)
        device, place = generator.device, torch.arange(longest, device=generator.device)
        if self.max_value is None:
            a, b = integers(generator, self.base, 2, batch, longest)
        else:
            values, digits = integers(generator, self.max_value + 1, 2, batch), []
            for _ in range(longest):
                digits.append(values % self.base)
                values = values // self.base
            a, b = torch.stack(digits, 2)
        if self.carry_heavy:
            heavy = torch.rand(batch, 1, generator=generator, device=device) < self.carry_heavy
            most = torch.rand(batch, longest, generator=generator, device=device) < 0.8
            carried = torch.where(place == 0, self.base - a, self.base - 1 - a).clamp_(max=self.base - 1)
            b = torch.where(heavy & most, carried, b)
        inside = place < lengths
        a, b = a * inside, b * inside
        a, b = self.ordered(a, b)
        answer = self.digits(a, b)
        width = (
            torch.zeros_like(lengths)
            + self.output_length(0)
            + (self.output_length(1) - self.output_length(0)) * lengths
        )
        out = torch.arange(answer.shape[1], device=device)
        told = out < width
        if not self.little_endian:
            a, b = (x.gather(1, (lengths - 1 - place).clamp_(min=0)) for x in (a, b))
            answer = answer.gather(1, (width - 1 - out).clamp_(min=0))
        at = torch.arange(2 * longest + 2, device=device)
        tokens = torch.where(at < lengths, F.pad(a, (0, longest + 2)), self.base)
        second = at - lengths - 1
        tokens = torch.where((second >= 0) & (second < lengths), b.gather(1, second.clamp(0, longest - 1)), tokens)
        mask = second <= lengths
        tokens = tokens.masked_fill(second == lengths, self.base + 1).masked_fill(~mask, 0)
        return Sample(tokens, mask, answer.masked_fill(~told, IGNORED))

    def ordered(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers as they are."""
        return a, b

    @abstractmethod
    def digits(self, a: Tensor, b: Tensor) -> Tensor:
        """The result's digits, smallest first."""


def _carried(base: int, digits: Tensor) -> Tensor:  # (B, n) to the same
    """Digits in range, what is above or below it carried on; as many as there were."""
    result, carry = [], torch.zeros_like(digits[:, 0])
    for digit in digits.unbind(1):
        total = digit + carry
        carry = total.div(base, rounding_mode="floor")
        result.append(total - carry * base)
    return torch.stack(result, 1)


@register_task("add")
class Add(_Arithmetic):
    """a + b, one digit longer."""

    def output_length(self, length: int) -> int:
        """One more."""
        return length + 1

    def digits(self, a: Tensor, b: Tensor) -> Tensor:
        """Of the sum."""
        return _carried(self.base, F.pad(a + b, (0, 1)))


@register_task("add_columns")
@dataclass(frozen=True, kw_only=True)
class AddColumns(Task):
    """The sum of two numbers as it is written by hand: a token is a column of two digits, the smallest first.

    A last column of zeros has the carry's place. ``length`` counts digits.

    Args:
        base: Of the digits; the id of a column is base · first + second.
    """

    base: int = 10

    def __post_init__(self):
        at_least("AddColumns", base=(self.base, 2))

    @property
    def vocab_size(self) -> int:
        """Columns."""
        return self.base**2

    @property
    def output_size(self) -> int:
        """Digits."""
        return self.base

    def input_length(self, length: int) -> int:
        """One more, for the carry."""
        return length + 1

    def output_length(self, length: int) -> int:
        """One more."""
        return length + 1

    def num_samples(self, length: int) -> int:
        """Pairs of numbers."""
        return self.base ** (2 * length)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Uniform digits."""
        lengths, longest = self.checked(generator, batch, length)
        place = torch.arange(longest + 1, device=generator.device)
        first, second = integers(generator, self.base, 2, batch, longest + 1) * (place < lengths)
        answer = _carried(self.base, first + second)
        mask = place <= lengths
        distance = (place + 1).expand(batch, -1)
        return Sample(first * self.base + second, mask, answer.masked_fill(~mask, IGNORED), distance)


@register_task("subtract")
class Subtract(_Arithmetic):
    """a - b, the larger number first."""

    def ordered(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The larger first, by its highest digit that differs."""
        differ = (a != b).long()
        place = torch.arange(1, a.shape[1] + 1, device=a.device)
        highest = (differ * place).argmax(1, keepdim=True)
        swap = a.gather(1, highest) < b.gather(1, highest)
        return torch.where(swap, b, a), torch.where(swap, a, b)

    def digits(self, a: Tensor, b: Tensor) -> Tensor:
        """Of the difference."""
        return _carried(self.base, a - b)


@register_task("multiply")
class Multiply(_Arithmetic):
    """a · b, twice as long."""

    def output_length(self, length: int) -> int:
        """Twice as many."""
        return 2 * length

    def digits(self, a: Tensor, b: Tensor) -> Tensor:
        """Of the product: digits' products summed by place, then carried."""
        n = a.shape[1]
        sums = torch.zeros(len(a), 2 * n, dtype=torch.long, device=a.device)
        for i in range(n):
            sums[:, i : i + n] += a[:, i : i + 1] * b
        return _carried(self.base, sums)


@register_task("modular")
@dataclass(frozen=True, kw_only=True)
class ModularArithmetic(Task):
    """A chain a + b · c - …, worked from left to right, modulo m; ``length`` numbers.

    Args:
        modulus: m; ids are 0 .. m - 1, then +, -, ·.
    """

    modulus: int = 5

    def __post_init__(self):
        at_least("ModularArithmetic", modulus=(self.modulus, 2))

    @property
    def vocab_size(self) -> int:
        """Numbers and three signs."""
        return self.modulus + 3

    @property
    def output_size(self) -> int:
        """Numbers."""
        return self.modulus

    def input_length(self, length: int) -> int:
        """A sign between two numbers."""
        return 2 * length - 1

    def output_length(self, length: int) -> int:
        """One."""
        return 1

    def num_samples(self, length: int) -> int:
        """Numbers and signs."""
        return self.modulus**length * 3 ** (length - 1)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Numbers and signs in turn."""
        lengths, longest = self.checked(generator, batch, length)
        numbers = integers(generator, self.modulus, batch, longest)
        signs = integers(generator, 3, batch, longest)
        value = numbers[:, :1]
        for i in range(1, longest):
            sign, number = signs[:, i - 1 : i], numbers[:, i : i + 1]
            results = torch.where(sign == 0, value + number, torch.where(sign == 1, value - number, value * number))
            value = torch.where(i < lengths, results.remainder(self.modulus), value)
        tokens = torch.stack([numbers, signs + self.modulus], 2).flatten(1)[:, :-1]
        mask = torch.arange(2 * longest - 1, device=generator.device) < 2 * lengths - 1
        return Sample(tokens.masked_fill(~mask, 0), mask, value)
