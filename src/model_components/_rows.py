"""Read rows of data, for all packages.

Sources are data sets, data frames, hub ids, parquet files, and JSON, JSON lines, CSV and TSV files,
which may be gzipped.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ._hub import hub_id

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
"""Suffixes of files that hold rows; ``.gz`` may follow any of them except ``.parquet``."""

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # PowerShell's redirection writes UTF-16
_LONGEST_FIELD = 1 << 30  # of a CSV file; some answers exceed Python's default limit of 128 kB
_UNREADABLE = (UnicodeError, gzip.BadGzipFile, zlib.error, EOFError, csv.Error)


def kind_of(path: Path) -> str:
    """Return a file's suffix in lower case, ignoring ``.gz``.

    >>> kind_of(Path("rows.JSONL.gz"))
    '.jsonl'
    """
    name = path.stem if path.suffix.lower() == ".gz" else path.name
    return Path(name).suffix.lower()


def each_row(source: Any, operation: str) -> Iterator[tuple[int, Any]]:
    """Yield each row with its number, counted from 1.

    In JSON lines and CSV files, the number is the line number in the file (of the last line of a
    CSV record). Otherwise, it is the position of the row. A JSON file may hold a list or one value
    per line, regardless of its suffix. A byte order mark is skipped.

    Args:
        source: A path, a hub id that ``datasets`` reads, a ``datasets`` data set, a pandas data
            frame, or any iterable of rows.
        operation: The name that error messages begin with.

    Yields:
        The number and the row. A line that cannot be read yields a `ValueError` with the reason
        instead of a row, so that no line is lost silently.

    Raises:
        ValueError: The file is missing, has an unknown suffix, or cannot be read.
        ImportError: The source needs ``datasets`` or pyarrow, which is not installed.

    >>> list(each_row([{"a": 1}, {"a": 2}], "read"))
    [(1, {'a': 1}), (2, {'a': 2})]
    """
    if hasattr(source, "iterrows"):  # a pandas data frame
        # an empty cell is NaN in a data frame, and None in rows
        source = source.astype(object).where(source.notna(), None).to_dict("records")
    if isinstance(source, Mapping) or not isinstance(source, (str, Path, Iterable)):
        raise ValueError(
            f"{operation}: expected a file, a hub id or rows, got {type(source).__name__}"
        )
    if not isinstance(source, (str, Path)):
        yield from enumerate(source, 1)
        return
    path = Path(source)
    if not path.is_file():
        if kind_of(path) in SUFFIXES or path.suffix.lower() == ".gz" or hub_id(path) is None:
            raise ValueError(f"{operation}: there is no file {path}")
        yield from enumerate(_dataset(operation, str(source)), 1)
    elif path.suffix.lower() == ".parquet":
        yield from enumerate(_parquet_rows(path, operation), 1)
    else:
        yield from _rows_of_file(path, operation)


def read_text(path: Path, operation: str) -> str:
    """Return the text of a file, which may be gzipped.

    The encoding is UTF-8, or UTF-16 if the file begins with a byte order mark of UTF-16.

    Raises:
        ValueError: The file is damaged or in another encoding.
    """
    try:
        with _open_text(path, newline=None) as file:  # newlines of Windows become \n
            return file.read()
    except _UNREADABLE as error:
        raise ValueError(f"{operation}: {path} cannot be read: {error}") from error


@contextlib.contextmanager
def _open_text(path: Path, newline: str | None = "") -> Iterator[IO[str]]:
    opened: Any = gzip.open if path.suffix.lower() == ".gz" else open
    # read as bytes first, because the first two bytes determine the encoding
    with opened(path, "rb") as raw:
        encoding = "utf-16" if raw.peek(2)[:2] in _UTF16 else "utf-8-sig"
        # by default newlines are not translated, because JSON and CSV values may contain them
        with io.TextIOWrapper(raw, encoding=encoding, newline=newline) as file:
            yield file


def _rows_of_file(path: Path, operation: str) -> Iterator[tuple[int, Any]]:
    kind = kind_of(path)
    if kind not in SUFFIXES or kind == ".parquet":  # only .parquet.gz comes here
        raise ValueError(
            f"{operation}: expected a file of type {', '.join(SUFFIXES[:-1])} (or gzipped) or of "
            f"type {SUFFIXES[-1]}, got {path}"
        )
    try:
        with _open_text(path) as file:
            if kind in (".csv", ".tsv"):
                yield from _csv_rows(file, "\t" if kind == ".tsv" else "")
            else:
                yield from _json_rows(file, path, operation)
    except _UNREADABLE as error:
        raise ValueError(f"{operation}: {path} cannot be read: {error}") from error


def _csv_rows(file: IO[str], delimiter: str) -> Iterator[tuple[int, object]]:
    """Yield the rows of a CSV file as dicts; without a delimiter, detect it from the header."""
    csv.field_size_limit(_LONGEST_FIELD)  # a setting of the whole process
    header = file.readline()
    before = 0
    if (
        header.startswith("sep=") and len(header.rstrip("\r\n")) == 5
    ):  # Excel's line that names the separator
        delimiter = delimiter or header[4]
        before = 1
    else:
        file.seek(0)
    # strict, because otherwise a quote that is not closed, or is closed within a field, would hide
    # the next rows
    reader = csv.DictReader(file, delimiter=delimiter or _delimiter_of(header), strict=True)
    names = list(reader.fieldnames or ())
    for name in names:
        if name and names.count(name) > 1:  # Excel may leave empty columns at the end
            raise csv.Error(f"two columns are called {name!r}")
    for row in reader:
        line = before + reader.line_num
        surplus = row.pop(None, None)  # DictReader stores fields without a name under None
        if surplus:
            yield line, ValueError(f"{len(surplus)} more fields than the header")
        else:
            yield line, row


def _delimiter_of(header: str) -> str:
    """Return the delimiter that splits a header into the most columns, or a comma if none does.

    In many countries, Excel writes semicolons.
    """
    return max(",;\t", key=lambda one: len(next(csv.reader([header], delimiter=one), ())))


def _parquet_rows(path: Path, operation: str) -> Iterator[object]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError(
            f"{operation}: reading {path} requires pyarrow; pip install 'model-components[trl]'"
        ) from error
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except ArrowException as error:
        raise ValueError(f"{operation}: {path} cannot be read: {error}") from error


def _json_rows(file: IO[str], path: Path, operation: str) -> Iterator[tuple[int, object]]:
    """Yield the rows of a JSON list, of one JSON value, or of JSON lines."""
    if _holds_lines(file):
        yield from _json_lines(file)
        return
    text = file.read()
    value = _json_or_error(text)
    if isinstance(value, list):
        yield from enumerate(value, 1)
    elif not isinstance(value, ValueError):
        yield 1, value
    elif text.strip():
        raise ValueError(f"{operation}: {path} cannot be read: invalid JSON ({value.__cause__})")


def _holds_lines(file: IO[str]) -> bool:
    """Return whether a file holds JSON lines rather than one value, and rewind the file."""
    filled = (line for line in file if line.strip())
    first = next(filled, "")
    has_more = next(filled, None) is not None
    file.seek(0)
    if not has_more:
        return False
    if not isinstance(_json_or_error(first), ValueError):
        return True
    # the file holds one value over several lines, or JSON lines with a damaged first line
    text = file.read()
    file.seek(0)
    return isinstance(_json_or_error(text), ValueError) and not text.lstrip().startswith("[")


def _json_lines(file: IO[str]) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, _json_or_error(line)


def _json_or_error(text: str) -> object:
    """Return the JSON value of a text, or a `ValueError` with the reason why there is none."""
    try:
        return json.loads(text, parse_constant=_null)  # Python writes NaN, which is not JSON
    except (ValueError, RecursionError) as error:
        # without the position, so that equal errors are counted together
        failure = ValueError(f"invalid JSON ({getattr(error, 'msg', error)})")
        failure.__cause__ = error
        return failure


def _null(constant: str) -> None:
    """Read NaN and infinities, which JSON does not have, as None."""


def _dataset(operation: str, source: str) -> Iterable[object]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{operation}: reading {source} requires datasets; pip install 'model-components[trl]'"
        ) from error
    try:
        return load_dataset(source, split="train")
    except (
        Exception
    ) as error:  # errors of the network, the hub and the data are all reported in this way
        raise ValueError(f"{operation}: {source} cannot be read by datasets: {error}") from error
