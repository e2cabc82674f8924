"""Code that two processes of one machine run together, with what torchrun tells them."""

import os
import socket
import sys
from pathlib import Path

from tests.support.warm import run_script

_HEAD = (
    "import os, sys, torch\nimport torch.distributed as dist\nout, cases = sys.argv[1], "
    "sys.argv[2:]\n"
)
# After the barrier: gloo's threads can abort a process that takes itself down.
_TAIL = "\nif dist.is_initialized():\n    dist.barrier()\n    os._exit(0)\n"


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def in_two_processes(code: str, folder: Path, *cases: object) -> Path:
    """Run ``code``, which knows ``out``, a folder, and ``cases``, in two processes with gloo;
    returns the folder."""
    folder.mkdir(exist_ok=True)
    script = folder / "rank.py"
    script.write_text(
        f"import sys\nsys.path[:0] = {[os.getcwd(), *sys.path]}\n{_HEAD}{code}{_TAIL}"
    )
    told = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    ranks = [told | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    done = run_script(script, folder, *cases, environments=ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder
