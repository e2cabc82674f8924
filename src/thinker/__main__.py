"""The command line: ``python -m thinker train|evaluate|draw``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import set_seed

from model_components._commands import run_command
from model_components._devices import find_device
from model_components._folders import make_folder, write_json

from . import report, schedules
from .config import ThinkerConfig
from .curriculum import CurriculumDataset
from .flow import FlowPlan
from .losses import Reach
from .model import LatentThinker
from .report import evaluate_grid, evaluate_steps, plot_training
from .tasks import TASKS, AtTokens, make_task
from .training import RewindOnPeak, ThinkerTrainer, thinker_arguments
from .training.checkpoints import newest_whole

Settings = dict[str, Any]
"""Names and values: a run's settings and figures, as in its JSON files, or a call's options."""

RECIPES: dict[str, Settings] = {  # what a task needs beyond the defaults
    "reverse": {"iterations": 1000, "model": {"from_end": True}},
    "roll": {"iterations": 1000, "model": {"from_end": True}},
    "add": {
        "iterations": 2000,
        "batch": 128,
        "length": 3,
        "schedule": "fixed",
        "options": {"max_value": 1000},
        "model": {"positions": "aligned"},
    },
}
SCHEDULES = ("frontier", "uniform", "progressive", "dynamic", "fixed")


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="python -m thinker", description="Train a latent thinker, and look at it."
    )
    commands = top.add_subparsers(dest="command", required=True)
    training = commands.add_parser(
        "train", help="train on a task: a folder with the model, and what it can do"
    )
    training.add_argument(
        "task",
        choices=sorted(name for name, task in TASKS.items() if not task.by_step),
        help="of `thinker.tasks`; what has an answer at each step (hops) needs ThinkerTrainer",
    )
    training.add_argument("--out", type=Path, help="folder to write (default: runs/thinker/TASK)")
    training.add_argument(
        "--options", nargs="*", default=[], metavar="NAME=VALUE", help="of the task: symbols=32"
    )
    training.add_argument(
        "--model",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="of ThinkerConfig: num_heads=8; latent_init=tokens for a latent at each token",
    )
    training.add_argument(
        "--length", type=int, help="longest in training (default: 20, or the task's)"
    )
    training.add_argument(
        "--schedule", choices=SCHEDULES, help="of lengths (default: frontier, or the task's)"
    )
    training.add_argument(
        "--plan", default="every_step", help="every_step, read_once, or a file with a table"
    )
    training.add_argument(
        "--steps",
        type=int,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="of thought (default: 1 6; with latents at the tokens 1 to the length and six more)",
    )
    training.add_argument(
        "--iterations", type=int, help="of training (default: 500, or the task's)"
    )
    training.add_argument(
        "--lengths", type=int, nargs="*", default=[], help="longer ones to make room for"
    )
    training.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in the folder"
    )
    training.add_argument("--no-progress", action="store_true", help="no progress bar")
    looking = commands.add_parser("evaluate", help="accuracy of a trained one by length and steps")
    looking.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        help="of held-out samples (default: the longest trained on, and train's --lengths)",
    )
    looking.add_argument(
        "--n-steps", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="of thought"
    )
    looking.add_argument("--json", type=Path, help="file to write figures to")
    drawing = commands.add_parser("draw", help="draw training and accuracy, into the folder")
    for command in (looking, drawing):
        command.add_argument("out", type=Path, help="folder that train wrote")
    for command in (training, looking):
        command.add_argument(
            "--samples", type=int, default=1024, help="held out, of each length (default: 1024)"
        )
        command.add_argument("--seed", type=int, default=0, help="of data and weights (default: 0)")
        command.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
    return top


def settings(pairs: Sequence[str]) -> Settings:
    """Names and values of ``NAME=VALUE``.

    Raises:
        ValueError: One without a sign.
    """
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ValueError(f"{wrong[0]!r} has no value; expected NAME=VALUE")
    return {name: _value(text) for name, text in (pair.split("=", 1) for pair in pairs)}


def _value(text: str) -> object:
    """YAML's, but 1e-1 is a number, too."""
    value = yaml.safe_load(text)
    try:
        if isinstance(value, str):
            return float(value)
        return value
    except ValueError:
        return value


def told_of(options: argparse.Namespace) -> Settings:
    """The settings of a run, from which its data can be made again."""
    recipe = RECIPES.get(options.task, {})
    model = recipe.get("model", {}) | settings(options.model)
    if model.get("causal"):
        model.setdefault("latent_init", "tokens")  # as ThinkerConfig has it
    if options.steps is not None and model.get("latent_init") == "tokens":
        raise ValueError(
            f"steps are {options.steps}, but latents at the tokens think by length; expected no "
            "--steps"
        )
    plan = options.plan
    if plan not in ("every_step", "read_once"):
        plan = Path(plan).read_text(encoding="utf-8")
    return {
        "task": options.task,
        "options": recipe.get("options", {}) | settings(options.options),
        "model": model,
        "length": recipe.get("length", 20) if options.length is None else options.length,
        "steps": options.steps or [1, 6],
        "plan": plan,
        "schedule": options.schedule or recipe.get("schedule", "frontier"),
        "batch": recipe.get("batch", 64),
        "iterations": recipe.get("iterations", 2400 if _noise(model) else 500)
        if options.iterations is None
        else options.iterations,
        "lengths": options.lengths,
        "seed": options.seed,
    }


