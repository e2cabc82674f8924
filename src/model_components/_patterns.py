"""Check regular expressions in files that users download."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection

# plain names, as most users write them; without repetition operators, matching is fast
_PLAIN = re.compile(r"[\w.-]*")
_SECONDS = 5
"""The time limit. Ordinary patterns take milliseconds; malicious ones can take years."""
_MATCH_ALL = r"""
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    try:
        # the three ways in which peft uses patterns
        forms = (pattern, rf"(.*\.)?({pattern})$", rf".*\.{pattern}\.(\d+)\.")
        forms = [re.compile(form) for form in forms]
    except Exception as error:
        sys.exit(f"{pattern!r} is not a valid regular expression ({error})")
    for name in names:
        for form in forms:
            form.match(name)
            form.fullmatch(name)
"""


def pattern_problem(patterns: Collection[str], names: Collection[str]) -> str:
    r"""Return why patterns of module names are rejected, or an empty string if they are accepted.

    With nested repeats, such as ``(a+)+``, or with many repeats, matching may take forever and
    cannot be interrupted. The patterns are therefore tried in another process, which can be ended.

    Args:
        patterns: The patterns.
        names: The module names to match.

    >>> pattern_problem([r"layers\.\d+\..*proj", "q_proj"], ["layers.0.q_proj"])
    ''
    >>> pattern_problem(["(q"], ["layers.0.q_proj"])
    "'(q' is not a valid regular expression (missing ), unterminated subpattern at position 0)"
    """
    special = [pattern for pattern in patterns if not _PLAIN.fullmatch(pattern)]
    if not special:
        return ""
    try:
        done = subprocess.run(
            # -I, so that a json.py in the current folder is not imported
            [sys.executable, "-I", "-c", _MATCH_ALL],
            input=json.dumps([special, list(names)]),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"matching {', '.join(special)[:200]!r} takes longer than {_SECONDS} seconds"
    # the last line is the text of sys.exit, or the error that ended the process
    return done.stderr.strip().split("\n")[-1] if done.returncode else ""
