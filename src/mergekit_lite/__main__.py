"""``mergekit-lite merge RECIPE OUT``, ``mergekit-lite plan RECIPE``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from model_components import _cli

_COMMANDS = {"merge": "mergekit_lite._cli:merge", "plan": "mergekit_lite._cli:plan"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    return _cli.main(arguments, program="mergekit-lite", commands=_COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
