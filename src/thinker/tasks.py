"""Algorithmic tasks: batches of inputs and answers, made by tensor operations on any device.

Shapes: B batch, L input length, O answer length; a task's ``length`` is its own measure: symbols, digits, hops.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # where there is nothing to answer, as in torch's cross-entropy

TASKS: dict[str, type[Task]] = {}


class Sample(NamedTuple):
    """A batch: ids (B, L), where there are any (B, L), answers (B, O) with -100 where there is none."""

    tokens: Tensor
    mask: Tensor
    targets: Tensor


def register_task(name: str) -> Callable[[type[Task]], type[Task]]:
    """Put a `Task` under a name, for `make_task`; of a user's own too.

    Raises:
        ValueError: A name that is taken.
    """

    def put(kind: type[Task]) -> type[Task]:
        if name in TASKS:
            raise ValueError(f"register_task: {name!r} is taken, by {TASKS[name].__name__}")
        TASKS[name] = kind
        return kind

    return put


def make_task(name: str, **options: Any) -> Task:
    """A registered task.

    Args:
        name: Of `TASKS`.
        **options: Its fields.

    >>> make_task("roll", shift=2).vocab_size
    16
    """
    if name not in TASKS:
        raise ValueError(f"make_task: no task {name!r}; needed one of {', '.join(sorted(TASKS))}")
    return TASKS[name](**options)


class Task(ABC):
    """What a task says of itself. ``length`` is a whole number, or (B,), one for each row; shorter rows are padded."""

    min_length: ClassVar[int] = 1

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Input ids are below it."""

    @property
    def output_size(self) -> int:
        """Answers are below it."""
        return self.vocab_size

    @property
    def separators(self) -> tuple[int, ...]:
        """Ids that end an operand, for aligned positions."""
        return ()

    def input_length(self, length: int) -> int:
        """L of a length."""
        return length

    def output_length(self, length: int) -> int:
        """O of a length."""
        return length

    @abstractmethod
    def num_samples(self, length: int) -> float:
        """About how many different inputs of a length there are."""

    @abstractmethod
    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """A batch, drawn and made on the generator's device."""

    def accuracy_mask(self, sample: Sample) -> Tensor:  # (B, O)
        """Which answers count."""
        return sample.targets != IGNORED

    def checked(self, generator: torch.Generator, batch: int, length: int | Tensor) -> tuple[Tensor, int]:
        """Lengths as (B, 1) on the device, and the longest; refuses those below ``min_length``."""
        if isinstance(length, int):
            longest = shortest = length
            lengths = torch.full((batch, 1), length, device=generator.device)
        else:
            if length.shape != (batch,):
                raise ValueError(f"{type(self).__name__}: lengths have shape {list(length.shape)}; needed ({batch},)")
            shortest, longest = (int(v) for v in torch.aminmax(length))
            lengths = length.to(generator.device)[:, None]
        if shortest < self.min_length:
            raise ValueError(f"{type(self).__name__}: length {shortest}; needed {self.min_length} or more")
        return lengths, longest


def _integers(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=generator, device=generator.device)


def _at_least(what: str, **least: tuple[int, int]) -> None:
    for name, (value, needed) in least.items():
        if value < needed:
            raise ValueError(f"{what}: {name} is {value}; needed {needed} or more")


