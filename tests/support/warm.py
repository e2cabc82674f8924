"""Run scripts in forks of one process that has imported torch and the packages already.

Importing them takes longer than most examples with ``--smoke`` do.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Each request is a line: a script, its arguments, a folder to run in, modules that are absent, and
# files for what it prints. The answer is its exit status.
_SERVER = """
import json, os, runpy, sys
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot, peft, torch, transformers, trl, yaml
import heads.lora, heads.pairwise, kronecker, mergekit_lite, mergekit_lite.masks, thinker
from transformers import AutoModelForCausalLM, AutoTokenizer, BertModel, LlamaForCausalLM, Trainer

def run(script, arguments, folder, absent, out, errors):
    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    sys.modules.update(dict.fromkeys(absent))
    runpy.run_path(script, run_name="__main__")

print("ready", flush=True)
while line := sys.stdin.readline():
    child = os.fork()
    if not child:
        run(*json.loads(line))
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class _Server:
    """The process that forks; one for each of pytest's workers, begun when it is first needed."""

    process: subprocess.Popen[str] | None = None

    def answer(self, request: list[object]) -> int:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            atexit.register(self.process.kill)
            assert self.process.stdout.readline() == "ready\n"
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


_SERVER_OF_WORKER = _Server()


def run_script(
    script: Path, *arguments: object, cwd: Path | None = None, absent: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a script with arguments; ``absent`` names modules that it cannot import."""
    with tempfile.TemporaryDirectory() as folder:
        printed = [str(Path(folder, name)) for name in ("out", "errors")]
        request = [str(script), [str(a) for a in arguments], str(cwd or Path.cwd()), absent]
        status = _SERVER_OF_WORKER.answer([*request, *printed])
        out, errors = (Path(path).read_text(encoding="utf-8") for path in printed)
    return subprocess.CompletedProcess([str(script)], status, out, errors)
