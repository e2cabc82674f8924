"""`tuning_report`: findings about a run in a trainer's log."""

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
"""(step, loss) pairs, as a trainer logs them."""

_WINDOW = 40  # log entries before a step; their median is the usual loss there
_FEWEST = 3  # fewest earlier entries from which that median is taken
# standard deviations above the median that make a spike: for two of three neighbors, for one
_SUSTAINED = 5.0
_SINGLE = 15.0
_HUMPS = (5, 10, 20, 40)  # lengths of a hump that are tried, in log entries
_RISE = 0.3  # nats by which a level must rise to count: a third more perplexity
_CERTAIN = 6.0  # standard errors by which a level must rise, too
_MEDIAN = 1.57  # variance of the median of normal noise, divided by that of the mean
_TENTH = 10  # a level is the median of a tenth of the entries
_LEVEL = 3  # and of at least 3
_NORMAL = 1.4826  # standard deviation of normal noise, divided by its median absolute deviation
_ENOUGH = 5  # fewest third differences of held-out losses from which their noise is estimated
_RISEN = 4.0  # deviations of that noise by which the last held-out loss must exceed the lowest
_SHARE = 0.1  # fraction of the range of held-out losses that replaces their noise if there are few


class Spike(NamedTuple):
    """A jump of the training loss far above its recent median.

    Attributes:
        step: The step at which the loss is highest.
        loss: The loss at this step, in nats.
        usual: The median loss of the log entries before the spike.
        entries: The number of log entries that the spike lasts.
        learning_rate: The learning rate at this step, or None if it was not logged.
        grad_norm: The gradient's norm at this step before clipping, or None if it was not logged.
    """

    step: int
    loss: float
    usual: float
    entries: int
    learning_rate: float | None
    grad_norm: float | None

    def __str__(self) -> str:
        """Return the spike's step, loss and length, and what else was logged at this step."""
        text = f"spike at step {self.step}: loss {self.loss:.3f}, usual {self.usual:.3f}"
        if self.entries > 1:
            text += f", over {self.entries} log entries"
        if self.learning_rate is not None:
            text += f", learning rate {self.learning_rate:.3g}"
        if self.grad_norm is not None:
            text += f", the gradient's norm {self.grad_norm:.3g}"
        return text


class _LogEntry(NamedTuple):
    """A training loss, and what was logged with it."""

    step: int
    loss: float
    learning_rate: float | None
    grad_norm: float | None


