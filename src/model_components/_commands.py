"""Command lines: an error is one line, and a stop says whether the work goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable

GOES_ON = "the same command goes on from here"


def run_command(program: str, work: Callable[[], object], *, kept: Callable[[], str] = str) -> int:
    """Do the work of a command.

    Args:
        program: The command's name, with which its error lines begin.
        work: What the command does.
        kept: What to say after a stop about how to go on; empty if nothing was kept.

    Returns:
        The exit status: 1 after an error, 130 after Ctrl-C.
    """
    try:
        work()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"{program}: {str(error).removeprefix(f'{program}: ')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            f"{program}: stopped; {kept() or 'nothing was kept, the same command begins anew'}",
            file=sys.stderr,
        )
        return 130
    return 0