def _noise(model: Mapping[str, object]) -> bool:
    return model.get("latent_init") == "noise"


def plan_of(told: Settings) -> FlowPlan:
    """Return what each step does."""
    if told["plan"] in ("every_step", "read_once"):
        memory = told["model"].get("memory", "none") != "none"
        static = bool(told["model"].get("num_static_tokens"))
        return getattr(FlowPlan, told["plan"])(memory=memory, static=static)
    return FlowPlan.from_table(told["plan"])


def data_of(told: Settings) -> CurriculumDataset:
    """The data of a run; where latents are the tokens, it thinks a step a token and six more."""
    task = make_task(told["task"], **told["options"])
    plan = plan_of(told)
    numbers = Settings()
    if told["model"].get("latent_init") == "tokens":
        task, numbers["n_step"] = (
            AtTokens(task),
            lambda length: (plan.num_steps(1), plan.num_steps(length + 6)),
        )
    else:
        numbers["n_step"] = tuple(map(plan.num_steps, told["steps"]))
    if _noise(told["model"]):
        numbers["n_latent"] = (8, 16)
    kind = getattr(schedules, told["schedule"].capitalize())
    lengths = {"max_length": told["length"]}
    if told["schedule"] == "fixed":
        schedule = kind(**lengths)
    else:
        schedule = kind(min_length=task.min_length, **lengths)
    return CurriculumDataset(task, schedule, seed=told["seed"], batch_size=told["batch"], **numbers)