@dataclass(frozen=True, kw_only=True)
class SequenceTask(Task):
    """Uniform symbols; a subclass says what becomes of them in `answer`.

    Args:
        symbols: How many there are.
    """

    symbols: int = 16

    def __post_init__(self):
        _at_least(type(self).__name__, symbols=(self.symbols, 2))

    @property
    def vocab_size(self) -> int:
        """The symbols."""
        return self.symbols

    def num_samples(self, length: int) -> float:
        """symbols^length."""
        return float(self.symbols) ** length

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Symbols, and `answer` where the sequence has not ended."""
        lengths, longest = self.checked(generator, batch, length)
        tokens = _integers(generator, self.symbols, batch, longest)
        place = torch.arange(longest, device=generator.device)
        mask = place < lengths
        answer = self.answer(tokens, mask, lengths, place)
        if answer.shape[1] == longest:
            answer = answer.masked_fill(~mask, IGNORED)
        return Sample(tokens.masked_fill_(~mask, 0), mask, answer)

    @abstractmethod
    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """The answer of every position, (B, L), or of the whole, (B, 1); what lies behind the end does not matter."""


@register_task("copy")
class Copy(SequenceTask):
    """The input itself."""

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """t_i."""
        return tokens.clone()


@register_task("reverse")
class Reverse(SequenceTask):
    """The input from its end."""

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """t_{n-1-i}."""
        return tokens.gather(1, (lengths - 1 - place).clamp_(min=0))


@register_task("flip")
class Flip(SequenceTask):
    """Each symbol's mirror image: the first for the last, and so on."""

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Symbols - 1 - t_i."""
        return self.symbols - 1 - tokens


@register_task("roll")
@dataclass(frozen=True, kw_only=True)
class Roll(SequenceTask):
    """The input moved on, its end at the start.

    Args:
        shift: By how many places.
    """

    shift: int = 1

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """t_{(i - shift) mod n}."""
        return tokens.gather(1, (place - self.shift).remainder(lengths))


@register_task("sort")
class Sort(SequenceTask):
    """The symbols in order."""

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Ascending."""
        return tokens.masked_fill(~mask, self.symbols).sort(1).values


@register_task("prefix_sum")
@dataclass(frozen=True, kw_only=True)
class PrefixSum(SequenceTask):
    """Each prefix's sum modulo the number of symbols; of two symbols: prefix parity."""

    symbols: int = 2

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """(t_0 + … + t_i) mod symbols."""
        return tokens.cumsum(1).remainder(self.symbols)


