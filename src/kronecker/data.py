"""What calibration reads: batches of a model's arguments, checked before any work starts, and batches from text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

Batch = Mapping[str, Any]

_LABELS = ("role", "from", "type")  # of a chat's turns and their parts: no text


def batches(calibration: Iterable[Any], model: nn.Module, operation: str) -> list[dict[str, Any]]:
    """Calibration data as keyword arguments of the model, on its device: from dicts, or from tensors of token ids.

    Raises:
        ValueError: No batch, or one that the model could not be run on: text, ids that are no integers or outside the
            vocabulary, rows that are longer than the model has positions for, nothing but labels; padding for an
            encoder-decoder, whose two masks are not told apart.
    """
    if not isinstance(calibration, Iterable):
        raise ValueError(f"{operation}: calibration is {calibration!r}, needed batches of token ids")
    device = next(model.parameters()).device
    checked = []
    for item in calibration:
        if not isinstance(item, (Tensor, Mapping)):
            raise ValueError(
                f"{operation}: a batch of calibration is a {type(item).__name__}, needed a tensor of token ids (B, T) "
                f"or a dict of the model's arguments; a tokenizer makes them from text"
            )
        batch = {"input_ids": item} if isinstance(item, Tensor) else dict(item)
        if not any(isinstance(v, Tensor) and v.numel() for k, v in batch.items() if k not in ("labels", "label")):
            raise ValueError(f"{operation}: a batch of calibration has no tensor but {sorted(batch)}, needed token ids")
        if any(isinstance(v, Tensor) and not v.dim() for k, v in batch.items() if k.endswith("input_ids")):
            raise ValueError(f"{operation}: token ids are one number, needed (B, T)")
        for name, value in batch.items():
            if isinstance(value, Tensor) and name in ("input_ids", "attention_mask") and value.dim() == 1:
                batch[name] = value[None]
        config = getattr(model, "config", None)
        for name in ("input_ids", "decoder_input_ids"):
            _check_ids(operation, batch.get(name), model)
        if isinstance(config, PretrainedConfig) and config.is_encoder_decoder:
            _check_two_sides(operation, batch)
        checked.append({k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()})
    if not checked:
        raise ValueError(f"{operation}: calibration is empty, needed batches of token ids")
    return checked


@torch.no_grad()
def first_output(model: nn.Module, batch: Batch) -> Tensor:
    """What a model says first, in float32: logits or hidden states."""
    out = model(**without_labels(batch))
    values = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else (out,)
    return next(v for v in values if isinstance(v, Tensor) and v.dim()).float()


def without_labels(batch: Batch) -> dict[str, Any]:
    """What a forward needs that computes no loss."""
    return {k: v for k, v in batch.items() if k not in ("labels", "label")}


def _check_two_sides(operation: str, batch: Batch) -> None:
    """What an encoder-decoder needs beyond other models."""
    if not any(name.startswith("decoder_input") for name in batch):
        raise ValueError(f"{operation}: a batch has {sorted(batch)}, needed decoder_input_ids for an encoder-decoder")
    masks = [batch[n] for n in ("attention_mask", "decoder_attention_mask") if isinstance(batch.get(n), Tensor)]
    if not all(bool(mask.all()) for mask in masks):
        raise ValueError(f"{operation}: padding of an encoder-decoder is not told apart, needed batches without any")


def positions_of(model: nn.Module) -> int | None:
    """How many tokens a row may have; None: no limit that is known."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return None
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    tables = [m for n, m in model.named_modules() if n.endswith("position_embeddings") and isinstance(m, nn.Embedding)]
    if isinstance(positions, int) and tables and tables[0].padding_idx is not None:
        positions -= tables[0].padding_idx + 1  # RoBERTa counts from behind the padding's
    return positions if isinstance(positions, int) and positions > 0 else None


