"""Runs of the command ``think``: training and evaluation."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from transformers import set_seed

from model_components._checkpoints import newest_whole
from model_components._checks import Whole, check_value
from model_components._folders import new_file, write_json
from model_components._formats import reading
from model_components._model_folders import CARD, card_of, complete_folder
from model_components._report import Report, Table
from model_components._runs import RunFolder

from . import report
from .curriculum import CurriculumDataset
from .losses import Reach
from .model import LatentThinker
from .presets import MORE_STEPS
from .report import Grid, evaluate_grid, evaluate_steps
from .run_settings import Run
from .solving import Solutions, solve
from .tasks import TASKS, AtTokens, RowsTask
from .tasks.at_tokens import without_layout
from .training import RewindOnPeak, ThinkerTrainer, thinker_arguments

_GRID_STEPS = (1, 2, 4, 6, 8, 12, 16, 24)
"""Numbers of steps at which a trained model is measured; training has 1 to 6 by default."""
_GRID_LATENTS = (4, 6, 8, 12, 16, 24, 32)
"""Numbers of latents at which a model that starts from noise is measured; training has 8 to 16."""
_STEPS = (1, 2, 4, 8, 16, 32)
"""Numbers of steps at which a model without a latent for each token is evaluated."""


@dataclass(frozen=True)
class TrainingReport(Report):
    """A trained model's accuracy, as in its ``result.json``."""

    run: Run
    result: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the result, as in ``result.json``."""
        return self.result

    def summary(self) -> Sequence[str]:
        """Return the task, the cost of training, and the accuracy at the longest length."""
        return (
            f"{self.run.task}, length {self.run.length}: {self.result['iterations']} iterations, "
            f"{self.result['cpu_seconds']:.0f} CPU seconds"
            f"{' since it was resumed' if self.result['resumed'] else ''}",
            f"held out: {self.result['token']:.2%} of symbols and {self.result['sequence']:.2%} of "
            "rows are right",
            "",
        )

    def table(self) -> Table:
        """Return the accuracy at each length."""
        rows = []
        for length, (symbols, whole) in self.result["by_length"].items():
            longer = "(longer)" if length > self.run.length else ""
            rows.append((str(length), f"{symbols:.2%}", f"{whole:.2%}", longer))
        return Table(("length", "symbols", "rows", ""), rows)


def train(
    run: Run, out: Path, *, samples: int, device: str, fresh: bool = False, progress: bool
) -> TrainingReport:
    """Train a model, and write it and its accuracy into a folder.

    An unfinished run in the folder is continued.

    Args:
        run: The settings.
        out: A new folder, or the folder of the same run.
        samples: Number of held-out samples of each length.
        device: ``"cpu"``; with any other value, transformers chooses the device.
        fresh: Whether to start over, which removes the checkpoints and the result of an earlier run
            in the folder.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The folder holds another run or a finished one, another process is writing to
            it, or settings are invalid.
    """
    check_value("think train", "samples", samples, Whole)
    # before the model is made, since its weights are drawn at random
    set_seed(run.seed)
    # invalid settings raise an error before a folder is made
    data = run.data()
    _lengths_of(run, data)
    rows = without_layout(data.task)
    model = run.thinker(data)
    folder = RunFolder(
        out,
        run.to_dict(),
        "think train",
        checkpoints="checkpoints",
        # a finished run may be trained further
        may_change=("iterations",),
        contents={"rows": repr(rows)} if isinstance(rows, RowsTask) else None,
        results=("result.json", "model", _kept_rows(run.task)),
        fresh=fresh,
    )
    # before the folder gets this run's settings, since the card is compared with the earlier
    # settings
    edited = not fresh and _is_edited(out)
    with folder:
        _check_unfinished(out, run)
        folder.update()
        return _train(run, model, data, out, samples, device, edited=edited, progress=progress)


def _train(
    run: Run,
    model: LatentThinker,
    data: CurriculumDataset,
    out: Path,
    samples: int,
    device: str,
    *,
    edited: bool,
    progress: bool,
) -> TrainingReport:
    begun = (out / "checkpoints").is_dir()  # before the trainer makes it
    trainer = _trainer_of(run, model, data, out, device=device, progress=progress)
    checkpoint = newest_whole(out / "checkpoints", "think train", trainer.needed_files())
    if checkpoint is not None:
        print(f"think train: continuing from {checkpoint}")
    elif begun:
        print(f"think train: no checkpoint in {out} yet, so training starts over")
    begin = time.process_time()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.process_time() - begin
    model.save_pretrained(out / "model")
    result, grid = measure(model, data, run, samples)
    trained = trainer.state.global_step
    if trained < run.iterations:
        print(
            f"think train: stopped after {trained} of {run.iterations} iterations, because the "
            "loss peaked again after every rewind; try another --seed"
        )
    result |= {
        "iterations": trained,
        "cpu_seconds": round(seconds, 1),
        "resumed": checkpoint is not None,
        "parameters": model.num_parameters(),
        "seed": run.seed,
    }
    if run.task not in TASKS:
        # so that the model can be used without the training file
        with new_file(out / _kept_rows(run.task), "think train") as part:
            shutil.copyfile(run.task, part)
    if not edited:
        complete_folder(out / "model", _card(result, run))
    # last, since it marks a finished run
    write_json(out / "result.json", result)
    if grid is not None:
        print(f"\n{grid}")
    print(
        f"think train: wrote model/ and result.json to {out}; next: model-components think "
        f"evaluate|solve {out}"
    )
    return TrainingReport(run, result)


def _trainer_of(
    run: Run,
    model: LatentThinker,
    data: CurriculumDataset,
    out: Path,
    *,
    device: str,
    progress: bool,
) -> ThinkerTrainer:
    settings: dict[str, Any] = {
        "max_steps": run.iterations,
        # four checkpoints, so that an interruption loses at most a quarter of a run
        "save_steps": max(10, run.iterations // 4),
        "save_total_limit": 1,
        "seed": run.seed,
        "use_cpu": device == "cpu",
        # at least ten lines of log, in short runs too
        "logging_steps": max(1, min(50, run.iterations // 10)),
        "disable_tqdm": not progress,
    }
    preset = run.settings()
    if preset is not None:
        callbacks = [RewindOnPeak()]
        return preset.trainer(model, data, out / "checkpoints", callbacks=callbacks, **settings)
    arguments = thinker_arguments(out / "checkpoints", **settings)
    loss: dict[str, Any] = {}
    if run.at_tokens and "window" in run.model:
        # with a window, early steps cannot use tokens that are farther away
        loss["step_loss"] = Reach(window=run.model["window"])
    return ThinkerTrainer(model, arguments, train_dataset=data, callbacks=[RewindOnPeak()], **loss)


def _card(result: dict[str, Any], run: Run) -> str:
    task = Path(run.task).name  # without the path of this machine
    values = run.to_dict() | {"task": task}
    del values["plan"]
    if run.preset is not None:  # the preset sets these
        del values["schedule"], values["steps"]
    settings = "\n".join(f"- {name}: {value}" for name, value in values.items())
    return card_of(
        f"A thinker for {task}",
        [
            "Load it with `thinker.LatentThinker.from_pretrained`.",
            f"Right on held-out samples of length {result['length']}: {result['token']:.4f} of "
            f"symbols, {result['sequence']:.4f} of rows.",
            f"Made by `model-components think train {task}` with\n\n{settings}",
        ],
        bases=[],
        tags=["thinker"],
        library_name="model-components",
    )


def _is_edited(out: Path) -> bool:
    """Return whether the model card of an earlier training was edited by hand."""
    card = out / "model" / CARD
    if not card.is_file() or not (out / "result.json").is_file():
        return False
    before = _run_in(out)
    return card.read_text(encoding="utf-8") != _card(read_json(out, "result.json"), before)


def _check_unfinished(out: Path, run: Run) -> None:
    """Raise an error if the folder holds a finished run with at least as many iterations."""
    if (out / "result.json").is_file():
        result = read_json(out, "result.json")
        with reading(out / "result.json", "think train"):
            trained = int(result["iterations"])
        if run.iterations <= trained:
            raise ValueError(
                f"think train: the run in {out} is finished, with {trained} iterations; expected "
                f"--iterations above {trained} (to train it further) or --fresh (to start over), "
                f"got --iterations {run.iterations}"
            )


def measure(
    model: LatentThinker, data: CurriculumDataset, run: Run, samples: int
) -> tuple[dict[str, Any], Grid | None]:
    """Measure accuracy by length, and by number of latents and steps."""
    plan = run.flow_plan()
    n_steps = None
    task = data.task
    if isinstance(task, AtTokens):

        def n_steps(length: int) -> list[int]:
            # more steps than an input needs, since a correct answer also has to stay correct
            return [plan.num_steps(2 * task.reach(length) + MORE_STEPS)]

    lengths = _lengths_of(run, data)
    curves = evaluate_steps(model, data, lengths, n_steps=n_steps, samples=samples)
    by_length = {n: cells[0] for n, cells in zip(lengths, curves.cells, strict=True)}
    # a file of rows may have no held-out row of the longest length
    length = max((n for n in lengths if n <= run.length), default=lengths[0])
    longest = by_length[length]
    result: dict[str, Any] = {
        "task": run.task,
        "length": length,
        "token": round(longest.token, 5),
        "sequence": round(longest.sequence, 5),
        "by_length": {n: (round(a.token, 4), round(a.sequence, 4)) for n, a in by_length.items()},
    }
    # with a latent for each token, a number of steps is meaningful only for one length
    if run.at_tokens:
        return result, None
    latents = _GRID_LATENTS if run.with_noise else (model.config.latents_for(1),)
    steps = sorted({plan.num_steps(n) for n in (*_GRID_STEPS, run.steps[1])})
    grid = evaluate_grid(model, data, n_latents=latents, n_steps=steps, samples=samples)
    return result | {"grid": grid.to_dict()}, grid


def _lengths_of(run: Run, data: CurriculumDataset) -> list[int]:
    """Return the lengths to evaluate: about four trained lengths, and the run's ``lengths``.

    For a file of rows, only lengths with held-out rows are returned.

    Raises:
        ValueError: No such length has held-out rows.
    """
    lengths = {run.length, *run.lengths}
    if run.schedule != "fixed":
        lengths |= {*range(data.schedule.min_length, run.length, max(1, run.length // 4))}
    rows = without_layout(data.task)
    if isinstance(rows, RowsTask):
        lengths = {n for n in lengths & set(rows.lengths) if data.holds_out(n)}
    if not lengths:
        raise ValueError(
            "think train: expected held-out rows to measure the accuracy, got none in "
            f"{rows!r}; add rows until a length has 10 different inputs, or rows longer than "
            "--length"
        )
    return sorted(lengths)


def read_json(folder: Path, name: str) -> Any:
    """Read a JSON file that `train` wrote.

    Raises:
        ValueError: The file does not exist, or is damaged.
    """
    if not (folder / name).is_file():
        raise ValueError(
            f"think: expected the folder of a finished run of think train, got {folder} "
            f"({_why_not_finished(folder)})"
        )
    with reading(folder / name, "think"):
        return json.loads((folder / name).read_text(encoding="utf-8"))


def _why_not_finished(folder: Path) -> str:
    """Return why a folder is not the folder of a finished run."""
    if not folder.is_dir():
        return "no such folder"
    if (folder / "run.json").is_file():
        return "not finished; if think train made it, repeat that command"
    return "it has no run.json"


def _run_in(folder: Path) -> Run:
    """Return the settings of the run in a folder."""
    values = read_json(folder, "run.json")
    known = {field.name for field in fields(Run)}
    with reading(folder / "run.json", "think"):
        # without the command and the user's own notes
        return Run.from_dict({name: value for name, value in values.items() if name in known})


def _kept_rows(task: str) -> str:
    """Return the name under which a run's folder keeps a copy of a file of rows."""
    path = Path(task)
    return "rows" + "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:])


