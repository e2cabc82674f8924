"""Pairs as token ids, cut each for itself, and batches in which no token is padding and none comes twice.

Shapes: T tokens of all sequences, S sequences, P pairs, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from model_components._report import Report

from .config import CLASSES, PairwiseConfig
from .pairs import Pair, Words, check_label, check_words, count_labels, turns_of

_CHUNK = 256  # pairs that are tokenised at once


@dataclass(frozen=True)
class CutReport(Report):
    """How many pairs there are, and of each class, what they hold, and what was cut to fit."""

    pairs: int
    labels: tuple[int, ...]
    tokens: int
    prompts_cut: int
    answers_cut: int
    tokens_cut: int

    def summary(self) -> list[str]:
        """Pairs, classes, tokens."""
        counts = ", ".join(f"{name} {count}" for name, count in zip(CLASSES, self.labels, strict=True))
        return [f"{self.pairs} pairs ({counts if sum(self.labels) else 'without labels'}), {self.tokens} tokens"]

    def remarks(self) -> list[str]:
        """What was cut."""
        if not self.tokens_cut:
            return []
        return [
            f"{self.prompts_cut} prompts and {self.answers_cut} answers were too long: {self.tokens_cut} tokens were "
            "cut, from the beginnings of prompts and the middles of answers"
        ]


class Tokens(NamedTuple):
    """One sequence: token ids, their types, and how many tokens its answer had before it was cut."""

    ids: np.ndarray
    types: np.ndarray
    answer_tokens: int


class Template:
    """Where a tokenizer puts special tokens around a prompt and an answer.

    Args:
        tokenizer: A fast one.
        config: Whether there is a prompt, and the most tokens.

    Raises:
        ValueError: A tokenizer without offsets, or special tokens that leave no room.
    """

    def __init__(self, tokenizer: Any, config: PairwiseConfig):
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"PairwiseDataset: tokenizer is a {type(tokenizer).__name__}, needed a fast one")
        texts = ("a", "b") if config.append_prompt else ("b",)
        made = tokenizer(*texts)
        owners = made.sequence_ids(0)
        kinds = made.get("token_type_ids") if (getattr(config.encoder, "type_vocab_size", 0) or 0) > 1 else None
        kinds = [0] * len(owners) if kinds is None else kinds
        self.tokenizer, self.with_prompt = tokenizer, config.append_prompt
        last = len(texts) - 1  # the answer
        first = [i for i, owner in enumerate(owners) if owner == last]
        prompt = [i for i, owner in enumerate(owners) if owner == 0 and last]
        ids = made["input_ids"]
        before = prompt[0] if prompt else first[0]
        self.before, self.after = ids[:before], ids[first[-1] + 1 :]
        self.between = ids[prompt[-1] + 1 : first[0]] if prompt else []
        self.kinds = tuple(
            kinds[i] for i in (0, prompt[0] if prompt else 0, prompt[-1] + 1 if prompt else 0, first[0], -1)
        )
        limit = config.max_tokens
        if limit is None:
            raise ValueError("PairwiseDataset: config.max_tokens is None; needed a number, which from_encoder finds")
        self.room = limit - len(self.before) - len(self.between) - len(self.after)
        if self.room < 2:
            raise ValueError(f"PairwiseDataset: max_tokens is {limit}, which special tokens fill; needed more")
        self.prompt_room = min(config.max_prompt_tokens or limit // 4, self.room - 1)

    def sequences(self, groups: Sequence[tuple[Words, Sequence[Words]]]) -> Iterator[list[tuple[Tokens, int, int]]]:
        """Of each group, a prompt and its answers: sequences, and how many tokens prompt and answer had to give up.

        What follows an answer's first turn in a conversation belongs to its own sequence's prompt, turns parted by what
        parts prompt and answer. A prompt keeps what its answer leaves, and at least its own budget.
        """
        told = [
            (turns_of("user", prompt), [turns_of("assistant", answer) for answer in answers])
            for prompt, answers in groups
        ]
        texts = [turn.text for shared, rest in told for part in (shared, *rest) for turn in part]
        ids = iter(token_ids(self.tokenizer, texts))
        for shared, rest in told:
            before = [next(ids) for _ in shared]
            made = []
            for turns in rest:
                own = [next(ids) for _ in turns]
                said = sum(len(part) for turn, part in zip(turns, own, strict=True) if turn.role == "assistant")
                made.append(self._sequence([*before, *own[:-1]], own[-1], said))
            yield made

    def _sequence(self, parts: Sequence[Sequence[int]], answer: Sequence[int], said: int) -> tuple[Tokens, int, int]:
        prompt: list[int] = []
        for k, part in enumerate(parts if self.with_prompt else ()):
            prompt += [*(self.between if k else ()), *part]
        kept = min(len(prompt), max(self.prompt_room, self.room - len(answer)))
        cut = prompt[len(prompt) - kept :], cut_middle(answer, self.room - kept)
        pieces = (self.before, cut[0], self.between, cut[1], self.after)
        ids = [token for piece in pieces for token in piece]
        kinds = [kind for piece, kind in zip(pieces, self.kinds, strict=True) for _ in piece]
        tokens = Tokens(np.array(ids, dtype=np.int32), np.array(kinds, dtype=np.int8), said)
        return tokens, len(prompt) - kept, len(answer) - len(cut[1])


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, in which the names of special tokens are text as any other."""
    if not texts:
        return []
    return tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def cut_middle(tokens: Sequence[int], room: int) -> Sequence[int]:
    """The first and the last tokens, half of the room each.

    >>> cut_middle([1, 2, 3, 4, 5], 3)
    [1, 2, 5]
    """
    if len(tokens) <= room:
        return tokens
    tail = room // 2
    return [*tokens[: room - tail], *tokens[len(tokens) - tail :]]


