"""Pairs as token ids: a truncation that knows the pair, and batches in which no token is padding and none comes twice.

Shapes: T tokens of all sequences, S sequences, P pairs, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from model_components._report import Report

from .config import CLASSES, PairwiseConfig
from .rows import Pair, check_label, count_labels, sound

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
            f"{self.prompts_cut} prompts and {self.answers_cut} answers were too long: "
            f"{self.tokens_cut} tokens were cut from their middles"
        ]


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
        self.with_prompt = config.append_prompt
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

    def sequences(self, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> tuple[list[Tokens], int, list[int]]:
        """Answers to one prompt as sequences, and how many tokens the prompt and each answer had to give up.

        The prompt gives way to the longest answer down to its budget; what is left is every answer's.
        """
        prompt = prompt if self.with_prompt else []
        kept = min(len(prompt), max(self.prompt_room, self.room - max(map(len, answers))))
        made = []
        for answer in answers:
            cut = cut_middle(prompt, kept), cut_middle(answer, self.room - kept)
            parts = (self.before, cut[0], self.between, cut[1], self.after)
            ids = [token for part in parts for token in part]
            kinds = [kind for part, kind in zip(parts, self.kinds, strict=True) for _ in part]
            made.append(
                Tokens(torch.tensor(ids, dtype=torch.int32), torch.tensor(kinds, dtype=torch.int8), len(answer))
            )
        return made, len(prompt) - kept, [max(0, len(answer) - self.room + kept) for answer in answers]


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, in which the names of special tokens are text as any other."""
    return tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


