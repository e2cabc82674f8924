"""Callbacks of `ThinkerTrainer`: the curriculum's feedback, rewinding on a peak of the loss, evaluation grids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback

from model_components._folders import write_json

from ..curriculum import CurriculumDataset
from ..flow import FlowPlan
from ..model import LatentThinker
from ..report import Grid, evaluate_grid
from .tally import Counts, Tally


class ThinkerRun(Protocol):
    """What a callback may ask of a `ThinkerTrainer`."""

    tally: Tally
    data: CurriculumDataset
    plan: FlowPlan | None

    @property
    def thinker(self) -> LatentThinker:
        """The model, out of its wrappers."""
        ...

    @property
    def batches(self) -> int:
        """Where this process is in the data."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """A copy of what training changes."""
        ...

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Back to it."""
        ...

    def log(self, logs: dict[str, float]) -> None:
        """Write to the logs."""
        ...


class ThinkerCallback(TrainerCallback):
    """A callback that knows its `ThinkerTrainer` and has a state in its checkpoints."""

    trainer: ThinkerRun

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""

    def on_rewind(self) -> None:
        """Forget what was counted on the way that was given up."""


class CurriculumCallback(ThinkerCallback):
    """Tells the schedule what was right; `ThinkerTrainer` adds one when it gets none.

    Args:
        every: Steps between two reports.
    """

    def __init__(self, every: int = 10):
        self.every = every
        self.before: Counts | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count from here."""
        if self.before is None:
            self.before = self.trainer.tally.mark()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report."""
        trainer = self.trainer
        if state.global_step % self.every or not trainer.data.schedule.initial():
            return
        assert self.before is not None
        found = trainer.tally.since(self.before)
        if float(found["total"].sum()):
            trainer.data.report(found["right"], found["total"], step=trainer.batches)

    def on_rewind(self) -> None:
        """Count from here."""
        self.before = self.trainer.tally.mark()

    def state_dict(self) -> dict[str, Any]:
        """What was reported."""
        return {"before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on."""
        self.before = self.trainer.tally.loaded(state["before"])


class RewindOnPeak(ThinkerCallback):
    """Back to the best point when the loss peaks or is not finite: weights, optimizer, schedule; the stream goes on.

    The mean loss of every ``every`` steps is compared with the best such mean; the state of the best is kept in memory
    and in checkpoints. New batches follow, so that the same peak does not come again. Logged as ``rewinds``.

    Args:
        factor: A peak is above ``factor`` times the best
        margin: plus this.
        every: Steps between two looks.
        limit: Never more often than this.
    """

    def __init__(self, *, factor: float = 3.0, margin: float = 0.3, every: int = 20, limit: int = 20):
        if factor < 1 or margin < 0 or every < 1 or limit < 1:
            raise ValueError(
                f"RewindOnPeak: factor {factor}, margin {margin}, every {every}, limit {limit}; needed from 1, 0, 1, 1"
            )
        self.factor, self.margin, self.every, self.limit = factor, margin, every, limit
        self.count = 0
        self.best: dict[str, Any] | None = None
        self.before: Counts | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count from here."""
        if self.before is None:
            self.before = self.trainer.tally.mark()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look, keep or go back."""
        if state.global_step % self.every:
            return
        assert self.before is not None
        total, count = self.trainer.tally.since(self.before)["loss"].tolist()
        loss = total / max(1.0, count)
        if self.best is not None and not loss <= self.factor * self.best["loss"] + self.margin:  # nan is a peak
            if self.count < self.limit:
                self._rewind(loss)
        elif math.isfinite(loss) and (self.best is None or loss < self.best["loss"]):
            self.best = {"loss": loss, "step": state.global_step} | self.trainer.snapshot()

    def _rewind(self, loss: float) -> None:
        assert self.best is not None
        self.trainer.restore(self.best)
        self.count += 1
        self.trainer.log({"rewinds": self.count, "peak": loss, "rewound_to_step": self.best["step"]})

    def state_dict(self) -> dict[str, Any]:
        """The count and the best point."""
        return {"count": self.count, "best": self.best, "before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on."""
        self.count, self.best = state["count"], state["best"]
        self.before = self.trainer.tally.loaded(state["before"])


class GridCallback(ThinkerCallback):
    """An evaluation grid every so many steps, in the logs as its mean and in a file as it is.

    Args:
        every: Steps between two grids.
        n_latents: Rows.
        n_steps: Columns.
        out: Folder for ``grid-STEP.json``; default none are written.
        **options: Of `evaluate_grid`.
    """

    def __init__(
        self,
        every: int,
        *,
        n_latents: Sequence[int],
        n_steps: Sequence[int],
        out: str | Path | None = None,
        **options: Any,
    ):
        self.every, self.out = every, None if out is None else Path(out)
        self.options: dict[str, Any] = {"n_latents": n_latents, "n_steps": n_steps, **options}
        self.grids: dict[int, Grid] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look."""
        if state.global_step % self.every or not state.is_world_process_zero:
            return
        trainer = self.trainer
        grid = evaluate_grid(trainer.thinker, trainer.data, plan=trainer.plan, **self.options)
        self.grids[state.global_step] = grid
        if self.out is not None:
            write_json(self.out / f"grid-{state.global_step}.json", grid.to_dict(), "GridCallback")
        trainer.log({"grid_accuracy": float(grid.token().mean())})
