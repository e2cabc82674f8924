"""`fit_uncertainty_`: a judge that is less sure of pairs that its training says little about.

Shapes: P pairs, D numbers that the head's last layers read of a pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from model_components._modes import evaluating

from .inference import sides_of

if TYPE_CHECKING:
    from .data.collate import PairwiseDataset
    from .model import PairwiseModel

_PRIOR = 1.0
"""Precision of the last weights before any pair is seen; they read features of unit size."""

WIDEST = 4096
"""Most numbers that the last layers may read: a covariance then takes 64 MiB."""


def width_of(model: PairwiseModel) -> int:
    """Return D, the number of values that the last layers read of a pair."""
    network: Any = model.head.beside
    inner = 0 if network is None else network[-1].in_features
    return model.head.outer.weight.shape[1] + inner


@torch.no_grad()
def fit_uncertainty_(model: PairwiseModel, data: PairwiseDataset, *, batch_size: int = 32) -> None:
    """Make a trained judge less sure of pairs that its training says little about, in place.

    The weights of the head's last layers get a normal distribution around what was learned: the
    Laplace approximation, of precision ``I + Σ v x xᵀ`` over the training pairs, where x is what
    these layers read of a pair and v the variance of its verdict. A verdict in evaluation is then
    the mean over these weights, near enough, and stays exactly fair. Which answer wins does not
    change. Call it after the training, with the pairs that were trained on; call it again after
    further training.

    Args:
        model: A `PairwiseModel` with link ``"antisymmetric"``.
        data: The training pairs.
        batch_size: Pairs at once.

    Raises:
        ValueError: Another link, no pairs, or a head that reads more than 4096 numbers.

    Source: MacKay 1992, "The evidence framework applied to classification networks"; of last
    layers, Kristiadi et al., arXiv 2002.10118.
    """
    if model.config.link != "antisymmetric":
        raise ValueError(
            f"fit_uncertainty_: the link is {model.config.link!r}, expected 'antisymmetric'"
        )
    if not len(data):
        raise ValueError("fit_uncertainty_: got no pairs, expected those of the training")
    width = width_of(model)
    if width > WIDEST:
        raise ValueError(
            f"fit_uncertainty_: the head reads {width} numbers, expected at most {WIDEST}; fewer "
            "kinds of pooling make it narrower"
        )
    head = model.head
    device = head.outer.weight.device
    # the fit is around the plain verdicts, also where one was made before
    head.covariance = None
    precision = _PRIOR * torch.eye(width, dtype=torch.float64, device=device)
    with evaluating(model):
        for start in range(0, len(data), batch_size):
            numbers = range(start, min(start + batch_size, len(data)))
            a, b, *looks = (x.to(device) for x in sides_of(model, data, numbers, batch_size))
            surface = looks if head.encoding is not None else (None, None)
            shares = head(a, b, *surface).softmax(-1).double()
            x = head.read_by_last(a, b, *surface).double()
            # the variance of (A wins) - (B wins), the information of a verdict about the logit
            difference = shares[:, 0] - shares[:, 1]
            variance = shares[:, 0] + shares[:, 1] - difference.square()
            precision += x.T @ (x * variance[:, None])
    covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
    head.covariance = covariance.to(head.outer.weight.dtype)
    model.config.uncertainty = True
