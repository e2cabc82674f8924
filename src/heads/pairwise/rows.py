"""Pairs of answers from files and rows: the Arena's format, and plain ones."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from model_components._report import Report

from .config import CLASSES

ARENA = ("response_a", "response_b", "winner_model_a", "winner_model_b", "winner_tie")
_SHOWN = 5  # row numbers in a message
_TRUE, _FALSE = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no", "", "none", "nan")


class Pair(NamedTuple):
    """A prompt, two answers, and which is better: 0 for A, 1 for B, 2 for a tie, shares of the three, or None."""

    prompt: str
    a: str
    b: str
    label: int | tuple[float, ...] | None = None


@dataclass(frozen=True)
class ReadReport(Report):
    """What became of the rows.

    Attributes:
        rows: How many there were.
        kept: How many have two answers.
        missing: The numbers, from 0, of the others.
        labels: How many kept ones each class has, shared labels by their largest share.
        ignored: Columns that were not read.
    """

    rows: int
    kept: int
    missing: tuple[int, ...]
    labels: tuple[int, ...]
    ignored: tuple[str, ...]

    def summary(self) -> list[str]:
        """Rows and classes."""
        counts = ", ".join(f"{name} {count}" for name, count in zip(CLASSES, self.labels, strict=True))
        bare = self.kept - sum(self.labels)
        return [f"{self.kept} of {self.rows} rows ({counts}{f', without a label {bare}' if bare else ''})"]

    def remarks(self) -> list[str]:
        """What was not read, or left out."""
        lines = [f"not read: {', '.join(self.ignored)}"] if self.ignored else []
        if self.missing:
            lines.append(f"{_listed(self.missing)} had a missing or empty answer and were left out")
        return lines


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN])) + (", ..." if len(numbers) > _SHOWN else "")
    return f"{len(numbers)} (row{'s' if len(numbers) > 1 else ''} {shown})"


def read_pairs(source: str | Path | Iterable[Mapping[str, Any]]) -> tuple[list[Pair], ReadReport]:
    """Pairs from a CSV, JSON or JSON-lines file, or from rows such as a `datasets` data set's.

    Rows have ``prompt``, then either the Arena's ``response_a``, ``response_b``, ``winner_model_a``,
    ``winner_model_b``, ``winner_tie``, or ``a``, ``b`` and ``label``: 0, 1, 2 or A, B, tie, or three shares. Texts may
    be lists of turns, also as JSON inside a string, as the Arena has them; turns are joined with an empty line.

    Args:
        source: A file, rows, or a pandas data frame.

    Returns:
        Pairs, without those whose answers are missing, null or empty, and the report that counts them.

    Raises:
        ValueError: With row numbers: columns that are missing, texts that are not text, two winners or none, labels
            outside the classes; nothing left.

    >>> row = {"prompt": '["2 + 2?"]', "response_a": '["4"]', "response_b": '["5"]'}
    >>> row |= {"winner_model_a": 1, "winner_model_b": 0, "winner_tie": 0}
    >>> pairs, report = read_pairs([row, row | {"response_b": "[null]"}])
    >>> pairs
    [Pair(prompt='2 + 2?', a='4', b='5', label=0)]
    >>> print(report)
    1 of 2 rows (A 1, B 0, tie 0)
      1 (row 1) had a missing or empty answer and were left out
    """
    if isinstance(source, (str, Path)):
        rows = _rows(Path(source))
    else:
        frame: Any = source
        rows = list(frame.to_dict("records") if hasattr(frame, "iterrows") else source)
    pairs, missing, wrong = [], [], {}
    for number, row in enumerate(rows):
        try:
            pair = _pair(row)
        except ValueError as error:
            wrong.setdefault(str(error), []).append(number)
            continue
        if pair is None:
            missing.append(number)
        else:
            pairs.append(pair)
    if wrong:
        raise ValueError("read_pairs: " + "; ".join(f"{what}: {_listed(numbers)}" for what, numbers in wrong.items()))
    if not pairs:
        raise ValueError(f"read_pairs: none of {len(rows)} rows has two answers")
    columns = dict.fromkeys(str(name) for row in rows for name in row)
    ignored = tuple(name for name in columns if name not in ("prompt", *ARENA, "a", "b", "label"))
    return pairs, ReadReport(len(rows), len(pairs), tuple(missing), count_labels(pairs), ignored)


def count_labels(pairs: Iterable[Pair]) -> tuple[int, ...]:
    """How many pairs each class has; shares count for the largest."""
    counts = [0, 0, 0]
    for pair in pairs:
        if pair.label is not None:
            counts[pair.label if isinstance(pair.label, int) else pair.label.index(max(pair.label))] += 1
    return tuple(counts)


def _rows(path: Path) -> list[Mapping[str, Any]]:
    if not path.is_file():
        raise ValueError(f"read_pairs: there is no file {path}")
    kind = path.suffix.lower()
    try:
        if kind == ".csv":
            csv.field_size_limit(1 << 30)
            with path.open(newline="", encoding="utf-8-sig") as file:
                return list(csv.DictReader(file))
        text = path.read_text(encoding="utf-8-sig")
        lines = [text] if kind == ".json" else text.split("\n")  # splitlines() also splits inside of texts
        found = [json.loads(line) for line in lines if line.strip()]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"read_pairs: {path} cannot be read: {error}; needed .csv, .json or .jsonl in UTF-8"
        ) from error
    found = found[0] if kind == ".json" and found else found
    if not isinstance(found, list):
        raise ValueError(f"read_pairs: {path} holds a {type(found).__name__}, needed a list of rows")
    return found


def _pair(row: Any) -> Pair | None:
    """A row's pair, or None where an answer is missing."""
    if not isinstance(row, Mapping):
        raise ValueError(f"a row is a {type(row).__name__}, not a mapping")
    arena = "response_a" in row or "response_b" in row
    names = ("prompt", *ARENA[:-1]) if arena else ("prompt", "a", "b")  # data without ties need no winner_tie
    absent = [name for name in names if name not in row]
    if absent:
        raise ValueError(f"no {', '.join(absent)} (there are {', '.join(map(str, row))})")
    prompt, a, b = (_text(name, row[name]) for name in names[:3])
    label = _winner(row) if arena else check_label(row.get("label"))
    return Pair(prompt, a, b, label) if a.strip() and b.strip() else None