class PairwiseDataset(Dataset):
    """Pairs as token ids, each sequence cut for itself, so that no answer changes what is read of another.

    A prompt loses its beginning first, down to its own budget; then the middle of the answer goes. An empty answer is
    a sequence without one. Tokens lie in two flat arrays, five bytes each.

    Args:
        pairs: `Pair`s, tuples like them (prompt, a, b, label), or mappings of those names. A label is 0 where A is
            better, 1 where B is, 2 for a tie, or the shares of judges; of all pairs or of none.
        tokenizer: The encoder's, a fast one.
        config: A `PairwiseConfig`; of a model, ``model.config``.
        progress: Show a bar.

    Attributes:
        report: What was cut.
        pairs: As they came.
        lengths: Tokens of each pair, both answers together.
        labels: Of each pair, or None.

    Raises:
        ValueError: With pair numbers: what is neither text nor turns, labels outside the classes.
    """

    def __init__(self, pairs: Sequence[Any], tokenizer: Any, config: PairwiseConfig, *, progress: bool = True):
        self.pairs = [_checked(number, pair, config.num_classes) for number, pair in enumerate(pairs)]
        self.labels = [pair.label for pair in self.pairs]
        labelled = sum(label is not None for label in self.labels)
        if labelled not in (0, len(self.labels)):
            raise ValueError(
                f"PairwiseDataset: {labelled} of {len(self.labels)} pairs have a label; needed all or none"
            )
        self.soft = any(isinstance(label, tuple) for label in self.labels)
        self.num_classes = config.num_classes
        template = Template(tokenizer, config)
        kept: list[Tokens] = []
        flat: list[Tokens] = []  # one for each chunk, which is what the list above costs least as
        sizes: list[int] = []
        answers: list[int] = []
        prompts_cut = answers_cut = tokens_cut = 0
        for start in tqdm(range(0, len(self.pairs), _CHUNK), "tokenising", disable=not progress, leave=False, delay=1):
            kept.clear()
            for made in template.sequences([(p.prompt, (p.a, p.b)) for p in self.pairs[start : start + _CHUNK]]):
                kept += [tokens for tokens, _, _ in made]
                prompts_cut += any(of_prompt for _, of_prompt, _ in made)
                answers_cut += sum(of_answer > 0 for _, _, of_answer in made)
                tokens_cut += sum(of_prompt + of_answer for _, of_prompt, of_answer in made)
            sizes += [len(one.ids) for one in kept]
            answers += [one.answer_tokens for one in kept]
            flat.append(Tokens(np.concatenate([t.ids for t in kept]), np.concatenate([t.types for t in kept]), 0))
        self._ids = np.concatenate([np.zeros(0, np.int32), *(one.ids for one in flat)])
        self._types = np.concatenate([np.zeros(0, np.int8), *(one.types for one in flat)])
        self._starts, self._answers = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), answers
        self.lengths = np.add(sizes[::2], sizes[1::2]).tolist()
        self.report = CutReport(
            len(self.pairs), count_labels(self.pairs), sum(sizes), prompts_cut, answers_cut, tokens_cut
        )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        return {"sequences": [self._tokens(2 * index + k) for k in (0, 1)], "label": self._label(self.labels[index])}

    def _tokens(self, number: int) -> Tokens:
        part = slice(self._starts[number], self._starts[number + 1])
        return Tokens(self._ids[part], self._types[part], self._answers[number])

    def _label(self, label: Any) -> Any:
        """A class, or shares where any label of the set is."""
        if not self.soft or isinstance(label, tuple):
            return label
        return tuple(float(k == label) for k in range(self.num_classes))