def _check_ids(operation: str, ids: object, model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if not isinstance(ids, Tensor) or not isinstance(config, PretrainedConfig):
        return
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{operation}: token ids are {ids.dtype}, needed integers")
    count, positions = getattr(config.get_text_config(), "vocab_size", None), positions_of(model)
    least, most = int(ids.min()), int(ids.max())
    if isinstance(count, int) and not 0 <= least <= most < count:
        raise ValueError(f"{operation}: token ids go from {least} to {most}, needed 0 to {count - 1}")
    if positions is not None and positions < ids.shape[-1]:
        raise ValueError(f"{operation}: rows have {ids.shape[-1]} tokens, needed at most the model's {positions}")


def text_of(path: str | Path) -> str:
    """A text file's text; of a JSON list or JSON lines of records their strings, records apart by a blank line.

    Of records that are chats the turns' texts.

    Raises:
        ValueError: No such file, or one that holds no text.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"calibration: {path} is not a file, needed one of text, or of JSON records with texts")
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if path.suffix in (".json", ".jsonl"):
        lines = [text] if path.suffix == ".json" else [line for line in text.split("\n") if line.strip()]
        try:
            records = [json.loads(line) for line in lines]
        except json.JSONDecodeError as error:
            raise ValueError(f"calibration: {path} is no JSON: {error}") from None
        while len(records) == 1 and isinstance(records[0], list):
            records = records[0]
        text = "\n\n".join("\n".join(_strings(record)) for record in records)
    if not text.strip():
        raise ValueError(f"calibration: {path} has no text, needed some")
    return text


def _strings(record: object) -> list[str]:
    if isinstance(record, str):
        return [record] if record else []
    if isinstance(record, Mapping):
        record = [value for name, value in record.items() if name not in _LABELS]
    return [text for value in record for text in _strings(value)] if isinstance(record, list) else []


def text_batches(
    text: str, encode: Callable[[str], list[int]], *, tokens: int, context: int = 512, rows: int = 4, skip: int = 0
) -> list[Tensor]:
    """Batches of token ids, (rows, context), from running text.

    Args:
        text: Of which as much is encoded as is needed.
        encode: A tokenizer's ``encode``, or any function from text to token ids.
        tokens: How many to take.
        context: Tokens in a row; whole rows only, or one shorter row where there is no more.
        rows: In a batch.
        skip: Tokens to leave out before, such as those that something was fitted on.

    Raises:
        ValueError: Fewer than two tokens, or sizes below 1.

    >>> [b.shape for b in text_batches("abcdefghij", lambda t: [ord(c) for c in t], tokens=8, context=2, rows=3)]
    [torch.Size([3, 2]), torch.Size([1, 2])]
    """
    if min(tokens, context, rows) < 1 or skip < 0:
        raise ValueError(
            f"calibration: tokens is {tokens}, context {context}, rows {rows}, skip {skip}, needed 1 or more"
        )
    encoded = encode(text[: 20 * (tokens + skip)])
    if text and not encoded:
        raise ValueError("calibration: the tokenizer makes no tokens of the text; needed the tokenizer of the model")
    ids = torch.tensor(encoded[skip : skip + tokens])
    if len(ids) < 2:
        after = f" after the first {skip:,}" if skip else ""
        raise ValueError(f"calibration: the text has {len(encoded):,} tokens, needed two or more{after}")
    context = min(context, len(ids))
    return list(ids[: len(ids) // context * context].view(-1, context).split(rows))


def strided(batches: Iterable[Tensor], *, context: int, stride: int) -> list[dict[str, Tensor]]:
    """Windows that overlap, for `perplexity`: every token counts once, all but the first with a context before it.

    Args:
        batches: As `text_batches` gives them: one text's rows in order.
        context: Tokens in a window.
        stride: From one window to the next; the tokens of a window that count, but for the first one's.

    Raises:
        ValueError: A stride below 1, or not below the context: a window's first token is predicted by none of its own.

    >>> [w["labels"].tolist() for w in strided([torch.arange(6)[None]], context=4, stride=2)]
    [[[0, 1, 2, 3]], [[-100, -100, 4, 5]]]
    """
    if not 1 <= stride < context:
        raise ValueError(f"calibration: stride is {stride}, needed 1 to {context - 1}, below the context")
    rows = [batch.reshape(-1) for batch in batches]
    if not rows:
        raise ValueError("calibration: there is no batch of tokens to make windows of, needed some")
    ids = torch.cat(rows)
    windows, done = [], 0
    for begin in range(0, len(ids), stride):
        row = ids[begin : begin + context]
        if begin + len(row) <= done or len(row) < 2:
            break
        labels = row.clone()
        labels[: max(0, done - begin)] = -100
        windows.append({"input_ids": row[None], "labels": labels[None]})
        done = begin + len(row)
    return windows
