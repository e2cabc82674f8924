"""Runs of the command ``think``: settings, training, evaluation and plots."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import set_seed

from model_components._folders import make_folder, write_json
from model_components._model_folders import card_of, complete_folder

from . import report, schedules
from .config import ThinkerConfig
from .curriculum import CurriculumDataset
from .flow import FlowPlan
from .losses import Reach
from .model import LatentThinker
from .report import evaluate_grid, evaluate_steps, plot_training
from .run_config import RunConfig
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

_MORE_STEPS = 6
"""Steps beyond one for each token; README's example has as many."""


def named_values(pairs: Sequence[str]) -> Settings:
    """Return the names and values of ``NAME=VALUE``.

    Raises:
        ValueError: A word has no equals sign.
    """
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ValueError(f"think train: expected NAME=VALUE, got {wrong[0]!r}")
    return {name: _value(text) for name, text in (pair.split("=", 1) for pair in pairs)}


def _value(text: str) -> object:
    """Parse a value as YAML, and as a number where YAML reads text (1e-1)."""
    value = yaml.safe_load(text)
    try:
        if isinstance(value, str):
            return float(value)
        return value
    except ValueError:
        return value


def settings_of(task: str, config: RunConfig) -> Settings:
    """Return the settings of a run, from which its data can be made again.

    Args:
        task: Name of the task.
        config: The flags of the command.

    Raises:
        ValueError: The task is unknown or has an answer at each step; iterations or steps are
            invalid.
    """
    known = sorted(name for name, kind in TASKS.items() if not kind.by_step)
    if task not in known:
        raise ValueError(f"think train: task must be one of {', '.join(known)}, got {task!r}")
    recipe = RECIPES.get(task, {})
    model = recipe.get("model", {}) | named_values(config.model)
    if model.get("causal"):
        model.setdefault("latent_init", "tokens")  # as ThinkerConfig has it
    if config.steps is not None and model.get("latent_init") == "tokens":
        raise ValueError(
            "think train: expected no --steps with latent_init=tokens, whose steps follow the "
            f"length, got {list(config.steps)}"
        )
    plan = config.plan
    if plan not in ("every_step", "read_once"):
        plan = Path(plan).read_text(encoding="utf-8")
    iterations = config.iterations
    if iterations is None:
        iterations = recipe.get("iterations", 2400 if _noise(model) else 500)
    if iterations < 1:
        raise ValueError(f"think train: expected 1 or more iterations, got {iterations}")
    return {
        "task": task,
        "options": recipe.get("options", {}) | named_values(config.options),
        "model": model,
        "length": recipe.get("length", 20) if config.length is None else config.length,
        "steps": list(config.steps or (1, 6)),
        "plan": plan,
        "schedule": config.schedule or recipe.get("schedule", "frontier"),
        "batch": recipe.get("batch", 64),
        "iterations": iterations,
        "lengths": list(config.lengths),
        "seed": config.seed,
    }


def _noise(model: Mapping[str, object]) -> bool:
    return model.get("latent_init") == "noise"


def plan_of(run: Settings) -> FlowPlan:
    """Return the flow plan of a run."""
    if run["plan"] in ("every_step", "read_once"):
        memory = run["model"].get("memory", "none") != "none"
        static = bool(run["model"].get("num_static_tokens"))
        return getattr(FlowPlan, run["plan"])(memory=memory, static=static)
    return FlowPlan.from_table(run["plan"])


def data_of(run: Settings) -> CurriculumDataset:
    """Return the data of a run. With latents at the tokens, length n has 1 to n + 6 steps."""
    task = make_task(run["task"], **run["options"])
    plan = plan_of(run)
    ranges = Settings()
    if run["model"].get("latent_init") == "tokens":
        task = AtTokens(task)
        ranges["n_step"] = lambda length: (plan.num_steps(1), plan.num_steps(length + _MORE_STEPS))
    else:
        ranges["n_step"] = tuple(map(plan.num_steps, run["steps"]))
    if _noise(run["model"]):
        ranges["n_latent"] = (8, 16)
    kind = getattr(schedules, run["schedule"].capitalize())
    lengths = {"max_length": run["length"]}
    if run["schedule"] == "fixed":
        schedule = kind(**lengths)
    else:
        schedule = kind(min_length=task.min_length, **lengths)
    return CurriculumDataset(task, schedule, seed=run["seed"], batch_size=run["batch"], **ranges)