@register_task("parity")
@dataclass(frozen=True, kw_only=True)
class Parity(SequenceTask):
    """The whole sum modulo the number of symbols."""

    symbols: int = 2

    def output_length(self, length: int) -> int:
        """One."""
        return 1

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Σ t_i mod symbols."""
        return (tokens * mask).sum(1, keepdim=True).remainder(self.symbols)


@register_task("majority")
class Majority(SequenceTask):
    """The most frequent symbol, the smallest of several."""

    def output_length(self, length: int) -> int:
        """One."""
        return 1

    def answer(self, tokens: Tensor, mask: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
        """Argmax of counts."""
        counts = torch.zeros(len(tokens), self.symbols, dtype=torch.long, device=tokens.device)
        counts.scatter_add_(1, tokens, mask.long())
        best = counts == counts.amax(1, keepdim=True)
        return best.long().argmax(1, keepdim=True)


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
        _at_least(type(self).__name__, base=(self.base, 2), max_value=(self.max_value or 1, 1))
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

    def num_samples(self, length: int) -> float:
        """Pairs of numbers."""
        values = float(self.base) ** length
        return min(values, math.inf if self.max_value is None else self.max_value + 1) ** 2

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Digits of both numbers, smallest first, then laid out."""
        lengths, longest = self.checked(generator, batch, length)
        device, place = generator.device, torch.arange(longest, device=generator.device)
        if self.max_value is None:
            a, b = _integers(generator, self.base, 2, batch, longest)
        else:
            values = _integers(generator, self.max_value + 1, 2, batch, 1)
            a, b = (values // self.base**place % self.base).unbind(0)
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
        tokens = torch.where(at < lengths, torch.nn.functional.pad(a, (0, longest + 2)), self.base)
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

    def carried(self, digits: Tensor) -> Tensor:
        """Digits in range, what is above or below it carried on; as many as there were."""
        made, carry = [], torch.zeros_like(digits[:, 0])
        for digit in digits.unbind(1):
            total = digit + carry
            carry = total.div(self.base, rounding_mode="floor")
            made.append(total - carry * self.base)
        return torch.stack(made, 1)


@register_task("add")
class Add(_Arithmetic):
    """a + b, one digit longer."""

    def output_length(self, length: int) -> int:
        """One more."""
        return length + 1

    def digits(self, a: Tensor, b: Tensor) -> Tensor:
        """Of the sum."""
        return self.carried(torch.nn.functional.pad(a + b, (0, 1)))


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
        return self.carried(a - b)


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
        return self.carried(sums)


@register_task("modular")
@dataclass(frozen=True, kw_only=True)
class ModularArithmetic(Task):
    """A chain a + b · c - …, worked from left to right, modulo m; ``length`` numbers.

    Args:
        modulus: m; ids are 0 .. m - 1, then +, -, ·.
    """

    modulus: int = 5

    def __post_init__(self):
        _at_least("ModularArithmetic", modulus=(self.modulus, 2))

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

    def num_samples(self, length: int) -> float:
        """Numbers and signs."""
        return float(self.modulus) ** length * 3.0 ** (length - 1)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Numbers and signs in turn."""
        lengths, longest = self.checked(generator, batch, length)
        numbers = _integers(generator, self.modulus, batch, longest)
        signs = _integers(generator, 3, batch, longest)
        value = numbers[:, :1]
        for i in range(1, longest):
            sign, number = signs[:, i - 1 : i], numbers[:, i : i + 1]
            made = torch.where(sign == 0, value + number, torch.where(sign == 1, value - number, value * number))
            value = torch.where(i < lengths, made.remainder(self.modulus), value)
        tokens = torch.stack([numbers, signs + self.modulus], 2).flatten(1)[:, :-1]
        mask = torch.arange(2 * longest - 1, device=generator.device) < 2 * lengths - 1
        return Sample(tokens.masked_fill(~mask, 0), mask, value)


@register_task("hops")
@dataclass(frozen=True, kw_only=True)
class Hops(Task):
    """f(f(…f(s))): a permutation's table, a start, the number of hops, which is ``length``.

    Args:
        size: Of the permutation; ids are 0 .. size - 1, then the numbers of hops.
        max_hops: Most that can be asked.
    """

    size: int = 10
    max_hops: int = 16

    def __post_init__(self):
        _at_least("Hops", size=(self.size, 2), max_hops=(self.max_hops, 1))

    @property
    def vocab_size(self) -> int:
        """Places and numbers of hops."""
        return self.size + self.max_hops + 1

    @property
    def output_size(self) -> int:
        """Places."""
        return self.size

    def input_length(self, length: int) -> int:
        """The table, start and hops."""
        return self.size + 2

    def output_length(self, length: int) -> int:
        """One."""
        return 1

    def num_samples(self, length: int) -> float:
        """Permutations and starts."""
        return float(math.factorial(self.size) * self.size)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Table, start, hops."""
        hops, longest = self.checked(generator, batch, length)
        if longest > self.max_hops:
            raise ValueError(f"Hops: length {longest}; needed at most max_hops, {self.max_hops}")
        table = torch.rand(batch, self.size, generator=generator, device=generator.device).argsort(1)
        start = value = _integers(generator, self.size, batch, 1)
        for i in range(longest):
            value = torch.where(i < hops, table.gather(1, value), value)
        tokens = torch.cat([table, start, self.size + hops], 1)
        return Sample(tokens, torch.ones_like(tokens, dtype=torch.bool), value)


@register_task("brackets")
@dataclass(frozen=True, kw_only=True)
class Brackets(Task):
    """Whether brackets close what they open; ``length`` pairs, half of the rows balanced.

    Args:
        kinds: Of brackets; ids are openings 0 .. kinds - 1, then closings.
    """

    kinds: int = 2

    def __post_init__(self):
        _at_least("Brackets", kinds=(self.kinds, 1))

    @property
    def vocab_size(self) -> int:
        """Openings and closings."""
        return 2 * self.kinds

    @property
    def output_size(self) -> int:
        """No, yes."""
        return 2

    def input_length(self, length: int) -> int:
        """Pairs."""
        return 2 * length

    def output_length(self, length: int) -> int:
        """One."""
        return 1

    def num_samples(self, length: int) -> float:
        """Balanced ones: kinds^n times the n-th Catalan number."""
        return float(self.kinds) ** length * math.comb(2 * length, length) / (length + 1)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Balanced rows by a walk that never falls below 0 and ends there; in half of them one bracket is another's."""
        lengths, longest = self.checked(generator, batch, length)
        device, width = generator.device, 2 * longest
        chance = torch.rand(batch, width, generator=generator, device=device)
        kind = _integers(generator, self.kinds, batch, width)
        stack = torch.zeros(batch, longest + 1, 1, dtype=torch.long, device=device)
        depth, tokens = torch.zeros(batch, 1, dtype=torch.long, device=device), []
        for i in range(width):
            left = 2 * lengths - i
            opens = ((depth == 0) | (chance[:, i : i + 1] < 0.5)) & (depth < left)
            closing = stack[:, :, 0].gather(1, (depth - 1).clamp(min=0))
            tokens.append(torch.where(opens, kind[:, i : i + 1], closing + self.kinds))
            stack[:, :, 0].scatter_(1, depth.clamp(max=longest), torch.where(opens, kind[:, i : i + 1], closing))
            depth = (depth + torch.where(opens, 1, -1)).clamp_(min=0)
        made = torch.cat(tokens, 1)
        at = torch.rand(batch, 1, generator=generator, device=device).mul(2 * lengths).long()
        other = made.gather(1, at) + 1 + _integers(generator, max(1, self.vocab_size - 1), batch, 1)
        spoilt = torch.rand(batch, 1, generator=generator, device=device) < 0.5
        made = made.scatter(1, at, torch.where(spoilt, other % self.vocab_size, made.gather(1, at)))
        mask = torch.arange(width, device=device) < 2 * lengths
        return Sample(made.masked_fill(~mask, 0), mask, (~spoilt).long())


@register_task("lookup")
@dataclass(frozen=True, kw_only=True)
class LookUp(Task):
    """The value of a key: ``length`` different keys, each with its value, then one of the keys.

    Args:
        keys: How many keys there are; ids are keys, then values.
        values: How many values there are.
    """

    keys: int = 32
    values: int = 16

    def __post_init__(self):
        _at_least("LookUp", keys=(self.keys, 1), values=(self.values, 2))

    @property
    def vocab_size(self) -> int:
        """Keys and values."""
        return self.keys + self.values

    @property
    def output_size(self) -> int:
        """Values."""
        return self.values

    def input_length(self, length: int) -> int:
        """Pairs and the question."""
        return 2 * length + 1

    def output_length(self, length: int) -> int:
        """One."""
        return 1

    def num_samples(self, length: int) -> float:
        """Keys in order, their values, the question."""
        return float(math.perm(self.keys, length)) * float(self.values) ** length * length

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Pairs, then the question."""
        lengths, longest = self.checked(generator, batch, length)
        if longest > self.keys:
            raise ValueError(f"LookUp: length {longest}; needed at most as many as keys, {self.keys}")
        device = generator.device
        keys = torch.rand(batch, self.keys, generator=generator, device=device).argsort(1)[:, :longest]
        values = _integers(generator, self.values, batch, longest)
        asked = torch.rand(batch, 1, generator=generator, device=device).mul(lengths).long()
        pairs = torch.stack([keys, values + self.keys], 2).flatten(1)
        tokens = torch.nn.functional.pad(pairs, (0, 1)).scatter(1, 2 * lengths, keys.gather(1, asked))
        mask = torch.arange(2 * longest + 1, device=device) <= 2 * lengths
        return Sample(tokens.masked_fill(~mask, 0), mask, values.gather(1, asked))
