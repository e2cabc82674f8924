"""Tokenize pairs, and collate them into batches without padding, in which each answer occurs once.

Shapes: T tokens of all sequences, S sequences, P pairs, W width of the features, F surface
features, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from model_components._report import Report

from ..config import PairwiseConfig
from ..judge import Judge
from ..pairs import (
    Words,
    WordsLike,
    as_pairs,
    check_words,
    count_labels,
    listed_counts,
    said_by,
)
from ..surface import surface_of
from .cache import encoded, fingerprint
from .template import Template, Tokens, sequence_batch

_CHUNK = 256  # pairs that are tokenized at once


@dataclass(frozen=True)
class CutReport(Report):
    """Counts of pairs, labels and tokens, and of the texts that were truncated.

    Attributes:
        pairs: The number of pairs.
        labels: The number of pairs of each class.
        tokens: The number of tokens, without the tokens that were cut.
        prompts_cut: The number of pairs whose prompt was truncated.
        answers_cut: The number of answers that were truncated.
        tokens_cut: The number of tokens that were cut.
    """

    pairs: int
    labels: tuple[int, ...]
    tokens: int
    prompts_cut: int
    answers_cut: int
    tokens_cut: int

    def summary(self) -> list[str]:
        """Return a line with the numbers of pairs, labels and tokens."""
        labels = listed_counts(self.labels) if sum(self.labels) else "without labels"
        return [f"{self.pairs} pairs ({labels}), {self.tokens} tokens"]

    def remarks(self) -> list[str]:
        """Return a line on the texts that were truncated, if there are any."""
        if not self.tokens_cut:
            return []
        return [
            f"{self.prompts_cut} prompts and {self.answers_cut} answers were too long: "
            f"{self.tokens_cut} tokens were cut, from the beginnings of prompts and the middles of "
            "answers"
        ]


class Answer(NamedTuple):
    """A prompt and an answer as inputs of a model.

    Attributes:
        tokens: The tokens of the prompt and the answer.
        surface: The surface features, (F,).
        features: The encoder's features, (W,), after `PairwiseDataset.encode_`.
    """

    tokens: Tokens
    surface: np.ndarray
    features: np.ndarray | None = None

    def key(self) -> tuple[bytes, ...]:
        """Return a key that is equal for answers that give the model equal inputs."""
        begin = str(self.tokens.begin).encode()  # pooling depends on where the answer begins
        return self.tokens.ids.tobytes(), self.tokens.types.tobytes(), begin, self.surface.tobytes()


_SAMPLE = "Two answers to 1 prompt: which is better, A or B? {x} größer 答え"


def sample_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the token ids of a short text, which differ between almost any two tokenizers."""
    return tuple(tokenizer(_SAMPLE)["input_ids"])


