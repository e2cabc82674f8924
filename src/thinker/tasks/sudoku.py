"""Sudoku: puzzles with one solution each, and symmetries that make new puzzles.

A grid is read row by row. 0 is an empty cell, and digits start at 1. All functions work on batches:
possible digits are (N, L, S), for N puzzles of L = S² cells and S = box² digits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Literal

import torch
from torch import Tensor

from model_components._checks import Range, Whole, check_value

from .task import integers


def sudoku_puzzles(
    count: int, *, box: int = 3, clues: int = 0, seed: int = 0
) -> tuple[Tensor, Tensor]:  # (count, L) twice
    """Make different puzzles with one solution each, and return them and their solutions.

    0 is an empty cell, and digits start at 1. A puzzle can be solved by one rule: fill cells that
    have only one possible digit.

    Args:
        count: The number of puzzles.
        box: Side of a box: 2 for puzzles of 4 x 4 cells, 3 for 9 x 9.
        clues: The number of clues at which the removal of digits stops. It stops earlier if the
            rule needs each of the remaining clues to solve the puzzle. Then puzzles of 9 x 9 cells
            have 20 to 30 clues, and puzzles of 4 x 4 cells have 4 to 6.
        seed: The seed of all random choices.

    Raises:
        ValueError: An argument is invalid, or fewer than ``count`` puzzles were found.

    >>> puzzles, solutions = sudoku_puzzles(2, box=2)
    >>> (
    ...     puzzles.shape,
    ...     bool(((puzzles == 0) | (puzzles == solutions)).all()),
    ...     solutions.sum(1).tolist(),
    ... )
    (torch.Size([2, 16]), True, [40, 40])
    """
    for name, value, kind in (
        ("box", box, Literal[2, 3]),
        ("count", count, Whole),
        ("clues", clues, Annotated[int, Range(least=0, most=box**4 - 1)]),
        ("seed", seed, int),
    ):
        check_value("sudoku_puzzles", name, value, kind)
    generator = torch.Generator().manual_seed(seed)
    solution_of: dict[tuple[int, ...], Tensor] = {}
    dry = 0
    while len(solution_of) < count:
        before = len(solution_of)
        # twice the missing number, in case of duplicates; 512 limits the memory
        solutions = _full_grids(generator, min(2 * (count - before) + 8, 512), box)
        puzzles = _dug(generator, solutions, box, clues)
        for puzzle, solution in zip(puzzles, solutions, strict=True):
            solution_of.setdefault(tuple(puzzle.tolist()), solution)
        dry = dry + 1 if len(solution_of) == before else 0
        if dry == 8:
            raise ValueError(
                f"sudoku_puzzles: found only {len(solution_of)} different puzzles with box={box}; "
                f"expected {count}; there may be no more, so lower count, or change clues"
            )
    return torch.tensor(list(solution_of)[:count]), torch.stack(list(solution_of.values())[:count])


def sudoku_fill(
    generator: torch.Generator,
    puzzles: Tensor,  # (N, L)
    solutions: Tensor,  # (N, L)
    clues: int | Tensor,  # or (N,)
) -> Tensor:  # (N, L)
    """Fill in digits of the solutions, in random cells, until puzzles have ``clues`` clues.

    Puzzles with at least as many clues do not change.

    >>> puzzles, solutions = sudoku_puzzles(2, box=2)
    >>> filled = sudoku_fill(torch.Generator().manual_seed(0), puzzles, solutions, 12)
    >>> (filled > 0).sum(1).tolist(), bool(((filled == 0) | (filled == solutions)).all())
    ([12, 12], True)
    """
    is_empty = puzzles == 0
    wanted = torch.as_tensor(clues, device=puzzles.device).expand(len(puzzles))
    missing = wanted - (~is_empty).sum(1)
    drawn = torch.rand(puzzles.shape, generator=generator, device=generator.device)
    # the random rank of each empty cell in its puzzle; given cells come last
    rank = drawn.masked_fill(~is_empty, 2.0).argsort(1).argsort(1)
    return torch.where(is_empty & (rank < missing[:, None]), solutions, puzzles)


def sudoku_shuffle(
    box: int = 3, *, clues: tuple[int, int] | None = None
) -> Callable[[torch.Generator, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return an augmentation that turns each puzzle into a random equivalent one.

    It renames the digits, permutes the rows and columns within bands and the bands themselves, and
    transposes half of the grids.

    Do not use this augmentation for 4 x 4 cells: there are so few solutions that a shuffled puzzle
    can equal a held-out one.

    Args:
        box: Side of a box.
        clues: The fewest and most clues. A number of clues in this range is drawn for each puzzle,
            and `sudoku_fill` fills in digits up to that number. A model that trains on all numbers
            of clues at once learns rules from easy puzzles and can use them in hard ones. Default:
            puzzles keep their clues.

    Returns:
        A function of (generator, puzzles (N, L), solutions (N, L)), as `TensorTask` takes for
        ``augment``.
    """
    if clues is not None and not 0 <= clues[0] <= clues[1] <= box**4:
        raise ValueError(
            f"sudoku_shuffle: expected clues of 0 <= least <= most <= {box**4}, got {clues!r}"
        )
    side = box**2

    def lines(generator: torch.Generator, rows: int) -> Tensor:  # (N, S)
        bands = torch.rand(rows, box, generator=generator, device=generator.device).argsort(1)
        inside = torch.rand(rows, box, box, generator=generator, device=generator.device).argsort(2)
        return (bands[:, :, None] * box + inside).flatten(1)

    def shuffle(
        generator: torch.Generator, puzzles: Tensor, solutions: Tensor
    ) -> tuple[Tensor, Tensor]:
        _check("sudoku_shuffle", puzzles, box)
        n = len(puzzles)
        device = generator.device
        row = lines(generator, n)
        column = lines(generator, n)
        turned = integers(generator, 2, n, 1, 1).bool()
        cells = row[:, :, None] * side + column[:, None]
        cells = torch.where(turned, cells.transpose(1, 2), cells).flatten(1)
        names = torch.rand(n, side, generator=generator, device=device).argsort(1) + 1
        names = torch.cat([torch.zeros_like(names[:, :1]), names], 1)
        puzzles, solutions = (names.gather(1, x.gather(1, cells)) for x in (puzzles, solutions))
        if clues is not None:
            fewest, most = clues
            wanted = fewest + integers(generator, most - fewest + 1, n)
            puzzles = sudoku_fill(generator, puzzles, solutions, wanted)
        return puzzles, solutions

    return shuffle


