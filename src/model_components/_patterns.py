"""Patterns of module names that stand in files of others."""

from __future__ import annotations

import re

_REPEAT = re.compile(r"(?<!\\)[*+{]")
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
_CHOICE = re.compile(r"\([^()]*\|")
_MOST = 4
"""Repeats and choices of a pattern. With so many, a name of 100 letters takes well under a second;
each one more multiplies that by up to 100."""


def check_pattern(pattern: str) -> str:
    r"""Return why a pattern of module names is not taken, or an empty string.

    Matching takes exponential time where a repeat is inside a repeat, such as ``(a+)+``, or where
    there are many of them.

    >>> check_pattern(r"model\.layers\.\d+\..*(q_proj|v_proj)"), check_pattern("(a+)+b")
    ('', 'it repeats a group, for which matching may take for ever')
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"it is no pattern ({error})"
    if _REPEATED_GROUP.search(pattern):
        return "it repeats a group, for which matching may take for ever"
    for kind, found in (("repeats", _REPEAT), ("choices", _CHOICE)):
        if len(found.findall(pattern)) > _MOST:
            return f"it has more than {_MOST} {kind}, for which matching may take for ever"
    return ""
