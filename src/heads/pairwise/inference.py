"""Predict verdicts on many pairs, and rank several answers to one prompt.

Shapes: N pairs, P pairs of a batch, C classes, K answers, W width of the features, F surface
features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm

from model_components._devices import on_device, warn_if_slow
from model_components._modes import evaluating

from .choices import CLASSES
from .data.collate import Answer, PairwiseCollator, PairwiseDataset, flat_batch
from .functional import log_probabilities, swapped
from .judge import Judge

Sides = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""The features of A and of B, (P, W), and the surface features of A and of B, (P, F), if any."""


@dataclass(frozen=True)
class Predictions:
    """Verdicts on N pairs.

    Attributes:
        log_probabilities: The log-probabilities of A, B and tie, (N, C) float32.
        swapped_log_probabilities: The log-probabilities from pairs with A and B swapped, (N, C);
            the columns are swapped back.
        scores: The scores of A and B, (N, 2), or None if the link does not score single answers.
            Compare scores only between answers to the same prompt.
        alike: For each input of the head (``"encoder"`` or a kind of surface features), the
            log-probabilities if both answers' values of this input are replaced by their mean.
            Empty unless `predict_pairs` was called with ``parts=True``.
    """

    log_probabilities: Tensor
    swapped_log_probabilities: Tensor
    scores: Tensor | None
    alike: Mapping[str, Tensor]

    @property
    def probabilities(self) -> Tensor:
        """The probabilities of A, B and tie, (N, C)."""
        return self.log_probabilities.exp()

    @property
    def verdicts(self) -> list[str]:
        """The most likely class of each pair: ``"A"``, ``"B"`` or ``"tie"``.

        If A and B are equally likely, the verdict is ``"tie"``.
        """
        return [CLASSES[k] for k in verdicts_of(self.log_probabilities).tolist()]


@dataclass(frozen=True)
class Ranking:
    """A ranking of K answers.

    Attributes:
        order: The indices of the given answers, from best to worst.
        scores: The scores of the given answers, (K,), shifted to sum to 0. They are the link's
            scores or, if the link does not score single answers, Bradley-Terry log-strengths from
            comparisons of all pairs.
        wins: The win probabilities, (K, K): entry (i, j) is the probability that answer i beats
            answer j. A tie counts as half a win.
    """

    order: tuple[int, ...]
    scores: Tensor
    wins: Tensor


def verdicts_of(found: Tensor) -> Tensor:
    """Return the most likely classes, (N,), from log-probabilities (N, C).

    If A and B are equally likely, the class is 2, a tie, even if there are only two classes.

    >>> (
    ...     verdicts_of(torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.5, 0.0]])),
    ...     verdicts_of(torch.tensor([[0.5, 0.5]])),
    ... )
    (tensor([1, 2]), tensor([2]))
    """
    best = found.argmax(-1)
    # argmax returns the first of equal values, which would always be A
    return torch.where((found[..., 0] == found[..., 1]) & (best < 2), 2, best)


