"""A small thinker that learns an algorithm on short inputs and runs it on long ones, by thinking longer.

python examples/think_longer.py --task parity --train-length 5 --seed 11

trains for a quarter of a minute on sequences of up to five bits and prints the share of right symbols at lengths 10,
20, 40 and 100 after several numbers of steps: at length 100 nine of ten after 100 steps or all, and all after 200.
Each token has a latent that looks at itself and at its neighbour before; what it knows travels one token a step.
``--out`` takes a picture of it (extra ``plot``), ``--json`` the figures.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

import thinker as th

TASKS: dict[str, dict[str, Any]] = {
    "parity": {"task": "prefix_sum"},
    "sums": {"task": "prefix_sum", "symbols": 5},
    "depth": {"task": "depth", "length": 8, "iterations": 1500},
    "add2": {"task": "add_columns", "base": 2},
    "add10": {"task": "add_columns", "base": 10, "iterations": 2000},
    "add16": {"task": "add_columns", "base": 16, "iterations": 3000},
}


def main() -> None:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="parity")
    parser.add_argument("--train-length", type=int, help="the longest input in training; default 5, or the task's")
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 20, 40, 100], help="to test")
    parser.add_argument("--iterations", type=int, help="of 64 rows; default 1200, or the task's")
    parser.add_argument("--samples", type=int, default=512, help="rows of each length to test")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--out", type=Path, help="a folder for the picture")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    if options.out is not None:
        import matplotlib  # noqa: F401  (before it trains, so that nobody waits in vain)

    torch.set_num_threads(1)
    set_seed(options.seed)
    started = time.process_time()
    recipe = {"length": 5, "iterations": 1200, **TASKS[options.task]}
    trained = options.train_length or recipe.pop("length")
    iterations = options.iterations or recipe.pop("iterations")
    recipe = {k: v for k, v in recipe.items() if k not in ("length", "iterations")}

    task = th.AtTokens(th.make_task(recipe.pop("task"), **recipe))
    data = th.CurriculumDataset(
        task, th.Frontier(max_length=trained), n_step=lambda longest: (1, longest + 6), holdout=0.0, seed=options.seed
    )
    config = th.ThinkerConfig(
        **data.sizes(max(options.lengths)),
        hidden_size=32,
        num_heads=2,
        causal=True,
        window=2,
        positions="rotary",
        step_update="normalized",
        step_noise=0.1,
    )
    model = th.LatentThinker(config)
    arguments = th.thinker_arguments(
        "runs/think_longer",
        max_steps=iterations,
        learning_rate=4e-3,
        warmup_steps=50,
        logging_steps=max(1, iterations // 6),
        seed=options.seed,
        use_cpu=True,
    )
    trainer = th.ThinkerTrainer(model, arguments, train_dataset=data, step_loss=th.Reach(window=2))
    trainer.train()
    seconds = time.process_time() - started
    print(f"{model.num_parameters()} parameters, lengths up to {trained}, {iterations} iterations, {seconds:.0f} CPU s")

    def steps(length: int) -> list[int]:
        return [max(1, length // 4), length // 2, length, length + 8, 2 * length, 10 * length]

    curves = th.evaluate_steps(model, data, options.lengths, n_steps=steps, samples=options.samples)
    print(curves)
    if options.json is not None:
        options.json.write_text(json.dumps(curves.rows(), indent=1) + "\n", encoding="utf-8")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        figure = curves.plot()
        figure.suptitle(f"{options.task}, trained on lengths up to {trained}")
        figure.savefig(options.out / f"{options.task}-{options.seed}.svg")


if __name__ == "__main__":
    main()
