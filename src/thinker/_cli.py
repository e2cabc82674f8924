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
    """Train a thinker on a task; write the model and its accuracy.

    Args:
        task: Name of the task, such as reverse. An unknown name prints the list. Tasks with an
            answer at each step, such as hops, are trained from Python with ThinkerTrainer.
        out: Output folder; default: runs/thinker/TASK.
        options: Options of the task, as NAME=VALUE, for example symbols=32.
        model: Fields of ThinkerConfig, as NAME=VALUE, for example num_heads=8. With
            latent_init=tokens there is one latent for each token.
        length: Longest sequence in training; default: the task's own, or 20.
        schedule: Schedule of the training lengths; default: the task's own, or frontier.
        plan: every_step, read_once, or the path of a file with a FlowPlan table.
        steps: Fewest and most thinking steps; default: 1 6. With latent_init=tokens they follow the
            length: from 1 to length + 6.
        iterations: Number of training steps; default: the task's own, 2400 with latent_init=noise,
            or 500.
        lengths: Lengths beyond --length that the model must support and is evaluated at.
        samples: Number of held-out samples of each length.
        seed: Random seed of the data and the weights.
        device: Device that computes, such as cpu or cuda.
        resume: Continue from the last checkpoint in the folder.
        progress: Show a progress bar; default: only on a terminal.
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
        saved = runs.whole_checkpoint(folder / "checkpoints")
        hint = "run the same command with --resume to continue" if saved else ""
        raise KeyboardInterrupt(hint) from None


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
        lengths: Lengths of the held-out samples; default: --length and --lengths of the training.
        n_steps: Numbers of thinking steps to compare.
        samples: Number of held-out samples of each length.
        seed: Random seed of the data.
        device: Device that computes, such as cpu or cuda.
    """
    from . import runs

    where = find_device(device, "think evaluate")
    return runs.evaluate(out, lengths, n_steps=n_steps, samples=samples, seed=seed, device=where)


def draw(out: Path, /) -> str:
    """Write plots of training and accuracy into a trained thinker's folder.

    Args:
        out: Folder that think train wrote.
    """
    from . import runs

    return runs.draw(out)