class Tokens(NamedTuple):
    """One sequence: token ids, their types, and how many tokens its answer had before it was cut."""

    ids: Tensor
    types: Tensor
    answer_tokens: int


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
    """Pairs as token ids, cut so that both answers keep the same budget.

    A prompt keeps what the longer answer leaves, and at least its own budget; both answers then may have what is left.
    Of what is too long the middle goes.

    Args:
        pairs: `Pair`s, tuples like them (prompt, a, b, label), or mappings. A label is 0 where A is better, 1 where
            B is, 2 for a tie, or the shares of judges; of all pairs or of none.
        tokenizer: The encoder's, a fast one.
        config: A `PairwiseConfig`; of a model, ``model.config``.
        progress: Show a bar.

    Attributes:
        report: What was cut.
        pairs: As they came.
        lengths: Tokens of each pair, both answers together.
        labels: Of each pair, or None.

    Raises:
        ValueError: With pair numbers: texts that are not text, empty answers, labels outside the classes.
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
        self._items: list[list[Tokens]] = []
        prompts_cut = answers_cut = tokens_cut = 0
        for start in tqdm(range(0, len(self.pairs), _CHUNK), "tokenising", disable=not progress, leave=False, delay=1):
            chunk = self.pairs[start : start + _CHUNK]
            texts = [text for pair in chunk for text in pair[:3]]
            made = token_ids(tokenizer, texts)
            for number, (prompt, a, b) in enumerate(zip(made[::3], made[1::3], made[2::3], strict=True), start):
                if not a or not b:
                    raise ValueError(f"PairwiseDataset: pair {number}: an answer has no token that the tokenizer knows")
                sequences, of_prompt, of_answers = template.sequences(prompt, (a, b))
                prompts_cut += of_prompt > 0
                answers_cut += sum(cut > 0 for cut in of_answers)
                tokens_cut += of_prompt + sum(of_answers)
                self._items.append(sequences)
        self.lengths = [len(one.ids) + len(other.ids) for one, other in self._items]
        self.report = CutReport(
            len(self.pairs), count_labels(self.pairs), sum(self.lengths), prompts_cut, answers_cut, tokens_cut
        )

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"sequences": self._items[index], "label": self._label(self.labels[index])}

    def _label(self, label: Any) -> Any:
        """A class, or shares where any label of the set is."""
        if not self.soft or isinstance(label, tuple):
            return label
        return tuple(float(k == label) for k in range(self.num_classes))


def _checked(number: int, pair: Any, classes: int) -> Pair:
    if isinstance(pair, Mapping) and {"prompt", "a", "b"} <= set(pair):
        pair = (pair["prompt"], pair["a"], pair["b"], pair.get("label"))
    if not isinstance(pair, (tuple, list)) or len(pair) not in (3, 4):
        raise ValueError(
            f"PairwiseDataset: pair {number} is {pair!r:.60}; needed (prompt, a, b) or (prompt, a, b, label)"
        )
    check_texts(f"PairwiseDataset: pair {number}", dict(zip(("prompt", "a", "b"), pair, strict=False)))
    try:
        return Pair(pair[0], pair[1], pair[2], check_label(pair[3], classes) if len(pair) == 4 else None)
    except ValueError as error:
        raise ValueError(f"PairwiseDataset: pair {number}: {error}") from error


def check_texts(operation: str, texts: Mapping[str, Any]) -> None:
    """Refuse what is not text, and answers, which are all but the prompt, that are empty."""
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{operation}: {name} is {text!r:.60}, needed text")
        if name != "prompt" and not text.strip():
            raise ValueError(f"{operation}: {name} is empty, needed an answer")
        try:
            sound(name, text)
        except ValueError as error:
            raise ValueError(f"{operation}: {error}") from error


def answers_to(prompt: str, answers: Sequence[str], tokenizer: Any, config: PairwiseConfig) -> list[Tokens]:
    """Several answers to one prompt as sequences, cut alike; refuses what is not text or has no tokens."""
    check_texts("rank", {"prompt": prompt} | {f"answer {k}": answer for k, answer in enumerate(answers)})
    ids = token_ids(tokenizer, [prompt, *answers])
    if not all(ids[1:]):
        raise ValueError("rank: an answer has no token that the tokenizer knows")
    return Template(tokenizer, config).sequences(ids[0], ids[1:])[0]


def flat_batch(groups: Iterable[tuple[Sequence[Tokens], Sequence[tuple[int, int]]]]) -> dict[str, Tensor]:
    """Groups of sequences, and which of each are compared, as one flat run of tokens.

    Sequences that are equal are encoded once. A group's come in an order of their own, not in the one they were given
    in, so that exchanging A and B changes nothing in the encoder, not even by rounding.

    >>> one, other = (Tokens(torch.tensor(ids), torch.zeros(len(ids)), 1) for ids in ([5, 6], [4]))
    >>> batch = flat_batch([([one, other, one], [(0, 1), (0, 2)])])
    >>> batch["input_ids"].tolist(), batch["lengths"].tolist(), batch["pairs"].tolist()
    ([4, 5, 6], [1, 2], [[1, 0], [1, 1]])
    """
    places: dict[tuple[bytes, bytes, int], int] = {}
    kept: list[Tokens] = []
    compared: list[list[int]] = []
    for sequences, pairs in groups:
        keys = [(s.ids.numpy().tobytes(), s.types.numpy().tobytes(), s.answer_tokens) for s in sequences]
        for k in sorted(range(len(keys)), key=keys.__getitem__):
            if keys[k] not in places:
                places[keys[k]] = len(kept)
                kept.append(sequences[k])
        compared += [[places[keys[i]], places[keys[j]]] for i, j in pairs]
    return {
        "pairs": torch.tensor(compared),  # first: the trainer takes its length for the batch's
        "input_ids": torch.cat([sequence.ids for sequence in kept]).long(),
        "token_type_ids": torch.cat([sequence.types for sequence in kept]).long(),
        "lengths": torch.tensor([len(sequence.ids) for sequence in kept]),
        "answer_tokens": torch.tensor([sequence.answer_tokens for sequence in kept]),
    }


class PairwiseCollator:
    """Items of a `PairwiseDataset` to what `PairwiseModel` takes: see `flat_batch`.

    >>> item = {"sequences": [Tokens(torch.tensor([n]), torch.tensor([0]), 1) for n in (5, 4)], "label": 0}
    >>> batch = PairwiseCollator()([item])
    >>> list(batch), batch["pairs"], batch["labels"]
    (['pairs', 'input_ids', 'token_type_ids', 'lengths', 'answer_tokens', 'labels'], tensor([[1, 0]]), tensor([0]))
    """

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Pairs, tokens, types, lengths and, where the pairs have them, labels."""
        made = flat_batch((item["sequences"], [(0, 1)]) for item in items)
        labels = [item["label"] for item in items]
        return made if labels[0] is None else made | {"labels": torch.tensor(labels)}