def _checked(number: int, pair: Any, classes: int) -> Pair:
    operation = f"PairwiseDataset: pair {number}"
    if isinstance(pair, Mapping) and {"prompt", "a", "b"} <= set(pair):
        pair = (pair["prompt"], pair["a"], pair["b"], pair.get("label"))
    if not isinstance(pair, (tuple, list)) or not 3 <= len(pair) <= len(Pair._fields):
        raise ValueError(f"{operation} is {pair!r:.60}; needed (prompt, a, b) or (prompt, a, b, label)")
    try:
        words = [check_words(name, part) for name, part in zip(("prompt", "a", "b"), pair, strict=False)]
        label = check_label(pair[3], classes) if len(pair) > 3 else None
    except ValueError as error:
        raise ValueError(f"{operation}: {error}") from error
    return Pair(words[0], words[1], words[2], label, *pair[4:])


def answers_to(prompt: Words, answers: Sequence[Words], tokenizer: Any, config: PairwiseConfig) -> list[Tokens]:
    """Several answers to one prompt as sequences; refuses what is neither text nor turns."""
    try:
        asked = check_words("prompt", prompt)
        checked = [check_words(f"answer {k}", answer) for k, answer in enumerate(answers)]
    except ValueError as error:
        raise ValueError(f"rank: {error}") from error
    (made,) = Template(tokenizer, config).sequences([(asked, checked)])
    return [tokens for tokens, _, _ in made]


def flat_batch(groups: Iterable[tuple[Sequence[Tokens], Sequence[tuple[int, int]]]]) -> dict[str, Tensor]:
    """Groups of sequences, and which of each are compared, as one flat run of tokens.

    Sequences that are equal are encoded once. A group's come in an order of their own, not in the one they were given
    in, so that exchanging A and B changes nothing in the encoder, not even by rounding.

    >>> one, other = (Tokens(np.array(ids), np.zeros(len(ids)), 1) for ids in ([5, 6], [4]))
    >>> batch = flat_batch([([one, other, one], [(0, 1), (0, 2)])])
    >>> batch["input_ids"].tolist(), batch["lengths"].tolist(), batch["pairs"].tolist()
    ([4, 5, 6], [1, 2], [[1, 0], [1, 1]])
    """
    places: dict[tuple[bytes, bytes, int], int] = {}
    kept: list[Tokens] = []
    compared: list[list[int]] = []
    for sequences, pairs in groups:
        keys = [(s.ids.tobytes(), s.types.tobytes(), s.answer_tokens) for s in sequences]
        for k in sorted(range(len(keys)), key=keys.__getitem__):
            if keys[k] not in places:
                places[keys[k]] = len(kept)
                kept.append(sequences[k])
        compared += [[places[keys[i]], places[keys[j]]] for i, j in pairs]
    return {
        "pairs": torch.tensor(compared),  # first: the trainer takes its length for the batch's
        "input_ids": torch.from_numpy(np.concatenate([sequence.ids for sequence in kept])).long(),
        "token_type_ids": torch.from_numpy(np.concatenate([sequence.types for sequence in kept])).long(),
        "lengths": torch.tensor([len(sequence.ids) for sequence in kept]),
        "answer_tokens": torch.tensor([sequence.answer_tokens for sequence in kept]),
    }


class PairwiseCollator:
    """Items of a `PairwiseDataset` to what `PairwiseModel` takes: see `flat_batch`.

    >>> item = {"sequences": [Tokens(np.array([n]), np.array([0]), 1) for n in (5, 4)], "label": 0}
    >>> batch = PairwiseCollator()([item])
    >>> list(batch), batch["pairs"], batch["labels"]
    (['pairs', 'input_ids', 'token_type_ids', 'lengths', 'answer_tokens', 'labels'], tensor([[1, 0]]), tensor([0]))
    """

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Pairs, tokens, types, lengths and, where the pairs have them, labels."""
        made = flat_batch((item["sequences"], [(0, 1)]) for item in items)
        labels = [item["label"] for item in items]
        return made if labels[0] is None else made | {"labels": torch.tensor(labels)}
