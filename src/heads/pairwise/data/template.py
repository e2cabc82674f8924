"""`Template`: convert a prompt and an answer to token ids.

Special tokens come from the tokenizer's chat template if it has one, otherwise from the tokenizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..config import PairwiseConfig
from ..pairs import ROLES, Turn, Words, turns_of

# placeholders for texts, to find the tokens that a chat template puts between texts
_MARKS = tuple(f"zqx{k}xqz" for k in "abcde")


class Tokens(NamedTuple):
    """The tokens of one sequence, which contains a prompt and an answer.

    Attributes:
        ids: The token ids.
        types: The token type ids.
        begin: The index of the answer's first token; the answer ends with the sequence.
    """

    ids: np.ndarray
    types: np.ndarray
    begin: int


class CutTokens(NamedTuple):
    """A sequence, and the numbers of tokens that were cut from its prompt and its answer."""

    tokens: Tokens
    of_prompt: int
    of_answer: int


class Template:
    """The special tokens around a prompt and an answer, and the rules for truncating both.

    If the tokenizer has a chat template, the template adds the special tokens around each turn.
    Otherwise, prompt and answer get the special tokens that the tokenizer adds to a pair of texts,
    and further turns are separated in the same way.

    Args:
        tokenizer: A fast tokenizer.
        config: The config with ``append_prompt``, ``max_tokens`` and ``max_prompt_tokens``.

    Raises:
        ValueError: The tokenizer is not a fast tokenizer, its chat template fails or does not
            render each turn exactly once, ``max_tokens`` is None, or special tokens leave no room
            for text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PairwiseConfig):
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"PairwiseDataset: expected a fast tokenizer, got a {type(tokenizer).__name__}"
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
                "PairwiseDataset: config.max_tokens is None, expected a number; from_encoder sets "
                "this field"
            )
        self.limit = config.max_tokens
        room = self._room("user", "user")
        # at least one token for the prompt and one for the answer
        if room < 2:
            raise ValueError(
                f"PairwiseDataset: max_tokens is {self.limit}, expected at least "
                f"{self.limit - room + 2}: the special tokens and 2 tokens of text"
            )
        self.prompt_room = min(config.max_prompt_tokens or self.limit // 4, room - 1)

    def _read_pair(self, config: PairwiseConfig) -> None:
        """Read which special tokens the tokenizer adds to prompt and answer, or an answer alone."""
        # two short texts show the special tokens that the tokenizer adds to any two texts
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
        # without a prompt, all tokens before the answer are the beginning, and there is no gap
        prompt = [i for i, owner in enumerate(owners) if owner == 0 and self.with_prompt] or answer[
            :1
        ]
        gap = prompt[-1] + 1
        between = ids[gap : answer[0]]
        self._after = ids[answer[-1] + 1 :]
        if self.with_prompt and not between:  # a tokenizer that does not separate two texts
            between = token_ids(self.tokenizer, ["\n\n"])[0]
        # GPT-2's tokenizer adds no end token; with an end token, even an empty answer has a token
        if not self._after and self.tokenizer.eos_token_id is not None:
            self._after = [self.tokenizer.eos_token_id]
        self._before = dict.fromkeys(ROLES, ids[: prompt[0]])
        self._between = {("user", "assistant"): between, ("assistant", "user"): between}
        places = (0, prompt[0], gap, answer[0], -1)
        # pyrefly: ignore[bad-assignment]: five places, five kinds
        self._kinds = tuple(kinds[min(place, len(kinds) - 1)] for place in places)

    def _some_text(self) -> str:
        """Return a short text that the tokenizer converts to one or more tokens."""
        special = self.tokenizer.all_special_tokens
        for text in ("a", *self.tokenizer.get_vocab()):
            # tokenizers raises an Exception for a text without tokens if there is no unknown token
            with contextlib.suppress(Exception):
                if text not in special and token_ids(self.tokenizer, [text])[0]:
                    return text
        raise ValueError(
            "PairwiseDataset: expected a tokenizer with tokens for text, got only special tokens"
        )

    def _read_chat_template(self) -> None:
        """Read the tokens that the chat template puts before, between and after turns."""
        # the shortest conversation with both kinds of gaps and an answer that is not the first
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
        except ValueError:  # the template has no system role: treat such a turn as the user's
            told = [whole[0], whole[2], *whole[1:]]
        self._before["system"] = self._special(told[0])
        self._between["system", "user"] = self._special(told[1])
        # many templates reject an assistant's turn at the start: put an empty user's turn before it
        self._before["assistant"] = [*self._before["user"], *self._between["user", "assistant"]]

    def _rendered(self, roles: Sequence[str]) -> list[str]:
        """Return the chat template's text before, between and after turns of these roles."""
        marks = _MARKS[: len(roles)]
        turns = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            text = str(self.tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception as error:  # errors of Jinja, and any that a template raises
            raise ValueError(
                "PairwiseDataset: the chat template cannot render turns of the roles "
                f"{', '.join(roles)}: {error}"
            ) from error
        parts = []
        for mark in marks:
            if text.count(mark) != 1:
                raise ValueError(
                    "PairwiseDataset: expected a chat template that renders each turn exactly "
                    "once, got one that omits or repeats turns"
                )
            before, text = text.split(mark)
            parts.append(before)
        return [*parts, text]

    def _special(self, text: str) -> list[int]:
        if text:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return []

    def _room(self, first: str, last: str) -> int:
        """Return the number of tokens left for a prompt and an answer.

        The prompt begins with a turn of role ``first`` and ends with a turn of role ``last``.
        """
        return (
            self.limit
            - len(self._before[first])
            - len(self._gap(last, "assistant"))
            - len(self._after)
        )

    def _gap(self, one: str, other: str) -> list[int]:
        """Return the tokens between turns of two roles.

        If the template does not support this order of roles, return the tokens of the usual order.
        """
        if other == "assistant":
            usual = ("user", "assistant")
        else:
            usual = ("assistant", "user")
        return self._between.get((one, other), self._between[usual])

    def sequences(
        self, groups: Sequence[tuple[Words, Sequence[Words]]]
    ) -> Iterator[list[CutTokens]]:
        """Yield, for each group of a prompt and its answers, one sequence per answer.

        In a conversation, all turns before the last belong to the prompt. A long prompt keeps as
        many tokens as its answer leaves room for, and at least ``max_prompt_tokens``.
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
                f"PairwiseDataset: max_tokens is {self.limit}, expected at least "
                f"{self.limit - room + 2}: the special tokens of a conversation that begins with a "
                f"{roles[0]} turn, and 2 tokens of text"
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
                "PairwiseDataset: expected text in the prompt or the answer, got a prompt and an "
                "answer without tokens"
            )
        # an empty answer without tokens after it begins at the last token
        begin = min(sum(map(len, pieces[:3])), len(ids) - 1)
        tokens = Tokens(np.array(ids, dtype=np.int32), np.array(kinds, dtype=np.int8), begin)
        return CutTokens(tokens, len(prompt) - room_for_prompt, len(answer) - len(cut[1]))


def sequence_batch(sequences: Sequence[Tokens]) -> dict[str, Tensor]:
    """Concatenate sequences into the inputs of `PairwiseModel.features`."""
    return {
        "input_ids": torch.from_numpy(np.concatenate([tokens.ids for tokens in sequences])).long(),
        "token_type_ids": torch.from_numpy(
            np.concatenate([tokens.types for tokens in sequences])
        ).long(),
        "lengths": torch.tensor([len(tokens.ids) for tokens in sequences]),
        "begins": torch.tensor([tokens.begin for tokens in sequences]),
    }


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts; special tokens that occur in a text are treated as text."""
    if not texts:
        return []
    return tokenizer(
        list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False
    )["input_ids"]


def cut_middle(tokens: Sequence[int], room: int) -> Sequence[int]:
    """Return the first and last ``room / 2`` tokens, or all tokens if there are at most ``room``.

    >>> cut_middle([1, 2, 3, 4, 5], 3)
    [1, 2, 5]
    """
    if len(tokens) <= room:
        return tokens
    tail = room // 2
    return [*tokens[: room - tail], *tokens[len(tokens) - tail :]]
