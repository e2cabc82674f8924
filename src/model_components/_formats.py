"""Check the format version of files, and report damaged files with one kind of error."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from ._version import __version__

_PACKAGES = ("model_components", "mergekit_lite", "kronecker", "thinker", "heads")


def stamp(version: int) -> dict[str, Any]:
    """Return the fields that record a file's format version and the library's version.

    >>> sorted(stamp(1))
    ['format_version', 'made_with']
    """
    return {"format_version": version, "made_with": __version__}


def check_format(found: Mapping[str, Any], newest: int, operation: str) -> None:
    """Check that this library can read a file's format.

    Args:
        found: The file's fields. The format version may be a number or text; the default is 1.
        newest: The newest format version that this library reads.
        operation: The beginning of the error message: the operation and the file.

    Raises:
        ValueError: ``found`` is not a mapping, or its version is newer than ``newest`` or not a
            positive whole number.

    >>> check_format({"format_version": 2, "made_with": "0.3.0"}, 1, "load: a.json")
    Traceback (most recent call last):
    ValueError: load: a.json: expected format 1, got 2; pip install "model-components>=0.3.0"
    """
    if not isinstance(found, Mapping):
        raise ValueError(f"{operation}: expected a JSON object, got a {type(found).__name__}")
    # the version is a number in JSON, and text in the metadata of safetensors
    version = str(found.get("format_version", 1))
    # nine digits at most, because `int` raises a different error for thousands of digits
    if not re.fullmatch("[1-9][0-9]{0,8}", version) or int(version) > newest:
        expected = "1" if newest == 1 else f"1 to {newest}"
        made_with = found.get("made_with")
        advice = "the file needs a newer model-components, or is damaged"
        # a file that this version of the library wrote needs no newer one: the file is damaged
        if made_with not in (None, __version__):
            advice = f'pip install "model-components>={made_with}"'
        raise ValueError(f"{operation}: expected format {expected}, got {version}; {advice}")


@contextlib.contextmanager
def reading(path: object, operation: str) -> Iterator[None]:
    """Turn any error in reading a file into a ValueError that names the file.

    Somebody may have edited the file, or a full disk may have cut it short. The block should only
    read, because its other errors would also be reported as faults of the file.

    Args:
        path: The file, folder or hub id.
        operation: The name that the error message begins with.

    Raises:
        ValueError: The file cannot be read. A ValueError that this library raised passes unchanged,
            and so do import errors and out-of-memory errors.

    >>> with reading("run.json", "load"):
    ...     {}["steps"]
    Traceback (most recent call last):
    ValueError: load: run.json cannot be read (KeyError: 'steps')
    """
    try:
        yield
    except Exception as error:  # torch, safetensors and transformers raise errors of many classes
        if isinstance(error, ValueError) and _is_our_error(error):
            raise
        # torch defines its own OutOfMemoryError
        if isinstance(error, (ImportError, MemoryError)) or "OutOfMemory" in type(error).__name__:
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"{operation}: {path} cannot be read ({reason})") from error


def _is_our_error(error: Exception) -> bool:
    """Return whether this library raised an error, rather than a library that it called."""
    frames = list(traceback.walk_tb(error.__traceback__))
    module = frames[-1][0].f_globals.get("__name__", "")
    return module.partition(".")[0] in _PACKAGES
