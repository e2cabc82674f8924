"""The version of a file's format, so that an older library refuses a newer file by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ._version import __version__


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
    version = str(found.get("format_version", 1))
    if not re.fullmatch("[1-9][0-9]{0,8}", version) or int(version) > newest:
        expected = "1" if newest == 1 else f"1 to {newest}"
        made_with = found.get("made_with")
        advice = "the file needs a newer model-components, or is damaged"
        if made_with not in (None, __version__):
            advice = f'pip install "model-components>={made_with}"'
        raise ValueError(f"{operation}: expected format {expected}, got {version}; {advice}")
