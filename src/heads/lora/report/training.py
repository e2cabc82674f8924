"""`tuning_report`: find the problems of a training run in its trainer's log."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from model_components._report import Axes, Figure, Report, axes_for

if TYPE_CHECKING:
    import numpy as np

LossLog = Sequence[tuple[int, float]]
"""(step, loss) pairs in the order of the log."""

_WINDOW = 40  # number of earlier log entries whose median is the usual loss at a step
_FEWEST = 3  # minimum number of earlier log entries for this median
# number of standard deviations by which a spike exceeds the usual loss: each of two nearby losses
# must exceed it by _SUSTAINED, or a single loss by _SINGLE
_SUSTAINED = 5.0
_SINGLE = 15.0
_RISE = 0.3  # minimum rise of a level, in nats; 0.3 nats increase the perplexity by a third
_CERTAIN = 6.0  # minimum rise of a level, in standard errors
_MEDIAN = 1.57  # variance of the median of normal noise, divided by the variance of its mean
_TENTH = 10  # a level is the median of consecutive entries, 1 / _TENTH of all entries
_LEVEL = 3  # minimum number of entries in a level
_LEAST_NOISE = 1e-4  # nats; losses are logged with four digits
_NORMAL = 1.4826  # standard deviation of normal noise, divided by its median absolute deviation
_ENOUGH = 5  # minimum number of third differences for an estimate of the noise of held-out losses
_RISEN = 4.0  # a held-out loss rises or falls if it changes by this many deviations of that noise
_SHARE = 0.1  # fraction of the range of held-out losses that is used if the noise is unknown


class Spike(NamedTuple):
    """A jump of the training loss far above its recent median.

    Attributes:
        step: The step at which the loss is highest.
        loss: The loss at this step, in nats.
        usual: The median loss of the log entries before the spike.
        learning_rate: The learning rate at this step, or None if it was not logged.
        grad_norm: The gradient norm before clipping at this step, or None if it was not logged.
    """

    step: int
    loss: float
    usual: float
    learning_rate: float | None
    grad_norm: float | None

    def __str__(self) -> str:
        """Return the spike's step and loss, and its rate and gradient norm if logged."""
        text = f"spike at step {self.step}: loss {self.loss:.3f}, usual {self.usual:.3f}"
        if self.learning_rate is not None:
            text += f", learning rate {self.learning_rate:.3g}"
        if self.grad_norm is not None:
            text += f", the gradient's norm {self.grad_norm:.3g}"
        return text


class _LogEntry(NamedTuple):
    """A training loss, with the learning rate and gradient norm that were logged with it."""

    step: int
    loss: float
    learning_rate: float | None
    grad_norm: float | None