@torch.no_grad()
def predict_pairs(
    model: Judge,
    data: PairwiseDataset,
    *,
    batch_size: int = 32,
    parts: bool = False,
    progress: bool = True,
) -> Predictions:
    """Predict a model's verdicts on a data set; pairs of similar length share a batch.

    Args:
        model: A `PairwiseModel`.
        data: The pairs, with or without labels.
        batch_size: Number of pairs in a batch.
        parts: Whether to also predict, for each input of the head, the verdicts if both answers
            were equal in this input; see ``alike`` in `Predictions`.
        progress: Whether to show a progress bar.

    Returns:
        The predictions, in the order of the data set.

    Raises:
        ValueError: There are no pairs, ``batch_size`` is below 1, the data set holds features of
            another encoder, or the logits are not finite.
    """
    if not len(data) or batch_size < 1:
        raise ValueError(
            "predict_pairs: expected at least 1 pair and a batch_size of at least 1, got "
            f"{len(data)} pairs and a batch_size of {batch_size}"
        )
    data.check_made_for("predict_pairs", model)
    if not data.encoded:
        warn_if_slow("predict_pairs", model.encoder)
    order = sorted(range(len(data)), key=lambda i: data.lengths[i])
    collate = PairwiseCollator()
    device = next(model.parameters()).device
    made = []
    turned = []
    scores = []
    alike: dict[str, list[Tensor]] = {part: [] for part in (model.parts if parts else ())}
    with evaluating(model):
        for start in tqdm(
            range(0, len(order), batch_size), "judging", disable=not progress, leave=False, delay=1
        ):
            items = [data[i] for i in order[start : start + batch_size]]
            sides = _sides(model, on_device(collate(items), device))
            with torch.autocast(device.type, enabled=False):
                first, second, both_scores = _verdicts(model, sides)
                for part, kept in alike.items():
                    kept.append(_verdicts(model, sides, part)[0].cpu())
            made.append(first.cpu())
            turned.append(second.cpu())
            scores += [] if both_scores is None else [both_scores.cpu()]
    back = torch.tensor(order).argsort()
    first = torch.cat(made)[back]
    if not torch.isfinite(first).all():
        raise ValueError(
            "predict_pairs: expected finite logits, got inf or nan; was the model trained in "
            "float16?"
        )
    without = {part: torch.cat(kept)[back] for part, kept in alike.items()}
    return Predictions(
        first, torch.cat(turned)[back], torch.cat(scores)[back] if scores else None, without
    )


@torch.no_grad()
def sides_of(
    model: Judge, data: PairwiseDataset, numbers: Sequence[int], batch_size: int = 32
) -> list[Tensor]:
    """Return features and surface features of A and B, on the CPU, for pairs with these indices."""
    collate = PairwiseCollator()
    device = next(model.parameters()).device
    sides: list[list[Tensor]] = [[], [], [], []]
    with evaluating(model):
        for start in range(0, len(numbers), batch_size):
            items = [data[i] for i in numbers[start : start + batch_size]]
            batch = on_device(collate(items), device)
            for kept, part in zip(sides, _sides(model, batch), strict=True):
                # fit_ takes four tensors, of which a head without surface features ignores two
                kept.append(torch.zeros(0, 0) if part is None else part.cpu())
    return [torch.cat(kept) for kept in sides]