def train(run: Settings, out: Path, *, samples: int, device: str, progress: bool) -> str:
    """Train a model; write it, its figures and its log into a folder, and return a table.

    An unfinished run in the folder is continued.

    Raises:
        ValueError: The folder holds another run, or a finished one; settings do not fit.
    """
    set_seed(run["seed"])
    data = data_of(run)
    config = _config_of(run, data)
    model = LatentThinker(config)
    _check_run_folder(out, run)
    write_json(make_folder(out, "train") / "run.json", run)
    iterations = run["iterations"]
    arguments = thinker_arguments(
        out / "checkpoints",
        max_steps=iterations,
        # four checkpoints, so that a stop loses at most a quarter of a run
        save_steps=max(10, iterations // 4),
        save_total_limit=1,
        seed=run["seed"],
        use_cpu=device == "cpu",
        # ten points for the plot of a short run
        logging_steps=max(1, min(50, iterations // 10)),
        disable_tqdm=not progress,
    )
    loss: Settings = {}
    if config.latent_init == "tokens" and "window" in run["model"]:
        loss = {"step_loss": Reach(window=run["model"]["window"])}
    trainer = ThinkerTrainer(
        model, arguments, train_dataset=data, callbacks=[RewindOnPeak()], **loss
    )
    checkpoint = whole_checkpoint(out / "checkpoints")
    begin = time.process_time()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.process_time() - begin
    model.save_pretrained(out / "model")
    write_json(out / "log.json", trainer.state.log_history)
    result = figures(model, data, run, samples) | {
        "iterations": iterations,
        "cpu_seconds": round(seconds, 1),
        "resumed": checkpoint is not None,
        "parameters": model.num_parameters(),
        "seed": run["seed"],
    }
    complete_folder(out / "model", _card(result, run))
    write_json(out / "result.json", result)
    print(
        f"{out}: model/, result.json; next: model-components think evaluate {out}, "
        f"model-components think draw {out}"
    )
    return _table(result, run, seconds)


def _card(result: Settings, run: Settings) -> str:
    settings = "\n".join(f"- {name}: {value}" for name, value in run.items() if name != "plan")
    return card_of(
        f"A thinker for {run['task']}",
        [
            "Load it with `thinker.LatentThinker.from_pretrained`.",
            f"Right on held-out samples of length {result['length']}: {result['token']:.4f} of "
            f"symbols, {result['sequence']:.4f} of rows.",
            f"Made by `model-components think train {run['task']}` with\n\n{settings}",
        ],
        bases=[],
        tags=["thinker"],
    )


def _config_of(run: Settings, data: CurriculumDataset) -> ThinkerConfig:
    """Return the configuration of a run's model.

    Raises:
        ValueError: A name or a value is invalid.
    """
    plan = plan_of(run)
    choices = dict(run["model"])
    if choices.get("positions") == "aligned":
        choices["separators"] = data.task.separators
    fields: Settings = {"plan": plan}
    if choices.get("latent_init") != "tokens":
        fields |= {
            "num_latents": 16 if _noise(choices) else 8,
            "n_step": plan.num_steps(run["steps"][1]),
        }
    fields = {**data.sizes(max([run["length"], *run["lengths"]])), **fields, **choices}
    try:
        return ThinkerConfig(**fields)
    except TypeError as error:  # a name or value of NAME=VALUE
        raise ValueError(error) from error


def _check_run_folder(out: Path, run: Settings) -> None:
    """Check that the folder holds no run, or one that this run continues."""
    if not (out / "run.json").is_file():
        return
    before = read_json(out, "run.json")
    for name, value in run.items():
        if name != "iterations" and value != before.get(name):
            raise ValueError(
                f"think train: the run in {out} has {name} {before.get(name)!r}, got {value!r}; "
                "expected the same, or another folder"
            )
    if (out / "result.json").is_file():
        trained = read_json(out, "result.json")["iterations"]
        if run["iterations"] <= trained:
            raise ValueError(
                f"think train: the run in {out} has {trained} iterations; expected more "
                f"--iterations, or another folder, got {run['iterations']}"
            )


def _table(result: Settings, run: Settings, seconds: float) -> str:
    lines = [
        f"{run['task']}, length {run['length']}: {result['iterations']} iterations, "
        f"{seconds:.0f} CPU seconds",
        f"held out: {result['token']:.4f} of symbols, {result['sequence']:.4f} of rows",
        "",
        "length  symbols     rows",
    ]
    for length, (symbols, rows) in result["by_length"].items():
        longer = "  (longer)" if length > run["length"] else ""
        lines.append(f"{length:>6} {symbols:>8.4f} {rows:>8.4f}{longer}")
    return "\n".join(lines)


def whole_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint, or None."""
    try:
        return str(newest_whole(folder, "thinker_state.pt"))
    except ValueError:
        return None


def figures(model: LatentThinker, data: CurriculumDataset, run: Settings, samples: int) -> Settings:
    """Measure accuracy by length, and by number of latents and steps."""
    shortest = data.schedule.min_length
    longest = run["length"]
    if run["schedule"] == "fixed":
        shorter = []
    else:
        shorter = range(shortest, longest, max(1, longest // 4))
    plan = plan_of(run)
    at_tokens = run["model"].get("latent_init") == "tokens"
    lengths = sorted({*shorter, longest, *run["lengths"]})
    n_steps = None
    if at_tokens:

        def n_steps(length: int) -> list[int]:
            return [plan.num_steps(2 * length + 6)]

    curves = evaluate_steps(model, data, lengths, n_steps=n_steps, samples=samples)
    by_length = {n: cells[0] for n, cells in zip(lengths, curves.cells, strict=True)}
    at = by_length[longest]
    result: Settings = {
        "task": run["task"],
        "length": longest,
        "token": round(at.token, 5),
        "sequence": round(at.sequence, 5),
        "by_length": {n: (round(a.token, 4), round(a.sequence, 4)) for n, a in by_length.items()},
    }
    if not at_tokens:
        steps = sorted({plan.num_steps(n) for n in (1, 2, 4, 6, 8, 12, 16, 24, run["steps"][1])})
        if _noise(run["model"]):
            latents: list[Any] = [4, 6, 8, 12, 16, 24, 32]
        else:
            latents = [model.config.num_latents]
        grid = evaluate_grid(model, data, n_latents=latents, n_steps=steps, samples=samples)
        print(f"\n{grid}")
        result["grid"] = grid.to_dict()
    return result


def read_json(out: Path, name: str) -> Any:
    """Read a JSON file that `train` wrote.

    Raises:
        ValueError: The file does not exist.
    """
    if not (out / name).is_file():
        raise ValueError(
            f"{out} has no {name}; expected a folder that think train wrote to its end"
        )
    return json.loads((out / name).read_text(encoding="utf-8"))


def evaluate(
    out: Path,
    lengths: Sequence[int],
    *,
    n_steps: Sequence[int],
    samples: int,
    seed: int,
    device: str,
) -> report.Curves:
    """Evaluate the model in a run's folder by length and steps."""
    run = read_json(out, "run.json")
    model: Any = LatentThinker.from_pretrained(out / "model")
    model.to(device)
    lengths = lengths or sorted({run["length"], *run["lengths"]})
    return evaluate_steps(
        model, data_of(run), lengths, n_steps=list(n_steps), samples=samples, seed=seed
    )


def draw(out: Path) -> str:
    """Write the plots of a run, and return the names of the files."""
    result = read_json(out, "result.json")
    plot_training(read_json(out, "log.json")).savefig(out / "training.png")
    drawn = ["training.png"]
    if "grid" in result:
        report.Grid.from_dict(result["grid"]).plot().savefig(out / "grid.png")
        drawn.append("grid.png")
    return f"{out}: {', '.join(drawn)}"
