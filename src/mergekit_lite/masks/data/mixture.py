"""`TaskMixture`: the examples of several components in one data set."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from .collator import Examples

_Place = tuple[int, int, int]  # indices of a component, of a data set, and of an example in it


class TaskMixture(Dataset):
    """A data set of the examples of several components, each with its ``task``.

    The task is the index of the component that an example belongs to.

    Args:
        datasets: One data set, or a list of data sets, for each component, in the order of the
            merger's components. Examples are dicts with ``input_ids`` and optionally ``labels``.
        weights: The relative number of examples of each component; default: each example once. With
            weights, the mixture is as long as all data sets together, so examples of one component
            may be repeated, and examples of another left out. ``"tokens"`` gives all components
            about the same number of supervised tokens, since long answers would otherwise outweigh
            short ones in the loss, a mean over tokens. This reads all examples once.
        temperature: Instead of ``weights``, weight each component by its number of examples
            to the power of 1 / ``temperature``. 1 keeps the proportions, and a large number makes
            all components equally frequent (Raffel et al., arXiv 1910.10683).
        seed: The seed for the choice of examples that are repeated or left out.

    Raises:
        ValueError: ``datasets`` is a mapping. A data set is a path or has no length. Weights or
            temperature are invalid. A component without examples has a weight above 0.

    >>> mixture = TaskMixture([[{"input_ids": [1]}], [{"input_ids": [2]}, {"input_ids": [3]}]])
    >>> len(mixture), mixture[1]
    (3, {'input_ids': [2], 'task': 1})
    >>> mixture = TaskMixture([[{"input_ids": [1]}], [{"input_ids": [2]}] * 3], weights=[1, 1])
    >>> [example["task"] for example in mixture]
    [0, 0, 1, 1]
    """

    def __init__(
        self,
        datasets: Sequence[object],
        *,
        weights: Sequence[float] | str | None = None,
        temperature: float | None = None,
        seed: int = 0,
    ):
        if isinstance(weights, str) and weights != "tokens":
            raise ValueError(f"TaskMixture: weights is {weights!r}, expected numbers or 'tokens'")
        if temperature is not None and (weights is not None or not temperature > 0):
            raise ValueError(
                "TaskMixture: expected either weights or a temperature above 0, got "
                f"weights={weights!r} and temperature={temperature!r}"
            )
        self.datasets = _of_components("TaskMixture", datasets)
        places = [_places(task, parts) for task, parts in enumerate(self.datasets)]
        sizes = [len(own) for own in places]
        if temperature is not None:
            weights = [size ** (1 / temperature) for size in sizes]
        elif isinstance(weights, str):
            weights = [_by_tokens(parts) for parts in self.datasets]
        self._places: list[_Place] = []
        counts = sizes
        if weights is not None:
            _check_weights("TaskMixture", weights, sizes)
            counts = _counts(sum(sizes), weights)
        rng = random.Random(seed)
        for own, count in zip(places, counts, strict=True):
            # without weights, nothing is drawn, so that examples keep their order
            self._places += own if weights is None else _drawn(rng, own, count)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, object]:
        task, dataset, place = self._places[index]
        # "task" comes last, so that it replaces a task that the example may have
        return {**self.datasets[task][dataset][place], "task": task}


def _places(task: int, parts: Sequence[Any]) -> list[_Place]:
    """Return the indices (component, data set, example) of all examples of a component."""
    places: list[_Place] = []
    for number, part in enumerate(parts):
        if not hasattr(part, "__len__"):
            raise ValueError(
                "TaskMixture: expected data sets with a length, got one without a length, such "
                "as a stream"
            )
        places += [(task, number, place) for place in range(len(part))]
    return places


def _of_components(operation: str, datasets: Sequence[object]) -> list[list[Any]]:
    """Return, for each component, the list of its data sets."""
    if isinstance(datasets, Mapping):
        raise ValueError(
            f"{operation}: datasets is a mapping, expected a list in the order of the components"
        )
    components = []
    for given in datasets:
        parts: list[Any] = [given]
        if isinstance(given, (str, Path)):
            raise ValueError(
                f"{operation}: expected a data set, such as TextExamples(file, tokenizer), got "
                f"{str(given)!r}"
            )
        # a list of examples is one data set, a list of anything else several
        if isinstance(given, (list, tuple)) and given and not isinstance(given[0], Mapping):
            parts = list(given)
        components.append(parts)
    return components


def _by_tokens(parts: Sequence[Examples]) -> float:
    """Return the number of examples per supervised token, or 0 if no token is supervised."""
    count = 0
    tokens = 0
    for part in parts:
        for place in range(len(part)):
            example = part[place]
            labels = torch.as_tensor(example.get("labels", example["input_ids"]))
            if labels.dim():
                labels = labels[1:]  # no logit predicts the first token
            tokens += int((labels != -100).sum())  # for a classifier, its one label
            count += 1
    return count / tokens if tokens else 0.0


def _check_weights(operation: str, weights: Sequence[float], sizes: Sequence[int]) -> None:
    numbers = [w for w in weights if isinstance(w, (int, float)) and 0 <= w < math.inf]
    fits = len(numbers) == len(weights) == len(sizes)
    if not fits or not sum(weights) > 0:
        raise ValueError(
            f"{operation}: weights are {list(weights)}, expected {len(sizes)} numbers of 0 or "
            "more, not all 0"
        )
    for number, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        if weight and not size:
            raise ValueError(
                f"{operation}: component {number} has no examples, expected weight 0, got {weight}"
            )


def _counts(total: int, weights: Sequence[float]) -> list[int]:
    """Return numbers of examples in proportion to weights, at least 1 for each weight above 0."""
    counts = _shares(total, weights)
    # rounding must not leave a component without examples
    for task, weight in enumerate(weights):
        if weight:
            counts[task] = max(1, counts[task])
    return counts


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Return integers that sum to ``total``, as nearly in proportion to weights as possible."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    # distribute the remainder to the numbers that rounding down reduced most
    by_loss = sorted(range(len(exact)), key=lambda place: counts[place] - exact[place])
    for place in by_loss[: total - sum(counts)]:
        counts[place] += 1
    return counts


def _drawn(rng: random.Random, places: list[_Place], count: int) -> list[_Place]:
    """Draw ``count`` of the examples at ``places``; their frequencies differ by at most one."""
    whole, rest = divmod(count, len(places)) if places else (0, 0)
    return places * whole + rng.sample(places, rest)
