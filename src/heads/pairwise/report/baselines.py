"""Baselines without an encoder, which use class frequencies, lengths, words and style."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..functional import swapped
from ..pairs import Pair, Words, as_pairs, said_by
from ..surface import surfaces_of
from .metrics import alike, at_verdict, pairwise_metrics, shares_of

NEAR = 1.2  # answers have similar length if the longer one is at most this many times as long

BASELINES = (
    "the training labels' shares",
    "a curve of length",
    "words and style, linear",
    "style, boosted trees",
)


@dataclass(frozen=True)
class Rival:
    """A baseline's metrics, and a model's gain over the baseline.

    Attributes:
        name: The name of the baseline.
        accuracy: Fraction of correct verdicts.
        near_accuracy: The accuracy on pairs in which neither answer is more than a fifth longer
            than the other; nan if there are none.
        log_loss: The log-loss in nats.
        calibration_error: See `PairwiseMetrics`.
        gain: The baseline's log-loss minus the model's, in nats per pair.
        error: The standard error of the gain, clustered by prompt; nan if all pairs have the same
            prompt.
    """

    name: str
    accuracy: float
    near_accuracy: float
    log_loss: float
    calibration_error: float
    gain: float
    error: float


def needs_scikit_learn(operation: str) -> None:
    """Check that scikit-learn is installed, before any work starts.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ImportError(
            f"{operation}: baselines need scikit-learn; pip install 'model-components[judge]'"
        )


