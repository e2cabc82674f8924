"""Read calibration data as padded batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from model_components._examples import TextExamples
from model_components._walk import Batch

from ..files import Source


def calibration_batches(
    data: Any, source: Source, *, batch_size: int, max_length: int
) -> list[Batch]:
    """Return padded batches of token ids, sorted by length.

    Args:
        data: A file or rows for `TextExamples`, or examples with ``input_ids``.
        source: The model that the data are for. Text is read with its tokenizer.
        batch_size: Examples per batch.
        max_length: Largest number of tokens of an example. Further tokens are cut off.

    Raises:
        ValueError: The data have another form or are empty, an example has no tokens, or a token is
            not in the model's vocabulary.
    """
    examples: Any = data
    has_ids = False
    if not isinstance(data, (str, Path)):
        examples = _rows_of(data, source)
        has_ids = isinstance(examples[0], Mapping) and "input_ids" in examples[0]
    if not has_ids:
        tokenizer = AutoTokenizer.from_pretrained(source.folder)
        # labels are not used, but a row whose labels are cut off is dropped, so label all tokens
        texts = TextExamples(examples, tokenizer, max_length=max_length, train_on_inputs=True)
        examples = [texts[place] for place in range(len(texts))]
    # models of images and text have the language model's settings under text_config
    size = (source.config.get("text_config") or source.config).get("vocab_size", math.inf)
    ids = []
    for example in examples:
        tokens = _without_padding(example, source)[:max_length]
        strange = tokens[(tokens < 0) | (tokens >= size)]
        if strange.numel():
            raise ValueError(
                f"calibration of {source.label}: expected token ids of 0 or more and below {size}, "
                f"got {int(strange[0])}"
            )
        ids.append(tokens)
    # batches of similar lengths need little padding; ids[0] is then the shortest example
    ids.sort(key=len)
    if not len(ids[0]):
        raise ValueError(
            f"calibration of {source.label}: expected one or more tokens in each example, got none"
        )
    return [_pad_batch(ids[first : first + batch_size]) for first in range(0, len(ids), batch_size)]


def _rows_of(data: Any, source: Source) -> list[Any]:
    """Return examples or rows as a list; raise an error for any other data and for empty data."""
    if isinstance(data, Mapping):
        names = ", ".join(map(str, data))
        raise ValueError(
            f"calibration of {source.label}: expected rows, got a mapping with the keys {names}"
        )
    # torch's data sets have __getitem__ and no __iter__
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise ValueError(
            f"calibration of {source.label}: expected a file, rows or examples, got {data!r}"
        )
    rows = list(data)
    if not rows:
        raise ValueError(f"calibration of {source.label}: expected one or more examples, got none")
    return rows


def _without_padding(example: Mapping[str, object], source: Source) -> Tensor:
    """Return an example's tokens (L,) without those that its attention mask excludes."""
    ids = torch.as_tensor(example["input_ids"], dtype=torch.long)
    if ids.dim() != 1:
        raise ValueError(
            f"calibration of {source.label}: expected input_ids of shape (L,) in each example, got "
            f"shape {list(ids.shape)}"
        )
    mask = example.get("attention_mask")
    if mask is None:
        return ids
    return ids[torch.as_tensor(mask).bool()]


def _pad_batch(rows: list[Tensor]) -> Batch:
    # padding is token 0 on the right: the mask hides it, and positions need no shift
    masks = [torch.ones_like(row) for row in rows]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
    }