def _verdicts(
    model: Judge, sides: Sides, alike: str | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probabilities (P, C) for (A, B) and for (B, A), and scores (P, 2) or None.

    The columns of the second order are swapped back.
    """
    found = model.compare(*sides, both_orders=True, alike=alike)
    assert found.logits is not None
    assert found.swapped_logits is not None
    both = (
        log_probabilities(found.logits.float()),
        swapped(log_probabilities(found.swapped_logits.float())),
    )
    return *both, found.scores


def _sides(model: Judge, batch: dict[str, Tensor]) -> Sides:
    """Return a batch's features of A and B, and their surface features or None."""
    tokens = dict(batch)
    tokens.pop("labels", None)
    surface = tokens.pop("surface", None)
    a, b = tokens.pop("pairs").unbind(1)
    if "features" in batch:
        features = batch["features"]
    else:
        features = model.features(**tokens)
    return _parted(features, surface, a, b)


def _parted(features: Tensor, surface: Tensor | None, a: Tensor, b: Tensor) -> Sides:
    if surface is None:
        return features[a], features[b], None, None
    return features[a], features[b], surface[a], surface[b]


@torch.no_grad()
def rank_answers(model: Judge, answers: Sequence[Answer], batch_size: int) -> Ranking:
    """Score, compare and order answers, for `PairwiseModel.rank`."""
    device = next(model.parameters()).device
    count = len(answers)
    features = []
    looks = []
    with evaluating(model), torch.autocast(device.type, enabled=False):
        # fewer answers than pairs at once, because only answers go through the encoder
        for start in range(0, count, max(1, batch_size // 4)):
            part = answers[start : start + max(1, batch_size // 4)]
            # pair each answer with itself: the pair gives its index, which equal answers share
            batch = flat_batch([(part, [(k, k) for k in range(len(part))])])
            batch = on_device(batch, device)
            places = batch.pop("pairs")[:, 0]
            look = batch.pop("surface", None)
            features.append(model.features(**batch)[places].to(model.head.outer.weight.dtype))
            looks += [] if look is None else [look[places].to(model.head.outer.weight.dtype)]
        states = torch.cat(features)
        surface = torch.cat(looks) if looks else None
        link = model.config.link == "davidson"
        scores = model.head.score(states, surface) if link else None
        pairs = torch.combinations(torch.arange(count, device=device))
        shares = []
        for some in pairs.split(batch_size):
            first, second = some.unbind(1)
            if scores is not None:
                logits = model.head.linked(scores[first], scores[second]) / model.head.temperature
                shares.append(log_probabilities(logits).exp().cpu())
                continue
            orders = _verdicts(model, _parted(states, surface, first, second))[:2]
            # the mean of both orders is symmetric for concat, too
            shares.append(torch.stack(orders).exp().mean(0).cpu())
    wins = _wins(torch.cat(shares) if shares else torch.zeros(0, 2), pairs.cpu(), count)
    if scores is None:
        # a certain win has no finite score
        strengths = _bradley_terry(wins.clamp(1e-9, 1 - 1e-9))
    else:
        strengths = scores.double().cpu()
    return Ranking(
        # stable: answers with equal scores keep their order
        tuple(strengths.argsort(descending=True, stable=True).tolist()),
        strengths - strengths.mean(),
        wins,
    )


_MOST_NEWTON_STEPS = 200  # a few are usually enough; no tested table needed nearly as many


def _wins(shares: Tensor, pairs: Tensor, count: int) -> Tensor:
    """Return win probabilities (K, K) from class probabilities (N, C) of answer pairs (N, 2)."""
    shares, (first, second) = shares.double(), pairs.unbind(1)
    ties = shares[:, 2] / 2 if shares.shape[1] == 3 else 0.0
    wins = torch.full((count, count), 0.5, dtype=torch.float64)
    wins[first, second], wins[second, first] = shares[:, 0] + ties, shares[:, 1] + ties
    return wins


def _bradley_terry(wins: Tensor) -> Tensor:
    """Fit Bradley-Terry scores to a table of wins by Newton's method.

    Source: Bradley and Terry 1952.

    Args:
        wins: The win probabilities, (K, K), strictly between 0 and 1. Entry (i, j) is the
            probability that answer i beats answer j.

    Returns:
        The log-strengths, (K,) float64, which sum to 0.
    """
    count = len(wins)
    table = wins * (1 - torch.eye(count, dtype=torch.float64))
    won = table.sum(1)
    games = table + table.T
    ones = torch.ones(count, count, dtype=torch.float64)

    def likelihood(scores: Tensor) -> Tensor:
        return (table * torch.nn.functional.logsigmoid(scores[:, None] - scores[None])).sum()

    scores = torch.zeros(count, dtype=torch.float64)
    for _ in range(_MOST_NEWTON_STEPS):
        expected = torch.sigmoid(scores[:, None] - scores[None])
        slope = won - (games * expected).sum(1)
        bend = games * expected * (1 - expected)
        # the matrix alone is singular, because adding a constant to all scores changes nothing
        step = torch.linalg.solve(bend.sum(1).diag() - bend + ones / count, slope)
        # at most 2 nats, because a full step from far away overshoots; the last step can be 0
        size = min(1.0, 2.0 / max(float(step.abs().max()), 1e-300))
        while size > 1e-9 and likelihood(scores + size * step) < likelihood(scores):
            size /= 2
        scores = scores + size * step
        if float(step.abs().max()) < 1e-10:
            break
    return scores - scores.mean()
