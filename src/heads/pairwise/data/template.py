"""`Template`: a prompt and an answer as token ids.

Around them stand a tokenizer's own special tokens, or its chat template's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..config import PairwiseConfig
from ..pairs import ROLES, Turn, Words, turns_of

# stand for texts where a chat template is taken apart
_MARKS = tuple(f"zqx{k}xqz" for k in "abcde")


class Tokens(NamedTuple):
    """One sequence: token ids, their types, and where the answer starts.

    The answer ends with the sequence.
    """

    ids: np.ndarray
    types: np.ndarray
    begin: int


class CutTokens(NamedTuple):
    """A sequence, and how many tokens of its prompt and of its answer did not fit."""

    tokens: Tokens
    of_prompt: int
    of_answer: int


class Template:
    """Tokens that a tokenizer puts around a prompt and an answer, and how both are cut to fit.

    With a chat template, turns are framed as it frames them. Without one, prompt and answer are
    framed as the tokenizer frames a pair of texts, and more turns are separated as these two are.

    Args:
        tokenizer: A fast one.
        config: Whether there is a prompt, and the most tokens.

    Raises:
        ValueError: A tokenizer without offsets, a chat template that does not show what was said,
            or special tokens that leave no room.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PairwiseConfig):
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"PairwiseDataset: tokenizer is a {type(tokenizer).__name__}, expected a fast one"
            )
        self.tokenizer = tokenizer
        self.with_prompt = config.append_prompt
        self._before: dict[str, list[int]] = {}  # by the role of the first turn
        self._between: dict[tuple[str, str], list[int]] = {}
        self._after: list[int] = []
        self._kinds = (0, 0, 0, 0, 0)
        if getattr(tokenizer, "chat_template", None):
            self._read_chat_template()
        else:
            self._read_pair(config)
        if config.max_tokens is None:
            raise ValueError(
                "PairwiseDataset: config.max_tokens is None; expected a number, which from_encoder "
                "finds"
            )
        self.limit = config.max_tokens
        room = self._room("user", "user")
        # a token for the prompt and one for the answer
        if room < 2:
            raise ValueError(
                "PairwiseDataset: expected max_tokens above what special tokens take, got "
                f"{self.limit}"
            )
        self.prompt_room = min(config.max_prompt_tokens or self.limit // 4, room - 1)

    def _read_pair(self, config: PairwiseConfig) -> None:
        """Special tokens as the tokenizer puts them around two texts, or around one."""
        # two short texts show what the tokenizer puts around any two
        text = self._some_text()
        encoding = self.tokenizer(*((text, text) if self.with_prompt else (text,)))
        owners = encoding.sequence_ids(0)
        ids = encoding["input_ids"]
        if (getattr(config.encoder, "type_vocab_size", 0) or 0) > 1:
            kinds = encoding.get("token_type_ids")
        else:
            kinds = None
        kinds = [0] * len(ids) if kinds is None else kinds
        answer = [i for i, owner in enumerate(owners) if owner == int(self.with_prompt)]
        # without a prompt all before the answer is the beginning, and nothing lies between
        prompt = [i for i, owner in enumerate(owners) if owner == 0 and self.with_prompt] or answer[
            :1
        ]
        gap = prompt[-1] + 1
        between = ids[gap : answer[0]]
        self._after = ids[answer[-1] + 1 :]
        if self.with_prompt and not between:  # a tokenizer that does not tell two texts apart
            between = token_ids(self.tokenizer, ["\n\n"])[0]
        # GPT-2's tokenizer ends no text; with an end even an empty answer has a token
        if not self._after and self.tokenizer.eos_token_id is not None:
            self._after = [self.tokenizer.eos_token_id]
        self._before = dict.fromkeys(ROLES, ids[: prompt[0]])
        self._between = {("user", "assistant"): between, ("assistant", "user"): between}
        places = (0, prompt[0], gap, answer[0], -1)
        # pyrefly: ignore[bad-assignment]: five places, five kinds
        self._kinds = tuple(kinds[min(place, len(kinds) - 1)] for place in places)

    def _some_text(self) -> str:
        """Return a short text that has a token."""
        special = self.tokenizer.all_special_tokens
        for text in ("a", *self.tokenizer.get_vocab()):
            # tokenizers raises a bare Exception for a text that has no token and no unknown one
            with contextlib.suppress(Exception):
                if text not in special and token_ids(self.tokenizer, [text])[0]:
                    return text
        raise ValueError(
            "PairwiseDataset: expected a tokenizer that makes tokens of text, got none"
        )

    def _read_chat_template(self) -> None:
        """Read what the chat template writes before, between and after turns."""
        # the shortest talk that shows both gaps and an end that is no beginning
        said = ("user", "assistant", "user", "assistant")
        whole = self._rendered(said)
        self._before["user"] = self._special(whole[0])
        self._between = {
            ("user", "assistant"): self._special(whole[1]),
            ("assistant", "user"): self._special(whole[2]),
        }
        self._after = self._special(whole[-1].rstrip())
        try:
            told = self._rendered(("system", *said[:2]))
        except ValueError:  # it knows no system's turn: that is told as the user's
            told = [whole[0], whole[2], *whole[1:]]
        self._before["system"] = self._special(told[0])
        self._between["system", "user"] = self._special(told[1])
        # many templates refuse an assistant who speaks first: a silent user comes before
        self._before["assistant"] = [*self._before["user"], *self._between["user", "assistant"]]

    def _rendered(self, roles: Sequence[str]) -> list[str]:
        """The chat template's own text before, between and after turns of these roles."""
        marks = _MARKS[: len(roles)]
        turns = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            text = str(self.tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception as error:  # Jinja's, and whatever a template raises
            raise ValueError(
                f"PairwiseDataset: the chat template refuses {', '.join(roles)}: {error}"
            ) from error
        parts = []
        for mark in marks:
            if text.count(mark) != 1:
                raise ValueError("PairwiseDataset: the chat template does not show each turn once")
            before, text = text.split(mark)
            parts.append(before)
        return [*parts, text]

    def _special(self, text: str) -> list[int]:
        if text:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return []

    def _room(self, first: str, last: str) -> int:
        """Return how many tokens are left for a prompt and an answer.

        The prompt begins and ends with turns of these roles.
        """
        return (
            self.limit
            - len(self._before[first])
            - len(self._gap(last, "assistant"))
            - len(self._after)
        )

    def _gap(self, one: str, other: str) -> list[int]:
        """Return the tokens between turns of two roles.

        In an order that a template does not expect, those of the usual order.
        """
        if other == "assistant":
            usual = ("user", "assistant")
        else:
            usual = ("assistant", "user")
        return self._between.get((one, other), self._between[usual])

    def sequences(
        self, groups: Sequence[tuple[Words, Sequence[Words]]]
    ) -> Iterator[list[CutTokens]]:
        """Yield for each group, a prompt and its answers, a sequence for each answer.

        Of a conversation, all turns before the last belong to that sequence's prompt. A prompt
        keeps what its answer leaves, and at least its own budget.
        """
        conversations: list[tuple[tuple[Turn, ...], list[tuple[Turn, ...]]]] = []
        texts: list[str] = []
        for prompt, answers in groups:
            shared = turns_of("user", prompt) if self.with_prompt else ()
            replies = [turns_of("assistant", answer) for answer in answers]
            conversations.append((shared, replies))
            texts += [turn.text for turn in chain(shared, *replies)]
        # one call for all texts, which a fast tokenizer spreads over the processors
        ids = iter(token_ids(self.tokenizer, texts))
        for shared, replies in conversations:
            shared_ids = list(islice(ids, len(shared)))
            sequences = []
            for turns in replies:
                turn_ids = list(islice(ids, len(turns)))
                sequences.append(self._sequence((*shared, *turns), [*shared_ids, *turn_ids]))
            yield sequences

    def _sequence(self, turns: Sequence[Turn], parts: Sequence[Sequence[int]]) -> CutTokens:
        answer = parts[-1]
        roles = [turn.role for turn in turns[:-1]] if self.with_prompt else []
        roles = roles or ["user"]  # an empty prompt
        prompt: list[int] = []
        for k, part in enumerate(parts[:-1] if self.with_prompt else ()):
            prompt += [*(self._gap(roles[k - 1], roles[k]) if k else ()), *part]
        room = self._room(roles[0], roles[-1])
        if room < 2:
            raise ValueError(
                "PairwiseDataset: expected max_tokens above what special tokens of a conversation "
                f"that begins with {roles[0]} take, got {self.limit}"
            )
        room_for_prompt = min(len(prompt), max(min(self.prompt_room, room - 1), room - len(answer)))
        cut = prompt[len(prompt) - room_for_prompt :], cut_middle(answer, room - room_for_prompt)
        pieces = (
            self._before[roles[0]],
            cut[0],
            self._gap(roles[-1], "assistant"),
            cut[1],
            self._after,
        )
        ids: list[int] = []
        kinds: list[int] = []
        for piece, kind in zip(pieces, self._kinds, strict=True):
            ids += piece
            kinds += [kind] * len(piece)
        if not ids:
            raise ValueError(
                "PairwiseDataset: a prompt and its answer have no token; expected some text in one "
                "of them"
            )
        # an empty answer and nothing after it: the last token
        begin = min(sum(map(len, pieces[:3])), len(ids) - 1)
        tokens = Tokens(np.array(ids, dtype=np.int32), np.array(kinds, dtype=np.int8), begin)
        return CutTokens(tokens, len(prompt) - room_for_prompt, len(answer) - len(cut[1]))


def sequence_batch(sequences: Sequence[Tokens]) -> dict[str, Tensor]:
    """Lay out sequences as one flat run of tokens, as `PairwiseModel.features` takes them."""
    return {
        "input_ids": torch.from_numpy(np.concatenate([tokens.ids for tokens in sequences])).long(),
        "token_type_ids": torch.from_numpy(
            np.concatenate([tokens.types for tokens in sequences])
        ).long(),
        "lengths": torch.tensor([len(tokens.ids) for tokens in sequences]),
        "begins": torch.tensor([tokens.begin for tokens in sequences]),
    }


def on_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return a batch on a device."""
    return {name: value.to(device) for name, value in batch.items()}


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, in which the names of special tokens are text as any other."""
    if not texts:
        return []
    return tokenizer(
        list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False
    )["input_ids"]


def cut_middle(tokens: Sequence[int], room: int) -> Sequence[int]:
    """The first and the last tokens, half of the room each.

    >>> cut_middle([1, 2, 3, 4, 5], 3)
    [1, 2, 5]
    """
    if len(tokens) <= room:
        return tokens
    tail = room // 2
    return [*tokens[: room - tail], *tokens[len(tokens) - tail :]]
