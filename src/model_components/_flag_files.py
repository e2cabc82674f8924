"""Read flags from a YAML file, for ``--config``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ._checks import refuse_unknown

_YAML_WORDS = {
    "bool": re.compile("(true|True|TRUE|false|False|FALSE)$"),
    "null": re.compile("(~|null|Null|NULL|)$"),
}
"""Unquoted words in a flag file that are not read as text.

Numbers are read as text, because YAML would read 010 as 8.
"""


class FlagFileError(ValueError):
    """An error for a ``--config`` file that cannot be read, or that sets an unknown flag."""


def flags_of_file(path: Path, known: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return the flags in a YAML file as words of a command line.

    Args:
        path: The file.
        known: Names of the command's flags.
        given: The words of the command line, whose flags override the file's.

    Raises:
        FlagFileError: The file cannot be read, or has a flag that the command does not have.
    """
    values = read_flags(path)
    try:
        refuse_unknown(f"--config {path}", [str(n).replace("-", "_") for n in values], known)
    except ValueError as error:
        raise FlagFileError(error) from error
    return words_of(values, given)


def read_flags(path: Path) -> Mapping[object, object]:
    """Return the names and values in a YAML file of flags.

    Raises:
        FlagFileError: The file cannot be read, or is not a YAML mapping.
    """
    from . import _yaml  # imported only if a file is given

    class Loader(_yaml.Loader):
        """A loader that reads true, false and null as values, and every other word as text."""

    # removes YAML's own rules, which turn 1:30 into a number and 2024-12-13 into a date
    Loader.yaml_implicit_resolvers = {}
    for kind, words in _YAML_WORDS.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", words, None)
    try:
        return _yaml.read_mapping(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise FlagFileError(f"--config: {path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise FlagFileError(
            f"--config: expected a YAML mapping of flags to values in {path}: {error}"
        ) from error


def words_of(values: Mapping[object, object], given: Sequence[str]) -> list[str]:
    """Return flags and values as words of a command line.

    Args:
        values: The value of each flag by name, as in a flag file.
        given: The words of the command line, whose flags override the file's.

    >>> words_of({"keep": 0.5, "layers": ["a", "b"], "progress": False}, ["--keep=0.3"])
    ['--layers', 'a', 'b', '--no-progress']
    """
    overridden = {_setting_of(word) for word in given if word.startswith("--")}
    words = []
    for name, value in values.items():
        flag = str(name).replace("_", "-")
        if flag in overridden or value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(_word_of, value)]
        elif isinstance(value, Mapping):
            pairs = [f"{key}={_word_of(inner)}" for key, inner in value.items()]
            words += [f"--{flag}", *pairs]
        else:
            words.append(f"--{flag}={value}")  # one word, because the value may begin with a dash
    return words


def _word_of(value: object) -> str:
    """Return a value in the spelling of YAML: true and null, not True and None."""
    return value if isinstance(value, str) else json.dumps(value)


def _setting_of(word: str) -> str:
    """Return the name of the setting of a flag, without leading dashes, ``no-`` and the value.

    >>> _setting_of("--no-save_others"), _setting_of("--keep=0.5")
    ('save-others', 'keep')
    """
    name = word.partition("=")[0].removeprefix("--").replace("_", "-")
    return name.removeprefix("no-")