def _text(name: str, value: Any) -> str:
    """A text, or the turns of one; nothing where it is missing or where a turn is null."""
    if hasattr(value, "tolist"):  # of numpy, as parquet files have it
        value = value.tolist()
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            found = json.loads(value)
        except json.JSONDecodeError:
            found = None  # a text that begins with a bracket
        if isinstance(found, list) and all(turn is None or isinstance(turn, str) for turn in found):
            value = found
    if isinstance(value, str):
        return sound(name, value)
    if not isinstance(value, (list, tuple)) or not all(turn is None or isinstance(turn, str) for turn in value):
        raise ValueError(f"{name} is a {type(value).__name__}, needed text or a list of turns")
    if name == "prompt":  # an answer with a turn missing is missing, a prompt is what there is of it
        value = [turn for turn in value if turn is not None]
    return "" if any(turn is None for turn in value) else sound(name, "\n\n".join(value))


def sound(name: str, text: str) -> str:
    """The text; refused where it cannot be written as UTF-8, which tokenizers need."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half of a surrogate pair, needed Unicode text") from error
    return text


def _winner(row: Mapping[str, Any]) -> int:
    won = []
    for name in ARENA[2:]:
        text = str(row.get(name, 0)).strip().lower()
        if text not in _TRUE + _FALSE:
            raise ValueError(f"{name} is {row[name]!r}, needed 0 or 1")
        won.append(text in _TRUE)
    if sum(won) != 1:
        raise ValueError("two winners" if sum(won) else "no winner")
    return won.index(True)


def check_label(label: Any, classes: int = 3) -> int | tuple[float, ...] | None:
    """A label as a class, as shares that sum to 1, or None.

    Raises:
        ValueError: Anything else.
    """
    if hasattr(label, "tolist"):  # of numpy, pandas or torch
        label = label.tolist()
    if isinstance(label, str) and label.strip():
        text = label.strip().lower()
        known = {name.lower(): k for k, name in enumerate(CLASSES)}
        known |= {form: k for k in range(len(CLASSES)) for form in (str(k), f"{k}.0")}
        label = known.get(text, label)
    if label is None or label != label or (isinstance(label, str) and not label.strip()):
        return None
    if isinstance(label, (list, tuple)):
        try:
            shares = tuple(float(share) for share in label)
        except (TypeError, ValueError):
            shares = ()
        if len(shares) != classes or not min(shares) >= 0 or not abs(sum(shares) - 1) < 1e-3:
            raise ValueError(f"a label is {label!r}, needed {classes} shares that sum to 1")
        return shares
    if isinstance(label, bool) or not isinstance(label, (int, float)) or label not in range(classes):
        known = ", ".join(f"{k} ({name})" for k, name in enumerate(CLASSES[:classes]))
        raise ValueError(f"a label is {label!r}, needed {known}")
    return int(label)
