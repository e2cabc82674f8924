"""Commands: think train, think evaluate, think draw."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from model_components._cli import ON_TERMINAL
from model_components._devices import find_device
from model_components._report import Report

Schedule = Literal["frontier", "uniform", "progressive", "dynamic", "fixed"]


def train(
    task: str,
    /,
    *,
    out: Path | None = None,
    options: tuple[str, ...] = (),
    model: tuple[str, ...] = (),
    length: int | None = None,
    schedule: Schedule | None = None,
    plan: str = "every_step",
    steps: tuple[int, int] | None = None,
    iterations: int | None = None,
    lengths: tuple[int, ...] = (),
    samples: int = 1024,
    seed: int = 0,
    device: str = "cpu",
    resume: bool = False,
    progress: bool = ON_TERMINAL,
) -> str:
    """Train a thinker on a task: a folder with the model, and what it can do.

    Args:
        task: A name of `thinker.TASKS`, such as reverse; a wrong name lists them. A task with an
            answer at each step (hops) needs `ThinkerTrainer`.
        out: Folder to write; default: runs/thinker/TASK.
        options: Options of the task, as NAME=VALUE: symbols=32.
        model: Fields of `ThinkerConfig`, as NAME=VALUE: num_heads=8; latent_init=tokens for a
            latent at each token.
        length: The longest sequence in training; default: 20, or the task's.
        schedule: The schedule of lengths; default: frontier, or the task's.
        plan: every_step, read_once, or a file with a table.
        steps: Fewest and most steps of thought; default: 1 6; with latents at the tokens 1 to the
            length and six more.
        iterations: Steps of training; default: 500, or the task's.
        lengths: Longer lengths to make room for.
        samples: Held-out samples of each length.
        seed: Seed of data and weights.
        device: Where to compute.
        resume: Go on from the last checkpoint in the folder.
        progress: Show a progress bar.
    """
    from . import runs

    where = find_device(device, "think train")
    run = runs.settings_of(
        task,
        options=runs.named_values(options),
        model=runs.named_values(model),
        length=length,
        schedule=schedule,
        plan=plan,
        steps=steps,
        iterations=iterations,
        lengths=lengths,
        seed=seed,
    )
    folder = out or Path("runs/thinker", task)
    try:
        return runs.train(
            run, folder, samples=samples, device=where, resume=resume, progress=progress
        )
    except KeyboardInterrupt:
        kept = runs.whole_checkpoint(folder / "checkpoints")
        how = "the same command with --resume goes on from here" if kept else ""
        raise KeyboardInterrupt(how) from None


def evaluate(
    out: Path,
    /,
    *,
    lengths: tuple[int, ...] = (),
    n_steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
    samples: int = 1024,
    seed: int = 0,
    device: str = "cpu",
) -> Report:
    """Evaluate a trained thinker: accuracy by length and steps.

    Args:
        out: Folder that think train wrote.
        lengths: Lengths of held-out samples; default: the longest in training, and its --lengths.
        n_steps: Steps of thought.
        samples: Held-out samples of each length.
        seed: Seed of the data.
        device: Where to compute.
    """
    from . import runs

    where = find_device(device, "think evaluate")
    return runs.evaluate(out, lengths, n_steps=n_steps, samples=samples, seed=seed, device=where)


def draw(out: Path, /) -> str:
    """Draw training and accuracy of a trained thinker, into its folder.

    Args:
        out: Folder that think train wrote.
    """
    from . import runs

    return runs.draw(out)