@dataclass(frozen=True)
class TuningReport(Report):
    """Findings in a trainer's log: losses, spikes, and where a run overfits.

    Attributes:
        train: (step, loss) of the training rows, as logged.
        held_out: (step, loss) of the held-out rows.
        spikes: The jumps of the training loss.
        overfits_from: The step of the least held-out loss, if that rose afterwards and the training
            loss did not.
        diverges_from: The step of the least loss, if the training loss clearly rose afterwards: the
            rate is too high.
        breaks_at: The first step with a loss that is not finite, or the first of the final steps
            whose gradient norms are all not finite.
        improves: Whether the loss was still falling at the end.
        largest_rise: The largest rise of the held-out loss above its lowest value so far.
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
        """The gravest finding: breaks, diverges, overfits, spikes, still improves, or settled."""
        findings = {
            "breaks": self.breaks_at is not None,
            "diverges": self.diverges_from is not None,
            "overfits": self.overfits_from is not None,
            "spikes": bool(self.spikes),
            "still improves": self.improves,
        }
        return next((name for name, found in findings.items() if found), "settled")

    def summary(self) -> list[str]:
        """Return the first, last and lowest loss, and the verdict."""
        lines = []
        for name, entries in (("training", self.train), ("held out", self.held_out)):
            finite = _finite(entries)
            if finite:
                step, least = min(finite, key=lambda entry: entry[1])
                (_, first), (last_step, last) = entries[0], entries[-1]
                lines.append(
                    f"{name}: loss {first:.3f} to {last:.3f} at step {last_step} (perplexity "
                    f"{perplexity(last):.2f}), least {least:.3f} at step {step}"
                )
        return [*lines, f"verdict: {self.verdict}"]

    def remarks(self) -> list[str]:
        """List where the run breaks, overfits, diverges and spikes."""
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
                f"the held-out loss rose {self.largest_rise:.3f} above its earlier minimum"
            )
        return lines

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot the losses by step, with perplexity at the right.

        Spikes are marked, and the steps from which the run overfits, diverges or breaks (extra
        ``plot``).

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
        axes.set(xlabel="step", ylabel="loss, nats a token")
        if self.train or self.held_out:
            right = axes.secondary_yaxis("right", functions=(_exponential, _logarithm))
            right.set_ylabel("perplexity")
            axes.legend(fontsize=8)
        return figure


def _exponential(losses: object) -> np.ndarray:
    # a secondary axis may ask for any loss; e to 710 is more than a float64 holds
    return torch.as_tensor(losses).double().clamp(max=700.0).exp().numpy()


def _logarithm(perplexities: object) -> np.ndarray:
    return torch.as_tensor(perplexities).double().clamp(min=1e-300).log().numpy()


def perplexity(loss: float) -> float:
    """Return e to a loss, limited to values below the largest float."""
    return math.exp(min(loss, 700.0))  # math.exp raises from 710 on


def _finite(entries: LossLog) -> list[tuple[int, float]]:
    return [entry for entry in entries if math.isfinite(entry[1])]


def tuning_report(
    log: Sequence[Mapping[str, float]], *, held_out: str = "eval_loss", tolerance: float = 0.01
) -> TuningReport:
    """Report on the log of `transformers.Trainer`, `trl.SFTTrainer` or a trainer based on them.

    Log often (``logging_steps=1``), and evaluate during training (``eval_strategy="steps"``). The
    noise of a loss is estimated from its changes between log entries. The rules:

    - breaks: a loss is not finite, or the last gradients are not.
    - diverges: the training loss ends 0.3 nats and 6 standard errors above its lowest level, where
      a level is the median of a tenth of the entries; or the held-out loss rises and a line through
      the training losses since then climbs by 3 standard errors.
    - overfits: the last held-out loss is above the lowest by more than the larger of ``tolerance``
      and 4 times the noise between evaluations. With fewer than 8 evaluations, a tenth of their
      range replaces the noise.
    - spikes: a training loss is 15 standard deviations above the median of the 40 before it; or two
      losses at most two entries apart are each 5 above it; or the mean of 5 to 40 losses is 0.3
      nats and 6 standard errors above it, and the loss then falls by half of that rise. If each
      entry is the mean of many steps, 0.3 nats and 6 standard deviations may be enough for one
      entry. Heavy-tailed noise is still reported now and then.
    - still improves: the last held-out loss is the least, and the evaluation a third of the run
      earlier was higher by more than the larger of ``tolerance`` and 4 times the noise. Without
      held-out losses: the level of the last tenth of the training losses is below that of the tenth
      before it by 3 standard errors.

    Args:
        log: ``trainer.state.log_history``.
        held_out: The name of the held-out loss; with several sets, ``eval_NAME_loss``.
        tolerance: Smallest rise or fall of the held-out loss that counts, in nats.

    Returns:
        Losses, spikes and the verdict; it prints as text and can be plotted.

    Raises:
        ValueError: The log is not a list of dicts, an entry has no number where one is expected, or
            the log has no losses, or held-out losses with other names only.

    >>> log = [{"step": i, "loss": 2 - i / 40, "grad_norm": 1.0} for i in range(1, 31)]
    >>> log[24] |= {"loss": 9.0, "grad_norm": 70.0}
    >>> log += [{"step": i, "eval_loss": 2 + (i - 20) ** 2 / 900} for i in (0, 10, 20, 30)]
    >>> print(tuning_report(log))
    training: loss 1.975 to 1.250 at step 30 (perplexity 3.49), least 1.250 at step 30
    held out: loss 2.444 to 2.111 at step 30 (perplexity 8.26), least 2.000 at step 20
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
    if not broken:  # Trainer logs a loss that is not finite as 0
        diverges = _diverging(entries)
        spikes = _spikes(entries)
    # both losses rise: not overfitting, but a learning rate that is too high
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

    Raise if the log has neither, or if its held-out losses have other names.
    """
    if isinstance(log, (str, Mapping)):
        raise ValueError(
            "tuning_report: expected a list of dicts (trainer.state.log_history), got a "
            f"{type(log).__name__}"
        )
    for entry in log:
        if not isinstance(entry, Mapping):
            raise ValueError(
                "tuning_report: expected a list of dicts (trainer.state.log_history), got one with "
                f"an entry of type {type(entry).__name__}"
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
            f"tuning_report: the log has no {held_out}; expected held_out= one of "
            f"{', '.join(sorted(others))}"
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
            f"tuning_report: an entry of the log has {name} {value!r}, expected a number"
        ) from error


def _step(entry: Mapping[str, object]) -> int:
    step = _number(entry, "step")
    if not math.isfinite(step):
        raise ValueError(f"tuning_report: an entry has step {step}, expected a finite number")
    return int(step)


def _noise(losses: Sequence[float]) -> float:
    """Return the standard deviation of the noise in one log entry.

    It is estimated from changes between entries, and is at least a hundredth of the median loss.
    """
    if len(losses) < 2:
        return math.inf
    changes = [after - before for before, after in pairwise(losses)]
    middle = statistics.median(changes)
    deviation = _NORMAL * statistics.median(abs(change - middle) for change in changes)
    # a difference of independent noise has twice the variance
    return max(deviation / 2**0.5, 0.01 * abs(statistics.median(losses)))


def _level_size(count: int) -> int:
    return max(_LEVEL, count // _TENTH)


def _level_error(noise: float, *sizes: int) -> float:
    """Return the standard error of the difference of two levels of these sizes."""
    return noise * sum(_MEDIAN / size for size in sizes) ** 0.5


def _diverging(entries: Sequence[_LogEntry]) -> int | None:
    """Return the step of the training loss's lowest level, if the loss ends clearly above it."""
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
    """Return whether the training loss still falls.

    It does if the median of the last tenth is clearly below that of the tenth before.
    """
    losses = [entry.loss for entry in entries]
    size = _level_size(len(losses))
    if len(losses) < 2 * size or not all(map(math.isfinite, losses)):
        return False
    fall = statistics.median(losses[-2 * size : -size]) - statistics.median(losses[-size:])
    return fall > 3 * _level_error(_noise(losses), size, size)


