"""Commands: think train, think evaluate, think solve."""

from __future__ import annotations

from pathlib import Path

from model_components._cli import RunFlags
from model_components._devices import find_device
from model_components._report import Report

from .run_config import RunConfig


def train(
    task: str,
    out: Path,
    /,
    *,
    run_config: RunConfig,
    samples: int = 1024,
    fresh: bool = False,
    run_flags: RunFlags,
) -> Report:
    """Train a thinker on a task or on your own rows, and write the model and its accuracy.

    To continue an interrupted run, repeat the command. To train a finished model further, repeat
    the command with more --iterations.

    Args:
        task: Name of a task, such as reverse (an unknown name prints the list), or a file of rows
            with input and answer (JSON lines, JSON, CSV, TSV, parquet). Tasks with an answer at
            each step, such as hops, can be trained only from Python, with ThinkerTrainer.
        out: Output folder: a new path, or the folder of a run to continue.
        run_config: Settings of the run.
        samples: Number of held-out samples of each length.
        fresh: Start over instead of continuing the run in the folder.
        run_flags: The device, and whether to show progress.
    """
    # imported here, because the help of a command must not load torch
    from . import runs
    from .run_settings import run_of

    where = find_device(run_flags.device, "think train")
    run = run_of(task, run_config)
    return runs.train(
        run, out, samples=samples, device=where, fresh=fresh, progress=run_flags.progress
    )


def evaluate(
    folder: Path,
    /,
    *,
    lengths: tuple[int, ...] = (),
    n_steps: tuple[int, ...] = (),
    samples: int = 1024,
    seed: int = 0,
    device: str = "cpu",
) -> Report:
    """Evaluate a trained thinker: accuracy by length and steps.

    Args:
        folder: Folder that think train wrote.
        lengths: Lengths of the held-out samples; default: --length and --lengths of think train.
        n_steps: Numbers of thinking steps to compare; default: n, 2n + 6 and 4n for length n
            if the model has a latent for each token, otherwise 1, 2, 4, 8, 16 and 32. n
            includes the length of an answer that follows the input.
        samples: Number of held-out samples of each length.
        seed: Random seed of the data.
        device: Device to run on, such as cpu or cuda.
    """
    from . import runs

    where = find_device(device, "think evaluate")
    return runs.evaluate(folder, lengths, n_steps=n_steps, samples=samples, seed=seed, device=where)


def solve(folder: Path, inputs: tuple[str, ...], /) -> Report:
    """Answer inputs with a trained thinker.

    Args:
        folder: Folder that think train wrote.
        inputs: Inputs, in quotes if they have spaces: texts as in the file of rows, or, for a named
            task, token ids separated by spaces.
    """
    from . import runs

    return runs.solve_rows(folder, inputs)
