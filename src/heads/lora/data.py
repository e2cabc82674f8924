"""Examples for tuning: rows to train, held-out rows, and a check that packed ones stay apart."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from model_components._examples import IGNORED, Example, TextExamples
from model_components._modes import evaluating

__all__ = ["TextExamples", "check_packed_examples", "first_answer", "split_examples"]


class Answer(NamedTuple):
    """The first answer of an example.

    Attributes:
        prompt: The token ids before it.
        reference: The token ids of the answer and of its end.
    """

    prompt: list[int]
    reference: list[int]


def first_answer(example: Example) -> Answer:
    """Return the first stretch of supervised tokens, and what is before it.

    >>> first_answer({"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, -100]})
    Answer(prompt=[1], reference=[2, 3])
    """
    ids = example["input_ids"]
    supervised = [label != IGNORED for label in example["labels"]]
    start = supervised.index(True)
    length = [*supervised[start:], False].index(False)
    return Answer(ids[:start], ids[start : start + length])


def split_examples(
    texts: TextExamples, share: float, most: int
) -> tuple[list[Example], list[Example]]:
    """Split examples by rows, at random, into training examples and held-out ones.

    All examples of a row are on one side. Training rows with the first prompt of a held-out row
    are dropped; so are texts without a prompt that are equal to a held-out one. The split does not
    depend on a run's seed, so that runs with different seeds can be compared.

    Args:
        texts: The examples.
        share: The share of the rows that is held out.
        most: The largest number of rows that is held out.

    Returns:
        The examples to train, and the held-out examples, at least one.
    """
    by_row: dict[int, list[Example]] = {}
    for row, example in zip(texts.rows, texts.examples, strict=True):
        by_row.setdefault(row, []).append(example)
    shuffled = list(by_row.values())
    random.Random(0).shuffle(shuffled)
    count = max(1, min(most, round(share * len(shuffled))))
    held_out = [example for row in shuffled[:count] for example in row]
    keys = {_key(row[0]) for row in shuffled[:count]}
    train = [example for row in shuffled[count:] if _key(row[0]) not in keys for example in row]
    return train, held_out


def _key(example: Example) -> tuple[int, ...]:
    """Return the first prompt of an example, or a text that has none."""
    return tuple(first_answer(example).prompt or example["input_ids"])


@torch.no_grad()
def check_packed_examples(model: PreTrainedModel | PeftModel) -> None:
    """Raise if packed examples influence each other.

    Two examples are packed and the first one is replaced: no bit of the second's logits may change.
    TRL warns of every attention but flash attention. The decoders of transformers also separate
    packed examples, by their position ids, with eager and SDPA attention.

    Args:
        model: A causal language model.

    Raises:
        ValueError: They influence each other, or the model returns no logits for every token.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> check_packed_examples(
    ...     GPT2LMHeadModel(
    ...         GPT2Config(vocab_size=32, n_positions=16, n_embd=4, n_layer=1, n_head=1)
    ...     )
    ... )
    """
    # tokens of each of the two examples
    length = 8
    device = next(model.parameters()).device
    vocabulary = next(model.get_input_embeddings().parameters()).shape[0]
    first = torch.arange(2 * length, device=device).remainder(vocabulary)[None]
    other = first.clone()
    other[:, :length] = (other[:, :length] + vocabulary // 2).remainder(vocabulary)
    positions = torch.arange(length, device=device).repeat(2)[None]
    with evaluating(model):
        runs = [
            model(input_ids=ids, position_ids=positions, use_cache=False)[0]
            for ids in (first, other)
        ]
    if runs[0].dim() != 3 or runs[0].shape[1] != 2 * length:
        raise ValueError(
            f"check_packed_examples: {type(model).__name__} gives {list(runs[0].shape)} for "
            f"{2 * length} tokens; expected logits of every token, as of a causal language model"
        )
    logits = [run[:, length:] for run in runs]
    if not torch.equal(*logits):
        raise ValueError(
            "check_packed_examples: expected packed examples to be independent, but in "
            f"{type(model).__name__} the logits of the second change with the first by up to "
            f"{float((logits[0] - logits[1]).abs().max()):.2g}; use pack=False (TRL: packing=False)"
        )
