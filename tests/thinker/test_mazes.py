"""The example's mazes: a task of one's own on a grid, against its definition."""

import sys
from pathlib import Path

import pytest
import torch

from thinker import TASKS, AtTokens

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from mazes import Maze

TASKS.pop("maze")  # importing the example registers it; other tests count the package's own tasks


def ways(cells, cell):
    """Open cells beside one."""
    return [
        other
        for other in ((cell[0] + a, cell[1] + b) for a, b in ((0, 1), (1, 0), (0, -1), (-1, 0)))
        if other in cells
    ]


def maze(task, tokens, answer, length):
    """A tree of cells that has every room; the answers are the only way from start to goal."""
    places = [(i // length, i % length) for i in range(length**2)]
    cells = {place for place, token in zip(places, tokens, strict=True) if token != 1}
    assert {(r, c) for r in range(0, length, 2) for c in range(0, length, 2)} <= cells
    # with all connected: no loop
    assert sum(len(ways(cells, cell)) for cell in cells) == 2 * (len(cells) - 1)
    start, goal = (places[tokens.index(kind)] for kind in (2, 3))
    back, edge = {start: start}, [start]
    for cell in edge:
        edge += [
            other
            for other in ways(cells, cell)
            if back.setdefault(other, cell) == cell and other not in edge
        ]
    assert back.keys() == cells
    way = {goal}
    while goal != start:
        goal = back[goal]
        way.add(goal)
    assert answer == [int(place in way) for place in places if place in cells]


def test_at_tokens_a_grid_stays_one():
    lengths = torch.tensor([5, 3, 7, 4])
    before, after = (
        t.sample(torch.Generator().manual_seed(0), 4, lengths) for t in (Maze(), AtTokens(Maze()))
    )
    for row, n in enumerate(lengths.tolist()):
        for a, b in zip(before, after, strict=True):
            if a is None:
                assert b is None
            elif a is before.distance:
                asked = before.targets[row, : n * n] != -100
                assert torch.equal(a[row, : n * n][asked], b[row, -n * n :][asked])
            else:
                assert torch.equal(a[row, : n * n], b[row, -n * n :])
    assert AtTokens(Maze()).vocab_size == 4
    assert AtTokens(Maze()).input_length(7) == 49


def test_mazes_are_drawn_at_random():
    sample = Maze().sample(torch.Generator().manual_seed(0), 4000, 5)
    # of the 192 trees on 3 x 3 rooms, those that such a walk makes
    assert len((sample.tokens != 1).unique(dim=0)) > 80
    starts, goals = ((sample.tokens == kind).nonzero()[:, 1] for kind in (2, 3))
    assert len(torch.stack([starts, goals], 1).unique(dim=0)) == 9 * 8
    assert [Maze().num_samples(n) for n in (3, 4, 5)] == [2 * 12, 2 * 12, 2**4 * 72]


def test_a_mazes_distances_are_the_rounds_of_filling_dead_ends():
    sample = Maze().sample(torch.Generator().manual_seed(0), 20, 11)
    for tokens, answers, distance in zip(
        *(x.tolist() for x in (sample.tokens, sample.targets, sample.distance)), strict=True
    ):
        cells = {(i // 11, i % 11) for i, token in enumerate(tokens) if token != 1}
        ends = {(i // 11, i % 11) for i, token in enumerate(tokens) if token > 1}
        for number in range(1, 122):
            dead = {cell for cell in cells - ends if len(ways(cells, cell)) <= 1}
            assert all(distance[r * 11 + c] == number for r, c in dead)
            cells -= dead
        assert cells == {(i // 11, i % 11) for i, answer in enumerate(answers) if answer == 1}
        assert all(distance[r * 11 + c] == 1 for r, c in cells)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_maze_is_its_definition(ragged):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 8, (100,), generator=generator) if ragged else 7
    sample = Maze().sample(generator, 100, lengths)
    for row in range(100):
        side = int(lengths[row]) if ragged else 7
        tokens = sample.tokens[row][sample.mask[row]].tolist()
        assert len(tokens) == side**2
        maze(Maze(), tokens, sample.targets[row][sample.targets[row] != -100].tolist(), side)


def test_a_maze_too_small_is_refused():
    with pytest.raises(ValueError, match=r"Maze: length.*2"):
        Maze().sample(torch.Generator(), 2, 2)
