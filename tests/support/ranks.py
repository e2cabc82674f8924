"""Code that two processes of one machine run together, as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path

_HEAD = (
    "import os, sys, torch\nimport torch.distributed as dist\nout, cases = sys.argv[1], "
    "sys.argv[2:]\n"
)
# After the barrier: gloo's threads can abort a process that takes itself down.
_TAIL = "\nif dist.is_initialized():\n    dist.barrier()\n    os._exit(0)\n"


def in_two_processes(code: str, folder: Path, *cases: object) -> Path:
    """Run ``code``, which knows ``out``, a folder, and ``cases``, in two processes with gloo;
    returns the folder."""
    folder.mkdir(exist_ok=True)
    script = folder / "rank.py"
    script.write_text(_HEAD + code + _TAIL)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *(p for p in sys.path if p)])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
    ]
    command += [str(folder), *map(str, cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder
