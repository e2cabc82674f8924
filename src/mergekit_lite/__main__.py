"""The ``mergekit-lite`` command: ``merge RECIPE OUT`` and ``plan RECIPE``.

Both subcommands also accept mergekit's flags.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from model_components import _cli

from ._mergekit_flags import translate

_COMMANDS = {"merge": "mergekit_lite._cli:merge", "plan": "mergekit_lite._cli:plan"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # a slice, because the list may be empty
    if words[:1] in (["merge"], ["plan"]):
        rest, notes = translate(words[1:], plan=words[0] == "plan")
        words = [words[0], *rest]
        for note in notes:
            print(f"mergekit-lite: {note}", file=sys.stderr)
    return _cli.main(words, program="mergekit-lite", commands=_COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
