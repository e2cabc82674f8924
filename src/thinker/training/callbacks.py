"""Callbacks of `ThinkerTrainer`.

The curriculum's feedback, rewinding on a peak of the loss.
"""

from __future__ import annotations

import math
from typing import Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from model_components._checks import Whole, check_value

from ..curriculum import CurriculumDataset, StateDict
from ..model import LatentThinker
from .tally import Counts, Tally, mean_loss

logger = logging.get_logger(__name__)


class ThinkerRun(Protocol):
    """Parts of a `ThinkerTrainer` that a callback may ask for."""

    tally: Tally
    data: CurriculumDataset
    state: TrainerState

    @property
    def thinker(self) -> LatentThinker:
        """The model, out of its wrappers."""
        ...

    @property
    def batches(self) -> int:
        """Return this process's place in the data."""
        ...

    def snapshot(self) -> StateDict:
        """A copy of what training changes."""
        ...

    def restore(self, snapshot: dict[str, object]) -> None:
        """Back to it."""
        ...

    def cool(self, factor: float) -> None:
        """Lower the learning rate for good."""
        ...

    def parameters_are_finite(self) -> bool:
        """Return whether no parameter has NaN or infinity."""
        ...

    def log(self, logs: dict[str, float]) -> None:
        """Write to the logs."""
        ...


class ThinkerCallback(TrainerCallback):
    """A callback that knows its `ThinkerTrainer` and has a state in its checkpoints."""

    trainer: ThinkerRun

    def state_dict(self) -> StateDict:
        """Return what a resume needs."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from there."""

    def on_rewind(self) -> None:
        """Called after a rewind: forget what was counted in the steps that were undone."""