class PairwiseDataset(Dataset):
    """A data set of pairs, as token ids.

    Each answer and its prompt are truncated independently of the other answer. First the beginning
    of the prompt is cut, down to ``max_prompt_tokens``, then the middle of the answer. An empty
    answer makes a sequence without answer tokens.

    Args:
        pairs: `Pair`s, tuples (prompt, a, b, label), or mappings with these keys. A label is 0 if A
            is better, 1 if B is better, 2 for a tie, or the fractions of annotators who chose A, B
            and tie. Either all pairs have labels or none.
        tokenizer: The encoder's tokenizer, which must be a fast tokenizer.
        config: A `PairwiseConfig`, such as ``model.config``.
        progress: Whether to show a progress bar.

    Attributes:
        report: Counts of pairs, labels, tokens and truncated texts.
        pairs: The pairs in their original order.
        lengths: The number of tokens of each pair, in both sequences together.
        labels: The label of each pair; None for a pair without a label.
        encoded: Whether `encode_` has been called.
        sample_ids: The tokenizer's ids of a short text, which distinguish tokenizers.

    Raises:
        ValueError: A prompt or an answer is neither a string nor a list of turns, or a label is
            invalid (the message gives the pair's index); some pairs have labels and others do not;
            or the tokenizer or the config is unsuitable.
    """

    def __init__(
        self,
        pairs: Sequence[object],
        tokenizer: PreTrainedTokenizerBase,
        config: PairwiseConfig,
        *,
        progress: bool = True,
    ):
        self.pairs = as_pairs("PairwiseDataset", pairs, config.num_classes)
        self.labels = [pair.label for pair in self.pairs]
        labeled = sum(label is not None for label in self.labels)
        if labeled not in (0, len(self.labels)):
            raise ValueError(
                f"PairwiseDataset: {labeled} of {len(self.labels)} pairs have a label; expected "
                "all or none"
            )
        self.soft = any(isinstance(label, tuple) for label in self.labels)
        self.num_classes = config.num_classes
        template = Template(tokenizer, config)
        self.sample_ids = sample_ids(tokenizer)
        # the tokens of A and B of the first pair, then of the second, and so on
        self._tokens: list[Tokens] = []
        surfaces: list[np.ndarray] = []
        self._features: np.ndarray | None = None
        self._features_of = ""
        self.lengths: list[int] = []
        prompts_cut = answers_cut = tokens_cut = 0
        starts = range(0, len(self.pairs), _CHUNK)
        for start in tqdm(starts, "tokenizing", disable=not progress, leave=False, delay=1):
            chunk = self.pairs[start : start + _CHUNK]
            groups = [(pair.prompt, (pair.a, pair.b)) for pair in chunk]
            for a, b in template.sequences(groups):
                self._tokens += [a.tokens, b.tokens]
                self.lengths.append(len(a.tokens.ids) + len(b.tokens.ids))
                # count once per pair, because both answers follow the same prompt
                prompts_cut += max(a.of_prompt, b.of_prompt) > 0
                answers_cut += (a.of_answer > 0) + (b.of_answer > 0)
                tokens_cut += a.of_prompt + a.of_answer + b.of_prompt + b.of_answer
            for prompt, answers in groups:
                surfaces += _surfaces(prompt, answers, config)
        self._surface = np.array(surfaces)
        self.report = CutReport(
            len(self.pairs),
            count_labels(self.pairs),
            sum(self.lengths),
            prompts_cut,
            answers_cut,
            tokens_cut,
        )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, object]:
        # range takes negative indices, too, and raises the IndexError that ends an iteration
        index = range(len(self))[index]
        return {
            "answers": [self.answer(2 * index), self.answer(2 * index + 1)],
            "label": self._label(self.labels[index]),
        }

    @property
    def encoded(self) -> bool:
        """Return whether the answers have features of a frozen encoder."""
        return self._features is not None

    def encode_(
        self, model: Judge, *, cache: str | Path | None = None, progress: bool = True
    ) -> None:
        """Encode each answer once with a model's frozen encoder, and keep the features.

        A head can then be trained in seconds.

        Args:
            model: A `PairwiseModel` whose encoder is frozen.
            cache: A folder to store the features in. Features that an earlier run with the same
                encoder stored there, finished or not, are not computed again.
            progress: Whether to show a progress bar.

        Raises:
            ValueError: The encoder is not frozen.
        """
        self._features = encoded(model, self._tokens, cache, progress)
        self._features_of = fingerprint(model)

    def check_made_for(self, operation: str, model: Judge) -> None:
        """Check that the tokens, and any labels and features, were made for this model.

        Raises:
            ValueError: The tokens are from another tokenizer, the labels have other classes, or the
                features are from another encoder or pooling.
        """
        own = model.tokenizer
        if own is not None and sample_ids(own) != self.sample_ids:
            raise ValueError(
                f"{operation}: expected a data set made with the model's tokenizer, got one made "
                "with another; call model.dataset(pairs)"
            )
        if any(label is not None for label in self.labels) and (
            self.num_classes != model.config.num_classes
        ):
            raise ValueError(
                f"{operation}: expected labels of {model.config.num_classes} classes, as in the "
                f"model, got a data set made for {self.num_classes}; call model.dataset(pairs)"
            )
        if self.encoded and self._features_of != fingerprint(model):
            raise ValueError(
                f"{operation}: the pairs hold features of another encoder or pooling; call "
                "data.encode_(model), or pass a data set without features"
            )

    def answer(self, number: int) -> Answer:
        """Return an answer by index: A and B of the first pair, then of the second, and so on."""
        features = None if self._features is None else self._features[number]
        return Answer(self._tokens[number], self._surface[number], features)

    def _label(self, label: object) -> Any:
        """Return a label as it is, or as a soft label if any label of the data set is soft."""
        if not self.soft or isinstance(label, tuple):
            return label
        return tuple(float(k == label) for k in range(self.num_classes))


