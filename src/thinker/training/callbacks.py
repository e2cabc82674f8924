"""Callbacks of `ThinkerTrainer`: feedback to the curriculum, and rewinding when the loss peaks."""

from __future__ import annotations

import math
from typing import Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from model_components._checks import Whole, check_value

from ..curriculum import CurriculumDataset, StateDict
from ..losses import StepLoss
from ..model import LatentThinker
from .tally import Counts, Tally, mean_loss

logger = logging.get_logger(__name__)


class ThinkerRun(Protocol):
    """The parts of a `ThinkerTrainer` that a callback may use."""

    tally: Tally
    data: CurriculumDataset
    state: TrainerState
    step_loss: StepLoss

    @property
    def thinker(self) -> LatentThinker:
        """The model without its wrappers."""
        ...

    @property
    def batches(self) -> int:
        """The number of batches that this process has consumed."""
        ...

    def snapshot(self) -> StateDict:
        """Return a copy of the state that training changes."""
        ...

    def restore(self, snapshot: dict[str, object]) -> None:
        """Go back to a snapshot."""
        ...

    def cool(self, factor: float) -> None:
        """Multiply the learning rate by ``factor`` for the rest of the run."""
        ...

    def parameters_are_finite(self) -> bool:
        """Return whether all parameters are finite."""
        ...

    def log(self, logs: dict[str, float]) -> None:
        """Write to the logs."""
        ...


class ThinkerCallback(TrainerCallback):
    """A callback with access to its `ThinkerTrainer` and a state in the trainer's checkpoints."""

    trainer: ThinkerRun

    def state_dict(self) -> StateDict:
        """Return the state needed to resume training."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a state that `state_dict` returned."""

    def on_rewind(self) -> None:
        """Discard the counts of the steps that a rewind has undone."""


class CurriculumCallback(ThinkerCallback):
    """A callback that reports the numbers of correct answers to the schedule.

    `ThinkerTrainer` adds this callback if none is given. Within a batch of several segments it does
    not report, so that all of its segments have the same rows.

    Args:
        every: Smallest number of steps between two reports.
    """

    def __init__(self, every: int = 10):
        check_value("CurriculumCallback", "every", every, Whole)
        self.every = every
        self.before: Counts | None = None
        self.reported = 0  # the step of the last report

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Start counting answers."""
        self.before = self.trainer.tally.mark()
        self.reported = state.global_step

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """After ``every`` steps or more, report the answers counted since the last report."""
        trainer = self.trainer
        # a report waits for the device, and a schedule without a state ignores it
        if not trainer.data.schedule.initial() or trainer.batches % trainer.data.segments:
            return
        if state.global_step < self.reported + self.every:
            return
        self.reported = state.global_step
        assert self.before is not None
        counts = trainer.tally.since(self.before)
        # nothing is counted if a rewind came first in this step
        if float(counts["total"].sum()):
            trainer.data.report(counts["right"], counts["total"])

    def on_rewind(self) -> None:
        """Start counting answers again."""
        self.before = self.trainer.tally.mark()

    def state_dict(self) -> StateDict:
        """Return the step of the last report and the counts at that step."""
        return {"before": self.before, "reported": self.reported}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a state that `state_dict` returned."""
        self.before = self.trainer.tally.loaded(state["before"])
        self.reported = state["reported"]


