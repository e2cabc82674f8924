"""Tasks that need a look at one thing after another: pointers, and depth in brackets."""

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
    """Follow a pointer: the table of f, a start s.

    The first step answers s, and each further one is another hop.

    ``length`` counts hops: step ``length + 1`` answers f(f(…f(s))).

    Args:
        size: The size of the table; ids are its places.
        permutation: f is one; otherwise each place points anywhere.
    """

    by_step: ClassVar[bool] = True
    size: int = 10
    permutation: bool = True

    def __post_init__(self):
        at_least("Hops", size=(self.size, 2))

    @property
    def vocab_size(self) -> int:
        """The number of places."""
        return self.size

    def input_length(self, length: int) -> int:
        """The table and the start."""
        return self.size + 1

    def output_length(self, length: int) -> int:
        """Return 1, since each step has one answer."""
        return 1

    def num_samples(self, length: int) -> int:
        """Return the number of tables and starts."""
        return (math.factorial(self.size) if self.permutation else self.size**self.size) * self.size

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Table and start; the place before the first and after each hop, (B, 1 + hops, 1)."""
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
    """Find how deep in brackets each place is.

    Openings (0) less closings (1) so far, never below 0 or above ``max_depth``.

    ``length`` counts brackets.

    Args:
        max_depth: The depth at which the next bracket closes.
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
        """The number of depths, from 0."""
        return self.max_depth + 1

    def num_samples(self, length: int) -> int:
        """Return a lower bound of the number of walks.

        With ``max_depth=2``, the fewest above 1, every other bracket is a choice.
        """
        if self.max_depth == 1:
            return 1
        return 2 ** (length // 2)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """A walk between two walls."""
        lengths, longest = self.checked(generator, batch, length)
        up = torch.rand(batch, longest, generator=generator, device=generator.device) < 0.5
        depth = torch.zeros(batch, dtype=torch.long, device=generator.device)
        depths = []
        for choice in up.unbind(1):
            # at either wall there is no choice
            opens = (choice | (depth == 0)) & (depth < self.max_depth)
            depth = depth + torch.where(opens, 1, -1)
            depths.append(depth)
        after = torch.stack(depths, 1)
        # closing where the depth fell; before the first bracket it is 0
        tokens = (after < F.pad(after[:, :-1], (1, 0))).long()
        place = torch.arange(longest, device=generator.device)
        mask = place < lengths
        distance = (place + 1).expand(batch, -1)
        return Sample(
            tokens.masked_fill(~mask, 0), mask, after.masked_fill(~mask, IGNORED), distance
        )
