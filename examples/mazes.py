"""Mazes as a custom task: a grid that is read row by row, with an answer for each cell.

Importing this file registers the task "maze", which `solve_puzzles.py --puzzle maze` learns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from thinker import Task, register_task
from thinker.tasks import Sample

OPEN, WALL, START, GOAL = range(4)


@register_task("maze")
@dataclass(frozen=True, kw_only=True)
class Maze(Task):
    """The task of finding the cells on the path from start to goal, in a maze without loops.

    ``length`` is the maze's side in cells; walls are cells, too. The cells at even rows and columns
    are rooms, and a random walk with backtracking opens the walls between rooms. The answer is 1
    for cells on the path, including both ends, and 0 for other open cells; walls have no answer.
    The path can be found by filling dead ends round by round. The ``distance`` of an answer is the
    round that fills its cell, or 1 on the path.
    """

    min_length: ClassVar[int] = 3
    grid: ClassVar[bool] = True
    vocab_size: ClassVar[int] = 4  # open, wall, start, goal
    output_size: ClassVar[int] = 2  # off the path, on the path

    def input_length(self, length: int) -> int:
        """Return the number of cells."""
        return length**2

    output_length = input_length

    def num_samples(self, length: int) -> int:
        """Return an estimate of the number of mazes: pairs of ends times trees of rooms."""
        side = (length + 1) // 2
        return 2 ** (side - 1) ** 2 * side**2 * (side**2 - 1)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Draw trees that join the rooms, two rooms as the ends, and the path between the ends."""
        lengths, longest = self.checked(generator, batch, length)
        cells, ends = _trees(generator, lengths, longest), _two_rooms(generator, lengths, longest)
        filled = _filled(cells, ends, longest)
        kinds = torch.tensor([[START, GOAL]], device=ends.device).expand_as(ends)
        tokens = torch.where(cells, OPEN, WALL).scatter(1, ends, kinds)
        place = torch.arange(longest**2, device=generator.device)
        mask = place < lengths**2
        # maps a cell of each row's own square to its cell in the largest square
        index = (place // lengths * longest + place % lengths).clamp(max=longest**2 - 1)
        tokens, filled, cells = (x.gather(1, index) for x in (tokens, filled, cells))
        targets = (filled == 0).long().masked_fill(~(cells & mask), -100)  # no answer
        return Sample(tokens.masked_fill(~mask, 0), mask, targets, filled.clamp(min=1))


def _trees(
    generator: torch.Generator, lengths: Tensor, longest: int
) -> Tensor:  # (B, 1) to (B, longest²)
    """Return which cells are open; a maze below the largest size is at the upper left."""
    wide = longest + 4  # with a border of two cells that are never entered
    place = torch.arange(wide**2, device=lengths.device)
    row, column = place // wide - 2, place % wide - 2
    taken = (row < 0) | (column < 0) | (row >= lengths) | (column >= lengths)
    steps = torch.tensor([-wide, wide, -1, 1], device=lengths.device)
    at = torch.randint(1 << 30, (len(lengths), 2), generator=generator, device=generator.device) % (
        (lengths + 1) // 2
    )
    here = ((2 * at[:, :1] + 2) * wide + 2 * at[:, 1:] + 2).clone()
    opened, back = torch.zeros_like(taken).scatter(1, here, value=True), torch.where(taken, 0, here)
    taken = taken.scatter(1, here, value=True)
    for _ in range(2 * ((longest + 1) // 2) ** 2):
        free = ~taken.gather(1, here + 2 * steps)
        chance = torch.rand(free.shape, generator=generator, device=free.device)
        step = steps[chance.masked_fill(~free, -1.0).argmax(1, keepdim=True)]
        goes = free.any(1, keepdim=True)
        before, here = here, torch.where(goes, here + 2 * step, back.gather(1, here))
        opened = opened.scatter(
            1, torch.cat([torch.where(goes, before + step, before), here], 1), value=True
        )
        taken = taken.scatter(1, here, value=True)
        back = back.scatter(1, here, torch.where(goes, before, back.gather(1, here)))
    return opened.view(-1, wide, wide)[:, 2:-2, 2:-2].flatten(1)


def _two_rooms(generator: torch.Generator, lengths: Tensor, longest: int) -> Tensor:  # (B, 2) cells
    """Draw two different rooms, and return their cell indices."""
    side = (lengths + 1) // 2
    first, other = (
        torch.randint(1 << 30, (len(lengths), 1), generator=generator, device=generator.device)
        for _ in range(2)
    )
    first = first % side**2
    other = other % (side**2 - 1)
    both = torch.cat([first, other + (other >= first)], 1)
    return 2 * (both // side) * longest + 2 * (both % side)


def _filled(cells: Tensor, ends: Tensor, longest: int) -> Tensor:  # (B, longest²)
    """Return the round, from 1, in which each cell is filled as a dead end; 0 on the path."""
    ends_kept = torch.zeros_like(cells).scatter(1, ends, value=True)
    filled, number = torch.zeros(cells.shape, dtype=torch.long, device=cells.device), 0
    while True:
        number += 1
        around = F.pad(cells.view(-1, longest, longest).long(), (1, 1, 1, 1))
        ways = (
            around[:, 2:, 1:-1] + around[:, :-2, 1:-1] + around[:, 1:-1, 2:] + around[:, 1:-1, :-2]
        )
        dead = cells & ~ends_kept & (ways.flatten(1) <= 1)
        if not bool(dead.any()):
            return filled
        filled, cells = filled.masked_fill(dead, number), cells & ~dead
