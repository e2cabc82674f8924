"""`RowsTask`: your own pairs of an input and its answer, of any lengths."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_components._rows import each_row

from .at_tokens import without_layout
from .task import IGNORED, Sample, Task, integers, row_key, row_words

Symbol = str | int

_FEW_SPACED = 0.05
"""If the share of texts with spaces is below this number, the spaces are considered mistakes."""


class RowsTask(Task):
    """A task given by pairs of an input and its answer, each of any length.

    A row is a pair, or a mapping with ``input`` and ``answer``. Input and answer are each a list of
    symbols (strings or whole numbers) or a text. If any text has white space, all texts are split
    there; otherwise texts are split into characters. The length of a row is the number of symbols
    of its input.

    The answers may have as many symbols as their inputs, a fixed number more or fewer, a fixed
    multiple of that number, or the same number for all inputs. Other answers are padded with an end
    symbol, up to the smallest multiple of the input's length that fits every answer. Empty answers
    are padded, too, and do not change the layout of other answers. If answers are longer by a fixed
    number of symbols, the inputs are padded to the answers' length, so that each symbol of an
    answer has a token of its own.

    A `CurriculumDataset` holds out a share of the inputs of each length with at least 10 different
    ones, and trains on the others. Rows longer than its schedule's longest length are used only for
    testing.

    Args:
        rows: The rows, or a file of them: JSON, JSON lines, CSV, TSV or parquet.

    Attributes:
        symbols: All symbols, sorted; a symbol's id is its index.
        lengths: The lengths of the rows, in ascending order.

    Raises:
        ValueError: There are no rows, a row is not a pair of an input and an answer, all answers
            are empty, or only very few texts have white space.

    Warns:
        UserWarning: Equal inputs have different answers.

    >>> task = RowsTask([("ab", "ba"), ("bca", "acb"), ("a", "a")])
    >>> task.symbols, task.lengths, task.decode(task.encode("cab"))
    (('a', 'b', 'c'), (1, 2, 3), 'cab')
    """

    def __init__(self, rows: str | Path | Iterable[object]):
        place = f" of {rows}" if isinstance(rows, str | Path) else ""
        pairs = [_pair_of(f"{n}{place}", row) for n, row in each_row(rows, "RowsTask")]
        if not any(answer for _, answer in pairs):
            what = "only empty answers" if pairs else "no rows"
            raise ValueError(f"RowsTask: expected rows with answers, got {what}")
        texts = [part for pair in pairs for part in pair if isinstance(part, str)]
        self._is_text = all(isinstance(answer, str) for _, answer in pairs)
        self._has_spaces = _have_spaces(texts)
        pairs = [(self._split(given), self._split(answer)) for given, answer in pairs]
        _warn_of_contradictions(pairs)
        # by length, and otherwise in the order of the file
        pairs.sort(key=lambda pair: len(pair[0]))
        known = {symbol for given, answer in pairs for symbol in (*given, *answer)}
        self.symbols = tuple(sorted(known, key=lambda symbol: (isinstance(symbol, str), symbol)))
        self._ids = {symbol: number for number, symbol in enumerate(self.symbols)}
        self._size_of_answers(pairs)
        self._rows = self._tensors(pairs)
        sizes = torch.tensor([len(given) for given, _ in pairs])
        self.lengths = tuple(sizes.unique().tolist())
        longest = self.lengths[-1]
        self._counts = torch.bincount(sizes, minlength=longest + 1)
        # repeated inputs count once: they are held out together
        assert self._rows.key is not None
        kinds = torch.stack([sizes, self._rows.key]).unique(dim=1)
        self._kinds = torch.bincount(kinds[0], minlength=longest + 1)
        self._starts = self._counts.cumsum(0) - self._counts
        # a length without rows is replaced by the nearest shorter one with rows
        places = torch.arange(longest + 1).masked_fill(self._counts == 0, self.lengths[0])
        self._nearest = places.cummax(0).values

    def _split(self, part: str | Sequence[Symbol]) -> list[Symbol]:
        if not isinstance(part, str):
            return list(part)
        return [*part.split()] if self._has_spaces else [*part]

    def _size_of_answers(self, pairs: Sequence[tuple[list[Symbol], list[Symbol]]]) -> None:
        """Compute the length of answers: a multiple of the input's length, plus a constant."""
        sizes = {(len(given), len(answer)) for given, answer in pairs}
        # empty answers are padded, and do not change the length of other answers
        known = [(given, answer) for given, answer in sizes if answer]
        more = {answer - given for given, answer in known}
        fixed = {answer for _, answer in known}
        # inputs of one length with shorter answers: the answers probably have a fixed size
        shorter = len(known) == 1 and min(more) < 0
        shortest = min(given for given, _ in sizes)
        self._pads = 0
        if len(more) == 1 and not shorter and shortest + min(more) >= 1:
            self._times = 1
            self._more = min(more)
            self._pads = max(0, self._more)
        elif len(fixed) == 1:
            self._times = 0
            self._more = min(fixed)
        else:
            self._times = max(-(-answer // given) for given, answer in known)
            self._more = 0
        self._ends = any(self.output_length(given) != answer for given, answer in sizes)

    def _tensors(self, pairs: Sequence[tuple[list[Symbol], list[Symbol]]]) -> Sample:
        longest = len(pairs[-1][0])
        width = self.input_length(longest)
        tokens = torch.zeros(len(pairs), width, dtype=torch.long)
        mask = torch.zeros(len(pairs), width, dtype=torch.bool)
        targets = torch.full((len(pairs), self.output_length(longest)), IGNORED)
        for row, (given, answer) in enumerate(pairs):
            ids = self.encode(given)
            tokens[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = True
            # an answer that ends early is padded with the end symbol
            targets[row, : self.output_length(len(given))] = self._end
            ids = [self._ids[symbol] for symbol in answer]
            targets[row, : len(answer)] = torch.tensor(ids, dtype=torch.long)
        key = row_key(tokens, mask, row_words(width, tokens.device))
        return Sample(tokens, mask, targets, None, key)

    def __repr__(self) -> str:
        # a resume compares tasks by their repr, so it must differ if the rows differ
        parts = [x.numpy().tobytes() for x in (self._rows.tokens, self._rows.targets)]
        content = b"".join([*parts, repr(self.symbols).encode()])
        return (
            f"RowsTask({len(self._rows.tokens)} rows of {self.lengths[0]} to {self.lengths[-1]}, "
            f"{zlib.crc32(content):08x})"
        )

    @property
    # pyrefly: ignore[bad-override]: a property, since the rows set it
    def min_length(self) -> int:
        """The shortest length."""
        return self.lengths[0]

    @property
    # pyrefly: ignore[bad-override]: a property, since the rows set it
    def default_length(self) -> int:
        """The longest length."""
        return self.lengths[-1]

    @property
    def _end(self) -> int:
        return len(self.symbols)

    @property
    def vocab_size(self) -> int:
        """The number of symbols, plus one if inputs are padded."""
        return len(self.symbols) + (self._pads > 0)

    def input_length(self, length: int) -> int:
        """Return the number of tokens of an input of this length, with its padding."""
        return length + self._pads

    @property
    def output_size(self) -> int:
        """The number of symbols, plus one if answers have an end symbol."""
        return len(self.symbols) + self._ends

    def output_length(self, length: int) -> int:
        """Return the length of the longest answer to inputs of this length."""
        return self._times * length + self._more

    def num_samples(self, length: int) -> int:
        """Return the number of different inputs of a length, or of the nearest shorter length."""
        return int(self._kinds[self._nearest[min(length, self.lengths[-1])]])

    def every(self, length: int) -> Sample:
        """Return all rows of a length.

        Raises:
            ValueError: No row has this length.
        """
        if length not in self.lengths:
            raise ValueError(
                f"RowsTask: no row has length {length}; expected one of {list(self.lengths)}"
            )
        first = int(self._starts[length])
        return self._cut(torch.arange(first, first + int(self._counts[length])), length)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Draw rows of a length, or, if there are none, of the nearest shorter length with rows."""
        lengths, longest = self.checked(generator, batch, length)
        lengths = lengths[:, 0].cpu().clamp(max=self.lengths[-1])
        nearest = self._nearest[lengths]
        drawn = integers(generator, 1 << 31, batch).cpu() % self._counts[nearest]
        rows = self._cut(self._starts[nearest] + drawn, min(longest, self.lengths[-1]))
        return rows.map(lambda column: column.to(generator.device))

    def _cut(self, which: Tensor, longest: int) -> Sample:
        """Return the rows ``which``, with only the columns that length ``longest`` needs."""
        rows = self._rows.rows(which)
        return rows._replace(
            tokens=rows.tokens[:, : self.input_length(longest)],
            mask=rows.mask[:, : self.input_length(longest)],
            targets=rows.targets[:, : self.output_length(longest)],
        )

    def encode(self, row: str | Sequence[Symbol]) -> list[int]:
        """Return the ids of an input's symbols, with its padding.

        Raises:
            ValueError: The input has a symbol that occurs in no row.
        """
        symbols = self._split(row)
        unknown = [symbol for symbol in symbols if symbol not in self._ids]
        if unknown:
            raise ValueError(
                f"RowsTask: expected symbols of {list(self.symbols)!r:.200}, got {unknown[0]!r} in "
                f"{row!r:.80}"
            )
        padding = [len(self.symbols)] * self._pads
        return [*(self._ids[symbol] for symbol in symbols), *padding]

    def decode(self, ids: Sequence[int]) -> str | tuple[Symbol, ...]:
        """Return an answer without the end symbol, as a text or as a tuple of symbols.

        It is a text if all answers of the rows are texts.
        """
        symbols = []
        for number in ids:
            if number == self._end:
                break
            symbols.append(self.symbols[number])
        if not self._is_text:
            return tuple(symbols)
        return (" " if self._has_spaces else "").join(map(str, symbols))


def _have_spaces(texts: Sequence[str]) -> bool:
    """Return whether texts must be split into symbols at white space.

    Raises:
        ValueError: Some texts have white space, but fewer than 5% of the texts with several
            characters.
    """
    longer = [text for text in texts if len(text) > 1]
    spaced = [text for text in longer if any(map(str.isspace, text))]
    if spaced and len(spaced) < _FEW_SPACED * len(longer):
        raise ValueError(
            "RowsTask: expected spaces between symbols in all texts or in none, got "
            f"{len(spaced)} of {len(longer)} texts with a space, such as {spaced[0]!r:.80}; remove "
            "the spaces, or pass lists of symbols"
        )
    return bool(spaced)


def _warn_of_contradictions(pairs: Sequence[tuple[list[Symbol], list[Symbol]]]) -> None:
    """Warn if equal inputs have different answers, which no model can learn."""
    answers: dict[tuple[Symbol, ...], list[Symbol]] = {}
    contradicted = {}
    for given, answer in pairs:
        first = answers.setdefault(tuple(given), answer)
        if first != answer:
            contradicted[tuple(given)] = answer
    if contradicted:
        given, answer = next(iter(contradicted.items()))
        warnings.warn(
            "RowsTask: expected one answer for each input, got inputs with several answers "
            f"({len(contradicted)} in all); {list(given)!r:.60} has {answers[given]!r:.60} and "
            f"{answer!r:.60}",
            stacklevel=3,
        )


def _pair_of(number: str, row: object) -> tuple[Any, Any]:
    """Return a row's input and answer.

    Raises:
        ValueError: The row is not a pair of texts or symbols.
    """
    if isinstance(row, ValueError):
        raise ValueError(f"RowsTask: row {number}: {row}")
    if isinstance(row, Mapping) and {"input", "answer"} <= set(row):
        pair = (row["input"], row["answer"])
    elif isinstance(row, Sequence) and not isinstance(row, str) and len(row) == 2:
        pair = (row[0], row[1])
    else:
        raise ValueError(
            f"RowsTask: row {number} is {row!r:.80}; expected a pair, or the keys 'input' and "
            "'answer'"
        )
    # a newline at the end of a line, or a space after a cell, is not a symbol
    given, answer = (part.strip() if isinstance(part, str) else part for part in pair)
    pair = (given, answer)
    for part in pair:
        is_list = isinstance(part, Sequence)
        if not is_list or not all(type(symbol) in (str, int) for symbol in part):
            raise ValueError(
                f"RowsTask: row {number} has {part!r:.80}; expected a text, or a list of texts or "
                "whole numbers"
            )
    if not given:
        raise ValueError(f"RowsTask: row {number} has an empty input: {pair!r:.80}")
    return pair


def symbols_of(task: Task) -> list[Symbol] | None:
    """Return the symbols of a `RowsTask`, wrapped in `AtTokens` or not; None for any other task."""
    rows = without_layout(task)
    return list(rows.symbols) if isinstance(rows, RowsTask) else None
