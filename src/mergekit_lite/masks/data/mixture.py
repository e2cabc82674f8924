"""The examples of several components: `TaskMixture`."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from .collator import Examples

_Place = tuple[int, int, int]  # a component, its data set, an example of that


class TaskMixture(Dataset):
    """The examples of several data sets, each with its ``task``.

    A task is the index of its component.

    Args:
        datasets: For each component, in the merger's order, a data set, or a list of several;
            examples are dicts with ``input_ids`` and perhaps ``labels``.
        weights: How many examples each component has, relative to each other; default: all once.
            Then the mixture is as long as all data sets together; what has too few examples repeats
            them, what has too many loses some. ``"tokens"``: so many that all components have about
            as many supervised tokens; the loss is a mean over tokens, so that otherwise long
            answers outweigh short ones (reads all examples once).
        temperature: Instead of ``weights``: sizes to the power of 1 / ``temperature``, so that 1
            leaves them and a large number makes them alike (Raffel et al., arXiv 1910.10683).
        seed: Of which examples are repeated or left out.

    Raises:
        ValueError: A mapping; data sets without a length; weights that are none, or of a component
            without examples.

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
            raise ValueError(f"TaskMixture: weights are {weights!r}, expected numbers, or 'tokens'")
        self.datasets = _of_components("TaskMixture", datasets)
        if not all(hasattr(d, "__len__") for parts in self.datasets for d in parts):
            raise ValueError(
                "TaskMixture: expected data sets that have a length, got one that is streamed"
            )
        places = [
            [(k, d, i) for d in range(len(parts)) for i in range(len(parts[d]))]
            for k, parts in enumerate(self.datasets)
        ]
        if temperature is not None and (weights is not None or not temperature > 0):
            raise ValueError(
                f"TaskMixture: temperature {temperature}, weights {weights}; expected one of "
                "them, the first above 0"
            )
        if temperature is not None:
            weights = [len(p) ** (1 / temperature) for p in places]
        elif isinstance(weights, str):
            weights = [_by_tokens(parts) for parts in self.datasets]
        if weights is not None:
            _check_weights("TaskMixture", weights, [len(p) for p in places])
            rng = random.Random(seed)
            counts = _shares(sum(map(len, places)), weights)
            places = [_drawn(rng, p, count) for p, count in zip(places, counts, strict=True)]
        self._places = [place for own in places for place in own]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, object]:
        task, dataset, place = self._places[index]
        return {**self.datasets[task][dataset][place], "task": task}


def _of_components(operation: str, datasets: Sequence[object]) -> list[list[Any]]:
    """For each component a list of data sets."""
    if isinstance(datasets, Mapping):
        raise ValueError(
            f"{operation}: datasets is a mapping, expected a list in the order of the components"
        )
    if odd := [d for d in datasets if isinstance(d, (str, Path))]:
        raise ValueError(
            f"{operation}: {str(odd[0])!r} is no data set; expected examples, as "
            "TextExamples(file, tokenizer)"
        )
    return [
        list(d) if isinstance(d, (list, tuple)) and d and not isinstance(d[0], Mapping) else [d]
        for d in datasets
    ]


def _by_tokens(parts: Sequence[Examples]) -> float:
    """The reciprocal of the mean number of supervised tokens of a component's examples.

    0 where there are none.
    """
    count = 0
    tokens = 0
    for example in (part[i] for part in parts for i in range(len(part))):
        labels = example.get("labels")
        labels = example["input_ids"] if labels is None else labels
        tokens += sum(
            label != -100
            for label in (labels.tolist() if hasattr(labels, "tolist") else labels)[1:]
        )
        count += 1
    return count / tokens if tokens else 0.0


def _check_weights(operation: str, weights: Sequence[float], sizes: Sequence[int]) -> None:
    fits = len(weights) == len(sizes) and all(
        isinstance(w, (int, float)) and 0 <= w < math.inf for w in weights
    )
    if not fits or not sum(weights) > 0:
        raise ValueError(
            f"{operation}: weights are {list(weights)}, expected {len(sizes)} numbers from 0, not "
            "all 0"
        )
    if empty := [k for k, size in enumerate(sizes) if weights[k] and not size]:
        raise ValueError(
            f"{operation}: component {empty[0]} has weight {weights[empty[0]]} and no examples"
        )


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to ``total``, as near to the weights as they can be."""
    exact = [total * w / sum(weights) for w in weights]
    counts = [int(x) for x in exact]
    for k in sorted(range(len(exact)), key=lambda k: counts[k] - exact[k])[: total - sum(counts)]:
        counts[k] += 1
    return counts


def _drawn(rng: random.Random, places: list[_Place], count: int) -> list[_Place]:
    """``count`` of the places, each as often as any other or once more."""
    whole, rest = divmod(count, len(places)) if places else (0, 0)
    return places * whole + rng.sample(places, rest)