class RewindOnPeak(ThinkerCallback):
    """A callback that restores the best state so far if the loss peaks or is not finite.

    Training then continues with new batches at a lower learning rate.

    Each window of ``every`` steps has a mean loss, which is compared with the lowest such mean and
    with the loss of the first step. (With `Reach`, the first step is ignored, since its batch may
    have hardly any answers within reach.) The state at the start of the best window is kept in
    memory and in checkpoints: weights, parameters of the loss, optimizer and schedule of lengths.
    After ``limit`` rewinds, the next peak stops the run.

    The best weights are restored if a run ends on a peak or with parameters that are not finite.
    After a rewind, they are also restored if the run ends with a loss above the best at the same
    difficulty. Each rewind logs ``rewinds``, ``peak`` and ``rewound_to_step``.

    Args:
        factor: A mean loss is a peak if it is above ``factor * reference + margin``, where the
            reference is the lower of the best mean and the first step's loss.
        margin: See ``factor``.
        every: Number of steps between two checks of the loss.
        limit: Maximum number of rewinds.
        cooling: Factor by which each rewind multiplies the learning rate.

    Raises:
        ValueError: A number is out of its range.
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
                "RewindOnPeak: expected factor >= 1, margin >= 0, every >= 1, limit >= 1 and "
                f"0 < cooling <= 1, got factor={factor}, margin={margin}, every={every}, "
                f"limit={limit} and cooling={cooling}"
            )
        self.factor = factor
        self.margin = margin
        self.every = every
        self.limit = limit
        self.cooling = cooling
        self.count = 0
        self.best: StateDict = {}
        self.newest: StateDict = {}  # the point at which the current window began
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
        """Start the first window of losses, with the current state as the best point so far."""
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
        """Every ``every`` steps, update the best state, or restore it if the loss has peaked."""
        assert self.before is not None
        if math.isnan(self.first) and self.trainer.step_loss.counts_from_start:
            # a batch with few steps has few answers in reach, so the first loss may be near 0
            self.first = math.inf
        if math.isnan(self.first):
            # a copy, since `Tally.since` would move the beginning of the window
            self.first = mean_loss(self.trainer.tally.since(dict(self.before)))
        if state.global_step % self.every:
            return
        self.last = mean_loss(self.trainer.tally.since(self.before))
        if self._is_peak(self.last):
            if not self.go_back():
                logger.warning(
                    "RewindOnPeak: after %d rewinds, the loss peaks again at step %d (%.4g, best "
                    "%.4g); training stops",
                    self.limit,
                    state.global_step,
                    self.last,
                    self.best["loss"],
                )
                control.should_training_stop = True
                return
        elif self.last < self.best["loss"]:
            # the point where the window began: at its end, the loss may already be rising to a peak
            self.best = self.newest | {"loss": self.last}
        self.newest = self._point(state.global_step)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Go back to the best weights if the run ends on worse ones."""
        assert self.before is not None
        rest = mean_loss(self.trainer.tally.since(self.before))  # of an incomplete window
        self.last = self.last if math.isnan(rest) else rest
        # a harder curriculum has a higher loss, without the model being worse
        as_hard = self.best["difficulty"] == self._difficulty()
        is_worse = self.count and as_hard and self.last > self.best["loss"]
        if self._is_peak(self.last) or is_worse or not self.trainer.parameters_are_finite():
            self._rewind()

    def go_back(self) -> bool:
        """Go back to the best point and lower the learning rate; return False if at the limit."""
        if self.count == self.limit:
            return False
        self.count += 1
        self._rewind()
        # at the same learning rate, the loss would peak again
        self.trainer.cool(self.cooling)
        return True

    def _difficulty(self) -> float:
        return self.trainer.data.difficulty(self.trainer.batches)

    def _point(self, step: int) -> dict[str, object]:
        return {
            # the mean loss is not known before the window has ended
            "loss": math.inf,
            "step": step,
            "difficulty": self._difficulty(),
        } | self.trainer.snapshot()

    def on_rewind(self) -> None:
        """Start a new window after a rewind by this or another callback."""
        self.before = self.trainer.tally.mark()
        # the point at the window's beginning belongs to the steps that were undone
        self.newest = self._point(self.trainer.state.global_step)

    def _is_peak(self, loss: float) -> bool:
        return (
            math.isinf(loss)
            # the margin: near a loss of 0, a factor alone would make every small rise a peak
            or loss > self.factor * min(self.best["loss"], self.first) + self.margin
        )

    def _rewind(self) -> None:
        self.trainer.restore(self.best)
        self.trainer.log(
            {"rewinds": self.count, "peak": self.last, "rewound_to_step": self.best["step"]}
        )

    def state_dict(self) -> StateDict:
        """Return the rewind count, the saved states, the losses and the current window's start."""
        return {k: getattr(self, k) for k in ("count", "best", "newest", "first", "last", "before")}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a state that `state_dict` returned."""
        for name in ("count", "best", "newest", "first", "last"):
            setattr(self, name, state[name])
        self.before = self.trainer.tally.loaded(state["before"])
