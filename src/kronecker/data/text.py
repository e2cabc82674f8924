"""Batches of token ids from text files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from model_components._rows import SUFFIXES, each_row, kind_of, read_text

_LABELS = ("role", "from", "type")  # fields of a chat's messages that hold no text


def text_of(path: str | Path) -> str:
    """Return the text of a file.

    For a file of records, the text consists of all strings in the records, with a blank line
    between records. Numbers in CSV and TSV files are left out. If the records are chats, the text
    consists of the texts of their messages.

    Args:
        path: A text, JSON, JSON lines, CSV or TSV file, which may be gzipped, or a parquet file.

    Returns:
        The whole text as one string.

    Raises:
        ValueError: There is no such file, or the file cannot be read or has no text.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"text_of: expected a file of text or of records, got {path}, which is not a file"
        )
    kind = kind_of(path)
    if kind in SUFFIXES:
        rows = [_strings(row) for row in _sound_rows(path)]
        if kind in (".csv", ".tsv"):  # numbers in these files are strings, too
            rows = [[text for text in row if not _is_number(text)] for row in rows]
        text = "\n\n".join("\n".join(row) for row in rows)
    else:
        text = read_text(path, "text_of")
    # replace unpaired surrogates, which JSON may contain and UTF-8 cannot encode
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    # UTF-16 without a byte order mark, and binary files, decode to text with null characters
    if "\0" in text:
        raise ValueError(f"text_of: expected text in UTF-8 or UTF-16, got null bytes in {path}")
    if not text.strip():
        raise ValueError(f"text_of: {path} has no text, expected a file with text")
    return text


def _sound_rows(path: Path) -> Iterator[object]:
    for number, row in each_row(path, "text_of"):
        if isinstance(row, ValueError):
            raise ValueError(f"text_of: {path}, line {number}: {row}")
        yield row


def _strings(record: object) -> list[str]:
    if isinstance(record, str):
        return [record] if record else []
    if isinstance(record, Mapping):
        # otherwise a value such as "user" would be in the text of every message
        record = [value for name, value in record.items() if name not in _LABELS]
    if isinstance(record, list):
        return [text for value in record for text in _strings(value)]
    return []


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def text_batches(
    text: str,
    encode: Callable[[str], list[int]],
    *,
    tokens: int,
    context: int = 512,
    rows: int = 4,
    skip: int = 0,
) -> list[Tensor]:
    """Return batches of token ids, (rows, context), from running text.

    Args:
        text: The text, of which only as much as needed is encoded.
        encode: A tokenizer's ``encode``, or any function from text to a list of token ids.
        tokens: The number of tokens to take, at most.
        context: The number of tokens in a row. An incomplete last row is left out, unless it is the
            only row.
        rows: The number of rows in a batch.
        skip: The number of tokens to leave out at the beginning of the text, such as those that a
            model was fitted on.

    Returns:
        Tensors of int64 token ids.

    Raises:
        ValueError: The text is not a string, is a file name or has fewer than two tokens, a number
            is too small, or ``encode`` does not return token ids.

    >>> [
    ...     b.shape
    ...     for b in text_batches(
    ...         "abcdefghij", lambda t: [ord(c) for c in t], tokens=8, context=2, rows=3
    ...     )
    ... ]
    [torch.Size([3, 2]), torch.Size([1, 2])]
    """
    if not isinstance(text, str):
        raise ValueError(f"text_batches: text is a {type(text).__name__}, expected one string")
    # file names have at most 255 bytes; asking for a longer one raises an OSError
    if len(text.encode(errors="replace")) < 250 and "\n" not in text and Path(text).is_file():
        raise ValueError(
            f"text_batches: expected text, got the name of a file, {text!r}; read the file with "
            f"text_of({text!r})"
        )
    numbers = {"tokens": (tokens, 2), "context": (context, 1), "rows": (rows, 1), "skip": (skip, 0)}
    for name, (number, least) in numbers.items():
        if number < least:
            raise ValueError(f"text_batches: {name} is {number}, expected {least} or more")
    # a generous 20 characters per token, so that a whole book need not be encoded
    size = 20 * (tokens + skip)
    encoded = encode(text[:size])
    # encode one token more than needed, because the last token of a cut text may be part of a word
    while isinstance(encoded, list) and len(encoded) <= tokens + skip and size < len(text):
        size *= 2
        encoded = encode(text[:size])
    if not isinstance(encoded, list):
        raise ValueError(
            f"text_batches: encode returned a {type(encoded).__name__}, expected a list of token "
            "ids, as from tokenizer.encode"
        )
    if text and not encoded:
        raise ValueError(
            "text_batches: expected the model's tokenizer, got one that returns no tokens for the "
            "text"
        )
    ids = torch.tensor(encoded[skip : skip + tokens])
    if len(ids) < 2:
        after = f" after the first {skip:,}" if skip else ""
        raise ValueError(
            f"text_batches: the text has {len(encoded):,} tokens, expected two or more{after}"
        )
    context = min(context, len(ids))
    return list(ids[: len(ids) // context * context].view(-1, context).split(rows))


def strided(batches: Iterable[Tensor], *, context: int, stride: int) -> list[dict[str, Tensor]]:
    """Return overlapping windows of tokens, for `perplexity`.

    Every token counts in one window, and every token except the first has context before it.

    Args:
        batches: Token ids, (B, T) each, as `text_batches` returns them: one text's rows in order.
        context: The number of tokens in a window.
        stride: The number of tokens from the start of one window to the start of the next. In each
            window after the first, at most this many tokens count.

    Returns:
        Dicts of ``input_ids`` and ``labels``, both (1, T) with T at most ``context``.

    Raises:
        ValueError: There is no batch, ``stride`` is below 1, or it is not below ``context``.
            Windows must overlap, because no token in a window predicts the window's first token.

    >>> [w["labels"].tolist() for w in strided([torch.arange(6)[None]], context=4, stride=2)]
    [[[0, 1, 2, 3]], [[-100, -100, 4, 5]]]
    """
    if not 1 <= stride < context:
        raise ValueError(
            f"strided: stride is {stride}, expected 1 to {context - 1}, below the context, which "
            f"is {context}"
        )
    rows = [batch.reshape(-1) for batch in batches]
    if not rows:
        raise ValueError("strided: expected one or more batches of tokens, got none")
    ids = torch.cat(rows)
    windows = []
    done = 0
    for begin in range(0, len(ids), stride):
        row = ids[begin : begin + context]
        # stop at a window without new tokens, or with one token, which predicts nothing
        if begin + len(row) <= done or len(row) < 2:
            break
        labels = row.clone()
        labels[: max(0, done - begin)] = -100
        windows.append({"input_ids": row[None], "labels": labels[None]})
        done = begin + len(row)
    return windows
