"""Train a small thinker on short inputs, and solve long inputs by thinking longer.

    python examples/think_longer.py --task parity --train-length 5 --seed 11

This command trains for 15 seconds on sequences of up to five bits. Then, at lengths 10, 20, 40 and
100, every symbol is right after slightly more steps than there are symbols, and still right after
ten times as many steps. Each token has a latent, a vector that attends to its neighbors in each
step, so information travels one token per step. ``--out`` names a folder for a plot (extra
``plot``), and ``--json`` a file for the results: a list of {length, steps, symbols, rows}. Here
symbols is the fraction of symbols that are right, and rows is the fraction of rows in which all
symbols are right.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
from common import ask_where, make_room, save_curves
from transformers import set_seed

import thinker as th

SCAN, EXCHANGE, POINTER = th.presets.scan, th.presets.exchange, th.presets.pointer

TASKS: dict[str, dict[str, Any]] = {  # longest in training, iterations, the task and its options
    "parity": {"length": 5, "iterations": 1200, "preset": SCAN, "task": "prefix_sum"},
    "sums": {"length": 5, "iterations": 1200, "preset": SCAN, "task": "prefix_sum", "symbols": 5},
    "depth": {"length": 8, "iterations": 1500, "preset": SCAN, "task": "depth"},
    "add2": {"length": 8, "iterations": 1500, "preset": SCAN, "task": "add_columns", "base": 2},
    "add10": {"length": 5, "iterations": 2000, "preset": SCAN, "task": "add_columns", "base": 10},
    "add16": {"length": 5, "iterations": 3000, "preset": SCAN, "task": "add_columns", "base": 16},
    "copy": {"length": 5, "iterations": 500, "preset": SCAN, "task": "copy"},
    "reverse": {
        "length": 12,
        "iterations": 1200,
        "preset": EXCHANGE,
        "task": "reverse",
        "by_step": True,
        "symbols": 4,
    },
    "sort": {
        "length": 12,
        "iterations": 3000,
        "preset": EXCHANGE,
        "task": "sort",
        "by_step": True,
        "symbols": 4,
    },
    "hops": {"length": 4, "iterations": 1000, "preset": POINTER, "task": "hops"},
    "pointers": {
        "length": 4,
        "iterations": 1000,
        "preset": POINTER,
        "task": "hops",
        "permutation": False,
    },
}
NOT_OF_THE_TASK = ("length", "iterations", "preset", "task")
FULL_CARRY = 400
"""The number of digits in 99...9 + 1, whose carry passes through all; random carries are short."""


def steps_to_test(name: str, length: int) -> list[int]:
    """Return the numbers of steps after which to test.

    For tasks that define an answer for each step, the model is compared with the answer of the
    step that it has reached.
    """
    if name in ("hops", "pointers"):
        return [length + 1]  # the first step reads the start
    if name == "reverse":
        return [length]  # further steps would turn it back
    longest = 2 if name == "sort" else 10  # times the length
    return [
        max(1, length // 4),
        max(1, length // 2),
        length,
        length + 8,
        2 * length,
        longest * length,
    ]


def full_carry(model: th.LatentThinker, task: th.Task, base: int, digits: int) -> None:
    """Print how many digits of 99...9 + 1 are right, and when the exit rule ended the thinking."""
    # a column's id is first digit * base + second digit; the lowest digits come first
    nines = (base - 1) * base
    columns = [nines + 1, *[nines] * (digits - 1), 0]  # the last column takes the last carry
    expected = [*[0] * digits, 1]
    max_steps = 2 * digits + 20
    found = th.solve(model, task, [columns], max_steps=max_steps)
    right = sum(a == b for a, b in zip(found.answers[0], expected, strict=True))
    if found.settled[0]:
        told = f"stopped after {found.steps[0]} steps (limit {max_steps})"
    else:
        told = f"did not stop within {max_steps} steps"
    print(
        f"a carry through all {digits} digits: {right} of {len(expected)} digits are right; the "
        f"exit rule {told}"
    )


def main() -> None:
    """Train the thinker, measure its accuracy, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="parity")
    parser.add_argument(
        "--train-length", type=int, help="maximum length in training (default: the task's, 4 to 12)"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[10, 20, 40, 100], help="lengths to test"
    )
    parser.add_argument(
        "--iterations", type=int, help="training iterations of 64 rows (default: the task's)"
    )
    parser.add_argument("--samples", type=int, default=128, help="rows of each length to test")
    parser.add_argument("--seed", type=int, default=11)
    ask_where(parser)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run for a few seconds, to test the script: sets --iterations and --samples",
    )
    options = parser.parse_args()
    if options.smoke:
        options.iterations, options.samples = 20, 16
    numbers = (*options.lengths, options.samples, options.train_length, options.iterations)
    if min(n for n in numbers if n is not None) < 1:
        parser.error("expected lengths, --samples and --iterations of 1 or more")
    draw = make_room(parser, options)
    torch.set_num_threads(1)
    set_seed(options.seed)
    started = time.process_time()
    recipe = TASKS[options.task]
    trained, iterations = (
        options.train_length or recipe["length"],
        options.iterations or recipe["iterations"],
    )
    preset = recipe["preset"]()
    task = th.make_task(
        recipe["task"], **{k: v for k, v in recipe.items() if k not in NOT_OF_THE_TASK}
    )
    data = preset.data(task, max_length=trained, holdout=0.0, seed=options.seed)
    longest = max(trained, *options.lengths)
    if recipe["task"] == "add_columns":
        longest = max(longest, FULL_CARRY)
    model = preset.thinker(data, longest=longest)
    trainer = preset.trainer(
        model,
        data,
        "runs/think_longer",
        max_steps=iterations,
        logging_steps=max(1, iterations // 6),
        seed=options.seed,
        use_cpu=True,
        save_strategy="no",
    )
    trainer.train()
    seconds = time.process_time() - started
    print(
        f"{model.num_parameters()} parameters, lengths up to {trained}, {iterations} iterations, "
        f"{seconds:.0f} CPU s"
    )
    print(
        f"testing on {options.samples} rows of lengths {options.lengths}, which may take longer "
        "than the training"
    )
    steps = partial(steps_to_test, options.task)
    curves = th.evaluate_steps(model, data, options.lengths, n_steps=steps, samples=options.samples)
    print(curves)
    if recipe["task"] == "add_columns":
        full_carry(model, task, recipe["base"], FULL_CARRY)
    save_curves(curves, options.task, options, draw)


if __name__ == "__main__":
    main()