def _with_kept_rows(folder: Path, run: Run) -> Run:
    """Return the run with the folder's copy of its file of rows, if it was trained on a file."""
    if run.task in TASKS:
        return run
    return replace(run, task=str(folder / _kept_rows(run.task)))


def evaluate(
    folder: Path,
    lengths: Sequence[int],
    *,
    n_steps: Sequence[int] = (),
    samples: int,
    seed: int,
    device: str,
) -> report.Curves:
    """Evaluate the model in a run's folder by length and steps.

    Args:
        folder: The folder.
        lengths: Lengths of the samples; if empty, the run's longest training length and longer
            ones.
        n_steps: Numbers of thinking steps; if empty, the defaults in the help of
            ``think evaluate``.
        samples: Number of held-out samples of each length.
        seed: Random seed of the samples.
        device: The device to run on.
    """
    run = _run_in(folder)
    # without this file, the model may belong to an earlier run
    read_json(folder, "result.json")
    model: Any = LatentThinker.from_pretrained(folder / "model")
    model.to(device)
    data = _with_kept_rows(folder, run).data()
    lengths = lengths or [n for n in _lengths_of(run, data) if n >= run.length] or [run.length]
    if data.task.input_length(max(lengths)) > model.config.max_input_length:
        raise ValueError(
            f"think evaluate: expected lengths whose inputs have at most "
            f"{model.config.max_input_length} tokens, got {max(lengths)} (an input of "
            f"{data.task.input_length(max(lengths))} tokens); train with think train --lengths "
            f"{max(lengths)}"
        )
    for number in n_steps:
        check_value("think evaluate", "n_steps", number, Whole)
    plan = run.flow_plan()

    def steps(length: int) -> list[int]:
        numbers = n_steps or _STEPS
        if isinstance(data.task, AtTokens) and not n_steps:
            reach = data.task.reach(length)
            numbers = (reach, 2 * reach + MORE_STEPS, 4 * reach)
        # a plan may need more steps, or have a fixed number
        return sorted({plan.num_steps(n) for n in numbers})

    return evaluate_steps(model, data, lengths, n_steps=steps, samples=samples, seed=seed)


def solve_rows(folder: Path, inputs: Sequence[str]) -> Solutions:
    """Answer inputs with the model in a run's folder.

    Args:
        folder: The folder of a run of ``think train``.
        inputs: Texts, as in the file of rows; for a named task, token ids separated by spaces, such
            as "3 1 2".
    """
    run = _run_in(folder)
    # without this file, the model may belong to an earlier run
    read_json(folder, "result.json")
    task = _with_kept_rows(folder, run).bare_task()
    model: Any = LatentThinker.from_pretrained(folder / "model")
    rows: list[Any] = list(inputs)
    if not isinstance(task, RowsTask):
        try:
            rows = [[int(word) for word in text.split()] for text in inputs]
        except ValueError as error:
            raise ValueError(
                f"think solve: {run.task} takes token ids separated by spaces, such as '3 1 2', "
                f"got {inputs}"
            ) from error
    return solve(model, task, rows)