@dataclass(frozen=True)
class TuningReport(Report):
    """The losses in a trainer's log, and the problems that `tuning_report` found in them.

    Attributes:
        train: The (step, loss) pairs of the training loss.
        held_out: The (step, loss) pairs of the held-out loss.
        spikes: The jumps of the training loss.
        overfits_from: The step of the lowest held-out loss, if the held-out loss rose afterwards
            and the training loss did not; otherwise None.
        diverges_from: The step after which the training loss clearly rose, which means that the
            learning rate is too high; None if the loss did not rise.
        breaks_at: The first step with a loss that is not finite, or the first of the final steps
            whose gradient norms are all not finite; None without such a step.
        improves: Whether the loss was still falling at the end.
        largest_rise: The largest rise of the held-out loss above its earlier minimum.
    """

    train: tuple[tuple[int, float], ...]
    held_out: tuple[tuple[int, float], ...]
    spikes: tuple[Spike, ...]
    overfits_from: int | None
    diverges_from: int | None
    breaks_at: int | None
    improves: bool
    largest_rise: float

    @property
    def verdict(self) -> str:
        """The most serious finding, such as ``"overfits"``, or ``"no problem found"``."""
        findings = {
            "breaks": self.breaks_at is not None,
            "diverges": self.diverges_from is not None,
            "overfits": self.overfits_from is not None,
            "spikes": bool(self.spikes),
            "still improves": self.improves,
        }
        return next((name for name, found in findings.items() if found), "no problem found")

    def summary(self) -> list[str]:
        """Return the losses at the beginning and at the end, and the verdict.

        Training losses are medians, because the losses of single batches vary.
        """
        lines = []
        losses = [loss for _, loss in _finite(self.train)]
        size = _level_size(len(losses))
        if len(losses) >= 2 * size:
            lines.append(
                f"training: median loss {statistics.median(losses[:size]):.3f} in the first "
                f"{size} log entries, {statistics.median(losses[-size:]):.3f} in the last {size}"
            )
        elif losses:
            lines.append(
                f"training: median loss {statistics.median(losses):.3f} in {len(losses)} log "
                "entries"
            )
        if finite := _finite(self.held_out):
            step, least = min(finite, key=lambda entry: entry[1])
            last_step, last = self.held_out[-1]
            lines.append(
                f"held out: first loss {self.held_out[0][1]:.3f}, {last:.3f} at step {last_step} "
                f"(perplexity {perplexity(last):.2f}), lowest {least:.3f} at step {step}"
            )
        return [*lines, f"verdict: {self.verdict}"]

    def remarks(self) -> list[str]:
        """Return a line for each problem, with the step at which it begins, if that is known."""
        lines = []
        if self.breaks_at is not None:
            lines.append(f"breaks at step {self.breaks_at}: the loss or the gradient is not finite")
        if self.overfits_from is not None:
            lines.append(
                f"overfits from step {self.overfits_from}: the held-out loss rises, but the "
                "training loss does not clearly rise"
            )
        if self.diverges_from is not None:
            lines.append(
                f"diverges from step {self.diverges_from}: the training loss rises; the learning "
                "rate is too high"
            )
        lines += map(str, self.spikes)
        if self.largest_rise > _RISE:
            lines.append(
                f"the held-out loss rose by {self.largest_rise:.3f} nats from its earlier minimum"
            )
        return lines

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot the losses by step, with a scale of perplexity on the right.

        The plot marks spikes and the step from which the run overfits, diverges or breaks. Plotting
        requires the extra ``plot``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure, axes = axes_for(ax, "TuningReport.plot")
        for entries, label, style in (
            (self.train, "training rows", "-"),
            (self.held_out, "held-out rows", "o-"),
        ):
            if entries:
                steps, losses = zip(*entries, strict=True)
                axes.plot(steps, losses, style, label=label, linewidth=1.2, markersize=3)
        if self.spikes:
            steps, losses = zip(*(spike[:2] for spike in self.spikes), strict=True)
            axes.plot(steps, losses, "v", color="tab:red", label="spikes")
        ends = {
            "overfits": self.overfits_from,
            "diverges": self.diverges_from,
            "breaks": self.breaks_at,
        }
        for label, step in ends.items():
            if step is not None:
                axes.axvline(step, color="gray", linestyle=":", label=f"{label} from step {step}")
        axes.set(xlabel="step", ylabel="loss, nats per token")
        if self.train or self.held_out:
            right = axes.secondary_yaxis("right", functions=(_exponential, _logarithm))
            right.set_ylabel("perplexity")
            axes.legend(fontsize=8)
        return figure


def _exponential(losses: object) -> np.ndarray:
    # a secondary axis may pass any loss, and e to the power of 710 overflows a float64
    return torch.as_tensor(losses).double().clamp(max=700.0).exp().numpy()


