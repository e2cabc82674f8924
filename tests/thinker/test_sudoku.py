"""Sudoku against a plain solver in Python: one solution each, by one rule, and symmetries."""

import itertools

import pytest
import torch

from thinker.tasks import sudoku_fill, sudoku_puzzles, sudoku_shuffle


def allowed(cells, place, side, box):
    """Digits that no cell of the same row, column or box has."""
    row, column = divmod(place, side)
    seen = {cells[row * side + i] for i in range(side)} | {
        cells[i * side + column] for i in range(side)
    }
    corner = row // box * box * side + column // box * box
    seen |= {cells[corner + a * side + b] for a, b in itertools.product(range(box), range(box))}
    return set(range(1, side + 1)) - seen


def solutions(cells, box, most=2):
    """Up to ``most`` of them, by trying out."""
    side = box**2
    empty = {
        place: allowed(cells, place, side, box) for place, digit in enumerate(cells) if not digit
    }
    if not empty:
        return [cells]
    place = min(empty, key=lambda p: len(empty[p]))
    found = []
    for digit in empty[place]:
        found += solutions([*cells[:place], digit, *cells[place + 1 :]], box, most - len(found))
        if len(found) >= most:
            break
    return found


def is_easy(cells, box):
    """Whether filling cells that have only one possible digit solves a puzzle."""
    side = box**2
    now, changed = list(cells), True
    while changed:
        can = {
            place: allowed(now, place, side, box) for place, digit in enumerate(now) if not digit
        }
        sure = {place: min(digits) for place, digits in can.items() if len(digits) == 1}
        for place, digit in sure.items():
            now[place] = digit
        changed = bool(sure)
    return all(now)


@pytest.mark.parametrize(("box", "count"), [(2, 40), (3, 4)])
def test_puzzles_have_one_solution_which_one_rule_finds_and_no_clue_too_many(box, count):
    puzzles, answers = sudoku_puzzles(count, box=box, seed=1)
    assert puzzles.shape == answers.shape == (count, box**4)
    assert len(puzzles.unique(dim=0)) == count
    for puzzle, answer in zip(puzzles.tolist(), answers.tolist(), strict=True):
        assert solutions(puzzle, box) == [answer]
        assert is_easy(puzzle, box)
        for place in [p for p, digit in enumerate(puzzle) if digit][:: 1 if box == 2 else 6]:
            fewer = [*puzzle[:place], 0, *puzzle[place + 1 :]]
            assert not is_easy(fewer, box)


def test_four_by_four_grids_are_all_there():
    """There are 288 of them; no clue less than four, as is known (Taalman 2007)."""
    puzzles, answers = sudoku_puzzles(4000, box=2)
    assert len(answers.unique(dim=0)) == 288
    assert int((puzzles > 0).sum(1).min()) == 4
    with pytest.raises(
        ValueError,
        match=r"sudoku_puzzles: found only 4\d{3} different puzzles with box=2; expected 4609",
    ):
        sudoku_puzzles(16 * 288 + 1, box=2, clues=15)


def test_as_many_clues_as_were_asked_for():
    puzzles, _ = sudoku_puzzles(20, box=2, clues=8)
    assert set((puzzles > 0).sum(1).tolist()) == {8}
    assert torch.equal(puzzles, sudoku_puzzles(20, box=2, clues=8)[0])
    assert not torch.equal(puzzles, sudoku_puzzles(20, box=2, clues=8, seed=1)[0])


@pytest.mark.parametrize("box", [2, 3])
def test_shuffled_puzzles_are_as_hard_and_have_the_shuffled_solution(box):
    puzzles, answers = (x.repeat(30, 1) for x in sudoku_puzzles(1, box=box))
    others, solved = sudoku_shuffle(box)(torch.Generator().manual_seed(0), puzzles, answers)
    assert len(others.unique(dim=0)) > 25
    for puzzle, answer in list(zip(others.tolist(), solved.tolist(), strict=True))[:5]:
        assert solutions(puzzle, box) == [answer]
        assert is_easy(puzzle, box)


