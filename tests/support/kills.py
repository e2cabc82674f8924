"""Kill a process at a chosen change of files, so that a test depends on counts and not on time."""

import os
import signal
import subprocess
import sys

# An audit hook sees every file that Python opens, renames or removes.
KILLS = """
import os, signal, sys
_root, _at, _seen = os.environ["KILL_UNDER"], int(os.environ["KILL_AT"]), 0
_CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")

def _hook(event, arguments):
    global _seen
    if event in _CHANGES and isinstance(arguments[0], str) and arguments[0].startswith(_root):
        _seen += 1
        if _seen == _at:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(_hook)
import atexit
atexit.register(lambda: print("changes:", _seen))
"""


def run_killed(arguments, under, at):
    """Run Python code that has `KILLS` in it; kill it before its change number ``at`` of a file.

    Args:
        arguments: The code, then its own arguments.
        under: Only what happens in this folder counts.
        at: 0: run to the end.

    Returns:
        How many changes there were; None where it was killed.
    """
    environment = {**os.environ, "KILL_UNDER": str(under), "KILL_AT": str(at)}
    command = [sys.executable, "-c", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return int(done.stdout.rpartition("changes: ")[2])
