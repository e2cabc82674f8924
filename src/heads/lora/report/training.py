"""`tuning_report`: what a trainer's log says of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from model_components._report import Axes, Figure, Report, axes_for

if TYPE_CHECKING:
    import numpy as np

LossLog = Sequence[tuple[int, float]]
"""(step, loss) pairs, as a trainer logs them."""

# log entries before a step that define its usual loss, and the fewest that can
_WINDOW = 40
_FEWEST = 10
# deviations above the usual that make a spike: in two logs of three, in one
_SUSTAINED = 5.0
_SINGLE = 15.0
_ENOUGH = 5  # third differences of held-out losses, from which their noise is estimated
_RISEN = 4.0  # deviations of that noise by which the last held-out loss must be above the least


class Spike(NamedTuple):
    """A training loss far above the usual.

    ``grad_norm`` is the gradient's norm before clipping, if it was logged.

    Attributes:
        step: Where.
        loss: There, in nats.
        usual: Median of the logs before.
        grad_norm: There, before clipping; None: not logged.
    """

    step: int
    loss: float
    usual: float
    grad_norm: float | None


@dataclass(frozen=True)
class TuningReport(Report):
    """Findings in a trainer's log: losses, spikes, and where a run overfits.

    Attributes:
        train: (step, loss) of the training rows, as logged.
        held_out: (step, loss) of the held-out rows.
        spikes: Training losses far above the usual.
        overfits_from: The step of the least held-out loss, if that rose afterwards and the training
            loss did not.
        diverges_from: The same, if the training loss rose, too: the rate is too high.
        breaks_at: The first step at which a loss or a gradient's norm is not finite.
        largest_rise: How far the held-out loss ever was above the least before it.
    """

    train: tuple[tuple[int, float], ...]
    held_out: tuple[tuple[int, float], ...]
    spikes: tuple[Spike, ...]
    overfits_from: int | None
    diverges_from: int | None
    breaks_at: int | None
    largest_rise: float

    def summary(self) -> list[str]:
        """First, last and least losses."""
        lines = []
        for name, looks in (("training", self.train), ("held out", self.held_out)):
            finite = _finite(looks)
            if finite:
                step, least = min(finite, key=lambda look: look[1])
                (_, first), (last_step, last) = looks[0], looks[-1]
                lines.append(
                    f"{name}: loss {first:.3f} to {last:.3f} at step {last_step} (perplexity "
                    f"{_perplexity(last):.2f}), least {least:.3f} at step {step}"
                )
        return lines

    def remarks(self) -> list[str]:
        """List where it breaks, overfits, diverges and spikes."""
        lines = []
        if self.breaks_at is not None:
            lines.append(f"breaks at step {self.breaks_at}: the loss or the gradient is not finite")
        if self.overfits_from is not None:
            lines.append(
                f"overfits from step {self.overfits_from}: the held-out loss rises, the training "
                "loss does not"
            )
        if self.diverges_from is not None:
            lines.append(
                f"diverges from step {self.diverges_from}: both losses rise; the learning rate is "
                "too high"
            )
        for step, loss, usual, norm in self.spikes:
            told = "" if norm is None else f", the gradient's norm {norm:.3g}"
            lines.append(f"spike at step {step}: loss {loss:.3f}, usual {usual:.3f}{told}")
        return lines

    def plot(self, ax: Axes | None = None) -> Figure:
        """Losses by step, perplexity at the right.

        Spikes and where it overfits are marked (extra ``plot``).

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure, axes = axes_for(ax, "TuningReport.plot")
        for looks, label, style in (
            (self.train, "training rows", "-"),
            (self.held_out, "held-out rows", "o-"),
        ):
            if looks:
                axes.plot(
                    *zip(*looks, strict=True), style, label=label, linewidth=1.2, markersize=3
                )
        if self.spikes:
            axes.plot(
                [s.step for s in self.spikes],
                [s.loss for s in self.spikes],
                "v",
                color="tab:red",
                label="spikes",
            )
        ends = {
            "overfits": self.overfits_from,
            "diverges": self.diverges_from,
            "breaks": self.breaks_at,
        }
        for label, step in ends.items():
            if step is not None:
                axes.axvline(step, color="grey", linestyle=":", label=f"{label} from step {step}")
        axes.set(xlabel="step", ylabel="loss, nats a token")
        if self.train or self.held_out:
            right = axes.secondary_yaxis("right", functions=(_exponential, _logarithm))
            right.set_ylabel("perplexity")
            axes.legend(fontsize=8)
        return figure


