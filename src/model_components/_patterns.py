"""Check regular expressions in files that users download."""

from __future__ import annotations

import re

_REPEAT = re.compile(r"(?<!\\)[*+{]")
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
_CHOICE = re.compile(r"\([^()]*\|")
_MOST = 4
"""Repeats, and as many choices, of a pattern. A name of 100 letters then takes well under a second;
each one more multiplies that by up to 100."""


def pattern_problem(pattern: str) -> str:
    r"""Return why a pattern of module names is not taken, or an empty string.

    Matching takes exponential time where a repeat is inside a repeat, such as ``(a+)+``, or where
    there are many of them.

    >>> pattern_problem(r"model\.layers\.\d+\..*(q_proj|v_proj)"), pattern_problem("(a+)+b")
    ('', 'it repeats a group, for which matching may never end')
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"it is no regular expression ({error})"
    if _REPEATED_GROUP.search(pattern):
        return "it repeats a group, for which matching may never end"
    for kind, found in (("repeats", _REPEAT), ("choices", _CHOICE)):
        if len(found.findall(pattern)) > _MOST:
            return f"it has more than {_MOST} {kind}, for which matching may never end"
    return ""