def train(options: argparse.Namespace) -> None:
    """A model, its figures and its log in a folder."""
    told = told_of(options)
    out = folder_of(options)
    if told["iterations"] < 1:
        raise ValueError(f"iterations is {told['iterations']}; expected 1 or more")
    set_seed(told["seed"])
    data = data_of(told)
    plan = plan_of(told)
    choices = dict(told["model"])
    if choices.get("positions") == "aligned":
        choices["separators"] = data.task.separators
    at_tokens = choices.get("latent_init") == "tokens"
    usual: Settings = {"plan": plan}
    if not at_tokens:
        usual |= {
            "num_latents": 16 if _noise(choices) else 8,
            "n_step": plan.num_steps(told["steps"][1]),
        }
    usual = {**data.sizes(max([told["length"], *told["lengths"]])), **usual, **choices}
    try:
        config = ThinkerConfig(**usual)
    except TypeError as error:  # a name or value of NAME=VALUE
        raise ValueError(error) from error
    model = LatentThinker(config)
    _check_run_folder(out, told, options.resume)
    write_json(make_folder(out, "train") / "run.json", told)
    iterations = told["iterations"]
    arguments = thinker_arguments(
        out / "checkpoints",
        max_steps=iterations,
        save_steps=max(10, iterations // 4),
        save_total_limit=1,
        seed=told["seed"],
        use_cpu=options.device == "cpu",
        logging_steps=max(1, min(50, iterations // 10)),
        disable_tqdm=options.no_progress,
    )
    if at_tokens and "window" in choices:
        loss: Settings = {"step_loss": Reach(window=choices["window"])}
    else:
        loss = {}
    trainer = ThinkerTrainer(
        model, arguments, train_dataset=data, callbacks=[RewindOnPeak()], **loss
    )
    checkpoint = None
    if options.resume:
        checkpoint = whole_checkpoint(out / "checkpoints")
        if checkpoint is None:
            print(
                f"thinker: {out} has no checkpoint to go on from; it begins anew", file=sys.stderr
            )
    begin = time.process_time()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.process_time() - begin
    model.save_pretrained(out / "model")
    write_json(out / "log.json", trainer.state.log_history)
    result = figures(model, data, told, options.samples) | {
        "iterations": iterations,
        "cpu_seconds": round(seconds, 1),
        "resumed": checkpoint is not None,
        "parameters": model.num_parameters(),
        "seed": told["seed"],
    }
    write_json(out / "result.json", result)
    _print_result(result, told, seconds)
    print(
        f"\n{out}: model/, result.json; next: python -m thinker evaluate {out}, python -m thinker "
        f"draw {out}"
    )


def _check_run_folder(out: Path, told: Settings, resume: bool) -> None:
    """Check that the folder has no run, or that --resume continues it with the same settings."""
    if not resume and (out / "result.json").exists():
        raise ValueError(
            f"{out} already has a run; expected another --out, or --resume to continue it"
        )
    if not resume or not (out / "run.json").is_file():
        return
    before = read_json(out, "run.json")
    for name, value in told.items():
        if name != "iterations" and value != before.get(name):
            raise ValueError(
                f"{out}: the run there has {name} {before.get(name)!r}, got {value!r}; expected "
                "the same, or another --out"
            )


def _print_result(result: Settings, told: Settings, seconds: float) -> None:
    print(
        f"\n{told['task']}, length {told['length']}: {result['iterations']} iterations, "
        f"{seconds:.0f} CPU seconds"
    )
    print(f"held out: {result['token']:.4f} of symbols, {result['sequence']:.4f} of rows\n")
    print("length  symbols     rows")
    for length, (symbols, rows) in result["by_length"].items():
        longer = "  (longer)" if length > told["length"] else ""
        print(f"{length:>6} {symbols:>8.4f} {rows:>8.4f}{longer}")


def folder_of(options: argparse.Namespace) -> Path:
    """Return where a run is, or will be."""
    return options.out or Path("runs/thinker", options.task)


def whole_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end; None without one."""
    try:
        return str(newest_whole(folder, "thinker_state.pt"))
    except ValueError:
        return None


def figures(
    model: LatentThinker, data: CurriculumDataset, told: Settings, samples: int
) -> Settings:
    """Accuracy by length, and by latents and steps."""
    shortest = data.schedule.min_length
    longest = told["length"]
    if told["schedule"] == "fixed":
        shorter = []
    else:
        shorter = range(shortest, longest, max(1, longest // 4))
    plan = plan_of(told)
    at_tokens = told["model"].get("latent_init") == "tokens"
    lengths = sorted({*shorter, longest, *told["lengths"]})
    n_steps = None
    if at_tokens:

        def n_steps(length: int) -> list[int]:
            return [plan.num_steps(2 * length + 6)]

    curves = evaluate_steps(model, data, lengths, n_steps=n_steps, samples=samples)
    by_length = {n: cells[0] for n, cells in zip(lengths, curves.cells, strict=True)}
    at = by_length[longest]
    result: Settings = {
        "task": told["task"],
        "length": longest,
        "token": round(at.token, 5),
        "sequence": round(at.sequence, 5),
        "by_length": {n: (round(a.token, 4), round(a.sequence, 4)) for n, a in by_length.items()},
    }
    if not at_tokens:
        steps = sorted({plan.num_steps(n) for n in (1, 2, 4, 6, 8, 12, 16, 24, told["steps"][1])})
        if _noise(told["model"]):
            latents: list[Any] = [4, 6, 8, 12, 16, 24, 32]
        else:
            latents = [model.config.num_latents]
        grid = evaluate_grid(model, data, n_latents=latents, n_steps=steps, samples=samples)
        print(f"\n{grid}")
        result["grid"] = grid.to_dict()
    return result


def read_json(out: Path, name: str) -> Any:
    """A file that `train` wrote.

    Raises:
        ValueError: It is not there.
    """
    if not (out / name).is_file():
        raise ValueError(
            f"{out} has no {name}; expected a folder that `python -m thinker train` wrote to its "
            "end"
        )
    return json.loads((out / name).read_text(encoding="utf-8"))


def evaluate(options: argparse.Namespace) -> None:
    """A trained model by length and steps."""
    told = read_json(options.out, "run.json")
    model = LatentThinker.from_pretrained(options.out / "model").to(options.device)
    lengths = options.lengths or sorted({told["length"], *told["lengths"]})
    options_of_grid = {"n_steps": options.n_steps, "samples": options.samples, "seed": options.seed}
    grid = evaluate_steps(model, data_of(told), lengths, **options_of_grid)
    print(grid)
    if options.json is not None:
        write_json(options.json, grid.rows())


def draw(options: argparse.Namespace) -> None:
    """Pictures of training, and of accuracy by latents and steps."""
    result = read_json(options.out, "result.json")
    plot_training(read_json(options.out, "log.json")).savefig(options.out / "training.png")
    drawn = ["training.png"]
    if "grid" in result:
        report.Grid.from_dict(result["grid"]).plot().savefig(options.out / "grid.png")
        drawn.append("grid.png")
    print(f"{options.out}: {', '.join(drawn)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parser().parse_args(arguments)

    def work() -> None:
        options.device = find_device(getattr(options, "device", "cpu"), options.command)
        {"train": train, "evaluate": evaluate, "draw": draw}[options.command](options)

    def kept() -> str:
        begun = options.command == "train" and whole_checkpoint(folder_of(options) / "checkpoints")
        if begun:
            return "the same command with --resume goes on from here"
        return ""

    return run_command("thinker", work, kept=kept)


if __name__ == "__main__":
    sys.exit(main())
