"""`read_pairs`: read pairs of answers from files, data sets and rows, and report bad rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from model_components._report import Report
from model_components._rows import each_row

from ..choices import CLASSES
from ..pairs import Pair, count_labels, listed_counts, said_by
from .formats import COLUMNS, VERDICTS, pair_of

# maximum numbers of line numbers and reasons in a message, and of characters in a reason
_SHOWN = 5
_LONGEST = 200
_NUMBERED = ("label", "winner")  # columns whose verdicts may be numbers
_ENOUGH = 20  # labels: among so many, A and B should each be better at least once


@dataclass(frozen=True)
class ReadReport(Report):
    """Counts of the rows that were read, and the errors of invalid rows.

    Attributes:
        rows: The number of rows that were read.
        kept: The number of rows that are valid pairs.
        empty: The number of pairs with an empty answer.
        labels: The number of pairs of each class; a soft label counts as its most frequent class.
        bad: For each error, the line numbers of the invalid rows that have it, counted from 1.
        ignored: Columns that were not read.
        is_ordered: Whether the first answer is always the better one, as in rows of a chosen and a
            rejected answer.
    """

    rows: int
    kept: int
    empty: int
    labels: tuple[int, ...]
    bad: Mapping[str, tuple[int, ...]]
    ignored: tuple[str, ...]
    is_ordered: bool = False

    def summary(self) -> list[str]:
        """Return a line with the numbers of rows, of pairs, and of pairs in each class."""
        counts = listed_counts(self.labels)
        bare = self.kept - sum(self.labels)
        if bare:
            counts += f", without a label {bare}"
        return [f"{self.kept} of {self.rows} rows ({counts})"]

    def remarks(self) -> list[str]:
        """Return lines on ignored columns, empty answers, one-sided labels and invalid rows."""
        lines = []
        if self.ignored:
            lines.append(f"columns not read: {', '.join(self.ignored)}")
        if self.empty:
            lines.append(f"{self.empty} pairs have an empty answer")
        # only A and B, because many data sets have no ties
        for name, count in zip(CLASSES[:2], self.labels, strict=False):
            if not count and sum(self.labels) >= _ENOUGH and not self.is_ordered:
                lines.append(f"no label says that {name} is better: check the labels' meaning")
        if self.bad:
            lines.append(f"rows left out: {_reasons(self.bad)}")
        return lines


def _reasons(bad: Mapping[str, Sequence[int]]) -> str:
    """Return the first reasons why rows are invalid, with the first line numbers of each."""
    shown = []
    for reason, lines in islice(bad.items(), _SHOWN):
        shown.append(f"{reason:.{_LONGEST}}: {_listed(lines)}")
    more = sum(map(len, list(bad.values())[_SHOWN:]))
    if more:
        shown.append(f"{more} for other reasons")
    return "; ".join(shown)


def _listed(lines: Sequence[int]) -> str:
    shown = ", ".join(map(str, lines[:_SHOWN]))
    if len(lines) > _SHOWN:
        shown += ", ..."
    word = "lines" if len(lines) > 1 else "line"
    return f"{len(lines)} ({word} {shown})"


def read_pairs(
    source: str | Path | Iterable[Mapping[str, object]],
    *,
    columns: Mapping[str, str] | None = None,
    max_bad: float = 0.01,
) -> tuple[list[Pair], ReadReport]:
    """Read pairs from a file, a data set of the hub, or rows, such as a `datasets` data set.

    The columns of the answers determine how a row is read:

    - ``response_a``, ``response_b`` with ``prompt``, as in Kaggle's Chatbot Arena, where all three
      may be JSON lists of turns; or ``a``, ``b`` with ``prompt``.
    - ``conversation_a``, ``conversation_b``: messages with role and content, as in the Arena's own
      records.
    - ``chosen``, ``rejected``: strings or messages. The prompt is in ``prompt``, or both answers
      begin with it. The chosen answer is A.
    - ``output_1``, ``output_2`` with ``instruction`` or ``prompt``.

    The verdict is in the first of these columns that a row has:

    - ``winner_model_a``, ``winner_model_b``, ``winner_tie``: 1 in one of them, 0 in the other two.
    - ``winner``: model_a, model_b, tie or another spelling, or any value of ``label``.
    - ``preference``: 1 if the first answer is better, 2 if the second is, 1.5 or 0 for a tie. Other
      numbers between 1 and 2 give a soft label.
    - ``label``: 0 (A), 1 (B), 2 (tie), a spelling as in ``winner``, or three fractions.

    With ``output_1`` and ``output_2``, if ``label`` or ``winner`` is 1 or 2 but never 0, it is the
    number of the better output. Without any of these columns, a pair has no label, except that
    ``chosen`` is better than ``rejected``. The names of the answering models are in ``model_a`` and
    ``model_b``, ``generator_1`` and ``generator_2``, or ``gen_a`` and ``gen_b``. A missing answer
    is read as an empty one.

    Args:
        source: A JSON, JSON Lines or CSV file (separated by commas, semicolons or tabs), which may
            be gzipped; a Parquet file; a hub id such as ``owner/name``; a data set, a data frame,
            or rows.
        columns: A mapping from names above to the names that the rows use instead, such as
            ``{"prompt": "question", "a": "first", "b": "second", "label": "better"}``.
        max_bad: The largest fraction of rows that may be invalid. Invalid rows are left out and
            reported.

    Returns:
        The pairs, and a report on the rows.

    Raises:
        ValueError: The file cannot be read, there are more invalid rows than allowed (the message
            gives their lines), there are no pairs, or a name in ``columns`` is not listed above.

    >>> row = {
    ...     "prompt": "2 + 2?",
    ...     "response_a": "4",
    ...     "response_b": "5",
    ...     "winner": "model_a",
    ...     "model_a": "x",
    ... }
    >>> pairs, report = read_pairs([row, row | {"winner": "tie (bothbad)"}])
    >>> pairs[0]
    Pair(prompt='2 + 2?', a='4', b='5', label=0, writers=('x', None))
    >>> print(report)
    2 of 2 rows (A 1, B 0, tie 1)
    """
    pairs: list[Pair] = []
    bad: dict[str, list[int]] = {}
    seen: dict[str, None] = {}
    count = 0
    for line, row, pair in each_pair(source, columns=columns):
        count += 1
        if isinstance(row, Mapping):
            seen |= dict.fromkeys(map(str, row))
        if isinstance(pair, ValueError):
            # grouped by reason: a wrong column gives one reason with many lines
            bad.setdefault(str(pair), []).append(line)
        else:
            pairs.append(pair)
    wrong = sum(map(len, bad.values()))
    if wrong > max_bad * count:
        raise ValueError(
            f"read_pairs: {wrong} of {count} rows are invalid, more than max_bad={max_bad:.0%} "
            f"allows: {_reasons(bad)}"
        )
    if not pairs:
        raise ValueError("read_pairs: expected at least 1 row, got none")
    known = COLUMNS | set((columns or {}).values())
    # a name with a lone surrogate could not be printed
    ignored = tuple(name.encode(errors="replace").decode() for name in seen if name not in known)
    empty = 0
    for pair in pairs:
        both = said_by("assistant", pair.a).strip() and said_by("assistant", pair.b).strip()
        empty += not both
    lines = {what: tuple(numbers) for what, numbers in bad.items()}
    named = _names(seen, columns or {})
    is_ordered = "chosen" in named and VERDICTS.isdisjoint(named)
    counts = count_labels(pairs)
    return pairs, ReadReport(count, len(pairs), empty, counts, lines, ignored, is_ordered)


def each_pair(
    source: object, *, columns: Mapping[str, str] | None = None, labels: bool = True
) -> Iterator[tuple[int, object, Pair | ValueError]]:
    """Yield each row's line number, the row, and its pair, or the error if it is not a pair.

    Args:
        source: The source, as in `read_pairs`.
        columns: The names of columns, as in `read_pairs`.
        labels: Whether to read verdicts; False ignores them, for pairs that a model will judge.

    Yields:
        A tuple of the line number, counted from 1, the row, and its `Pair` or the error.

    Raises:
        ValueError: The file cannot be read, or a name in ``columns`` is unknown.

    >>> [
    ...     pair if isinstance(pair, Pair) else str(pair)
    ...     for _, _, pair in each_pair([{"a": "4", "b": "5"}])
    ... ]
    ['expected a prompt or instruction column besides a and b, got none']
    """
    if odd := [name for name in columns or {} if name not in COLUMNS]:
        raise ValueError(
            f"read_pairs: columns has the key {odd[0]!r}, expected keys among "
            f"{', '.join(sorted(COLUMNS))}"
        )
    # read all rows first: only all verdicts together show whether they count from 1
    numbered = list(each_row(source, "read_pairs"))
    counts_from_one = labels and _counts_from_one([row for _, row in numbered], columns or {})
    for line, row in numbered:
        try:
            if isinstance(row, ValueError):
                raise row
            named = _renamed(row, columns or {})
            if counts_from_one:
                named = _from_zero(named)
            if not labels and isinstance(named, Mapping):
                named = {name: value for name, value in named.items() if name not in VERDICTS}
            yield line, row, pair_of(named)
        except ValueError as error:
            yield line, row, error


def _counts_from_one(rows: Sequence[object], columns: Mapping[str, str]) -> bool:
    """Return whether verdicts are 1 for the first answer and 2 for the second.

    This is the case if the columns of the answers end in 1 and 2, and all numbers are 1 or 2.

    Raises:
        ValueError: The columns of the answers end in 1 and 2, but all verdicts are 1, or all are 2.
            Or the columns do not end in 1 and 2, but in 20 or more rows verdicts are 1 and 2 and
            never 0. Read as 0, 1 and 2, they would mean that the first answer is never better.
    """
    verdicts: set[int] = set()
    labeled = 0
    has_numbered_answers = False
    for row in rows:
        if isinstance(row, Mapping):
            names = _names(row, columns)
            has_numbered_answers |= "output_1" in names
            # the column that is read
            used = next((name for name in ("winner", "preference", "label") if name in names), "")
            number = _number(row.get(names[used])) if used in _NUMBERED else None
            # other numbers are errors, which their rows report
            if number in (0, 1, 2):
                labeled += 1
                verdicts.add(number)
    if not verdicts or 0 in verdicts:
        return False
    if has_numbered_answers:
        if len(verdicts) == 1:
            raise ValueError(
                f"read_pairs: all {labeled} numeric verdicts are {verdicts.pop()}, so they may "
                "count from 0 or from 1; expected verdicts that include 0, or both 1 and 2; if 1 "
                "means the first answer, read the column as a preference: "
                'columns={"preference": "label"}'
            )
        return True
    # in only a few rows, it may be chance that the first answer is never better
    if len(verdicts) == 2 and labeled >= _ENOUGH:
        raise ValueError(
            f"read_pairs: expected verdicts 0 (A), 1 (B) and 2 (tie), got only 1 and 2 in "
            f"{labeled} rows; if 1 means the first answer, read the column as a preference: "
            'columns={"preference": "label"}'
        )
    return False


def _names(row: Iterable[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Map each field to its column in ``columns``, or else to the column of the same name."""
    return {name: name for name in row if name not in columns.values()} | dict(columns)


def _number(value: object) -> int | None:
    """Return a verdict as a whole number, or None if it is not a whole number."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def _from_zero(row: object) -> object:
    """Return a row with its verdicts 1 and 2 changed to 0 and 1."""
    if not isinstance(row, Mapping):
        return row
    changed = dict(row)
    for name in _NUMBERED:
        number = _number(row.get(name))
        if number in (1, 2):  # any other number is an error, which the row reports
            changed[name] = number - 1
    return changed


def _renamed(row: object, columns: Mapping[str, str]) -> object:
    """Return a row with the columns named as `pair_of` expects."""
    if not columns or not isinstance(row, Mapping):
        return row
    if lost := [own for own in columns.values() if own not in row]:
        raise ValueError(f"expected a column {lost[0]!r}, got {', '.join(map(str, row))}")
    rest = {name: value for name, value in row.items() if name not in columns.values()}
    # renamed columns come last, to replace columns of the file that already have these names
    return rest | {name: row[own] for name, own in columns.items()}
