"""`pairwise_report`: everything that verdicts on labelled pairs are worth, in print and as a plot; and calibration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .collate import CutReport, PairwiseDataset
from .config import CLASSES
from .inference import Predictions, predict_pairs, verdicts_of
from .metrics import LEAST, MOST, PairwiseMetrics, calibration_bins, fit_temperature, pairwise_metrics, shares_of
from .packing import PackingReport


@dataclass(frozen=True)
class PairwiseReport:
    """Metrics, how the encoder ran, what was cut of the texts, and the verdicts themselves."""

    metrics: PairwiseMetrics
    packing: PackingReport
    cut: CutReport
    predictions: Predictions

    def __str__(self) -> str:
        return f"{self.metrics}\n{self.cut}\n{self.packing}"


def pairwise_report(
    model: Any, data: PairwiseDataset, *, batch_size: int = 32, plot: str | Path | None = None, progress: bool = True
) -> PairwiseReport:
    """A model's metrics on labelled pairs.

    Args:
        model: A `PairwiseModel`.
        data: Pairs with labels; ``model.dataset(pairs)`` makes it.
        batch_size: Pairs at once.
        plot: A file for a reliability diagram and the confusion matrix (matplotlib, extra ``plot``).
        progress: Show a bar.

    Raises:
        ValueError: No pairs, or pairs without labels.
    """
    _check_labelled("pairwise_report", data)
    found = predict_pairs(model, data, batch_size=batch_size, progress=progress)
    metrics = pairwise_metrics(
        found.log_probabilities, _labels(data), swapped_log_probabilities=found.swapped_log_probabilities,
        length_difference=[len(pair.a) - len(pair.b) for pair in data.pairs],
    )  # fmt: skip
    if plot is not None:
        _draw(found, metrics, data, Path(plot))
    return PairwiseReport(metrics, model.packing, data.report, found)


@dataclass(frozen=True)
class CalibrationReport:
    """The temperature that `calibrate_` set, and the log-loss on its data before and after."""

    temperature: float
    before: float
    after: float

    def __str__(self) -> str:
        end = "" if LEAST < self.temperature < MOST else ", the limit: are these pairs other than those of training?"
        return f"log-loss {self.before:.4f}, now {self.after:.4f} (temperature {self.temperature:.3g}{end})"


def calibrate_(model: Any, data: PairwiseDataset, *, batch_size: int = 32, progress: bool = True) -> CalibrationReport:
    """Set a model's temperature so that its probabilities on held-out pairs are as good as they can be, in place.

    Verdicts stay what they are. The temperature is a buffer of the head's and divides logits in evaluation.

    Args:
        model: A `PairwiseModel`.
        data: Labelled pairs that were not trained on.
        batch_size: Pairs at once.
        progress: Show a bar.

    Raises:
        ValueError: No pairs, or pairs without labels.
    """
    _check_labelled("calibrate_", data)
    found = predict_pairs(model, data, batch_size=batch_size, progress=progress).log_probabilities
    held, labels = float(model.head.temperature), _labels(data)
    logits = found.double() * held
    temperature = fit_temperature(logits, labels)
    losses = [pairwise_metrics(one, labels).log_loss for one in (found, (logits / temperature).log_softmax(-1))]
    model.head.temperature.fill_(temperature)
    return CalibrationReport(temperature, *losses)


def _check_labelled(operation: str, data: PairwiseDataset) -> None:
    if not isinstance(data, PairwiseDataset):
        raise ValueError(
            f"{operation}: data is a {type(data).__name__}, needed a PairwiseDataset (model.dataset(pairs))"
        )
    if not len(data) or data.labels[0] is None:
        raise ValueError(
            f"{operation}: {len(data)} pairs{' without labels' if len(data) else ''}; needed labelled pairs"
        )


def _labels(data: PairwiseDataset) -> list[Any]:
    return [data[i]["label"] for i in range(len(data))]


def _draw(found: Predictions, metrics: PairwiseMetrics, data: PairwiseDataset, path: Path) -> None:
    from matplotlib.figure import Figure

    classes = found.log_probabilities.shape[-1]
    best = verdicts_of(found.log_probabilities)[:, None]
    right = shares_of(_labels(data), classes).gather(1, best)[:, 0]
    bins = calibration_bins(found.probabilities.double().gather(1, best)[:, 0], right)
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, matrix = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], color="0.7", linewidth=1, label="calibrated")
    left.scatter([b[1] for b in bins], [b[2] for b in bins], s=[20 + 400 * b[0] for b in bins], label="bins, by size")
    left.set(xlabel="confidence", ylabel="accuracy", xlim=(1 / classes - 0.02, 1.02), ylim=(0, 1.02))
    left.set_title(f"calibration error {metrics.calibration_error:.3f}")
    left.legend(loc="upper left", markerscale=0.5)
    names = CLASSES[:classes]
    matrix.imshow(metrics.confusion, cmap="Blues")
    top = max(max(row) for row in metrics.confusion)
    for i, row in enumerate(metrics.confusion):
        for j, count in enumerate(row):
            matrix.text(j, i, f"{count:g}", ha="center", va="center", color="white" if count > top / 2 else "black")
    matrix.set_xticks(range(classes), names)
    matrix.set_yticks(range(classes), names)
    matrix.set(xlabel="verdict", ylabel="label")
    matrix.set_title(f"accuracy {metrics.accuracy:.1%} of {metrics.pairs}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
