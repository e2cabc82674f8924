"""Metrics of verdicts: accuracy, log-loss, calibration, flip rate and correlation with length.

Shapes: N pairs, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model_components._report import Report, Table

from ..choices import CLASSES
from ..inference import verdicts_of

# as in Guo et al. 2017
_BINS = 15
# limits of a fitted temperature
_LEAST = 0.02
MOST = 50.0
# Prior standard deviation of 1 / temperature, whose prior mean is 1. With 0.5, ten pairs raise the
# log-loss of a calibrated judge by less than 0.007 nats. After a hundred pairs, the log-loss of a
# judge with random verdicts is less than 0.01 nats above that of always predicting one half. Tests
# check both values.
_PRIOR = 0.5


@dataclass(frozen=True)
class PairwiseMetrics(Report):
    """Metrics of the verdicts on N labeled pairs.

    Attributes:
        pairs: The number of pairs, N.
        accuracy: Fraction of correct verdicts; a soft label counts as the fraction of annotators
            who agree with the verdict.
        log_loss: The log-loss in nats.
        log_loss_prior: The log-loss of always predicting the class frequencies of the labels, with
            the frequencies of A and B averaged.
        calibration_error: Mean absolute difference of confidence and accuracy over 15 bins of
            confidence, weighted by the number of pairs in a bin.
        flip_rate: Fraction of verdicts that change if A and B are swapped.
        length_correlation: The correlation of P(A) - P(B) with the length of A minus the length
            of B, over both orders of each pair; nan if either is always 0.
        label_length_correlation: The same correlation for the labels.
        confusion: The confusion matrix; rows are labels, columns are verdicts.
    """

    pairs: int
    accuracy: float
    log_loss: float
    log_loss_prior: float
    calibration_error: float
    flip_rate: float
    length_correlation: float
    label_length_correlation: float
    confusion: tuple[tuple[float, ...], ...]

    def summary(self) -> list[str]:
        """Return lines with all metrics except the confusion matrix."""
        return [
            f"{self.pairs} pairs: accuracy {self.accuracy:.1%}",
            f"log-loss {self.log_loss:.4f} (class frequencies alone, A and B averaged: "
            f"{self.log_loss_prior:.4f})",
            f"calibration error {self.calibration_error:.3f}, flip rate {self.flip_rate:.1%}",
            f"correlation with length {self.length_correlation:.2f} (of the labels: "
            f"{self.label_length_correlation:.2f})",
        ]

    def table(self) -> Table:
        """Return the confusion matrix."""
        names = CLASSES[: len(self.confusion)]
        rows = []
        for name, counts in zip(names, self.confusion, strict=True):
            rows.append((name, *(f"{count:g}" for count in counts)))
        return Table(("label \\ verdict", *names), rows)


def alike(shares: Tensor) -> Tensor:
    """Return class frequencies (C,), with the frequencies of A and B averaged.

    A model that does not read the answers cannot distinguish A from B.

    >>> alike(torch.tensor([0.5, 0.25, 0.25]))
    tensor([0.3750, 0.3750, 0.2500])
    """
    return torch.cat([shares[:2].mean().expand(2), shares[2:]])


def at_verdict(table: Tensor, found: Tensor) -> Tensor:
    """Return, for each row of a table (N, C), the entry at the verdict of this row of ``found``.

    With two classes, the entry at a tie is the mean of both entries.

    >>> at_verdict(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.7, 0.3], [0.5, 0.5]]))
    tensor([1.0000, 0.5000])
    """
    if table.shape[1] == 2:
        # with two classes, a verdict is also a tie if A and B are equally likely
        table = torch.cat([table, table.mean(1, keepdim=True)], 1)
    return table.gather(1, verdicts_of(found)[:, None])[:, 0]


def shares_of(labels: Sequence[object] | Tensor, classes: int) -> Tensor:
    """Convert class indices (N,) or soft labels (N, C) to float64 class fractions (N, C)."""
    shares = torch.as_tensor(labels)
    if shares.dim() == 2:
        return shares.double()
    return F.one_hot(shares.long(), classes).double()


def pairwise_metrics(
    log_probabilities: Tensor,
    labels: Sequence[object] | Tensor,
    *,
    swapped_log_probabilities: Tensor | None = None,
    length_difference: Sequence[float] | Tensor | None = None,
) -> PairwiseMetrics:
    """Compute the metrics of N verdicts.

    Args:
        log_probabilities: The log-probabilities of A, B and tie, (N, C).
        labels: Class indices (N,) or soft labels (N, C).
        swapped_log_probabilities: The log-probabilities from pairs with A and B swapped, (N, C),
            with the columns swapped back; used for the flip rate.
        length_difference: The length of A minus the length of B, (N,); used for the correlations.

    Returns:
        All metrics; the flip rate and the correlations are nan without their inputs.

    Raises:
        ValueError: There are no pairs, or the shapes of labels and log-probabilities do not match.

    >>> found = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.7, 0.1]]).log()
    >>> pairwise_metrics(found, [0, 0]).accuracy
    0.5
    """
    found = log_probabilities.double()
    classes = log_probabilities.shape[-1]
    wanted = shares_of(labels, classes)
    if not len(found) or wanted.shape != found.shape:
        raise ValueError(
            "pairwise_metrics: expected log-probabilities of shape (N, C) with N at least 1, and "
            "labels of shape (N,) or (N, C), got shapes "
            f"{list(found.shape)} and {list(torch.as_tensor(labels).shape)}"
        )
    best = verdicts_of(found)
    right = at_verdict(wanted, found)
    prior = alike(wanted.mean(0))
    # fractions are added, so that a soft label counts in several rows
    confusion = torch.zeros(classes, len(CLASSES), dtype=torch.float64).index_add(1, best, wanted.T)
    if classes == 2:  # a tie counts as half of each
        confusion = confusion[:, :2] + confusion[:, 2:] / 2
    flips = float("nan")
    if swapped_log_probabilities is not None:
        flips = float((verdicts_of(swapped_log_probabilities.double()) != best).double().mean())
    if length_difference is None:
        longer = None
    else:
        longer = torch.as_tensor(length_difference).double()
    return PairwiseMetrics(
        pairs=len(found),
        accuracy=float(right.mean()),
        # 0 times an infinite loss would be nan
        log_loss=float(torch.where(wanted > 0, -wanted * found, 0.0).sum(1).mean()),
        log_loss_prior=float(torch.special.entr(prior).sum()),
        calibration_error=_calibration(at_verdict(found.exp(), found), right),
        flip_rate=flips,
        length_correlation=_correlation(found[:, 0].exp() - found[:, 1].exp(), longer),
        label_length_correlation=_correlation(wanted[:, 0] - wanted[:, 1], longer),
        confusion=tuple(tuple(row) for row in confusion.tolist()),
    )


def calibration_bins(confidence: Tensor, right: Tensor) -> list[tuple[float, float, float]]:
    """Return, for each non-empty bin, its fraction of all pairs, mean confidence and accuracy."""
    place = (confidence * _BINS).long().clamp(max=_BINS - 1)
    bins = [place == k for k in range(_BINS)]
    return [
        (
            float(inside.double().mean()),
            float(confidence[inside].mean()),
            float(right[inside].mean()),
        )
        for inside in bins
        if inside.any()
    ]


def _calibration(confidence: Tensor, right: Tensor) -> float:
    return sum(
        share * abs(sure - true) for share, sure, true in calibration_bins(confidence, right)
    )


def _correlation(one: Tensor, other: Tensor | None) -> float:
    if other is None or not one.any() or not other.any():
        return float("nan")
    # over both orders of each pair, both means are 0, so the cosine is the correlation
    return float(F.cosine_similarity(one, other, dim=0))


def _best_inverse(logits: Tensor, shares: Tensor, pull: float = 0.0) -> float:
    """Return the factor, from -1 to 50, that scales the logits to the lowest log-loss.

    It is the inverse of the best temperature (Guo et al. 2017), but negative if the judge is worse
    than chance. The log-loss is the mean over pairs, plus ``pull / 2`` times the squared difference
    of factor and 1.
    """
    wanted = (shares * logits).sum(1).mean()
    low = -1.0  # a minimum below -1 counts as -1, because no temperature is negative
    high = 1 / _LEAST
    # the sum is convex in the factor, so bisection on its derivative finds the minimum; 100
    # halvings are enough, because a double has fewer binary digits
    for _ in range(100):
        middle = (low + high) / 2
        mean = ((middle * logits).softmax(-1) * logits).sum(1).mean()
        slope = mean - wanted + pull * (middle - 1)
        low, high = (low, middle) if slope > 0 else (middle, high)
    return (low + high) / 2


def _limited(inverse: float) -> float:
    """Limit the inverse of a temperature so that the temperature is from 0.02 to 50."""
    return min(max(inverse, 1 / MOST), 1 / _LEAST)


class Temperature(NamedTuple):
    """A temperature that is shrunk toward 1 if there are few pairs.

    Attributes:
        value: The temperature to use.
        best_inverse: The inverse of the temperature with the lowest log-loss on these pairs. It is
            near 0 if the verdicts are no better than chance, and negative if they are worse. It is
            limited to -1 to 50, and is 50 if every verdict is right or all logits are equal.
        error: Standard error of ``best_inverse``, clustered by prompt; infinite if there is only
            one prompt, or if ``best_inverse`` is 50.
    """

    value: float
    best_inverse: float
    error: float


def _by_prompt(values: Tensor, prompts: Sequence[object]) -> list[float]:
    """Return the sums of values over the pairs of each prompt."""
    sums: dict[object, float] = {}
    for prompt, value in zip(prompts, values.tolist(), strict=True):
        sums[prompt] = sums.get(prompt, 0.0) + value
    return list(sums.values())


def _is_underconfident(logits: Tensor, wanted: Tensor, prompts: Sequence[object]) -> bool:
    """Return whether the judge is underconfident at temperature 1 by over two standard errors.

    The standard error at the best temperature is too small if that temperature is low by chance.
    With that error, one calibrated judge in eight got a temperature below 1 in a test with ten
    pairs.
    """
    probabilities = logits.softmax(-1)
    slopes = ((probabilities - wanted) * logits).sum(1)
    means = (probabilities * logits).sum(1)
    # the variance of the sum of slopes, if the judge is calibrated
    expected = float(((probabilities * logits.square()).sum(1) - means.square()).sum())
    sums = _by_prompt(slopes, prompts)
    spread = sum(value**2 for value in sums) * len(sums) / max(1, len(sums) - 1)
    return sum(sums) < -2 * max(spread, expected) ** 0.5


def cautious_temperature(
    logits: Tensor, labels: Sequence[object] | Tensor, prompts: Sequence[object]
) -> Temperature:
    """Fit a temperature, and shrink it toward 1 if there are few pairs or prompts.

    The temperature's inverse has a normal prior of mean 1 and standard deviation 0.5; the result is
    the most likely temperature (maximum a posteriori). Pairs with the same prompt are not
    independent: they count as fewer pairs, and the standard error is clustered by prompt. The
    temperature is below 1 only if the evidence for this exceeds two standard errors, because a
    judge that becomes more confident by chance is worse on other pairs. With a single prompt, it
    is 1.

    Args:
        logits: The logits, (N, C), of pairs that were not trained on.
        labels: Class indices (N,) or soft labels (N, C).
        prompts: The prompt of each pair, or any hashable value that identifies the prompt.

    Returns:
        The temperature, with the inverse of the best one on these pairs and its standard error.

    >>> few = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    >>> cautious_temperature(few, [0, 0], ["a", "b"]).value
    1.0
    """
    shares = shares_of(labels, logits.shape[-1])
    # subtracting a pair's mean logit changes no probability, and large logits lose fewer digits
    logits = logits.double() - logits.double().mean(1, keepdim=True)
    best = _best_inverse(logits, shares)
    probabilities = (logits * best).softmax(-1)
    centered = logits - (probabilities * logits).sum(1, keepdim=True)
    # derivatives of the log-loss with respect to 1 / T: the first for each pair, the second for all
    slopes = ((probabilities - shares) * centered).sum(1)
    curvature = float((probabilities * centered.square()).sum())
    sums = _by_prompt(slopes, prompts)
    if len(sums) < 2:
        return Temperature(1.0, best, math.inf)
    spread = sum(value**2 for value in sums) * len(sums) / (len(sums) - 1)
    error = math.inf
    repeats = 1.0
    if curvature > 0:
        # if every verdict is right, there is no best temperature, and `best` is at its limit
        if best < 0.99 / _LEAST:
            error = spread**0.5 / curvature
        # for independent pairs, the spread equals the curvature. If the pairs of a prompt are
        # alike, the spread is larger, and `repeats` pairs count as one
        repeats = max(1.0, spread / curvature)
    if best > 1 and (best - 2 * error < 1 or not _is_underconfident(logits, shares, prompts)):
        return Temperature(1.0, best, error)
    inverse = _best_inverse(logits, shares, pull=repeats / (_PRIOR**2 * len(logits)))
    return Temperature(1 / _limited(inverse), best, error)
