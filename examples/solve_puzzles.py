"""Train a small thinker to solve puzzles, and solve more of them by thinking longer.

Each cell is a latent.

python examples/solve_puzzles.py --puzzle sudoku4

learns 4 x 4 Sudoku in a minute and a half on one CPU core, from puzzles that need every clue they
have; it is tested on puzzles whose solutions it has never seen, after one step and after many.
``maze`` learns mazes of up to 9 x 9 cells in eight minutes and solves larger ones; ``sudoku9`` is
Sudoku of 9 x 9 cells, for a GPU (``--device cuda``). ``--out`` takes a picture (extra ``plot``),
``--json`` the figures: a list of {length, steps, symbols, rows}, where rows are whole puzzles and
length is a maze's side.
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
from thinker.tasks import TensorTask, sudoku_puzzles, sudoku_shuffle


@dataclass(frozen=True, kw_only=True)
class Puzzle:
    """What is learned, how, and on what it is tested."""

    train: th.CurriculumDataset
    test: th.CurriculumDataset
    lengths: tuple[int, ...]
    steps: Callable[[int], list[int]]  # at which to look, of a length
    model: dict[str, Any]
    trainer: dict[str, Any]
    iterations: int
    learning_rate: float


def sudoku(box: int, count: int, tested: int, seed: int, **recipe: Any) -> Puzzle:
    """Puzzles of one kind, some of whose solutions are kept for the test."""
    puzzles, solutions = sudoku_puzzles(count, box=box, seed=seed)
    # the same number, the same solution, in order
    which = torch.unique(solutions, dim=0, return_inverse=True)[1]
    # the first ones: none in training begins as they do
    test = which < which.max() * tested // count + 1
    # every 4 x 4 grid can be made of every other: there training makes no others of its puzzles
    others = sudoku_shuffle(box) if box > 2 else None
    parts = [
        th.CurriculumDataset(
            th.AtTokens(TensorTask(puzzles[rows], solutions[rows], grid=True, augment=augment)),
            n_step=(1, 4),
            holdout=0.0,
            seed=seed,
        )
        for rows, augment in ((~test, others), (test, None))
    ]
    return Puzzle(
        train=parts[0],
        test=parts[1],
        lengths=(1,),
        steps=lambda length: [1, 2, 4, 8, 16, 32],
        learning_rate=3e-3,
        trainer={"segments": 4},
        **recipe,
    )


def sudoku4(seed: int, smoke: bool) -> Puzzle:
    """A tenth of the 288 solutions that there are is kept for the test."""
    return sudoku(
        2,
        200 if smoke else 8000,
        20 if smoke else 800,
        seed,
        iterations=3000,
        model={"hidden_size": 64},
    )


def sudoku9(seed: int, smoke: bool) -> Puzzle:
    """Puzzles that cells with one digit left solve; training makes others of each."""
    model = {"hidden_size": 32 if smoke else 256, "num_heads": 8, "layers_per_step": 2}
    return sudoku(3, 12 if smoke else 2000, 4 if smoke else 200, seed, iterations=8000, model=model)


def maze(seed: int, smoke: bool) -> Puzzle:
    """A latent sees the eight cells around it.

    So a larger maze is the same work, more of it.
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
        test=data,
        lengths=(9,) if smoke else (9, 13, 17),
        steps=lambda side: [side, 2 * side, 4 * side, 8 * side],
        model={"hidden_size": 32, "positions": "rotary_2d", "window": 2, "max_input_length": 33**2},
        trainer={"step_loss": th.Reach()},
        iterations=4000,
        learning_rate=3e-3,
    )


PUZZLES = {"sudoku4": sudoku4, "maze": maze, "sudoku9": sudoku9}


def main() -> None:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--puzzle", choices=PUZZLES, default="sudoku4")
    parser.add_argument("--iterations", type=int, help="default: the puzzle's, 3000 to 8000")
    parser.add_argument("--samples", type=int, default=256, help="puzzles of each size to test")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    ask_where(parser)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="see that it works, in seconds: few iterations and samples, whatever is said",
    )
    options = parser.parse_args()
    if options.smoke:
        options.iterations, options.samples = 8, 8
    if min(options.samples, 1 if options.iterations is None else options.iterations) < 1:
        parser.error("samples and iterations must be 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU")
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
    curves = th.evaluate_steps(
        model, puzzle.test, puzzle.lengths, n_steps=puzzle.steps, samples=options.samples
    )
    for row in curves.rows():
        size = "{length} x {length}, " if len(puzzle.lengths) > 1 else ""
        print(
            (size + "{steps} steps: {symbols:.2%} of cells, {rows:.2%} of whole puzzles").format(
                **row
            )
        )
    save_curves(curves, options.puzzle, options, draw)


if __name__ == "__main__":
    main()
