"""`fit_uncertainty_`: a judge that is less sure of pairs that its training says little about.

Shapes: P pairs, D numbers that the head's last layers read of a pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from model_components._modes import evaluating
from model_components._report import Report

from .functional import log_probabilities
from .inference import sides_of

if TYPE_CHECKING:
    from .data.collate import PairwiseDataset
    from .model import PairwiseModel

PRECISIONS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Precisions of the last weights before any pair is seen, of which held-out pairs choose one: the
smaller, the less sure is the judge."""

EQUAL = 0.5
"""Standard errors by which a log-loss may be above the least and count as equal. With a whole one
and 1,200 training pairs, verdicts on pairs of the training's kind became .01 nats worse."""

WIDEST = 4096
"""Most numbers that the last layers may read: a covariance then takes 64 MiB."""


@dataclass(frozen=True)
class UncertaintyReport(Report):
    """The result of `fit_uncertainty_`.

    Attributes:
        pairs: Number of held-out pairs.
        precision: The prior precision that they chose.
        before: The log-loss of these pairs before the call.
        after: The log-loss of these pairs after it.
    """

    pairs: int
    precision: float
    before: float
    after: float

    def summary(self) -> list[str]:
        """Return the log-losses and the precision."""
        return [
            f"log-loss {self.before:.4f} before, {self.after:.4f} after, on {self.pairs} pairs "
            f"(prior precision {self.precision:g})"
        ]


def width_of(model: PairwiseModel) -> int:
    """Return D, the number of values that the last layers read of a pair."""
    network: Any = model.head.beside
    inner = 0 if network is None else network[-1].in_features
    return model.head.outer.weight.shape[1] + inner


@torch.no_grad()
def fit_uncertainty_(
    model: PairwiseModel,
    data: PairwiseDataset,
    held_out: PairwiseDataset,
    *,
    batch_size: int = 32,
) -> UncertaintyReport:
    """Make a trained judge less sure of pairs that its training says little about, in place.

    The weights of the head's last layers get a normal distribution around what was learned: the
    Laplace approximation, of precision ``p I + Σ v x xᵀ`` over the training pairs, where x is what
    these layers read of a pair, v the variance of its verdict, and p a prior precision. Held-out
    pairs choose p: of seven values, the smallest whose log-loss on them is at most half a standard
    error (of the paired difference) above the lowest. A smaller p makes a less sure judge, which
    pairs from other sources need. In evaluation a verdict is then, approximately, the mean over
    these weights. Which answer wins does not change, and swapping the answers still swaps the
    verdict exactly. Training does not use the distribution; call this again after further training.

    Args:
        model: A `PairwiseModel` with link ``"antisymmetric"``.
        data: The training pairs.
        held_out: Labeled pairs that were not trained on.
        batch_size: Number of pairs in a batch.

    Returns:
        The precision, and the log-loss before and after.

    Raises:
        ValueError: The link is not ``"antisymmetric"``, there are no pairs or no labels of held-out
            ones, or the last layers read more than 4096 numbers.

    Source: MacKay 1992, "The evidence framework applied to classification networks"; for last
    layers alone, Kristiadi et al., arXiv 2002.10118.
    """
    if model.config.link != "antisymmetric":
        raise ValueError(
            f"fit_uncertainty_: the link is {model.config.link!r}, expected 'antisymmetric'"
        )
    if not len(data) or not len(held_out) or held_out.labels[0] is None:
        raise ValueError(
            f"fit_uncertainty_: {len(data)} pairs and {len(held_out)} held-out ones; expected some "
            "of both, the latter with labels"
        )
    width = width_of(model)
    if width > WIDEST:
        raise ValueError(
            f"fit_uncertainty_: the head reads {width} numbers, expected at most {WIDEST}; fewer "
            "kinds of pooling make it narrower"
        )
    head = model.head
    # the fit is around the plain verdicts, also where one was made before
    head.covariance = None
    information = torch.zeros(width, width, dtype=torch.float64)
    with evaluating(model):
        for sides in _sides(model, data, batch_size):
            shares = head(*sides).softmax(-1).double().cpu()
            x = head.read_by_last(*sides).double().cpu()
            # the variance of (A wins) - (B wins), the information of a verdict about the logit
            difference = shares[:, 0] - shares[:, 1]
            variance = shares[:, 0] + shares[:, 1] - difference.square()
            information += x.T @ (x * variance[:, None])
        values, vectors = torch.linalg.eigh(information)
        kept = list(_sides(model, held_out, batch_size))
        labels = torch.stack([_shares(held_out, i, head.ties) for i in range(len(held_out))])
        before = _losses(model, kept, labels)
        found = []
        for precision in PRECISIONS:
            covariance = vectors / (values.clamp(min=0) + precision) @ vectors.T
            head.covariance = covariance.to(head.outer.weight)
            found.append(_losses(model, kept, labels))
    losses = torch.stack(found)
    chosen = _least_sure(losses)
    precision = PRECISIONS[chosen]
    covariance = vectors / (values.clamp(min=0) + precision) @ vectors.T
    head.covariance = covariance.to(head.outer.weight)
    model.config.uncertainty = True
    after = float(losses[chosen].mean())
    return UncertaintyReport(len(held_out), precision, float(before.mean()), after)


def _least_sure(losses: Tensor) -> int:  # (choices, P)
    """Return the first choice whose mean loss is as good as equal to the least."""
    best = int(losses.mean(1).argmin())
    # differences of the same pairs vary far less than the losses themselves
    worse = losses - losses[best]
    error = worse.std(1, correction=0) / losses.shape[1] ** 0.5
    return int((worse.mean(1) <= EQUAL * error).nonzero()[0])


def _sides(
    model: PairwiseModel, data: PairwiseDataset, batch_size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    """Yield features of A and of B and their surface features, batch by batch."""
    device = model.head.outer.weight.device
    for start in range(0, len(data), batch_size):
        numbers = range(start, min(start + batch_size, len(data)))
        a, b, *looks = (x.to(device) for x in sides_of(model, data, numbers, batch_size))
        if model.head.encoding is None:
            yield a, b, None, None
        else:
            yield a, b, looks[0], looks[1]


def _shares(data: PairwiseDataset, number: int, ties: bool) -> Tensor:
    """Return the label of a pair as shares of the classes."""
    label = data[number]["label"]
    if isinstance(label, int):
        return torch.nn.functional.one_hot(torch.tensor(label), 2 + ties).float()
    return torch.as_tensor(label, dtype=torch.float32)


def _losses(
    model: PairwiseModel,
    kept: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]],
    labels: Tensor,
) -> Tensor:  # (P,)
    """Return the log-loss of each verdict, the temperature included."""
    logits = torch.cat([model.head(*sides) for sides in kept]).cpu()
    return -(labels * log_probabilities(logits / model.head.temperature.cpu())).sum(1)