class CurriculumCallback(ThinkerCallback):
    """Tells the schedule what was right; `ThinkerTrainer` adds one when it gets none.

    Args:
        every: Steps between two reports.
    """

    def __init__(self, every: int = 10):
        check_value("CurriculumCallback", "every", every, Whole)
        self.every = every
        self.before: Counts | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Count from here."""
        self.before = self.trainer.tally.mark()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Report the losses of the step."""
        trainer = self.trainer
        # a report waits for the device, and is nothing to a schedule without a state
        if state.global_step % self.every or not trainer.data.schedule.initial():
            return
        assert self.before is not None
        counts = trainer.tally.since(self.before)
        # nothing is counted where a rewind came first at this very step
        if float(counts["total"].sum()):
            trainer.data.report(counts["right"], counts["total"], step=trainer.batches)

    def on_rewind(self) -> None:
        """Count from here."""
        self.before = self.trainer.tally.mark()

    def state_dict(self) -> StateDict:
        """Return what was reported."""
        return {"before": self.before}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on."""
        self.before = self.trainer.tally.loaded(state["before"])


class RewindOnPeak(ThinkerCallback):
    """Go back to the best point when the loss peaks or is not finite.

    It goes on with new batches at a lower rate.

    The mean loss of every ``every`` steps is compared with the best such mean and with the first
    step's loss. What is kept for the best one are weights, optimizer, moving average and schedule
    at its beginning, in memory and in checkpoints. A run that peaks once more than ``limit`` times
    is stopped. One that ends on a peak, or after a rewind above the best at the same difficulty,
    ends with the best weights. Logged as ``rewinds``, ``peak`` and ``rewound_to_step``.

    Args:
        factor: A peak is above ``factor`` times the best mean, or the first loss if that is lower,
            plus ``margin``.
        margin: See ``factor``.
        every: Steps between two looks.
        limit: Rewinds, at most.
        cooling: The learning rate is multiplied by it at each rewind.

    Raises:
        ValueError: A number out of its range.
    """

    def __init__(
        self,
        *,
        factor: float = 3.0,
        margin: float = 0.3,
        every: int = 20,
        limit: int = 20,
        cooling: float = 0.5,
    ):
        if not (factor >= 1 and margin >= 0 and every >= 1 and limit >= 1 and 0 < cooling <= 1):
            raise ValueError(
                f"RewindOnPeak: factor {factor}, margin {margin}, every {every}, limit {limit}, "
                f"cooling {cooling}; expected from 1, 0, 1, 1, and above 0 to 1"
            )
        self.factor = factor
        self.margin = margin
        self.every = every
        self.limit = limit
        self.cooling = cooling
        self.count = 0
        self.best: StateDict = {}
        self.newest: StateDict = {}  # where the present window began
        self.first = math.nan  # loss of the first step
        self.last = math.nan  # mean loss of the last window
        self.before: Counts | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Count from here; there is nothing better yet."""
        self.count = 0
        self.first = math.nan
        self.last = math.nan
        self.before = self.trainer.tally.mark()
        self.newest = self.best = self._point(state.global_step)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Keep a good point, or go back to it after a peak."""
        assert self.before is not None
        if math.isnan(self.first):
            # a copy, for `since` would move the beginning of the window
            self.first = mean_loss(self.trainer.tally.since(dict(self.before)))
        if state.global_step % self.every:
            return
        self.last = mean_loss(self.trainer.tally.since(self.before))
        if self._is_peak(self.last):
            if not self.go_back():
                logger.warning(
                    "RewindOnPeak: %d rewinds, and the loss peaks again at step %d (%.4g, best "
                    "%.4g); training stops",
                    self.limit,
                    state.global_step,
                    self.last,
                    self.best["loss"],
                )
                control.should_training_stop = True
                return
        elif self.last < self.best["loss"]:
            # from its beginning: at its end a peak may be rising already
            self.best = self.newest | {"loss": self.last}
        self.newest = self._point(state.global_step)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Go back to the best weights where the run ends on worse ones."""
        assert self.before is not None
        rest = mean_loss(self.trainer.tally.since(self.before))  # of a window that was not whole
        self.last = self.last if math.isnan(rest) else rest
        # a curriculum that has grown has a higher loss, and is not worse for it
        as_hard = self.best["difficulty"] == self._difficulty()
        is_worse = self.count and as_hard and self.last > self.best["loss"]
        if self._is_peak(self.last) or is_worse or not self.trainer.parameters_are_finite():
            self._rewind()

    def go_back(self) -> bool:
        """Go back to the best point and lower the rate; False where the limit is reached."""
        if self.count == self.limit:
            return False
        self.count += 1
        self._rewind()
        # at the same rate it would peak again
        self.trainer.cool(self.cooling)
        return True

    def _difficulty(self) -> float:
        return self.trainer.data.difficulty(self.trainer.batches)

    def _point(self, step: int) -> dict[str, object]:
        return {
            # not known before its window has ended
            "loss": math.inf,
            "step": step,
            "difficulty": self._difficulty(),
        } | self.trainer.snapshot()

    def on_rewind(self) -> None:
        """Count from here; another of its kind may have gone back."""
        self.before = self.trainer.tally.mark()
        # the point at the window's beginning is on the path that was left
        self.newest = self._point(self.trainer.state.global_step)

    def _is_peak(self, loss: float) -> bool:
        return (
            math.isinf(loss)
            # the margin: near a loss of 0 a factor alone makes a peak of every ripple
            or loss > self.factor * min(self.best["loss"], self.first) + self.margin
        )

    def _rewind(self) -> None:
        self.trainer.restore(self.best)
        self.trainer.log(
            {"rewinds": self.count, "peak": self.last, "rewound_to_step": self.best["step"]}
        )

    def state_dict(self) -> StateDict:
        """The count, the best point and the present window's beginning."""
        return {k: getattr(self, k) for k in ("count", "best", "newest", "first", "last", "before")}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on."""
        for name in ("count", "best", "newest", "first", "last"):
            setattr(self, name, state[name])
        self.before = self.trainer.tally.loaded(state["before"])