def _exponential(losses: object) -> np.ndarray:
    return torch.as_tensor(losses).double().clamp(max=700.0).exp().numpy()


def _logarithm(perplexities: object) -> np.ndarray:
    return torch.as_tensor(perplexities).double().clamp(min=1e-300).log().numpy()


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def _finite(looks: LossLog) -> list[tuple[int, float]]:
    return [look for look in looks if math.isfinite(look[1])]


def tuning_report(
    log: Sequence[Mapping[str, float]], *, held_out: str = "eval_loss", tolerance: float = 0.01
) -> TuningReport:
    """Read the log of a trainer: `transformers.Trainer`, `trl.SFTTrainer` or any on top of them.

    Log every step (``logging_steps=1``) to see spikes, and evaluate on the way
    (``eval_strategy="steps"``) to see where overfitting begins. What is usual are the 40 logs
    before, by median and median deviation, which earlier spikes do not move; a spike is two logs of
    three that are 5 standard deviations above it, or one that is 15. Noise of heavy tails is still
    reported now and then.

    Args:
        log: ``trainer.state.log_history``.
        held_out: The name of the held-out loss; of several sets ``eval_NAME_loss``.
        tolerance: How many nats the last held-out loss must be above the least to have risen; it
            must also be 4 times the noise between evaluations above it.

    Returns:
        First, last and least losses, where it overfits, spikes; it prints as text and can be
        plotted.

    Raises:
        ValueError: There is no loss in the log, or its held-out losses have other names.

    >>> log = [{"step": i, "loss": 2 - i / 40, "grad_norm": 1.0} for i in range(1, 31)]
    >>> log[24] |= {"loss": 9.0, "grad_norm": 70.0}
    >>> log += [{"step": i, "eval_loss": 2 + (i - 20) ** 2 / 900} for i in (0, 10, 20, 30)]
    >>> print(tuning_report(log))
    training: loss 1.975 to 1.250 at step 30 (perplexity 3.49), least 1.250 at step 30
    held out: loss 2.444 to 2.111 at step 30 (perplexity 8.26), least 2.000 at step 20
    overfits from step 20: the held-out loss rises, the training loss does not
    spike at step 25: loss 9.000, usual 1.688, the gradient's norm 70
    """
    if isinstance(log, (str, Mapping)) or not all(isinstance(entry, Mapping) for entry in log):
        raise ValueError(
            f"tuning_report: log is a {type(log).__name__}; expected trainer.state.log_history"
        )
    steps = [entry for entry in log if "loss" in entry]
    train = tuple((int(entry["step"]), float(entry["loss"])) for entry in steps)
    held_out_losses = tuple(
        (int(entry["step"]), float(entry[held_out])) for entry in log if held_out in entry
    )
    others = sorted(
        {key for entry in log for key in entry if key.startswith("eval_") and key.endswith("_loss")}
    )
    if not held_out_losses and others:
        raise ValueError(
            f"tuning_report: the log has no {held_out}; expected held_out= one of "
            f"{', '.join(others)}"
        )
    if not train and not held_out_losses:
        raise ValueError(
            "tuning_report: the log has neither loss nor eval_loss; expected "
            "trainer.state.log_history"
        )
    norms = [
        None if entry.get("grad_norm") is None else float(entry["grad_norm"]) for entry in steps
    ]
    broken = _non_finite_steps(train, held_out_losses, norms)
    turn = _turn(held_out_losses, tolerance)
    rises = turn is not None and _rises([look for look in _finite(train) if look[0] > turn])
    spikes = [] if broken else _spikes(train, norms)  # Trainer logs what is not finite as 0
    return TuningReport(
        train,
        held_out_losses,
        tuple(spikes),
        None if rises else turn,
        turn if rises else None,
        min(broken, default=None),
        _largest_rise(held_out_losses),
    )


