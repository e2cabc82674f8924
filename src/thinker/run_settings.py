"""The settings of a training run of the command ``think``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from model_components._checks import CheckedConfig, Range, Whole, check_choice
from model_components._formats import reading
from model_components._rows import SUFFIXES, kind_of
from model_components._yaml import read_yaml

from . import schedules
from .config import ThinkerConfig
from .curriculum import CurriculumDataset
from .flow import FlowPlan
from .model import LatentThinker
from .presets import MORE_STEPS, PRESETS, Preset
from .run_config import PresetName, RunConfig, Schedule
from .tasks import TASKS, AtTokens, RowsTask, Task, make_task

RECIPES: dict[str, dict[str, Any]] = {  # fields of a `Run` that a task needs
    # an answer depends on the position of its symbol counted from the end
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

PLANS = ("every_step", "read_once")
"""Names of plans; any other plan is a table."""


@dataclass(frozen=True, kw_only=True)
class Run(CheckedConfig):
    """The settings of a training run, from which its data and model can be rebuilt.

    Args:
        task: Name of the task, or a file of rows.
        preset: Name of a preset, which sets the model, schedule, steps and loss.
        options: Options of the task.
        model: Fields of the `ThinkerConfig`.
        length: Length of the longest sequences in training.
        steps: Minimum and maximum number of thinking steps.
        plan: Name of a plan, or its table.
        schedule: Schedule of the training lengths.
        batch: Number of rows in a batch.
        iterations: Number of training steps.
        lengths: Longer lengths that the model must support and is evaluated at.
        seed: Random seed of the data and the weights.
    """

    task: str
    preset: PresetName | None = None
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    length: Annotated[int, Range(least=1, most=1_000_000)] = 20
    steps: Annotated[tuple[int, int], Range(least=1)] = (1, 6)
    plan: str = "every_step"
    schedule: Schedule = "frontier"
    batch: Whole = 64
    iterations: Whole = 500
    lengths: Annotated[tuple[int, ...], Range(least=1, most=1_000_000)] = ()
    seed: int = 0

    @property
    def at_tokens(self) -> bool:
        """Return whether the latents start from the input's tokens."""
        if self.preset is not None:
            return self.preset != "pointer"
        return self.model.get("latent_init") == "tokens"

    def settings(self) -> Preset | None:
        """Return the preset with the run's model fields, or None without a preset."""
        return None if self.preset is None else PRESETS[self.preset](**self.model)

    def bare_task(self) -> Task:
        """Return the task, not wrapped in `AtTokens`."""
        if self.task in TASKS:
            return make_task(self.task, **self.options)
        return RowsTask(self.task)

    @property
    def with_noise(self) -> bool:
        """Return whether latents start from noise, so that their number may vary."""
        return self.model.get("latent_init") == "noise"

    def flow_plan(self) -> FlowPlan:
        """Return the plan of the steps."""
        if self.plan not in PLANS:
            return FlowPlan.from_table(self.plan)
        memory = self.model.get("memory", "none") != "none"
        static = bool(self.model.get("num_static_tokens"))
        return getattr(FlowPlan, self.plan)(memory=memory, static=static)

    def data(self) -> CurriculumDataset:
        """Return the run's data set.

        Without a preset, and with a latent at each token, a batch whose longest row has length n
        takes 1 to n + 6 steps.
        """
        task = self.bare_task()
        preset = self.settings()
        if preset is not None:
            return preset.data(task, max_length=self.length, seed=self.seed, batch_size=self.batch)
        plan = self.flow_plan()
        counts: dict[str, Any] = {}
        if self.at_tokens:
            task = at_tokens = AtTokens(task)
            counts["n_step"] = lambda n: (
                plan.num_steps(1),
                plan.num_steps(at_tokens.reach(n) + MORE_STEPS),
            )
        else:
            fewest, most = self.steps
            counts["n_step"] = (plan.num_steps(fewest), plan.num_steps(most))
        if self.with_noise:
            # training uses several numbers, so that the model works with any number of latents
            counts["n_latent"] = (8, 16)
        kind = getattr(schedules, self.schedule.capitalize())
        schedule = kind(max_length=self.length, min_length=task.min_length)
        return CurriculumDataset(task, schedule, seed=self.seed, batch_size=self.batch, **counts)

    def thinker(self, data: CurriculumDataset) -> LatentThinker:
        """Return the model, with new weights.

        Raises:
            ValueError: A name or a value is invalid.
        """
        preset = self.settings()
        if preset is None:
            return LatentThinker(self.config(data))
        return preset.thinker(data, longest=max([self.length, *self.lengths]))

    def config(self, data: CurriculumDataset) -> ThinkerConfig:
        """Return the model's configuration.

        Raises:
            ValueError: A name or a value is invalid.
        """
        plan = self.flow_plan()
        fields: dict[str, Any] = data.sizes(max([self.length, *self.lengths])) | {"plan": plan}
        if not self.at_tokens:
            fields["num_latents"] = 16 if self.with_noise else 8
            fields["n_step"] = plan.num_steps(self.steps[1])
        if self.model.get("positions") == "aligned":
            fields["separators"] = data.task.separators
        try:
            return ThinkerConfig(**fields | self.model)
        except TypeError as error:  # an invalid name or value in NAME=VALUE
            raise ValueError(error) from error