def _improves(held_out: LossLog, tolerance: float) -> bool:
    """Return whether the last held-out loss is the least, and clearly below an earlier one."""
    losses = [loss for _, loss in _finite(held_out)]
    if len(losses) < 2 or losses[-1] > min(losses):
        return False
    earlier = losses[-1 - max(1, len(losses) // 3)]
    return earlier - losses[-1] > max(tolerance, _RISEN * _bending(losses))


def _non_finite_steps(
    train: LossLog, held_out: LossLog, norms: Sequence[float | None]
) -> list[int]:
    """Return the steps with a loss that is not finite, and final steps with such a gradient.

    The final steps come after the last gradient norm that is finite.
    """
    broken = [step for step, loss in (*train, *held_out) if not math.isfinite(loss)]
    for (step, _), norm in zip(reversed(train), reversed(norms), strict=True):
        # in float16, single steps are skipped and training recovers
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
    """Return the noise of losses along a smooth curve; 0 if there are few."""
    bends = []
    for a, b, c, d in zip(losses, losses[1:], losses[2:], losses[3:], strict=False):
        bends.append(abs(d - 3 * c + 3 * b - a))  # 0 along a parabola
    if len(bends) < _ENOUGH:
        return 0.0
    # third differences of independent noise have 20 times the variance (1 + 9 + 9 + 1)
    return _NORMAL * statistics.median(bends) / 20**0.5


def _rises(entries: LossLog) -> bool:
    """Return whether a line through losses climbs, by three standard errors."""
    # in a log that was put together from several, a step may have several losses
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
    """Find losses far above the recent median; of overlapping finds, keep the clearest."""
    losses = [entry.loss for entry in entries]
    noise = _noise(losses)
    usual = [math.inf] * min(_FEWEST, len(losses))
    for place in range(_FEWEST, len(losses)):
        usual.append(statistics.median(losses[max(0, place - _WINDOW) : place]))
    above = [(loss - level) / noise for loss, level in zip(losses, usual, strict=True)]
    found = [(above[place], place, 1) for place in _steep(entries, above, noise)]
    found += _humps(losses, usual, noise)
    spikes: list[Spike] = []
    taken: set[int] = set()
    for _, start, length in sorted(found, reverse=True):
        covered = range(start, start + length)
        if not taken.isdisjoint(covered):
            continue
        # entries near it on both sides belong to the same spike
        margin = max(_LEVEL, length)
        taken |= set(range(start - margin, start + length + margin))
        top = entries[max(covered, key=losses.__getitem__)]
        spikes.append(
            Spike(top.step, top.loss, usual[start], length, top.learning_rate, top.grad_norm)
        )
    return sorted(spikes)


def _steep(entries: Sequence[_LogEntry], above: Sequence[float], noise: float) -> list[int]:
    """Return the indices of entries far above the usual loss, alone or with a neighbor.

    Args:
        entries: The training losses.
        above: How far each is above the usual loss, in standard deviations.
        noise: The standard deviation, in nats.
    """
    # an entry that is a mean of many batches has no heavy tails
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


def _humps(
    losses: Sequence[float], usual: Sequence[float], noise: float
) -> list[tuple[float, int, int]]:
    """Return stretches whose mean is clearly above the usual loss.

    Each one is a tuple of its height in standard errors, its start and its length.
    """
    found = []
    for length in _HUMPS:
        for start in range(_FEWEST, len(losses) - length):
            rise = statistics.fmean(losses[start : start + length]) - usual[start]
            before = min(start, _WINDOW)
            error = noise * (1 / length + _MEDIAN / before) ** 0.5
            after = statistics.median(losses[start + length :][:length])
            comes_back = after < usual[start] + rise / 2
            if comes_back and rise > max(_RISE, _CERTAIN * error):
                found.append((rise / error, start, length))
    return found
