"""Tasks that need a look at one thing after another: pointers, brackets, look-up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .task import IGNORED, Sample, Task, at_least, integers, register_task


@register_task("hops")
@dataclass(frozen=True, kw_only=True)
class Hops(Task):
    """Follow a pointer: the table of f, a start s; the first step answers s, and each further one is another hop.

    ``length`` counts hops: step ``length + 1`` answers f(f(…f(s))).

    Args:
        size: Of the table; ids are its places.
        permutation: f is one; otherwise each place points anywhere.
    """

    by_step: ClassVar[bool] = True
    size: int = 10
    permutation: bool = True

    def __post_init__(self):
        at_least("Hops", size=(self.size, 2))

    @property
    def vocab_size(self) -> int:
        """Places."""
        return self.size

    def input_length(self, length: int) -> int:
        """The table and the start."""
        return self.size + 1

    def output_length(self, length: int) -> int:
        """One, at each step."""
        return 1

    def num_samples(self, length: int) -> int:
        """Tables and starts."""
        return (math.factorial(self.size) if self.permutation else self.size**self.size) * self.size

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Table and start; the place before the first and after each hop, (B, 1 + hops, 1)."""
        hops, longest = self.checked(generator, batch, length)
        if self.permutation:
            table = torch.rand(batch, self.size, generator=generator, device=generator.device).argsort(1)
        else:
            table = integers(generator, self.size, batch, self.size)
        start = integers(generator, self.size, batch, 1)
        places = [start]
        for _ in range(longest):
            places.append(table.gather(1, places[-1]))
        after = torch.stack(places, 1)
        asked = torch.arange(longest + 1, device=generator.device) <= hops
        tokens = torch.cat([table, start], 1)
        targets = after.masked_fill(~asked[..., None], IGNORED)
        return Sample(tokens, torch.ones_like(tokens, dtype=torch.bool), targets)


@register_task("depth")
@dataclass(frozen=True, kw_only=True)
class Depth(Task):
    """How deep in brackets each place is: openings (0) less closings (1) so far, never below 0 or above ``max_depth``.

    ``length`` counts brackets.

    Args:
        max_depth: At which the next bracket closes.
    """

    max_depth: int = 4

    def __post_init__(self):
        at_least("Depth", max_depth=(self.max_depth, 1))

    @property
    def vocab_size(self) -> int:
        """Opening and closing."""
        return 2

    @property
    def output_size(self) -> int:
        """Depths from 0."""
        return self.max_depth + 1

    def num_samples(self, length: int) -> int:
        """At least so many walks: with ``max_depth=2``, the fewest above 1, every other bracket is a choice."""
        return 1 if self.max_depth == 1 else 2 ** (length // 2)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """A walk between two walls."""
        lengths, longest = self.checked(generator, batch, length)
        up = torch.rand(batch, longest, generator=generator, device=generator.device) < 0.5
        depth, depths = torch.zeros(batch, dtype=torch.long, device=generator.device), []
        for choice in up.unbind(1):
            opens = (choice | (depth == 0)) & (depth < self.max_depth)
            depth = depth + torch.where(opens, 1, -1)
            depths.append(depth)
        after = torch.stack(depths, 1)
        tokens = (after < F.pad(after[:, :-1], (1, 0))).long()
        place = torch.arange(longest, device=generator.device)
        mask = place < lengths
        distance = (place + 1).expand(batch, -1)
        return Sample(tokens.masked_fill(~mask, 0), mask, after.masked_fill(~mask, IGNORED), distance)


@register_task("brackets")
@dataclass(frozen=True, kw_only=True)
class Brackets(Task):
    """Whether brackets close what they open; ``length`` pairs, half of the rows balanced.

    Args:
        kinds: Of brackets; ids are openings 0 .. kinds - 1, then closings.
    """

    kinds: int = 2

    def __post_init__(self):
        at_least("Brackets", kinds=(self.kinds, 1))

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

    def num_samples(self, length: int) -> int:
        """Balanced ones: kinds^n times the n-th Catalan number."""
        return self.kinds**length * math.comb(2 * length, length) // (length + 1)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Balanced rows by a walk that never falls below 0 and ends there; in half of them one bracket is another's."""
        lengths, longest = self.checked(generator, batch, length)
        device, width = generator.device, 2 * longest
        chance = torch.rand(batch, width, generator=generator, device=device)
        kind = integers(generator, self.kinds, batch, width)
        stack = torch.zeros(batch, longest + 1, 1, dtype=torch.long, device=device)
        depth, tokens = torch.zeros(batch, 1, dtype=torch.long, device=device), []
        for i in range(width):
            left = 2 * lengths - i
            opens = ((depth == 0) | (chance[:, i : i + 1] < 0.5)) & (depth < left)
            closing = stack[:, :, 0].gather(1, (depth - 1).clamp(min=0))
            tokens.append(torch.where(opens, kind[:, i : i + 1], closing + self.kinds))
            stack[:, :, 0].scatter_(1, depth.clamp(max=longest), torch.where(opens, kind[:, i : i + 1], closing))
            depth = (depth + torch.where(opens, 1, -1)).clamp_(min=0)
        tokens_of_rows = torch.cat(tokens, 1)
        at = torch.rand(batch, 1, generator=generator, device=device).mul(2 * lengths).long()
        other = tokens_of_rows.gather(1, at) + 1 + integers(generator, max(1, self.vocab_size - 1), batch, 1)
        spoilt = torch.rand(batch, 1, generator=generator, device=device) < 0.5
        tokens_of_rows = tokens_of_rows.scatter(
            1, at, torch.where(spoilt, other % self.vocab_size, tokens_of_rows.gather(1, at))
        )
        mask = torch.arange(width, device=device) < 2 * lengths
        return Sample(tokens_of_rows.masked_fill(~mask, 0), mask, (~spoilt).long())


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
        at_least("LookUp", keys=(self.keys, 1), values=(self.values, 2))

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

    def num_samples(self, length: int) -> int:
        """Keys in order, their values, the question."""
        return math.perm(self.keys, length) * self.values**length * length

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Pairs, then the question."""
        lengths, longest = self.checked(generator, batch, length)
        if longest > self.keys:
            raise ValueError(f"LookUp: length {longest}; needed at most as many as keys, {self.keys}")
        device = generator.device
        keys = torch.rand(batch, self.keys, generator=generator, device=device).argsort(1)[:, :longest]
        values = integers(generator, self.values, batch, longest)
        asked = torch.rand(batch, 1, generator=generator, device=device).mul(lengths).long()
        pairs = torch.stack([keys, values + self.keys], 2).flatten(1)
        tokens = F.pad(pairs, (0, 1)).scatter(1, 2 * lengths, keys.gather(1, asked))
        mask = torch.arange(2 * longest + 1, device=device) <= 2 * lengths
        return Sample(tokens.masked_fill(~mask, 0), mask, values.gather(1, asked))
