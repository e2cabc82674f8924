"""Tasks of addition: the sum of two numbers, digit by digit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .task import IGNORED, Sample, Task, at_least, integers, register_task


@register_task("add")
@dataclass(frozen=True, kw_only=True)
class Add(Task):
    """A task of adding two numbers of ``length`` digits; their sum has one digit more.

    The input is the first number, the operator, the second number and ``=``. Numbers are written
    with the least significant digit first.

    Args:
        base: The base of the digits. Ids from 0 to base - 1 are digits; the operator and ``=``
            follow.
        max_value: The largest number to draw; default: all numbers of ``length`` digits are drawn.
    """

    base: int = 16
    max_value: int | None = None

    def __post_init__(self):
        at_least("Add", base=(self.base, 2), max_value=(self.max_value or 1, 1))

    @property
    def vocab_size(self) -> int:
        """The number of ids: digits, operator, ``=``."""
        return self.base + 2

    @property
    def output_size(self) -> int:
        """The number of different digits, ``base``."""
        return self.base

    @property
    def separators(self) -> tuple[int, ...]:
        """The ids of the operator and ``=``."""
        return self.base, self.base + 1

    def input_length(self, length: int) -> int:
        """Return the length of two numbers, the operator and ``=``."""
        return 2 * length + 2

    def output_length(self, length: int) -> int:
        """Return the number of digits of the sum, ``length`` + 1."""
        return length + 1

    def num_samples(self, length: int) -> int:
        """Return the number of pairs of numbers."""
        values = self.base**length
        return (values if self.max_value is None else min(values, self.max_value + 1)) ** 2

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Draw the digits of both numbers, and arrange them with the operator and ``=``."""
        lengths, longest = self.checked(generator, batch, length)
        device = generator.device
        place = torch.arange(longest, device=generator.device)
        if self.max_value is None:
            a, b = integers(generator, self.base, 2, batch, longest)
        else:
            values = integers(generator, self.max_value + 1, 2, batch)
            digits = []
            # repeated division, since powers of the base may not fit into 64 bits
            for _ in range(longest):
                digits.append(values % self.base)
                values = values // self.base
            a, b = torch.stack(digits, 2)
        inside = place < lengths
        a = a * inside
        b = b * inside
        # one more digit, for the last carry
        answer = _carried(self.base, F.pad(a + b, (0, 1)))
        width = lengths + 1
        out = torch.arange(answer.shape[1], device=device)
        told = out < width
        at = torch.arange(2 * longest + 2, device=device)
        tokens = torch.where(at < lengths, F.pad(a, (0, longest + 2)), self.base)
        # the index in the second number: -1 is the operator, and its length is the =
        second = at - lengths - 1
        tokens = torch.where(
            (second >= 0) & (second < lengths), b.gather(1, second.clamp(0, longest - 1)), tokens
        )
        mask = second <= lengths
        tokens = tokens.masked_fill(second == lengths, self.base + 1).masked_fill(~mask, 0)
        return Sample(tokens, mask, answer.masked_fill(~told, IGNORED))


def _carried(base: int, digits: Tensor) -> Tensor:  # (B, n) to the same
    """Propagate carries until every digit is in range; the number of digits stays the same."""
    result = []
    carry = torch.zeros_like(digits[:, 0])
    for digit in digits.unbind(1):
        total = digit + carry
        carry = total.div(base, rounding_mode="floor")
        result.append(total - carry * base)
    return torch.stack(result, 1)


@register_task("add_columns")
@dataclass(frozen=True, kw_only=True)
class AddColumns(Task):
    """A task of adding two numbers in columns, as by hand.

    A token is a column of two digits, and the least significant column comes first. The last column
    is zeros, and its answer is the carry. ``length`` is the number of digits.

    Args:
        base: The base of the digits; the id of a column is base · first + second.
    """

    base: int = 10

    def __post_init__(self):
        at_least("AddColumns", base=(self.base, 2))

    @property
    def vocab_size(self) -> int:
        """The number of different columns, that is, pairs of digits."""
        return self.base**2

    @property
    def output_size(self) -> int:
        """The number of different digits, ``base``."""
        return self.base

    def input_length(self, length: int) -> int:
        """Return ``length`` + 1, with room for the carry."""
        return length + 1

    def output_length(self, length: int) -> int:
        """Return ``length`` + 1."""
        return length + 1

    def num_samples(self, length: int) -> int:
        """Return the number of pairs of numbers."""
        return self.base ** (2 * length)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Draw uniform digits, and lay them out in columns."""
        lengths, longest = self.checked(generator, batch, length)
        place = torch.arange(longest + 1, device=generator.device)
        first, second = integers(generator, self.base, 2, batch, longest + 1) * (place < lengths)
        answer = _carried(self.base, first + second)
        mask = place <= lengths
        # a carry may come from the first column, and the start token lies before it
        distance = (place + 1).expand(batch, -1)
        return Sample(
            first * self.base + second, mask, answer.masked_fill(~mask, IGNORED), distance
        )
