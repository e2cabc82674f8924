"""Train a small thinker to solve puzzles, and solve more of them by thinking longer.

The thinker keeps a latent, a vector that each step of thought updates, for each cell of a puzzle.

    python examples/solve_puzzles.py --puzzle sudoku9

This command learns 9 x 9 Sudoku in three minutes on one CPU core, from 2000 puzzles and their
symmetric variants, with 26 to 56 clues. The thinker is tested on unseen puzzles with 50, 40 and 30
clues. ``sudoku4`` learns 4 x 4 Sudoku in less than a minute, from puzzles that need every clue they
have. ``maze`` learns mazes of up to 9 x 9 cells in eight minutes and solves larger ones. ``--out``
names a folder for a plot (extra ``plot``), and ``--json`` a file for the results: a list of
{length, steps, symbols, rows}. Here symbols is the fraction of cells that are right, rows is the
fraction of puzzles that are right in every cell, and length is a maze's side or a number of clues.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mazes  # noqa: F401, registers the task "maze"
import torch
from common import ask_where, make_room, save_curves
from transformers import set_seed

import thinker as th
from thinker.report import Curves
from thinker.tasks import TensorTask, sudoku_fill, sudoku_puzzles, sudoku_shuffle


@dataclass(frozen=True, kw_only=True)
class Puzzle:
    """The settings of one kind of puzzle: data, model, training and tests."""

    train: th.CurriculumDataset
    tests: dict[int, th.CurriculumDataset]  # by a maze's side, or a number of clues
    steps: Callable[[int], list[int]]  # steps to test, for a side or a number of clues
    label: str  # format of a test's number
    model: dict[str, Any]
    trainer: dict[str, Any]
    iterations: int
    learning_rate: float

    def measured(self, model: th.LatentThinker, samples: int) -> Curves:
        """Return the accuracy on every test set, after each number of steps to test."""
        found = []
        for number, data in self.tests.items():
            # a data set that is made from given rows has the length 1
            length = 1 if data.task.default_length == 1 else number
            steps = self.steps(number)
            found.append(th.evaluate_steps(model, data, [length], n_steps=steps, samples=samples))
        steps, cells = (tuple(getattr(c, name)[0] for c in found) for name in ("n_steps", "cells"))
        return Curves(tuple(self.tests), steps, cells)


def rows_of(
    puzzles: torch.Tensor, solutions: torch.Tensor, seed: int, augment: Any = None
) -> th.CurriculumDataset:
    """Return a data set of puzzles, of which none are held out."""
    symbols = int(solutions.max()) + 1  # digits, and 0 for an empty cell
    task = TensorTask(puzzles, solutions, grid=True, augment=augment, symbols=symbols)
    return th.CurriculumDataset(
        th.AtTokens(task), n_step=(1, 3), batch_size=16, holdout=0.0, seed=seed
    )


def sudoku4(seed: int, smoke: bool) -> Puzzle:
    """Return the settings of 4 x 4 Sudoku; a tenth of its 288 solutions is kept for the test."""
    count, tested = (200, 20) if smoke else (8000, 800)
    puzzles, solutions = sudoku_puzzles(count, box=2, seed=seed)
    # equal numbers mean equal solutions; the numbers follow the order of the solutions
    which = torch.unique(solutions, dim=0, return_inverse=True)[1]
    # test on the first solutions, so that no training solution begins like them
    test = which < which.max() * tested // count + 1
    # symmetries turn every 4 x 4 grid into every other, so training does not augment its puzzles
    return Puzzle(
        train=rows_of(puzzles[~test], solutions[~test], seed),
        # 4 x 4 puzzles that need every clue have 4 to 6 clues
        tests={5: rows_of(puzzles[test], solutions[test], seed)},
        steps=lambda clues: [1, 2, 4, 8, 16, 32],
        label="about {} clues",
        model={"hidden_size": 64, "mixer": "mlp", "layers_per_step": 2},
        trainer={"segments": 4},
        iterations=2000,
        learning_rate=3e-3,
    )


def sudoku9(seed: int, smoke: bool) -> Puzzle:
    """Return the settings of 9 x 9 Sudoku.

    Each puzzle can be solved by filling, again and again, a cell that has only one possible digit.
    Training augments the puzzles with their symmetries.
    """
    count, tested = (12, 4) if smoke else (2000, 256)
    puzzles, solutions = sudoku_puzzles(count + tested, clues=26, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tests = {}
    for clues in (50, 40, 30):
        filled = sudoku_fill(generator, puzzles[count:], solutions[count:], clues)
        tests[clues] = rows_of(filled, solutions[count:], seed)
    augment = sudoku_shuffle(3, clues=(26, 56))
    return Puzzle(
        train=rows_of(puzzles[:count], solutions[:count], seed, augment),
        tests=tests,
        steps=lambda clues: [1, 4, 16, 32, 64],
        label="{} clues",
        model={"hidden_size": 32 if smoke else 64, "mixer": "mlp", "layers_per_step": 2},
        trainer={"segments": 4},
        iterations=2200,
        learning_rate=3e-3,
    )


def maze(seed: int, smoke: bool) -> Puzzle:
    """Return the settings of mazes of increasing size.

    A latent attends to the eight cells around it, so a larger maze needs only more steps.
    """
    data = th.CurriculumDataset(
        th.AtTokens(th.make_task("maze")),
        th.Frontier(max_length=9, min_length=3),
        batch_size=32,
        n_step=(1, 16),
        seed=seed,
    )
    return Puzzle(
        train=data,
        tests=dict.fromkeys((9,) if smoke else (9, 13, 17), data),
        steps=lambda side: [side, 2 * side, 4 * side, 8 * side],
        label="{0} x {0}",
        model={"hidden_size": 32, "positions": "rotary_2d", "window": 2, "max_input_length": 33**2},
        trainer={"step_loss": th.Reach()},
        iterations=4000,
        learning_rate=3e-3,
    )


PUZZLES = {"sudoku4": sudoku4, "maze": maze, "sudoku9": sudoku9}


def main() -> None:
    """Train the thinker, measure its accuracy, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--puzzle", choices=PUZZLES, default="sudoku9")
    parser.add_argument(
        "--iterations", type=int, help="training iterations; default: 2000 to 4000, by puzzle"
    )
    parser.add_argument("--samples", type=int, default=256, help="puzzles of each size to test")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    ask_where(parser)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run for a few seconds, to test the script: sets --iterations and --samples",
    )
    options = parser.parse_args()
    if options.smoke:
        options.iterations, options.samples = 8, 8
    if min(options.samples, 1 if options.iterations is None else options.iterations) < 1:
        parser.error("expected --samples and --iterations of 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected --device cpu, because torch finds no GPU")
    draw = make_room(parser, options)
    if options.device == "cpu":
        torch.set_num_threads(1)
    set_seed(options.seed)
    started = time.process_time()
    puzzle = PUZZLES[options.puzzle](options.seed, options.smoke)
    iterations = options.iterations or puzzle.iterations
    model = th.LatentThinker(
        th.ThinkerConfig(**puzzle.train.sizes() | {"latent_init": "tokens"} | puzzle.model)
    )
    arguments = th.thinker_arguments(
        "runs/solve_puzzles",
        max_steps=iterations,
        learning_rate=puzzle.learning_rate,
        warmup_steps=50,
        logging_steps=max(1, iterations // 6),
        seed=options.seed,
        use_cpu=options.device == "cpu",
    )
    th.ThinkerTrainer(model, arguments, train_dataset=puzzle.train, **puzzle.trainer).train()
    seconds = time.process_time() - started
    print(f"{model.num_parameters()} parameters, {iterations} iterations, {seconds:.0f} CPU s")
    curves = puzzle.measured(model, options.samples)
    for row in curves.rows():
        print(
            puzzle.label.format(int(row["length"]))
            + ", {steps} steps: {symbols:.2%} of cells, {rows:.2%} of whole puzzles".format(**row)
        )
    save_curves(curves, options.puzzle, options, draw)


if __name__ == "__main__":
    main()
