"""Presets: a model, data, loss and learning rate for four kinds of tasks.

- `scan`: information moves from left to right, as in sums, automata and carries.
- `exchange`: neighbors exchange information in both directions, as in sorting.
- `pointer`: a few latents look up parts of the input, one hop per step.
- `grid`: every cell of a grid of one size has an answer, as in Sudoku.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback

from model_components._checks import is_whole, refuse

from .config import ThinkerConfig
from .curriculum import CurriculumDataset
from .losses import AllSteps, Reach, StepLoss
from .model import LatentThinker
from .schedules import Fixed, Frontier, Schedule
from .tasks import AtTokens, RowsTask, Task
from .training import ThinkerTrainer, thinker_arguments

Kind = Literal["scan", "exchange", "pointer", "grid"]

MORE_STEPS = 6
"""The number of thinking steps in training beyond one for each symbol. With them, models learn to
keep a correct answer."""

# The maximum number of steps of a batch if each step has its own answer. With more steps,
# information from an end of the row would reach all latents in training.
_MOST_EXCHANGES = 8

# If the latents are the tokens, these positions have no parameters per position, so they do not
# limit the input's length. _ANY_LENGTH is far more than memory and time allow in practice.
_WITHOUT_TABLE = ("rotary", "cyclic")
_ANY_LENGTH = 10_000


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings for one kind of task, as `scan`, `exchange`, `pointer` and `grid` return them.

    Attributes:
        kind: The name of the preset.
        model: Fields of `ThinkerConfig`.
        learning_rate: Learning rate.
        share: Share of the training rows that have the longest length.
        batch_size: Number of rows in a batch.
        segments: Optimizer steps for each batch; see `ThinkerTrainer`.
    """

    kind: Kind
    model: Mapping[str, Any]
    learning_rate: float
    share: float = 0.5
    batch_size: int = 64
    segments: int = 1

    def data(
        self, task: Task, *, max_length: int | None = None, **options: Any
    ) -> CurriculumDataset:
        """Return the training data. Except for `pointer`, the task is wrapped in `AtTokens`.

        Args:
            task: The task, not wrapped in `AtTokens`.
            max_length: Longest length in training; default: the task's.
            **options: Options of `CurriculumDataset`, such as ``holdout``, ``seed`` and
                ``schedule``. A schedule sets the lengths; for `pointer`, also pass its longest
                length as ``max_length``, which sets the number of steps.

        Returns:
            The data set, whose ``task`` has the layout that the model needs.
        """
        if not isinstance(task, Task):
            raise ValueError(
                "Preset.data: expected a Task, such as RowsTask(rows) or make_task(name), got "
                f"{task!r:.80}"
            )
        if self.kind == "grid" and isinstance(task, RowsTask) and len(task.lengths) > 1:
            raise ValueError(
                f"Preset.data: expected rows of one length for a grid, got lengths "
                f"{task.lengths[0]} to {task.lengths[-1]}"
            )
        longest = task.default_length if max_length is None else max_length
        if not is_whole(longest, 1):
            refuse("Preset.data", "max_length", longest, "a whole number, 1 or more")
        steps: Any
        schedule: Schedule
        if self.kind == "pointer":
            steps = longest + 1  # the first step reads the start
        else:
            task = AtTokens(task)
            steps = self._steps_of(task)
        if task.default_length == 1:
            schedule = Fixed(max_length=1)
        elif self.kind == "pointer" and task.by_step:
            # a row of the longest length has an answer for each step, so it trains all lengths
            schedule = Fixed(max_length=longest, min_length=task.min_length)
        else:
            schedule = Frontier(max_length=longest, min_length=task.min_length, share=self.share)
        settings: dict[str, Any] = {
            "schedule": schedule,
            "batch_size": self.batch_size,
            "n_step": steps,
        }
        return CurriculumDataset(task, **settings | options)

    def _steps_of(self, task: AtTokens) -> Any:
        """Return the range of steps, or a function from a batch's longest length to the range."""
        if self.kind == "grid":
            return (1, 3)
        if task.by_step:
            return lambda longest: (1, min(_MOST_EXCHANGES, longest))
        return lambda longest: (1, task.reach(longest) + MORE_STEPS)

    def thinker(
        self, data: CurriculumDataset, *, longest: int | None = None, **fields: Any
    ) -> LatentThinker:
        """Return a model for the data.

        Args:
            data: The training data.
            longest: Longest length that the model must support; default: the longest in training.
                Models of `scan` and `exchange` support at least 10,000, unless fields give them
                parameters for each position.
            **fields: Further fields of `ThinkerConfig`.
        """
        model = {**self.model, **fields}
        if longest is None:
            longest = data.schedule.max_length
        if _takes_any_length(model):
            longest = max(longest, _ANY_LENGTH)
        sizes: dict[str, Any] = data.sizes(longest)
        if self.kind == "pointer":
            # by default, `solve` takes at most as many steps as training did
            sizes["n_step"] = data.most_steps
        return LatentThinker(ThinkerConfig(**sizes | model))

    def step_loss(self) -> StepLoss | None:
        """Return the loss; None for the trainer's default."""
        if self.kind == "pointer":
            return AllSteps()
        window = self.model.get("window")
        return None if window is None else Reach(window=window)

    def trainer(
        self,
        model: LatentThinker,
        data: CurriculumDataset,
        output_dir: str | Path,
        *,
        max_steps: int,
        callbacks: Sequence[TrainerCallback] = (),
        **arguments: Any,
    ) -> ThinkerTrainer:
        """Return a `ThinkerTrainer` with the preset's loss and learning rate, and 50 warm-up steps.

        It saves a checkpoint after each quarter of the steps, but not more often than every 10
        steps, and keeps only the newest one. ``train(resume_from_checkpoint=True)`` continues from
        this checkpoint.

        Args:
            model: The model.
            data: The training data.
            output_dir: Folder of checkpoints and logs.
            max_steps: Number of optimizer steps.
            callbacks: Callbacks of the trainer, such as `RewindOnPeak`.
            **arguments: Arguments of `thinker_arguments`.
        """
        if not is_whole(max_steps, 1):
            refuse("Preset.trainer", "max_steps", max_steps, "a whole number, 1 or more")
        settings: dict[str, Any] = {
            "learning_rate": self.learning_rate,
            "warmup_steps": 50,
            # an interruption loses at most a quarter of a run
            "save_strategy": "steps",
            "save_steps": max(10, max_steps // 4),
            "save_total_limit": 1,
        }
        return ThinkerTrainer(
            model,
            thinker_arguments(output_dir, max_steps=int(max_steps), **settings | arguments),
            train_dataset=data,
            step_loss=self.step_loss(),
            segments=self.segments,
            callbacks=list(callbacks),
        )


def _takes_any_length(model: Mapping[str, Any]) -> bool:
    """Return whether no parameter of a model depends on the lengths of its inputs and answers."""
    at_tokens = model.get("latent_init") == "tokens" or bool(model.get("causal"))
    by_length = bool(model.get("from_end")) or model.get("mixer") == "mlp"
    return model.get("positions") in _WITHOUT_TABLE and at_tokens and not by_length


def scan(**fields: Any) -> Preset:
    """Return the preset for answers that can be found from left to right.

    Each token's latent attends to itself and its left neighbor, so information moves one token per
    step. Longer inputs take more steps. Examples: sums, parity, the carries of an addition that
    begins with the least significant digits, any finite automaton.

    Args:
        **fields: Fields of `ThinkerConfig`, in place of the preset's.

    Returns:
        The preset.

    >>> import thinker as th
    >>> preset = scan(hidden_size=16)
    >>> data = preset.data(th.make_task("prefix_sum"), max_length=5)
    >>> preset.thinker(data).config.max_input_length  # with the start token
    10001
    """
    model = {"causal": True, "window": 2, "positions": "rotary", "hidden_size": 32, "num_heads": 2}
    return Preset(kind="scan", model=model | fields, learning_rate=4e-3)


def exchange(**fields: Any) -> Preset:
    """Return the preset for tasks in which neighbors exchange information in both directions.

    Examples: sorting and reversing with ``by_step=True``, where each step has its own answer;
    cellular automata.

    Args:
        **fields: Fields of `ThinkerConfig`, in place of the preset's.

    Returns:
        The preset.
    """
    model = {"latent_init": "tokens", "window": 2, "positions": "cyclic"}
    return Preset(kind="exchange", model=model | fields, learning_rate=4e-3, share=0.3)


def pointer(**fields: Any) -> Preset:
    """Return the preset for answers that a few latents find by following pointers, one per step.

    Args:
        **fields: Fields of `ThinkerConfig`, in place of the preset's.

    Returns:
        The preset.
    """
    return Preset(kind="pointer", model={"num_latents": 4} | fields, learning_rate=3e-3)


def grid(**fields: Any) -> Preset:
    """Return the preset for grids of one size.

    It has token-mixing MLPs, and four optimizer steps per batch.

    Use it with ``TensorTask(..., grid=True)``.

    Args:
        **fields: Fields of `ThinkerConfig`, in place of the preset's.

    Returns:
        The preset.
    """
    model = {"latent_init": "tokens", "mixer": "mlp", "layers_per_step": 2}
    return Preset(kind="grid", model=model | fields, learning_rate=3e-3, batch_size=16, segments=4)


PRESETS = {"scan": scan, "exchange": exchange, "pointer": pointer, "grid": grid}
"""The presets by name, for the command ``think``."""
