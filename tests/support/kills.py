"""Kill a process at a chosen file operation, so that a test depends on counts and not on time."""

import os
import signal
import subprocess
import sys

# An audit hook sees every file that Python opens, renames or removes, not what compiled code does.
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
    """Run Python code that contains `KILLS`; kill it just before one of its file operations.

    Args:
        arguments: The code, then its own arguments.
        under: Only operations in this folder count.
        at: The operation to stop at, counted from 1; 0 never kills.

    Returns:
        The number of operations, or None if the process was killed.
    """
    environment = {**os.environ, "KILL_UNDER": str(under), "KILL_AT": str(at)}
    command = [sys.executable, "-c", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return int(done.stdout.rpartition("changes: ")[2])
