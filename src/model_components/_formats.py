"""Files that this library wrote: their format's version, and one error for what is damaged."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from ._version import __version__

_PACKAGES = ("model_components", "mergekit_lite", "kronecker", "thinker", "heads")


def stamp(version: int) -> dict[str, Any]:
    """Return what a file says of its format: its version, and that of the library.

    >>> sorted(stamp(1))
    ['format_version', 'made_with']
    """
    return {"format_version": version, "made_with": __version__}


def check_format(found: Mapping[str, Any], newest: int, operation: str) -> None:
    """Check that this library can read a file's format.

    Args:
        found: The file's fields. The version may be a number or text; if it is absent, it is 1.
        newest: The newest format version that this library reads.
        operation: The beginning of the error message: the operation and the file.

    Raises:
        ValueError: The version is newer than ``newest``, or is not a positive whole number.

    >>> check_format({"format_version": 2, "made_with": "0.3.0"}, 1, "load: a.json")
    Traceback (most recent call last):
    ValueError: load: a.json: expected format 1, got 2; pip install "model-components>=0.3.0"
    """
    if not isinstance(found, Mapping):
        raise ValueError(f"{operation}: expected a JSON object, got a {type(found).__name__}")
    # a number in JSON; the metadata of safetensors hold only text
    version = str(found.get("format_version", 1))
    # nine digits at most, since `int` has an error of its own for thousands of them
    if not re.fullmatch("[1-9][0-9]{0,8}", version) or int(version) > newest:
        expected = "1" if newest == 1 else f"1 to {newest}"
        made_with = found.get("made_with")
        advice = "the file needs a newer model-components, or is damaged"
        # a file of this very version needs no newer one: it is damaged
        if made_with not in (None, __version__):
            advice = f'pip install "model-components>={made_with}"'
        raise ValueError(f"{operation}: expected format {expected}, got {version}; {advice}")


@contextlib.contextmanager
def reading(path: object, operation: str) -> Iterator[None]:
    """Turn whatever reading a file raises into one error that names the file.

    A person may have edited it, and a full disk may have cut it. The block should do nothing but
    read, since what else fails in it is told as a fault of the file.

    Args:
        path: The file, folder or hub id.
        operation: The name that the error message begins with.

    Raises:
        ValueError: It cannot be read. A ValueError that this library raised passes unchanged, and
            so do errors of a missing library and of memory that runs out.

    >>> with reading("run.json", "load"):
    ...     {}["steps"]
    Traceback (most recent call last):
    ValueError: load: run.json cannot be read (KeyError: 'steps')
    """
    try:
        yield
    except Exception as error:  # torch, safetensors and transformers raise classes of many kinds
        if isinstance(error, ValueError) and _is_our_error(error):
            raise
        # torch has an OutOfMemoryError of its own
        if isinstance(error, (ImportError, MemoryError)) or "OutOfMemory" in type(error).__name__:
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"{operation}: {path} cannot be read ({reason})") from error


def _is_our_error(error: Exception) -> bool:
    """Return whether code of this library raised an error, and not what it called."""
    frames = list(traceback.walk_tb(error.__traceback__))
    module = frames[-1][0].f_globals.get("__name__", "")
    return module.partition(".")[0] in _PACKAGES
