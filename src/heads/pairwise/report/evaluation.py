"""`pairwise_report` evaluates a judge on labeled pairs; `calibrate_` sets its temperature."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from model_components._report import Axes, Figure, Report, Table, axes_for

from ..data.collate import CutReport, PairwiseDataset
from ..inference import Predictions, predict_pairs
from ..model import PairwiseModel
from ..packing import PackingReport
from ..pairs import Pair, as_pairs, said_by
from .baselines import (
    BASELINES,
    Rival,
    near_accuracy,
    near_in_length,
    needs_scikit_learn,
    rivals_of,
)
from .metrics import (
    MOST,
    PairwiseMetrics,
    at_verdict,
    calibration_bins,
    cautious_temperature,
    pairwise_metrics,
    shares_of,
)

_ENOUGH = 100  # number of pairs for a good estimate of the temperature


@dataclass(frozen=True)
class PairwiseReport(Report):
    """The result of `pairwise_report`.

    Attributes:
        metrics: The model's metrics.
        packing: Whether the encoder ran without padding.
        cut: Counts of tokens, and of the texts that were truncated.
        predictions: The predicted verdicts.
        labels: The labels of the pairs.
        near_accuracy: The accuracy on pairs in which neither answer is more than a fifth longer
            than the other; nan if there are none.
        owed: For each input of the head (``"encoder"``, ``"length"``, ``"style"`` or
            ``"overlap"``), the rise in log-loss if both answers' values of this input are replaced
            by their mean.
        lengths: The lengths of A and B in characters, for each pair.
        rivals: The baselines' metrics; empty without training pairs.
        seen: A line on how many test prompts and answering models occur in the training pairs;
            empty without training pairs.
    """

    metrics: PairwiseMetrics
    packing: PackingReport
    cut: CutReport
    predictions: Predictions
    labels: tuple[object, ...]
    near_accuracy: float
    owed: Mapping[str, float]
    lengths: tuple[tuple[int, int], ...]
    rivals: tuple[Rival, ...] = ()
    seen: tuple[str, ...] = ()

    def summary(self) -> list[str]:
        """Return metrics without the confusion matrix, and each input's effect on the log-loss."""
        told = ", ".join(f"{part} {rise:+.4f}" for part, rise in self.owed.items())
        return [
            *self.metrics.summary(),
            f"rise in log-loss if both answers were equal in one input: {told}",
        ]

    def table(self) -> Table:
        """Return metrics of the model and baselines or, without baselines, the confusion matrix."""
        if not self.rivals:
            return self.metrics.table()
        metrics = self.metrics
        rows = [
            (
                "this model",
                *_told(
                    metrics.accuracy,
                    self.near_accuracy,
                    metrics.log_loss,
                    metrics.calibration_error,
                ),
                "",
            )
        ]
        for one in self.rivals:
            told = _told(one.accuracy, one.near_accuracy, one.log_loss, one.calibration_error)
            # this baseline gives A and B the same probability, so its accuracy has no meaning
            if one.name == BASELINES[0]:
                told = ("-", "-", *told[2:])
            rows.append((one.name, *told, f"{one.gain:+.4f} ± {one.error:.4f}"))
        names = (
            "accuracy",
            "within 20 % length",
            "log-loss",
            "calibration error",
            "the model's gain",
        )
        return Table(("verdicts of", *names), rows)

    def remarks(self) -> list[str]:
        """Return lines on high log-loss, overlap with training data, cut texts and packing."""
        metrics = self.metrics
        worse = (
            f"log-loss {metrics.log_loss:.4f} is above {metrics.log_loss_prior:.4f}, the log-loss "
            "of always predicting the labels' class frequencies"
        )
        told = [
            f"{worse}, which needs no judge; fit the temperature to 100 or more pairs of this "
            "source (calibrate_), or train on such pairs"
        ]
        return [
            *told * (metrics.log_loss > metrics.log_loss_prior),
            *self.seen,
            str(self.cut),
            str(self.packing),
        ]

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot a reliability diagram: accuracy by confidence (needs the extra ``plot``).

        Larger markers mean more pairs in a bin.

        Args:
            ax: The axes to plot on; default: a new figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure, axes = axes_for(ax, "PairwiseReport.plot", width=4.6, height=4.2)
        predictions = self.predictions
        classes = predictions.log_probabilities.shape[-1]
        right = at_verdict(shares_of(self.labels, classes), predictions.log_probabilities)
        bins = calibration_bins(
            at_verdict(predictions.probabilities.double(), predictions.log_probabilities), right
        )
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, label="calibrated")
        sizes = [20 + 400 * b[0] for b in bins]
        axes.scatter([b[1] for b in bins], [b[2] for b in bins], s=sizes, label="bins, by size")
        axes.set(
            xlabel="confidence", ylabel="accuracy", xlim=(1 / classes - 0.02, 1.02), ylim=(0, 1.02)
        )
        axes.set_title(f"calibration error {self.metrics.calibration_error:.3f}")
        axes.legend(loc="upper left", markerscale=0.5)
        return figure

    def plot_lengths(self, ax: Axes | None = None) -> Figure:
        """Plot how often the longer answer wins, by length difference (needs the extra ``plot``).

        A tie is half a win. Pairs of equally long answers are left out.

        Args:
            ax: The axes to plot on; default: a new figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure, axes = axes_for(ax, "PairwiseReport.plot_lengths", width=5.2, height=4.2)
        logs = torch.tensor(self.lengths, dtype=torch.float64).log1p()
        longer = (logs[:, 0] > logs[:, 1])[:, None]
        difference = (logs[:, 0] - logs[:, 1]).abs()
        order = difference.argsort()
        order = order[difference[order] > 0]
        shares = shares_of(self.labels, self.predictions.log_probabilities.shape[-1])
        for name, found in (
            ("labels", shares),
            ("this model", self.predictions.probabilities.double()),
        ):
            won = torch.where(longer, found[:, :1], found[:, 1:2])[:, 0] + found[:, 2:].sum(1) / 2
            # about 20 pairs or more in a part, because the win rate of a few pairs is noise
            parts = order.tensor_split(min(8, max(1, len(order) // 20)))
            middles = [float((logs[p, 0] - logs[p, 1]).abs().mean().exp()) for p in parts]
            axes.plot(
                middles, [float(won[p].mean()) for p in parts], marker="o", markersize=4, label=name
            )
        axes.axhline(0.5, color="0.7", linewidth=1)
        axes.set(
            xscale="log",
            xlabel="how many times longer",
            ylabel="fraction of pairs that the longer answer wins",
            ylim=(0, 1),
        )
        axes.legend(loc="lower right")
        return figure


def _told(accuracy: float, near: float, loss: float, error: float) -> tuple[str, ...]:
    within = "-" if math.isnan(near) else f"{near:.1%}"  # nan: no answers of similar length
    return f"{accuracy:.1%}", within, f"{loss:.4f}", f"{error:.3f}"


def pairwise_report(
    model: PairwiseModel,
    data: PairwiseDataset,
    *,
    train: Sequence[Pair] | None = None,
    batch_size: int = 32,
    progress: bool = True,
) -> PairwiseReport:
    """Compute metrics on labeled pairs for a model and, with ``train``, for baselines.

    Args:
        model: A `PairwiseModel`.
        data: Pairs with labels, from ``model.dataset(pairs)``.
        train: The pairs that the model was trained on, such as ``train_data.pairs``. Four baselines
            are fitted on these pairs (extra ``judge``): the class frequencies of the labels, a
            curve of the difference in length, a regression on words and style, and boosted trees on
            style. A useful judge is better than all of them.
        batch_size: Number of pairs in a batch.
        progress: Whether to show a progress bar.

    Returns:
        A report with the metrics of the model and, with ``train``, of each baseline. It prints as a
        table.

    Raises:
        ValueError: There are no pairs, or they have no labels.
        ImportError: ``train`` is given, and scikit-learn is not installed.
    """
    _check_labeled("pairwise_report", data)
    if train is not None:
        needs_scikit_learn("pairwise_report")
        train = as_pairs("pairwise_report", train, model.config.num_classes)
    found = predict_pairs(model, data, batch_size=batch_size, parts=True, progress=progress)
    labels = _labels(data)
    lengths = []
    for pair in data.pairs:
        lengths.append((len(said_by("assistant", pair.a)), len(said_by("assistant", pair.b))))
    metrics = pairwise_metrics(
        found.log_probabilities,
        labels,
        swapped_log_probabilities=found.swapped_log_probabilities,
        length_difference=[a - b for a, b in lengths],
    )
    verdicts = found.log_probabilities.double()
    if train is None:
        rivals = ()
    else:
        rivals = rivals_of(verdicts, labels, train, data.pairs)
    near = near_accuracy(
        verdicts, shares_of(labels, verdicts.shape[-1]), near_in_length(data.pairs)
    )
    owed = {
        part: pairwise_metrics(one, labels).log_loss - metrics.log_loss
        for part, one in found.alike.items()
    }
    seen = () if train is None else _seen(train, data.pairs)
    return PairwiseReport(
        metrics,
        model.packing,
        data.report,
        found,
        tuple(labels),
        near,
        owed,
        tuple(lengths),
        rivals,
        seen,
    )


def _seen(train: Sequence[Pair], test: Sequence[Pair]) -> tuple[str, ...]:
    """Return a line on how many test prompts and answering models occur in the training pairs."""
    told = []
    known = {str(pair.prompt) for pair in train if pair.prompt}
    asked = {str(pair.prompt) for pair in test if pair.prompt}
    if asked:
        told.append(f"{len(asked & known)} of {len(asked)} prompts occur in training pairs")
    wrote, writers = _writers(train), _writers(test)
    if writers:
        told.append(
            f"{len(writers & wrote)} of {len(writers)} answering models occur in training pairs"
        )
    return ("; ".join(told),) if told else ()


def _writers(pairs: Sequence[Pair]) -> set[str]:
    """Return the known names of the models that wrote the answers."""
    names: set[str] = set()
    for pair in pairs:
        names.update(name for name in pair.writers if name)
    return names


@dataclass(frozen=True)
class CalibrationReport(Report):
    """The result of `calibrate_`.

    Attributes:
        pairs: Number of pairs that the temperature was fitted on.
        temperature: The temperature that was set.
        best_inverse: The inverse of the temperature with the lowest log-loss on these pairs. It is
            near 0 if the verdicts are no better than chance, and negative if they are worse. It is
            limited to -1 to 50, and is 50 if every verdict is right or all logits are equal.
        error: Standard error of ``best_inverse``; infinite if there is only one prompt, or if
            ``best_inverse`` is 50.
        before: The log-loss on these pairs before the call, in nats.
        after: The log-loss on these pairs after the call.
    """

    pairs: int
    temperature: float
    best_inverse: float
    error: float
    before: float
    after: float

    def summary(self) -> list[str]:
        """Return a line with the log-losses and the temperature."""
        losses = f"log-loss {self.before:.4f} before, {self.after:.4f} after"
        return [f"{losses} on {self.pairs} pairs (temperature {self.temperature:.3g})"]

    def remarks(self) -> list[str]:
        """Return lines on the best temperature, and on verdicts that are not better than chance."""
        lines = [
            f"best on these pairs: 1 / temperature = {self.best_inverse:.3g} ± {self.error:.2g} "
            "(one standard error)"
        ]
        if self.best_inverse <= 1 / MOST or self.best_inverse < 2 * self.error < math.inf:
            lines.append(
                "on these pairs the judge is not better than chance by two standard errors"
            )
        if self.pairs < _ENOUGH:
            lines.append(f"{_ENOUGH} pairs or more give a better estimate")
        return lines


def calibrate_(
    model: PairwiseModel, data: PairwiseDataset, *, batch_size: int = 32, progress: bool = True
) -> CalibrationReport:
    """Set a model's temperature, in place, so that the probabilities fit held-out pairs.

    Verdicts do not change. The temperature is a buffer of the head, and divides logits in
    evaluation. It is shrunk toward 1 if there are few pairs or prompts, and is set below 1 only if
    the evidence for this exceeds two standard errors (`cautious_temperature`). With a class for
    ties, it also moves the probability of a tie toward one third; if your labels have few ties,
    use a model with ``ties=False`` (``ties="drop"`` of `train_judge`).

    Args:
        model: A `PairwiseModel`.
        data: Labeled pairs that were not used for training or for choosing the epoch.
        batch_size: Number of pairs in a batch.
        progress: Whether to show a progress bar.

    Returns:
        A report with the temperature, and the log-loss before and after.

    Raises:
        ValueError: There are no pairs, or they have no labels.
    """
    _check_labeled("calibrate_", data)
    log_probs = predict_pairs(
        model, data, batch_size=batch_size, progress=progress
    ).log_probabilities
    old_temperature = float(model.head.temperature)
    labels = _labels(data)
    # undo the old temperature: otherwise a second call would fit the ratio of both
    logits = log_probs.double() * old_temperature
    # each pair without a prompt counts as a separate prompt
    prompts = [pair.prompt or number for number, pair in enumerate(data.pairs)]
    found = cautious_temperature(logits, labels, prompts)
    before = pairwise_metrics(log_probs, labels).log_loss
    after = pairwise_metrics((logits / found.value).log_softmax(-1), labels).log_loss
    model.head.temperature.fill_(found.value)
    return CalibrationReport(len(data), *found, before, after)


def _check_labeled(operation: str, data: PairwiseDataset) -> None:
    if not isinstance(data, PairwiseDataset):
        raise ValueError(
            f"{operation}: data is a {type(data).__name__}, expected a PairwiseDataset "
            "(model.dataset(pairs))"
        )
    if not len(data) or data.labels[0] is None:
        raise ValueError(
            f"{operation}: {len(data)} pairs{' without labels' if len(data) else ''}; expected "
            "labeled pairs"
        )


def _labels(data: PairwiseDataset) -> list[object]:
    return [data[i]["label"] for i in range(len(data))]
