"""Calibration data as padded batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    """Padded batches of token ids, long examples beside long ones.

    Args:
        data: A file or rows for `TextExamples`, examples, or batches, which stay as they are.
        source: Whose data, and whose tokenizer text needs.
        batch_size: Examples of a batch.
        max_length: Tokens of an example; more are cut off.

    Raises:
        ValueError: None of these, or nothing in it; a token that the model does not have.
    """
    batches = _batched(data, source, batch_size, max_length)
    size = (source.config.get("text_config") or source.config).get("vocab_size", math.inf)
    for ids in (batch["input_ids"] for batch in batches):
        if (bad := ids[(ids < 0) | (ids >= size)]).numel():
            raise ValueError(
                f"calibration of {source.label}: a token is {int(bad[0])}; expected 0 or more, "
                f"below {size}"
            )
    return batches


def _rows_of(data: Any, source: Source) -> list[Any]:
    """Return batches, examples or rows as a list; refuse what is none of these."""
    if isinstance(data, Tensor) or (isinstance(data, Mapping) and "input_ids" in data):
        return [data]  # one batch
    if isinstance(data, Mapping):
        names = ", ".join(map(str, data))
        raise ValueError(
            f"calibration of {source.label} is a mapping of {names}; expected rows, or input_ids"
        )
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise ValueError(
            f"calibration of {source.label}: is {data!r}; expected a file, rows, examples or "
            "batches"
        )
    rows = list(data)
    if not rows:
        raise ValueError(f"calibration of {source.label}: the data are empty; expected examples")
    return rows


def _batched(data: Any, source: Source, batch_size: int, max_length: int) -> list[Batch]:
    """Return calibration data of any admitted form as batches of ids and attention masks."""
    rows: list[Any] = []
    first: Any = None
    if not isinstance(data, (str, Path)):
        rows = _rows_of(data, source)
        first = rows[0]
    if isinstance(first, Tensor):
        return _batches_from_tensors(rows)
    has_ids = isinstance(first, Mapping) and "input_ids" in first
    if has_ids and isinstance(first["input_ids"], Tensor) and first["input_ids"].dim() == 2:
        return [
            {k: v for k, v in batch.items() if k in ("input_ids", "attention_mask")}
            for batch in rows
        ]
    if not has_ids:
        tokenizer = AutoTokenizer.from_pretrained(source.folder)
        examples = TextExamples(
            rows or data, tokenizer, max_length=max_length, train_on_inputs=True
        )
        rows = [examples[i] for i in range(len(examples))]
    ids = sorted((_without_padding(row)[:max_length] for row in rows), key=len)
    if not len(ids[0]):
        raise ValueError(
            f"calibration of {source.label}: an example has no token; expected one or more"
        )
    return [_pad_batch(ids[i : i + batch_size]) for i in range(0, len(ids), batch_size)]


def _batches_from_tensors(batches: Sequence[Tensor]) -> list[Batch]:
    for batch in batches:
        if batch.dim() != 2:
            raise ValueError(
                f"calibration: a tensor is {list(batch.shape)}; expected token ids (B, L)"
            )
    return [{"input_ids": batch} for batch in batches]


def _pad_batch(rows: list[Tensor]) -> Batch:
    masks = [torch.ones_like(row) for row in rows]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
    }


def _without_padding(row: Mapping[str, object]) -> Tensor:
    ids = torch.as_tensor(row["input_ids"], dtype=torch.long)
    mask = row.get("attention_mask")
    if mask is None:
        return ids
    return ids[torch.as_tensor(mask).bool()]