def _non_finite_steps(
    train: LossLog, held_out: LossLog, norms: Sequence[float | None]
) -> list[int]:
    """Return the steps of losses that are not finite, and the last steps of such gradients."""
    broken = [step for step, loss in (*train, *held_out) if not math.isfinite(loss)]
    for (step, _), norm in zip(reversed(train), reversed(norms), strict=True):
        # in float16 single steps are left out and training recovers
        if norm is None or math.isfinite(norm):
            break
        broken.append(step)
    return broken


def _largest_rise(losses: LossLog) -> float:
    """Return the largest rise of the loss above its earlier minimum."""
    low = math.inf
    rise = 0.0
    for _, loss in _finite(losses):
        low = min(low, loss)
        rise = max(rise, loss - low)
    return rise


def _turn(held_out: LossLog, tolerance: float) -> int | None:
    """Return the step of the least held-out loss, if the last loss is clearly above it.

    Clearly means by more than tolerance and noise.
    """
    looks = _finite(held_out)
    if len(looks) < 2:
        return None
    losses = [loss for _, loss in looks]
    bends = [
        abs(d - 3 * c + 3 * b - a)
        for a, b, c, d in zip(*(losses[k:] for k in range(4)), strict=False)
    ]
    # of independent noise, third differences have 20 times the variance (1 + 9 + 9 + 1)
    if len(bends) >= _ENOUGH:
        noise = 1.4826 * statistics.median(bends) / 20**0.5
    else:
        noise = 0.0
    least = min(losses)
    if losses[-1] - least <= max(tolerance, _RISEN * noise):
        return None
    return next(step for step, loss in looks if loss == least)


def _rises(looks: LossLog) -> bool:
    """Return whether a line through losses climbs, by three standard errors."""
    # of logs that were put together one step may have several
    if len({step for step, _ in looks}) < 3:
        return False
    line = statistics.linear_regression(*zip(*looks, strict=True))
    middle = statistics.fmean(step for step, _ in looks)
    left = sum((loss - line.slope * step - line.intercept) ** 2 for step, loss in looks)
    spread = sum((step - middle) ** 2 for step, _ in looks)
    return line.slope > 3 * (left / (len(looks) - 2) / spread) ** 0.5


def _spikes(train: LossLog, norms: Sequence[float | None]) -> list[Spike]:
    """The highest of each run of logs that are above the threshold."""
    usual = []
    above = []
    for place, (_, loss) in enumerate(train):
        before = [value for _, value in train[max(0, place - _WINDOW) : place]]
        if len(before) >= _FEWEST:
            middle = statistics.median(before)
        else:
            middle = math.inf
        if before:
            deviation = 1.4826 * statistics.median(abs(value - middle) for value in before)
        else:
            deviation = 0.0
        usual.append(middle)  # below, a hundredth of the loss is the least that a deviation may be
        above.append(
            (loss - middle) / max(deviation, 0.01 * abs(middle)) if math.isfinite(middle) else 0.0
        )
    spikes: list[Spike] = []
    last = -math.inf
    for place, (step, loss) in enumerate(train):
        near = above[max(0, place - 2) : place] + above[place + 1 : place + 3]
        sustained = above[place] > _SUSTAINED and max(near, default=0.0) > _SUSTAINED
        if not sustained and above[place] <= _SINGLE:
            continue
        one = Spike(step, loss, usual[place], norms[place])
        if place - last <= 2:
            spikes[-1] = max(spikes[-1], one, key=lambda s: s.loss)
        else:
            spikes.append(one)
        last = place
    return spikes