def baseline_verdicts(
    train: Sequence[Pair], test: Sequence[Pair], *, classes: int = 3
) -> dict[str, Tensor]:
    """Return log-probabilities of test pairs from baselines fitted on labeled training pairs.

    Each baseline is fitted on both orders of each pair and returns the mean of both orders, so it
    is symmetric in A and B. The baselines are:

    - the class frequencies of the training labels,
    - a logistic regression on a spline of the difference in log-length,
    - a logistic regression on differences of TF-IDF vectors and of the 24 surface features,
    - boosted trees on differences and means of the surface features.

    Args:
        train: Labeled pairs that the baselines are fitted on.
        test: Pairs to judge.
        classes: 3, or 2 for data without ties.

    Returns:
        A dictionary from the names of the baselines to their log-probabilities, (N, C) float64.

    Raises:
        ImportError: scikit-learn is not installed (extra ``judge``).
        ValueError: Training pairs have no labels, or there are no pairs.
    """
    operation = "baseline_verdicts"
    needs_scikit_learn(operation)
    if not train or any(pair.label is None for pair in train) or not test:
        raise ValueError(
            f"{operation}: expected 1 or more training pairs, all with labels, and 1 or more test "
            f"pairs, got {len(train)} training pairs and {len(test)} test pairs"
        )
    train = as_pairs(operation, train, classes)
    from scipy.sparse import csr_array, hstack
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import SplineTransformer

    labels = _shares(train, classes)
    (a, b), (test_a, test_b) = surfaces_of(train), surfaces_of(test)
    # min_df=2, because a word of a single answer would be memorized;
    # scikit-learn's default pattern leaves out words of one letter, such as I
    words = TfidfVectorizer(sublinear_tf=True, min_df=2, max_features=20_000, token_pattern=r"\w+")
    texts = []
    for side in _sides(train) + _sides(test):
        texts.append([said_by("assistant", answer) for answer in side])
    tfidf: list[object]
    try:
        # only training answers: nothing may be learned from the test pairs
        words.fit(texts[0] + texts[1])
        tfidf = [words.transform(side) for side in texts]
    except ValueError:  # no word is in two answers
        tfidf = [csr_array((len(side), 1)) for side in texts]
    # 1e-9, because the standard deviation is 0 if all pairs differ by the same amount
    spread = np.abs(a - b).std(0) + 1e-9

    def worded(one: Any, other: Any, style: np.ndarray) -> csr_array:
        style = style / spread
        # absolute differences do not depend on the order of the answers, so they can reveal ties
        return hstack([one - other, csr_array(np.c_[style, np.abs(style)])]).tocsr()

    def styled(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.c_[one - other, (one + other) / 2]

    # the first surface feature is log(1 + number of characters)
    longer = [one[:, :1] - other[:, :1] for one, other in ((a, b), (test_a, test_b))]
    verdicts: dict[str, Tensor] = {
        BASELINES[0]: alike(torch.from_numpy(labels.mean(0)))
        .clamp(min=1e-9)
        .log()
        .expand(len(test), classes)
    }
    verdicts[BASELINES[1]] = _fitted(
        make_pipeline(
            # constant: beyond the differences in training pairs, more length changes nothing
            SplineTransformer(n_knots=8, extrapolation="constant"),
            LogisticRegression(C=10, max_iter=1000),
        ),
        (longer[0], -longer[0]),
        labels,
        (longer[1], -longer[1]),
    )
    verdicts[BASELINES[2]] = _fitted(
        LogisticRegression(C=0.3, max_iter=2000),
        (worded(tfidf[0], tfidf[1], a - b), worded(tfidf[1], tfidf[0], b - a)),
        labels,
        (worded(tfidf[2], tfidf[3], test_a - test_b), worded(tfidf[3], tfidf[2], test_b - test_a)),
    )
    verdicts[BASELINES[3]] = _fitted(
        HistGradientBoostingClassifier(
            learning_rate=0.03,
            max_iter=200,
            l2_regularization=5.0,
            min_samples_leaf=40,
            random_state=0,
        ),
        (styled(a, b), styled(b, a)),
        labels,
        (styled(test_a, test_b), styled(test_b, test_a)),
    )
    return verdicts


def rivals_of(
    log_probs: Tensor, labels: Sequence[object], train: Sequence[Pair], test: Sequence[Pair]
) -> tuple[Rival, ...]:
    """Return the baselines' metrics on test pairs, and a model's gain over each baseline."""
    wanted = shares_of(labels, log_probs.shape[-1])
    near = near_in_length(test)

    def losses(verdicts: Tensor) -> Tensor:
        # 0 times an infinite loss would be nan
        return torch.where(wanted > 0, -wanted * verdicts, 0.0).sum(1)

    model_losses = losses(log_probs.double())
    rivals = []
    # each pair without a prompt counts as a separate prompt
    groups = [pair.prompt or number for number, pair in enumerate(test)]
    for name, verdicts in baseline_verdicts(train, test, classes=log_probs.shape[-1]).items():
        metrics = pairwise_metrics(verdicts, labels)
        gain, error = clustered(losses(verdicts) - model_losses, groups)
        share = near_accuracy(verdicts, wanted, near)
        rivals.append(
            Rival(
                name,
                metrics.accuracy,
                share,
                metrics.log_loss,
                metrics.calibration_error,
                gain,
                error,
            )
        )
    return tuple(rivals)


def near_in_length(pairs: Sequence[Pair]) -> Tensor:
    """Return, for each pair, whether the longer answer is at most a fifth longer than the other."""
    near = []
    for pair in pairs:
        one = len(said_by("assistant", pair.a))
        other = len(said_by("assistant", pair.b))
        near.append(max(one, other) <= NEAR * min(one, other))
    return torch.tensor(near)


def near_accuracy(found: Tensor, wanted: Tensor, near: Tensor) -> float:
    """Return the accuracy on pairs of similar length, or nan if there are none."""
    right = at_verdict(wanted, found)
    if near.any():
        return float(right[near].mean())
    return float("nan")


def clustered(differences: Tensor, groups: Sequence[object]) -> tuple[float, float]:
    """Return a mean and its standard error, clustered by group; with one group, the error is nan.

    >>> clustered(torch.tensor([1.0, 1.0, 3.0, 3.0]), ["p", "p", "q", "q"])
    (2.0, 1.0)
    """
    mean = float(differences.mean())
    sums: dict[object, float] = {}
    for group, one in zip(groups, differences.tolist(), strict=True):
        sums[group] = sums.get(group, 0.0) + one - mean
    if len(sums) == 1:
        return mean, float("nan")
    # a correction for few groups, which are closer to their own mean than to the true one
    variance = sum(one**2 for one in sums.values()) * len(sums) / (len(sums) - 1)
    return mean, variance**0.5 / len(differences)


def _sides(pairs: Sequence[Pair]) -> list[list[Words]]:
    return [[pair.a for pair in pairs], [pair.b for pair in pairs]]


_Sides = tuple[Any, Any]  # features of the orders A, B and B, A, dense or sparse


def _shares(pairs: Sequence[Pair], classes: int) -> np.ndarray:
    shares = np.zeros((len(pairs), classes))
    for row, pair in zip(shares, pairs, strict=True):
        if isinstance(pair.label, tuple):
            row[:] = pair.label
        elif pair.label is not None:
            row[pair.label] = 1
    return shares


def _fitted(model: Any, seen: _Sides, labels: np.ndarray, new: _Sides) -> Tensor:
    """Fit a model on both orders of the training pairs; return log-probabilities of new pairs.

    The probabilities are the means of both orders.
    """
    stack: Callable[[list], object] = np.concatenate
    if not isinstance(seen[0], np.ndarray):
        from scipy.sparse import vstack

        stack = vstack
    classes = labels.shape[1]
    turned = labels[:, [1, 0, *range(2, classes)]]
    rows = []
    targets = []
    weights = []
    for side, shares in zip(seen, (labels, turned), strict=True):
        # scikit-learn takes one class per sample: a soft label becomes several weighted samples
        for k in range(classes):
            counted = shares[:, k] > 0
            rows.append(side[counted])
            targets.append(np.full(counted.sum(), k))
            weights.append(shares[counted, k])
    if len(present := set(np.concatenate(targets).tolist())) < 2:  # all labels are ties
        only = torch.full((new[0].shape[0], classes), 1e-9, dtype=torch.float64)
        only[:, present.pop()] = 1.0
        return only.log()
    if hasattr(model, "steps"):
        # a pipeline takes weights for its last step under the name of this step
        last = model.steps[-1][0] + "__sample_weight"
    else:
        last = "sample_weight"
    model.fit(stack(rows), np.concatenate(targets), **{last: np.concatenate(weights)})
    there = torch.tensor(model.classes_)
    both = []
    for side in new:
        # 1e-9 for a class without training pairs: its loss is large but finite
        probabilities = torch.full((side.shape[0], classes), 1e-9, dtype=torch.float64)
        probabilities[:, there] = torch.from_numpy(model.predict_proba(side)).clamp(min=1e-9)
        both.append(probabilities)
    mean = (both[0] + swapped(both[1])) / 2
    return (mean / mean.sum(1, keepdim=True)).log()