def _surfaces(prompt: Words, answers: Sequence[Words], config: PairwiseConfig) -> list[np.ndarray]:
    """Return surface features, (F,), of each answer to a prompt.

    F is 0 if the model does not read surface features.
    """
    if not config.surface:
        return [np.zeros(0, np.float32)] * len(answers)
    # only the user's turns: repeating the system's instructions is not overlap
    asked = said_by("user", prompt)
    surfaces = []
    for answer in answers:
        surfaces.append(surface_of(asked, said_by("assistant", answer)).astype(np.float32))
    return surfaces


def answers_to(
    prompt: WordsLike,
    answers: Sequence[WordsLike],
    tokenizer: PreTrainedTokenizerBase,
    config: PairwiseConfig,
) -> list[Answer]:
    """Tokenize several answers to one prompt.

    Raises:
        ValueError: The prompt or an answer is neither a string nor a list of turns.
    """
    try:
        asked = check_words("prompt", prompt)
        checked = [check_words(f"answer {k}", answer) for k, answer in enumerate(answers)]
    except ValueError as error:
        raise ValueError(f"rank: {error}") from error
    (sequences,) = Template(tokenizer, config).sequences([(asked, checked)])
    tokens = [one.tokens for one in sequences]
    return list(map(Answer, tokens, _surfaces(asked, checked, config)))


def flat_batch(
    groups: Iterable[tuple[Sequence[Answer], Sequence[tuple[int, int]]]],
) -> dict[str, Tensor]:
    """Collate groups of answers into a batch: tokens or features, and the pairs to compare.

    Equal answers occur once. The answers of a group are sorted by content, whatever their order is,
    so that swapping A and B does not change the encoder's outputs, not even by rounding.

    >>> answers = [
    ...     Answer(Tokens(np.array(ids), np.zeros(len(ids)), 0), np.zeros(0))
    ...     for ids in ([5, 6], [4])
    ... ]
    >>> batch = flat_batch([([*answers, answers[0]], [(0, 1), (0, 2)])])
    >>> batch["input_ids"].tolist(), batch["lengths"].tolist(), batch["pairs"].tolist()
    ([4, 5, 6], [1, 2], [[1, 0], [1, 1]])
    """
    places: dict[tuple[bytes, ...], int] = {}
    chosen: list[Answer] = []
    compared: list[list[int]] = []
    for answers, pairs in groups:
        keys = [answer.key() for answer in answers]
        for k in sorted(range(len(keys)), key=keys.__getitem__):
            if keys[k] not in places:
                places[keys[k]] = len(chosen)
                chosen.append(answers[k])
        for i, j in pairs:
            compared.append([places[keys[i]], places[keys[j]]])
    batch = {"pairs": torch.tensor(compared)}  # first: the trainer reads the batch size from it
    if chosen[0].surface.size:
        batch["surface"] = torch.from_numpy(np.stack([answer.surface for answer in chosen]))
    features = [answer.features for answer in chosen if answer.features is not None]
    if features:
        return batch | {"features": torch.from_numpy(np.stack(features))}
    return batch | sequence_batch([answer.tokens for answer in chosen])


class PairwiseCollator:
    """A collator that turns items of a `PairwiseDataset` into inputs of a `PairwiseModel`.

    See `flat_batch`.

    >>> answers = [Answer(Tokens(np.array([n]), np.array([0]), 0), np.zeros(0)) for n in (5, 4)]
    >>> batch = PairwiseCollator()([{"answers": answers, "label": 0}])
    >>> list(batch)
    ['pairs', 'input_ids', 'token_type_ids', 'lengths', 'begins', 'labels']
    >>> batch["pairs"], batch["labels"]
    (tensor([[1, 0]]), tensor([0]))
    """

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return a batch: pairs, tokens or features, and any surface features and labels."""
        batch = flat_batch((item["answers"], [(0, 1)]) for item in items)
        labels = [item["label"] for item in items]
        if labels[0] is None:
            return batch
        return batch | {"labels": torch.tensor(labels)}
