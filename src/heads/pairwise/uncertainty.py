"""`fit_uncertainty_`: make a judge less confident on pairs unlike its training pairs.

Shapes: P pairs, D width of the inputs of the head's last layers.
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
"""Prior precisions of the last layers' weights, one of which is chosen on held-out pairs. A smaller
precision makes the judge less confident."""

EQUAL = 0.5
"""Number of standard errors by which a log-loss may exceed the lowest one and still count as equal.
With 1 standard error and 1,200 training pairs, the log-loss on pairs like the training pairs rose
by 0.01 nats."""

WIDEST = 4096
"""The largest D that is supported; the covariance then takes 64 MiB."""


@dataclass(frozen=True)
class UncertaintyReport(Report):
    """The result of `fit_uncertainty_`.

    Attributes:
        pairs: Number of held-out pairs.
        precision: The prior precision that was chosen on these pairs.
        before: The log-loss on these pairs before the call.
        after: The log-loss on these pairs after the call.
    """

    pairs: int
    precision: float
    before: float
    after: float

    def summary(self) -> list[str]:
        """Return a line with the log-losses before and after, and the prior precision."""
        return [
            f"log-loss {self.before:.4f} before, {self.after:.4f} after, on {self.pairs} pairs "
            f"(prior precision {self.precision:g})"
        ]


def width_of(model: PairwiseModel) -> int:
    """Return D, the width of the inputs of the head's last layers."""
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
    """Make a trained judge less confident on pairs unlike its training pairs, in place.

    The weights of the head's last layers get a normal distribution around the learned weights (the
    Laplace approximation). Its precision matrix is ``p I + Σ v x xᵀ``, summed over the training
    pairs: x is the input of these layers for a pair, v the variance of the pair's verdict, and p a
    prior precision. The value of p is chosen on held-out pairs: of seven candidates, it is the
    smallest whose log-loss exceeds the lowest by at most half a standard error of the difference.
    A smaller p makes the judge less confident, which suits pairs from other sources. In evaluation,
    the probabilities are approximately their mean over this distribution. Which answer wins does
    not change, and swapping the answers still swaps the probabilities exactly. Training does not
    use the distribution; call this function again after further training.

    Args:
        model: A `PairwiseModel` with link ``"antisymmetric"``.
        data: The training pairs.
        held_out: Labeled pairs that were not trained on.
        batch_size: Number of pairs in a batch.

    Returns:
        A report with the chosen precision, and the log-loss before and after.

    Raises:
        ValueError: The link is not ``"antisymmetric"``, a data set is empty, the held-out pairs
            have no labels, a data set holds features of another encoder, or the inputs of the last
            layers are wider than 4096.

    Source: MacKay 1992, "The evidence framework applied to classification networks"; for last
    layers alone, Kristiadi et al., arXiv 2002.10118.
    """
    if model.config.link != "antisymmetric":
        raise ValueError(
            f"fit_uncertainty_: the link is {model.config.link!r}, expected 'antisymmetric'"
        )
    if not len(data) or not len(held_out) or held_out.labels[0] is None:
        raise ValueError(
            "fit_uncertainty_: expected at least 1 training pair, and at least 1 held-out pair "
            f"with a label, got {len(data)} training pairs and {len(held_out)} held-out pairs"
        )
    width = width_of(model)
    if width > WIDEST:
        raise ValueError(
            f"fit_uncertainty_: the inputs of the head's last layers have width {width}, expected "
            f"at most {WIDEST}; use fewer kinds of pooling"
        )
    data.check_made_for("fit_uncertainty_", model)
    held_out.check_made_for("fit_uncertainty_", model)
    # inside a wrapper of peft, the head that is trained has the covariance
    head: Any = model.head
    if hasattr(head, "modules_to_save"):
        head = head.modules_to_save[head.active_adapter]
    # compute the verdicts without a covariance, even if the judge already has one
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
    """Return the index of the first choice whose mean loss is not clearly above the lowest.

    See `EQUAL`.
    """
    best = int(losses.mean(1).argmin())
    # differences of the same pairs vary far less than the losses themselves
    worse = losses - losses[best]
    error = worse.std(1, correction=0) / losses.shape[1] ** 0.5
    return int((worse.mean(1) <= EQUAL * error).nonzero()[0])


def _sides(
    model: PairwiseModel, data: PairwiseDataset, batch_size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    """Yield, for each batch, the features of A and of B, and the surface features of both."""
    device = model.head.outer.weight.device
    for start in range(0, len(data), batch_size):
        numbers = range(start, min(start + batch_size, len(data)))
        a, b, *looks = (x.to(device) for x in sides_of(model, data, numbers, batch_size))
        if model.head.encoding is None:
            yield a, b, None, None
        else:
            yield a, b, looks[0], looks[1]


def _shares(data: PairwiseDataset, number: int, ties: bool) -> Tensor:
    """Return the label of a pair as fractions of the classes."""
    label = data[number]["label"]
    if isinstance(label, int):
        return torch.nn.functional.one_hot(torch.tensor(label), 2 + ties).float()
    return torch.as_tensor(label, dtype=torch.float32)


def _losses(
    model: PairwiseModel,
    kept: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]],
    labels: Tensor,
) -> Tensor:  # (P,)
    """Return the log-loss of each verdict, with logits divided by the head's temperature."""
    logits = torch.cat([model.head(*sides) for sides in kept]).cpu()
    return -(labels * log_probabilities(logits / model.head.temperature.cpu())).sum(1)