def _check(what: str, puzzles: Tensor, box: int) -> None:
    """Check that puzzles are a tensor with a valid shape and valid digits."""
    if not isinstance(puzzles, Tensor):
        raise ValueError(
            f"{what}: puzzles are a {type(puzzles).__name__}; expected a tensor (N, box^4)"
        )
    if box not in (2, 3) or puzzles.dim() != 2 or puzzles.shape[1] != box**4:
        raise ValueError(
            f"{what}: puzzles have shape {list(puzzles.shape)}, box is {box!r}; expected shape "
            "(N, box^4), and box 2 or 3"
        )
    if len(puzzles) and not 0 <= int(puzzles.min()) <= int(puzzles.max()) <= box**2:
        raise ValueError(
            f"{what}: cells are {int(puzzles.min())} to {int(puzzles.max())}; expected 0 to "
            f"{box**2}"
        )


@lru_cache
def _units(box: int) -> Tensor:  # (3 S, L) float
    """Return the cells of each row, column and box."""
    side = box**2
    place = torch.arange(side**2)
    row = place // side
    column = place % side
    kinds = (row, column, row // box * box + column // box)
    # floats, since integer matrix products are slow
    return torch.cat([torch.arange(side)[:, None] == kind for kind in kinds]).float()


@lru_cache
def _peers(box: int) -> Tensor:  # (L, L) float
    """Return, for each cell, the other cells of its row, column and box."""
    units = _units(box)
    return ((units.T @ units) > 0).float().fill_diagonal_(0)


def _possible(puzzles: Tensor, box: int) -> Tensor:
    """Return the possible digits of each cell: all for an empty cell, otherwise the given digit."""
    digits = torch.arange(1, box**2 + 1)
    return (puzzles[..., None] == digits) | (puzzles == 0)[..., None]


def _solved(can: Tensor) -> Tensor:  # (N,)
    return (can.sum(2) == 1).all(1)


def _narrowed(
    can: Tensor,  # (N, L, S)
    box: int,
    *,
    hidden: bool = True,
    until: Tensor | None = None,  # (N,)
) -> Tensor:  # (N, L, S)
    """Remove impossible digits until nothing changes.

    If a puzzle has a contradiction, all of its digits are removed.

    Args:
        can: The possible digits of each cell.
        box: Side of a box.
        hidden: Whether to also place digits that fit in only one cell of a row, column or box.
        until: A cell of each puzzle; work on the puzzle stops when this cell has one digit.
    """
    can = can.clone()
    going = torch.arange(len(can))
    units = _units(box)
    peers = _peers(box)
    one = torch.ones(box**2)  # matrix products with it count digits faster than sums do
    while len(going):
        before = can[going].float()
        alone = before * ((before @ one) == 1)[..., None]
        now = before * ((peers @ alone) == 0)
        places = units @ now  # (N, 3 S, S): in how many cells of a unit a digit fits
        # a cell without a digit, or a digit without a cell
        broken = ((now @ one) == 0).any(1) | (places == 0).flatten(1).any(1)
        if hidden:
            # digits that fit nowhere else in one of the cell's units
            only = now * ((units.T @ (places == 1).float()) > 0)
            now = torch.where(((only @ one) > 0)[..., None], only, now)
        now *= ~broken[:, None, None]
        can[going] = now.bool()
        goes_on = (now != before).flatten(1).any(1) & ~broken
        if until is not None:
            goes_on &= (now[torch.arange(len(now)), until[going]] @ one) != 1
        going = going[goes_on]
    return can


def _choose(generator: torch.Generator, can: Tensor) -> tuple[Tensor, Tensor]:
    """Choose an undecided cell and one of its possible digits at random for each unsolved puzzle.

    The cell has the fewest possible digits.
    """
    left = can.sum(2).float()
    # the noise is below 1, so it only breaks ties
    order = left + torch.rand(left.shape, generator=generator)
    cell = order.masked_fill(left <= 1, float("inf")).argmin(1)
    of_cell = can[torch.arange(len(can)), cell]
    chance = torch.rand(of_cell.shape, generator=generator).masked_fill(~of_cell, -1.0)
    return cell, chance.argmax(1)


def _full_grids(generator: torch.Generator, count: int, box: int) -> Tensor:  # (count, L)
    """Make random solved grids.

    Random digits are placed one after another. If no digit fits in a cell of a grid, the grid
    starts again.
    """
    empty = torch.ones(count, box**4, box**2, dtype=torch.bool)
    can = empty.clone()
    while True:
        can[~can.any(2).all(1)] = True
        which = (~_solved(can)).nonzero()[:, 0]
        if not len(which):
            return can.long().argmax(2) + 1
        cell, digit = _choose(generator, can[which])
        can[which, cell] = False
        can[which, cell, digit] = True
        can[which] = _narrowed(can[which], box)


def _dug(generator: torch.Generator, solutions: Tensor, box: int, clues: int) -> Tensor:  # (N, L)
    """Remove digits in random order, but keep those that the rule needs to solve the puzzle."""
    puzzles = solutions.clone()
    for cells in torch.rand(solutions.shape, generator=generator).argsort(1).unbind(1):
        rows = ((puzzles > 0).sum(1) > clues).nonzero()[:, 0]
        cell = cells[rows]
        fewer = puzzles[rows]
        at = torch.arange(len(rows))
        fewer[at, cell] = 0
        # once the removed digit is found again, the other cells are solved as before
        can = _narrowed(_possible(fewer, box), box, hidden=False, until=cell)
        enough = can[at, cell].sum(1) == 1
        puzzles[rows[enough]] = fewer[enough]
    return puzzles