def run_of(task: str, config: RunConfig) -> Run:
    """Return the settings of a run: the command's flags, which override the task's recipe.

    Raises:
        ValueError: The task is unknown or has an answer at each step, or a flag is invalid.
    """
    _check_task(task)
    if task not in TASKS:
        # an absolute path, so that a run can be continued from any folder
        task = str(Path(task).resolve())
    if config.preset is None:
        recipe = RECIPES.get(task, {})
    else:
        _check_preset(config)
        recipe = {}
    model = recipe.get("model", {}) | _named_values(config.model)
    if model.get("causal"):
        model.setdefault("latent_init", "tokens")  # as in ThinkerConfig
    if config.steps is not None and model.get("latent_init") == "tokens":
        raise ValueError(
            f"think train: --steps is {list(config.steps)}, but with latent_init=tokens the number "
            "of steps follows from the length; leave out --steps"
        )
    flags: dict[str, Any] = {
        "length": config.length,
        "steps": config.steps,
        "schedule": config.schedule,
        "iterations": config.iterations,
    }
    fields: dict[str, Any] = recipe | {n: value for n, value in flags.items() if value is not None}
    if model.get("latent_init") == "noise":
        fields.setdefault("iterations", 2400)  # more, to learn to use any number of latents
    fields["options"] = recipe.get("options", {}) | _named_values(config.options)
    lengths = config.lengths
    if task not in TASKS:
        rows = RowsTask(task)
        fields.setdefault("length", rows.default_length)
        _check_rows(rows, config)
        lengths = lengths or tuple(n for n in rows.lengths if n > fields["length"])
    elif config.preset == "grid":
        raise ValueError(
            f"think train: expected a task of grids of one size with --preset grid, got {task}; "
            "train a thinker.tasks.TensorTask from Python"
        )
    return Run(
        **fields | {"task": task, "model": model, "plan": _plan_of(config.plan)},
        preset=config.preset,
        lengths=lengths,
        seed=config.seed,
    )


def _check_task(task: str) -> None:
    """Check that a task is a file, or a named task that the command can train."""
    known = sorted(name for name, kind in TASKS.items() if not kind.by_step)
    if task in TASKS and task not in known:
        raise ValueError(
            f"think train: {task} has an answer at each step; train it from Python with "
            "ThinkerTrainer"
        )
    if task in TASKS or Path(task).is_file():
        return
    if kind_of(Path(task)) in SUFFIXES:
        raise ValueError(f"think train: there is no file {task}")
    check_choice("think train", "task", task, [*known, "a file of rows"])


def _check_rows(rows: RowsTask, config: RunConfig) -> None:
    """Check that the flags of a run can be used with the rows of a file."""
    if config.options:
        raise ValueError(f"think train: a file of rows takes no --options, got {config.options[0]}")
    if config.preset == "grid" and len(rows.lengths) > 1:
        raise ValueError(
            "think train: --preset grid needs rows of one length, got lengths "
            f"{rows.lengths[0]} to {rows.lengths[-1]}"
        )
    missing = sorted(set(config.lengths) - set(rows.lengths))
    if missing:
        numbers = ", ".join(map(str, missing))
        print(
            f"think train: the model accepts inputs of these --lengths, but it is not evaluated at "
            f"them, because no row has such a length: {numbers}"
        )


def _check_preset(config: RunConfig) -> None:
    """Raise an error for flags whose values the preset sets."""
    given = [name for name in ("schedule", "steps") if getattr(config, name) is not None]
    if config.plan != RunConfig.plan:
        given.append("plan")
    if given:
        raise ValueError(
            f"think train: --preset sets the {given[0]}, got --{given[0]}; remove --{given[0]} or "
            "--preset"
        )


def _plan_of(plan: str) -> str:
    """Return ``plan`` if it is the name of a plan, otherwise the text of the file at this path."""
    if plan in PLANS:
        return plan
    path = Path(plan)
    if not path.is_file():
        raise ValueError(
            f"think train: --plan must be {', '.join(PLANS)} or a file with a table, got {plan}"
        )
    with reading(path, "think train"):
        # the file's text, so that a resumed run no longer needs the file
        return path.read_text(encoding="utf-8")


def _named_values(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse texts ``NAME=VALUE`` into a dictionary.

    Raises:
        ValueError: A text has no equals sign.
    """
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"think train: expected NAME=VALUE, got {pair!r}")
        values[name] = _value(text)
    return values


def _value(text: str) -> object:
    """Parse a value as YAML, or as a float if YAML reads it as a string (1e-1)."""
    try:
        (value,) = read_yaml(text) or [None]  # "---" starts a second value: ValueError, too
    except ValueError as error:
        raise ValueError(
            f"think train: expected one YAML value after NAME=, got {text!r}"
        ) from error
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