def _logarithm(perplexities: object) -> np.ndarray:
    return torch.as_tensor(perplexities).double().clamp(min=1e-300).log().numpy()


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats, limited so that it is finite."""
    return math.exp(min(loss, 700.0))  # math.exp overflows from 710 on


def _finite(entries: LossLog) -> list[tuple[int, float]]:
    return [entry for entry in entries if math.isfinite(entry[1])]


def tuning_report(
    log: Sequence[Mapping[str, float]], *, held_out: str = "eval_loss", tolerance: float = 0.01
) -> TuningReport:
    """Report on the log of `transformers.Trainer`, `trl.SFTTrainer` or a trainer based on them.

    Log often (``logging_steps=1``), and evaluate during training (``eval_strategy="steps"``). The
    noise of a loss is estimated from its changes between log entries. The verdict is the first of
    these findings that applies, or else ``no problem found``:

    - breaks: a loss is not finite, or the gradients of the last steps are not finite.
    - diverges: the training loss ends above its lowest level by more than 0.3 nats and 6 standard
      errors, where a level is the median of a tenth of the entries. Or the held-out loss rises
      after its minimum, and from there on a line fitted to the training losses has a slope of
      more than 3 standard errors.
    - overfits: the last held-out loss is above the lowest by more than ``tolerance`` and by more
      than 4 times the noise between evaluations. With fewer than 8 evaluations, a tenth of the
      range of their losses is used instead of 4 times the noise.
    - spikes: a training loss is 15 standard deviations above the median of the 40 losses before it.
      Or two losses, at most two entries apart, are each 5 standard deviations above this median. If
      each entry is the mean of many steps, 0.3 nats and 6 standard deviations can be enough for a
      single entry. Noise with heavy tails may still be reported as a spike.
    - still improves: the last held-out loss is the lowest, and it is below the loss a third of the
      run earlier by more than ``tolerance`` and by more than 4 times the noise. Without held-out
      losses, the last tenth of the training losses has a lower level than the tenth before it, by
      more than 3 standard errors.

    Args:
        log: ``trainer.state.log_history``.
        held_out: The key of the held-out loss in the log. With several evaluation sets, the keys
            are ``eval_NAME_loss``.
        tolerance: The smallest rise or fall of the held-out loss that counts, in nats.

    Returns:
        The report on the losses, with the verdict. It prints as text and can be plotted.

    Raises:
        ValueError: The log is not a list of dictionaries, a value in an entry is not a number, the
            log has no losses, or its held-out losses have only other names.

    >>> log = [{"step": i, "loss": 2 - i / 40, "grad_norm": 1.0} for i in range(1, 31)]
    >>> log[24] |= {"loss": 9.0, "grad_norm": 70.0}
    >>> log += [{"step": i, "eval_loss": 2 + (i - 20) ** 2 / 900} for i in (0, 10, 20, 30)]
    >>> print(tuning_report(log))
    training: median loss 1.950 in the first 3 log entries, 1.275 in the last 3
    held out: first loss 2.444, 2.111 at step 30 (perplexity 8.26), lowest 2.000 at step 20
    verdict: overfits
    overfits from step 20: the held-out loss rises, but the training loss does not clearly rise
    spike at step 25: loss 9.000, usual 1.688, the gradient's norm 70
    """
    entries, held_out_losses = _losses_of(log, held_out)
    train = tuple((entry.step, entry.loss) for entry in entries)
    broken = _non_finite_steps(train, held_out_losses, [entry.grad_norm for entry in entries])
    turn = _turn(held_out_losses, tolerance)
    diverges: int | None = None
    spikes: list[Spike] = []
    if not broken:  # in a broken run, Trainer logs losses that are not finite as 0
        diverges = _diverging(entries)
        spikes = _spikes(entries)
    # if both losses rise, the run does not overfit: its learning rate is too high
    if turn is not None and _rises([entry for entry in _finite(train) if entry[0] > turn]):
        diverges = turn
    improves = _improves(held_out_losses, tolerance) if held_out_losses else _falls(entries)
    return TuningReport(
        train,
        held_out_losses,
        tuple(spikes),
        turn if diverges is None else None,
        diverges,
        min(broken, default=None),
        improves,
        _largest_rise(held_out_losses),
    )


def _losses_of(
    log: Sequence[Mapping[str, float]], held_out: str
) -> tuple[list[_LogEntry], tuple[tuple[int, float], ...]]:
    """Return the training losses and the held-out losses.

    Raises:
        ValueError: The log has neither, or its held-out losses have other names.
    """
    if isinstance(log, (str, Mapping)):
        raise ValueError(
            "tuning_report: expected a list of dicts (trainer.state.log_history), got a "
            f"{type(log).__name__}"
        )
    for entry in log:
        if not isinstance(entry, Mapping):
            raise ValueError(
                "tuning_report: expected a list of dicts (trainer.state.log_history), got a list "
                f"with an entry of type {type(entry).__name__}"
            )
    entries = []
    held_out_losses = []
    others = set()
    for entry in log:
        if "loss" in entry:
            entries.append(_log_entry(entry))
        if held_out in entry:
            held_out_losses.append((_step(entry), _number(entry, held_out)))
        # with several evaluation sets, each has its own name
        others |= {key for key in entry if key.startswith("eval_") and key.endswith("_loss")}
    if not held_out_losses and others:
        raise ValueError(
            f"tuning_report: the log has no {held_out!r}; pass held_out= with the name of a "
            f"held-out loss that the log has: {', '.join(sorted(others))}"
        )
    if not entries and not held_out_losses:
        raise ValueError(
            f"tuning_report: expected entries with 'loss' or {held_out!r}, got neither in "
            f"{len(log)} entries"
        )
    return entries, tuple(held_out_losses)


def _log_entry(entry: Mapping[str, float]) -> _LogEntry:
    others = []
    for name in ("learning_rate", "grad_norm"):  # not every trainer logs them
        others.append(None if entry.get(name) is None else _number(entry, name))
    return _LogEntry(_step(entry), _number(entry, "loss"), *others)


def _number(entry: Mapping[str, object], name: str) -> float:
    value = entry.get(name)
    try:
        return float(value)  # pyrefly: ignore[bad-argument-type]: other types raise
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"tuning_report: an entry of the log has the {name} {value!r}, expected a number"
        ) from error


def _step(entry: Mapping[str, object]) -> int:
    step = _number(entry, "step")
    if not math.isfinite(step):
        raise ValueError(f"tuning_report: an entry has the step {step}, expected a finite number")
    return int(step)


def _noise(losses: Sequence[float]) -> float:
    """Return the standard deviation of the noise of a logged loss.

    It is estimated from the changes between entries, and is at least a hundredth of the median
    loss, and above 0. For fewer than two losses, it is infinite.
    """
    if len(losses) < 2:
        return math.inf
    changes = [after - before for before, after in pairwise(losses)]
    middle = statistics.median(changes)
    deviation = _NORMAL * statistics.median(abs(change - middle) for change in changes)
    # the difference of two independent losses has twice the variance
    # losses may all be logged as 0
    return max(deviation / 2**0.5, 0.01 * abs(statistics.median(losses)), _LEAST_NOISE)


def _level_size(count: int) -> int:
    return max(_LEVEL, count // _TENTH)


def _level_error(noise: float, *sizes: int) -> float:
    """Return the standard error of the difference of two levels (medians of ``sizes`` losses)."""
    return noise * sum(_MEDIAN / size for size in sizes) ** 0.5


def _diverging(entries: Sequence[_LogEntry]) -> int | None:
    """Return the step after which the training loss diverges, or None if it does not diverge.

    It diverges if its last level is clearly above its lowest level.
    """
    losses = [entry.loss for entry in entries]
    size = _level_size(len(losses))
    if len(losses) < 2 * size:
        return None
    levels = [statistics.median(losses[i : i + size]) for i in range(len(losses) - size + 1)]
    least = min(range(len(levels)), key=levels.__getitem__)
    error = _level_error(_noise(losses), size, size)
    if levels[-1] - levels[least] <= max(_RISE, _CERTAIN * error):
        return None
    return entries[least + size - 1].step


def _falls(entries: Sequence[_LogEntry]) -> bool:
    """Return whether the training loss is still falling.

    This is the case if the median of the last tenth of the losses is clearly below the median of
    the tenth before it.
    """
    losses = [entry.loss for entry in entries]
    size = _level_size(len(losses))
    if len(losses) < 2 * size or not all(map(math.isfinite, losses)):
        return False
    fall = statistics.median(losses[-2 * size : -size]) - statistics.median(losses[-size:])
    return fall > 3 * _level_error(_noise(losses), size, size)


def _improves(held_out: LossLog, tolerance: float) -> bool:
    """Return whether the last held-out loss is the lowest, and clearly below an earlier one."""
    losses = [loss for _, loss in _finite(held_out)]
    if len(losses) < 2 or losses[-1] > min(losses):
        return False
    earlier = losses[-1 - max(1, len(losses) // 3)]
    return earlier - losses[-1] > max(tolerance, _RISEN * _bending(losses))


def _non_finite_steps(
    train: LossLog, held_out: LossLog, norms: Sequence[float | None]
) -> list[int]:
    """Return the steps at which a loss, or a final gradient norm, is not finite.

    The final gradient norms are all gradient norms after the last finite one.
    """
    broken = [step for step, loss in (*train, *held_out) if not math.isfinite(loss)]
    for (step, _), norm in zip(reversed(train), reversed(norms), strict=True):
        # in float16, single steps with such a norm are skipped, and training recovers
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
    """Return the step after which the held-out loss rises, or None if it does not rise.

    The result is None unless the last loss is above the lowest by more than tolerance and noise.
    """
    entries = _finite(held_out)
    if len(entries) < 2:
        return None
    losses = [loss for _, loss in entries]
    least = min(losses)
    clear = max(tolerance, _RISEN * _bending(losses))
    if len(losses) < _ENOUGH + 3:
        clear = max(clear, _SHARE * (max(losses) - least))
    if losses[-1] - least <= clear:
        return None
    return next(step for step, loss in entries if loss == least)


def _bending(losses: Sequence[float]) -> float:
    """Return the standard deviation of losses around a smooth curve; 0 for fewer than 8 losses."""
    bends = []
    for a, b, c, d in zip(losses, losses[1:], losses[2:], losses[3:], strict=False):
        bends.append(abs(d - 3 * c + 3 * b - a))  # third difference: 0 along a parabola
    if len(bends) < _ENOUGH:
        return 0.0
    # third differences of independent noise have 20 (1 + 9 + 9 + 1) times its variance
    return _NORMAL * statistics.median(bends) / 20**0.5


def _rises(entries: LossLog) -> bool:
    """Return whether a line fitted to losses has a slope of more than three standard errors."""
    # in a log that was joined from several, a step may have several losses
    if len({step for step, _ in entries}) < 3:
        return False
    steps, losses = zip(*entries, strict=True)
    line = statistics.linear_regression(steps, losses)
    middle = statistics.fmean(steps)
    left = 0.0
    spread = 0.0
    for step, loss in entries:
        left += (loss - line.slope * step - line.intercept) ** 2
        spread += (step - middle) ** 2
    return line.slope > 3 * (left / (len(entries) - 2) / spread) ** 0.5


def _spikes(entries: Sequence[_LogEntry]) -> list[Spike]:
    """Return the spikes of the training loss; entries that are close together are one spike."""
    losses = [entry.loss for entry in entries]
    noise = _noise(losses)
    usual = [math.inf] * min(_FEWEST, len(losses))
    for place in range(_FEWEST, len(losses)):
        usual.append(statistics.median(losses[max(0, place - _WINDOW) : place]))
    above = [(loss - level) / noise for loss, level in zip(losses, usual, strict=True)]
    groups: list[list[int]] = []
    for place in _steep(entries, above, noise):
        if groups and place - groups[-1][-1] <= _LEVEL:
            groups[-1].append(place)
        else:
            groups.append([place])
    spikes = []
    for group in groups:
        top = entries[max(group, key=losses.__getitem__)]
        spikes.append(Spike(top.step, top.loss, usual[group[0]], top.learning_rate, top.grad_norm))
    return spikes


def _steep(entries: Sequence[_LogEntry], above: Sequence[float], noise: float) -> list[int]:
    """Return the indices of losses far above the usual, or high together with a nearby loss.

    Args:
        entries: The training losses.
        above: How far each loss is above the usual loss, in standard deviations of the noise.
        noise: The standard deviation of the noise, in nats.
    """
    # the mean of many batches has no heavy tails, so a lower threshold is enough
    batches = 1.0
    if len(entries) > 1:
        batches = statistics.median(after.step - before.step for before, after in pairwise(entries))
    single = max(_CERTAIN, _SINGLE / max(1, batches) ** 0.5)
    places = []
    for place, height in enumerate(above):
        near = [*above[max(0, place - 2) : place], *above[place + 1 : place + 3]]
        sustained = height > _SUSTAINED and max(near, default=0.0) > _SUSTAINED
        alone = height > _SINGLE or (height > single and height * noise > _RISE)
        if sustained or alone:
            places.append(place)
    return places
