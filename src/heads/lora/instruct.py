"""Instruction data: rows to tokens whose answers are trained, and examples to batches.

The end token is appended and trained; padding is told from it by its place, never by its id, so that a tokenizer whose
padding is its end token, as GPT-2's is made to be, still learns to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from model_components._modes import evaluating
from model_components._report import Report

from .rows import ChatTemplate, alpaca_template, encode_prompt, read_rows

IGNORED = -100
"""A label that is not trained."""


def _without(words: Iterable[str], text: str) -> str:
    for word in words:
        text = text.replace(word, "")
    return text.strip()


def _templated(operation: str, template: Callable[..., Any], row: Mapping[str, Any], number: int) -> tuple[str, str]:
    """What a template makes of a row; what goes wrong in it is told with the row's number."""
    try:
        text = template(row)
    except Exception as error:  # a template is the user's own code: anything can come out of it
        raise ValueError(f"{operation}: the template failed on row {number}: {error}") from error
    if not (isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)):
        raise ValueError(f"{operation}: the template made {text!r:.60} of row {number}, needed (prompt, answer)")
    return text


@dataclass(frozen=True)
class InstructionReport(Report):
    """What became of the rows."""

    rows: int
    kept: int
    empty_answers: int
    prompts_cut: int
    answers_cut: int
    tokens: int
    answer_tokens: int

    def summary(self) -> list[str]:
        """Rows and tokens."""
        return [f"{self.kept} of {self.rows} rows, {self.tokens} tokens, {self.answer_tokens} of them trained"]

    def remarks(self) -> list[str]:
        """What was left out or cut."""
        counts = {
            "had an empty answer and were left out": self.empty_answers,
            "had a prompt too long for the context, which was cut": self.prompts_cut,
            "had an answer too long for the context, which was cut and does not end": self.answers_cut,
        }
        return [f"{count} {what}" for what, count in counts.items() if count]


