"""What a trained model says: predictions over many pairs, and a ranking of several answers to one prompt.

Shapes: N pairs, C classes, K answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from model_components._modes import evaluating

from .collate import PairwiseCollator, PairwiseDataset
from .config import CLASSES
from .functional import log_probabilities, swapped


@dataclass(frozen=True)
class Predictions:
    """Verdicts on N pairs.

    Attributes:
        log_probabilities: (N, C) float32, of A, B and tie.
        swapped_log_probabilities: (N, C), of the same pairs with A and B exchanged, in this order's columns.
        scores: (N, 2) of A and of B, for the links that score single answers.
    """

    log_probabilities: Tensor
    swapped_log_probabilities: Tensor
    scores: Tensor | None

    @property
    def probabilities(self) -> Tensor:
        """(N, C) of A, B and tie."""
        return self.log_probabilities.exp()

    @property
    def verdicts(self) -> list[str]:
        """``"A"``, ``"B"`` or ``"tie"``, whichever is likeliest; ``"tie"`` where A and B are equally so."""
        return [CLASSES[k] for k in verdicts_of(self.log_probabilities).tolist()]


@dataclass(frozen=True)
class Ranking:
    """A tournament of K answers.

    Attributes:
        order: Places of the answers in what was given, the best first.
        scores: (K,) Bradley-Terry scores, log-strengths that sum to 0.
        wins: (K, K), how likely the row's answer beats the column's; a tie counts half.
    """

    order: tuple[int, ...]
    scores: Tensor
    wins: Tensor


def verdicts_of(found: Tensor) -> Tensor:
    """(N, C) log-probabilities to (N,) classes; of three, A and B that are both the likeliest make a tie.

    >>> verdicts_of(torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.5, 0.0]]))
    tensor([1, 2])
    """
    best = found.argmax(-1)
    if found.shape[-1] == 2:
        return best
    return torch.where((found[..., 0] == found[..., 1]) & (best < 2), 2, best)


@torch.no_grad()
def predict_pairs(model: Any, data: PairwiseDataset, *, batch_size: int = 32, progress: bool = True) -> Predictions:
    """A model's verdicts on a data set, in its order; pairs of like length share a batch.

    Args:
        model: A `PairwiseModel`.
        data: Pairs, with labels or without.
        batch_size: Pairs at once.
        progress: Show a bar.

    Raises:
        ValueError: No pairs, or numbers that are not finite.
    """
    if not len(data):
        raise ValueError("predict_pairs: there are no pairs")
    order = sorted(range(len(data)), key=lambda i: data.lengths[i])
    collate, device = PairwiseCollator(), next(model.parameters()).device
    made, turned, scores = [], [], []
    with evaluating(model):
        for start in tqdm(range(0, len(order), batch_size), "judging", disable=not progress, leave=False, delay=1):
            batch = collate([data[i] for i in order[start : start + batch_size]])
            batch = {name: value.to(device) for name, value in batch.items() if name != "labels"}
            found = model(**batch, both_orders=True)
            made.append(log_probabilities(found.logits.float()).cpu())
            turned.append(swapped(log_probabilities(found.swapped_logits.float())).cpu())
            scores += [] if found.scores is None else [found.scores.cpu()]
    back = torch.tensor(order).argsort()
    first = torch.cat(made)[back]
    if not torch.isfinite(first).all():
        raise ValueError("predict_pairs: the model's logits are not finite; was it trained in float16?")
    return Predictions(first, torch.cat(turned)[back], torch.cat(scores)[back] if scores else None)


def bradley_terry(wins: Tensor, *, iterations: int = 200) -> Tensor:
    """Scores whose differences explain a table of wins best (Bradley and Terry 1952), by Newton's method.

    Args:
        wins: (K, K), how often, or how likely, the row beat the column; a tie is half a win for both.
        iterations: Most steps; they end when nothing moves.

    Returns:
        (K,) float64 log-strengths that sum to 0.

    Raises:
        ValueError: A table that is not square, numbers below 0 or not finite, or answers of which some never won
            against the rest: no finite scores explain that best.

    >>> wins = torch.tensor([[0.0, 3.0], [1.0, 0.0]])
    >>> scores = bradley_terry(wins)
    >>> round(float(scores[0] - scores[1]), 4)  # log(3 / 1)
    1.0986
    """
    if wins.dim() != 2 or wins.shape[0] != wins.shape[1]:
        raise ValueError(f"bradley_terry: wins is {list(wins.shape)}, needed (K, K)")
    count = len(wins)
    if not count:
        raise ValueError("bradley_terry: wins is [0, 0], needed an answer or more")
    table = wins.double().cpu() * (1 - torch.eye(count, dtype=torch.float64))
    if not (torch.isfinite(table).all() and (table >= 0).all()):
        raise ValueError("bradley_terry: wins has numbers below 0 or not finite")
    reached = torch.eye(count, dtype=torch.bool) | (table > 0)
    for _ in range(count.bit_length()):
        reached = (reached.double() @ reached.double()) > 0
    if not reached.all():
        raise ValueError("bradley_terry: some never won against the rest, so that no finite scores are best")
    won, games = table.sum(1), table + table.T
    ones = torch.ones(count, count, dtype=torch.float64)

    def likelihood(scores: Tensor) -> Tensor:
        return (table * torch.nn.functional.logsigmoid(scores[:, None] - scores[None])).sum()

    scores = torch.zeros(count, dtype=torch.float64)
    for _ in range(iterations):
        expected = torch.sigmoid(scores[:, None] - scores[None])
        slope = won - (games * expected).sum(1)
        bend = games * expected * (1 - expected)
        step = torch.linalg.solve(bend.sum(1).diag() - bend + ones / count, slope)
        size = min(1.0, 2.0 / max(float(step.abs().max()), 1e-300))
        while size > 1e-9 and likelihood(scores + size * step) < likelihood(scores):
            size /= 2
        scores = scores + size * step
        if float(step.abs().max()) < 1e-10:
            break
    return scores - scores.mean()


def ranking_of(shares: Tensor, pairs: Sequence[tuple[int, int]], count: int) -> Ranking:
    """The ranking that (N, C) probabilities for all pairs of ``count`` answers amount to."""
    shares = shares.double()
    ties = shares[:, 2] / 2 if shares.shape[1] == 3 else torch.zeros(len(shares), dtype=torch.float64)
    wins = torch.full((count, count), 0.5, dtype=torch.float64)
    for (i, j), a, b, tie in zip(pairs, shares[:, 0], shares[:, 1], ties, strict=True):
        wins[i, j], wins[j, i] = a + tie, b + tie
    scores = bradley_terry(wins.clamp(1e-9, 1 - 1e-9))
    return Ranking(tuple(scores.argsort(descending=True, stable=True).tolist()), scores, wins)
