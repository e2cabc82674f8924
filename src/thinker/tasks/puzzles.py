"""Tasks that need several steps: following pointers, and the depth of brackets."""

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
    """A task of following pointers: the input is the table of a function f and a start s.

    The answer of the first step is s, and each further step takes one more hop. ``length`` is the
    number of hops: the answer of step ``length + 1`` is f(f(…f(s))).

    Args:
        size: The size of the table; ids are indices into it.
        permutation: Whether f is a permutation; otherwise each entry of the table is drawn
            independently.
    """

    by_step: ClassVar[bool] = True
    size: int = 10
    permutation: bool = True

    def __post_init__(self):
        at_least("Hops", size=(self.size, 2))

    @property
    def vocab_size(self) -> int:
        """The size of the table."""
        return self.size

    def input_length(self, length: int) -> int:
        """Return ``size`` + 1, for the table and the start."""
        return self.size + 1

    def output_length(self, length: int) -> int:
        """Return 1, since each step has one answer."""
        return 1

    def num_samples(self, length: int) -> int:
        """Return the number of pairs of a table and a start."""
        return (math.factorial(self.size) if self.permutation else self.size**self.size) * self.size

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Draw tables and starts.

        The targets, (B, 1 + hops, 1), are the start and the id after each hop.
        """
        hops, longest = self.checked(generator, batch, length)
        if self.permutation:
            table = torch.rand(
                batch, self.size, generator=generator, device=generator.device
            ).argsort(1)
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
    """A task of finding the depth of brackets at each position.

    The depth is the number of opening brackets (id 0) minus the number of closing brackets (id 1)
    so far. It is never below 0 or above ``max_depth``. ``length`` is the number of brackets.

    Args:
        max_depth: The maximum depth; at this depth, the next bracket always closes.
    """

    max_depth: int = 4

    def __post_init__(self):
        at_least("Depth", max_depth=(self.max_depth, 1))

    @property
    def vocab_size(self) -> int:
        """The number of ids, 2: an opening and a closing bracket."""
        return 2

    @property
    def output_size(self) -> int:
        """The number of possible depths, from 0 to ``max_depth``."""
        return self.max_depth + 1

    def num_samples(self, length: int) -> int:
        """Return a lower bound on the number of bracket sequences.

        With ``max_depth=2``, every other bracket is a free choice; larger depths leave more
        choices.
        """
        if self.max_depth == 1:
            return 1
        return 2 ** (length // 2)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Draw bracket sequences whose depth stays between 0 and ``max_depth``."""
        lengths, longest = self.checked(generator, batch, length)
        up = torch.rand(batch, longest, generator=generator, device=generator.device) < 0.5
        depth = torch.zeros(batch, dtype=torch.long, device=generator.device)
        depths = []
        for choice in up.unbind(1):
            # at depth 0 and at max_depth there is no choice
            opens = (choice | (depth == 0)) & (depth < self.max_depth)
            depth = depth + torch.where(opens, 1, -1)
            depths.append(depth)
        after = torch.stack(depths, 1)
        # a bracket closes where the depth fell; the depth before the first bracket is 0
        tokens = (after < F.pad(after[:, :-1], (1, 0))).long()
        place = torch.arange(longest, device=generator.device)
        mask = place < lengths
        distance = (place + 1).expand(batch, -1)
        return Sample(
            tokens.masked_fill(~mask, 0), mask, after.masked_fill(~mask, IGNORED), distance
        )