class InstructionDataset(Dataset):
    """Rows as ``input_ids`` and ``labels``: the prompt is not trained, the answer and the end token are.

    A row that is too long loses prompt tokens first, from ``truncation_side``, down to ``min_prompt`` of them, and then
    the end of its answer, which then has no end token. `report` counts it all; ``texts`` are the prompts and answers
    that are kept, uncut and without special tokens in the answers.

    Args:
        rows: What `read_rows` takes.
        tokenizer: Of the model; it needs an end token.
        template: Row to (prompt, answer): `alpaca_template`, ``ChatTemplate(tokenizer)`` or your own.
        max_length: Tokens a row, the model's context at most.
        truncation_side: ``"left"`` keeps a prompt's end, ``"right"`` its beginning.
        min_prompt: Tokens of a prompt that an answer never pushes out; a quarter of ``max_length`` by default.
        progress: Show a bar.

    Raises:
        ValueError: Bad rows (with their numbers), no end token, a context that is too short, nothing left to train.
    """

    def __init__(
        self,
        rows: str | Path | Iterable[Mapping[str, Any]],
        tokenizer: Any,
        *,
        template: Callable[[Mapping[str, Any]], tuple[str, str]] = alpaca_template,
        max_length: int = 512,
        truncation_side: str = "left",
        min_prompt: int | None = None,
        progress: bool = True,
    ):
        operation, end = "InstructionDataset", tokenizer.eos_token_id
        if end is None:
            raise ValueError(f"{operation}: the tokenizer has no end token; needed one, or answers never learn to end")
        if truncation_side not in ("left", "right"):
            raise ValueError(f"{operation}: truncation_side is {truncation_side!r}, needed left or right")
        if max_length < 8:
            raise ValueError(f"{operation}: max_length is {max_length}, needed at least 8 tokens")
        min_prompt = max_length // 4 if min_prompt is None else min_prompt
        if not 0 < min_prompt < max_length - 1:
            raise ValueError(f"{operation}: min_prompt is {min_prompt}, needed 1 to {max_length - 2} tokens")
        self.examples: list[dict[str, list[int]]] = []
        own = template is not alpaca_template and not isinstance(template, ChatTemplate)
        held = read_rows(rows, any_fields=own)
        self.texts: list[tuple[str, str]] = []
        empty = prompts = answers = 0
        for number, row in enumerate(tqdm(held, "tokenising", disable=not progress, leave=False), 1):
            text = _templated(operation, template, row, number)
            prompt = encode_prompt(tokenizer, text[0])
            answer = list(tokenizer(text[1], add_special_tokens=False)["input_ids"]) if text[1].strip() else []
            if not answer or answer == [end]:
                empty += 1
                continue
            if answer[-1] != end:
                answer.append(end)
            room = max(min(len(prompt), min_prompt), max_length - len(answer))
            if len(prompt) > room:
                prompts += 1
                prompt = prompt[-room:] if truncation_side == "left" else prompt[:room]
            if len(prompt) + len(answer) > max_length:
                answers += 1
                answer = answer[: max_length - len(prompt)]
            self.examples.append({"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer})
            self.texts.append((text[0], _without(tokenizer.all_special_tokens, text[1])))
        if not self.examples:
            raise ValueError(f"{operation}: none of {len(held)} rows has an answer")
        self.report = InstructionReport(
            len(held), len(self.examples), empty, prompts, answers,
            sum(len(e["input_ids"]) for e in self.examples),
            sum(label != IGNORED for e in self.examples for label in e["labels"]),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.examples[index]


@dataclass(frozen=True, kw_only=True)
class InstructionCollator:
    """A batch of examples: padded to the longest, or packed into one row without padding.

    Packed, ``position_ids`` begin anew at every example, from which transformers' decoders build a mask that keeps them
    apart: see `check_packing`.

    Args:
        pad_token_id: Fills up rows; it may be the end token, since places tell them apart.
        pack: One row of all examples.
        pad_to_multiple_of: Rounds the length up, for kernels that want it.

    Raises:
        ValueError: ``pad_token_id`` is no id.

    >>> examples = [{"input_ids": [5, 6, 2], "labels": [-100, 6, 2]}, {"input_ids": [7, 2], "labels": [-100, 2]}]
    >>> InstructionCollator(pad_token_id=2)(examples)["labels"].tolist()
    [[-100, 6, 2], [-100, 2, -100]]
    >>> InstructionCollator(pad_token_id=2, pack=True)(examples)["position_ids"].tolist()
    [[0, 1, 2, 0, 1]]
    """

    pad_token_id: int
    pack: bool = False
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pad_token_id, int):
            raise ValueError(
                f"InstructionCollator: pad_token_id is {self.pad_token_id!r}, needed a token's id (the end's will do)"
            )

    def __call__(self, examples: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Tensor]:
        """Examples of `InstructionDataset` to tensors (rows, tokens)."""
        ids = [list(e["input_ids"]) for e in examples]
        labels = [[IGNORED, *e["labels"][1:]] for e in examples]  # nothing of its own comes before a first token
        positions = [list(range(len(row))) for row in ids]
        if self.pack:
            ids, labels, positions = ([list(chain.from_iterable(rows))] for rows in (ids, labels, positions))
        width = max(map(len, ids))
        if self.pad_to_multiple_of:
            width += -width % self.pad_to_multiple_of
        fills = {"input_ids": (ids, self.pad_token_id), "labels": (labels, IGNORED)}
        if self.pack:
            fills["position_ids"] = (positions, 0)
        else:
            fills["attention_mask"] = ([[1] * len(row) for row in ids], 0)
        return {
            name: torch.tensor([row + [fill] * (width - len(row)) for row in rows])
            for name, (rows, fill) in fills.items()
        }


@torch.no_grad()
def check_packing(model: nn.Module, *, length: int = 8) -> None:
    """Refuse a model in which packed examples see each other.

    Two examples are packed, the first is exchanged, and the second's logits must not move by a bit.

    Raises:
        ValueError: They did; the model gives no logits of every token.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> check_packing(GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=4, n_layer=1, n_head=1)))
    """
    device = next(model.parameters()).device
    held: Any = model
    vocabulary = held.get_input_embeddings().weight.shape[0]
    first = torch.arange(2 * length, device=device).remainder(vocabulary)[None]
    other = first.clone()
    other[:, :length] = (other[:, :length] + vocabulary // 2).remainder(vocabulary)
    positions = torch.arange(length, device=device).repeat(2)[None]
    with evaluating(model):
        runs = [model(input_ids=ids, position_ids=positions, use_cache=False)[0] for ids in (first, other)]
    if runs[0].dim() != 3 or runs[0].shape[1] != 2 * length:
        raise ValueError(
            f"check_packing: {type(model).__name__} gives {list(runs[0].shape)} for {2 * length} tokens; needed "
            "logits of every token, as of a causal language model"
        )
    logits = [run[:, length:] for run in runs]
    if not torch.equal(*logits):
        raise ValueError(
            f"check_packing: in {type(model).__name__} packed examples see each other (logits move by "
            f"{float((logits[0] - logits[1]).abs().max()):.2g}); needed pack=False"
        )
