"""Run scripts in forks of one process that has imported torch and the packages already.

Importing them takes longer than most examples with ``--smoke`` do.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# Each request is a line: `run_script`'s arguments, and the environment of each process that is to run
# it. The answer is the first exit status that is not 0, when the others have ended or were killed.
_SERVER = """
import json, os, runpy, signal, sys
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot, peft, torch, transformers, trl, yaml
import heads.lora, heads.pairwise, kronecker, mergekit_lite, mergekit_lite.masks, thinker
from transformers import AutoModelForCausalLM, AutoTokenizer, BertModel, LlamaForCausalLM, Trainer

def run(script, arguments, folder, absent, out, errors):
    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    for name in absent:
        loaded = [one for one in sys.modules if one.startswith(name + ".")]
        sys.modules.update(dict.fromkeys([name, *loaded]))
    runpy.run_path(script, run_name="__main__")

def serve():
    print("ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        *request, environments = json.loads(line)
        children = set()
        for environment in environments:
            child = os.fork()
            if not child:
                signal.alarm(600)  # a script that hangs ends
                os.environ.clear()
                os.environ.update(environment)
                return run(*request)
            children.add(child)
        failed = 0
        while children:
            child, status = os.wait()
            children.remove(child)
            if status and not failed:
                failed = os.waitstatus_to_exitcode(status)
                for other in children:
                    os.kill(other, signal.SIGKILL)
        print(failed, flush=True)

serve()
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
        answer = self.process.stdout.readline()
        assert answer, "the process that runs scripts has ended; its errors are above"
        return int(answer)


_SERVER_OF_WORKER = _Server()


def run_script(
    script: Path,
    *arguments: object,
    cwd: Path | None = None,
    absent: Sequence[str] = (),
    environments: Sequence[Mapping[str, str]] = ({},),
) -> subprocess.CompletedProcess[str]:
    """Run a script with arguments, in one process for each of ``environments``, all at once.

    Args:
        script: Its path.
        *arguments: Its arguments.
        cwd: Where it runs; default: here.
        absent: Modules that it cannot import.
        environments: What each process has in its environment beyond this one's.
    """
    with tempfile.TemporaryDirectory() as folder:
        printed = [str(Path(folder, name)) for name in ("out", "errors")]
        request = [str(script), [str(a) for a in arguments], str(cwd or Path.cwd()), [*absent]]
        each = [{**os.environ, "OMP_NUM_THREADS": "1", **more} for more in environments]
        status = _SERVER_OF_WORKER.answer([*request, *printed, each])
        out, errors = (Path(path).read_text(encoding="utf-8") for path in printed)
    return subprocess.CompletedProcess([str(script)], status, out, errors)