@pytest.mark.parametrize("box", [2, 3])
def test_shuffling_reaches_every_symmetry(box):
    """Where the cells and digits of one grid come to lie."""
    side = box**2
    answers = sudoku_puzzles(1, box=box)[1].expand(1000, -1)
    numbered = torch.zeros_like(answers)
    numbered[:, 1] = answers[:, 1]
    moved, _ = sudoku_shuffle(box)(torch.Generator().manual_seed(0), numbered, answers)
    # bands and lines of both axes
    assert set((moved > 0).nonzero()[:, 1].tolist()) == set(range(side**2))
    assert set(moved[moved > 0].tolist()) == set(range(1, side + 1))  # digits
    numbered[:, 0] = 1  # and its neighbor on the left
    moved, _ = sudoku_shuffle(box)(torch.Generator().manual_seed(0), numbered, answers)
    pairs = (moved > 0).nonzero()[:, 1].view(-1, 2)
    rows, columns = pairs // side, pairs % side
    across, down = rows[:, 0] == rows[:, 1], columns[:, 0] == columns[:, 1]
    assert (across | down).all()
    assert 0.4 < float(across.float().mean()) < 0.6  # turned or not
    apart = torch.where(across[:, None], columns, rows) // box
    assert (apart[:, 0] == apart[:, 1]).all()  # still in one box


def test_grids_are_drawn_at_random():
    _, answers = sudoku_puzzles(60, box=3, clues=70)
    assert len(answers.unique(dim=0)) > 50
    for cell in (0, 40, 80):
        assert len(answers[:, cell].unique()) == 9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sudoku_shuffle(3)(None, torch.zeros(1, 16), torch.zeros(1, 16)),
            r"sudoku_shuffle:.*\[1.*16\].*3",
        ),
        (
            lambda: sudoku_shuffle(2)(None, torch.full((1, 16), 5), torch.zeros(1, 16)),
            r"sudoku_shuffle:.*cells.*5.*5.*0.*4",
        ),
        (
            lambda: sudoku_shuffle(3)(None, [[0] * 81], [[0] * 81]),
            r"sudoku_shuffle:.*\(N.*box\^4\)",
        ),
        (
            lambda: sudoku_shuffle(2)(None, torch.zeros(2, 81), torch.zeros(2, 81)),
            "sudoku_shuffle: puzzles",
        ),
        (lambda: sudoku_puzzles(2.5), r"sudoku_puzzles:.*count.*2.5.*1"),
        (lambda: sudoku_puzzles(2, clues=1.5), r"sudoku_puzzles:.*clues.*1.5.*0.*80"),
        (lambda: sudoku_puzzles(True), "count is True"),
        (lambda: sudoku_puzzles(2, seed=None), "seed is None"),
    ],
)
def test_what_is_no_sudoku_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("count", 0, "1 or more"),
        ("box", 4, "one of 2, 3"),
        ("clues", 81, "0 to 80"),
        ("clues", -1, "0 to 80"),
    ],
)
def test_what_cannot_be_made_is_refused(name, value, needed):
    with pytest.raises(
        ValueError, match=f"sudoku_puzzles: {name} is {value!r}, expected .*{needed}"
    ):
        sudoku_puzzles(**{"count": 1, name: value})


def test_training_sees_every_number_of_clues():
    puzzles, answers = sudoku_puzzles(40, clues=30)
    augment = sudoku_shuffle(3, clues=(30, 56))
    others, solved = augment(torch.Generator().manual_seed(0), puzzles, answers)
    counts = (others > 0).sum(1)
    assert counts.min() < 36
    assert counts.max() > 50
    assert counts.max() <= 56
    assert bool(((others == 0) | (others == solved)).all())
    filled = sudoku_fill(torch.Generator().manual_seed(0), puzzles, answers, 20)
    assert torch.equal(filled, puzzles)  # they have more
    with pytest.raises(ValueError, match="sudoku_shuffle: expected clues of 0 <= least"):
        sudoku_shuffle(2, clues=(4, 17))
