"""peft's own tests with every LoRA model accelerated: what fails then has to fail with plain peft,
too.

`make test-peers` lays peft's sources beside; tests that want a model of the hub fail both ways: the
hub that they ask is on this machine and has none.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.hub import fake_hub

ROOT = Path(__file__).parents[3]
PEERS = ROOT / "build" / "peers"
FILES = (
    "custom_models mixed lora_variants low_level_api tuners_utils target_parameters "
    "lora_conversion loraplus lorafa"
)
CHOSEN = "(lora or LoRA or Lora or mixed) and not from_state_dict"

PLUGIN = '''"""Every LoRA model goes through `accelerate_lora_`."""

from peft.tuners.lora import LoraModel

from heads.lora import accelerate_lora_

inject = LoraModel.inject_adapter
counts = {"accelerated": 0, "left to peft": 0}


def inject_and_accelerate(self, model, *args, **kwargs):
    result = inject(self, model, *args, **kwargs)
    try:
        report = accelerate_lora_(model)
    except ValueError as error:
        assert "has no LoRA layers" in str(error), error
    else:
        counts["accelerated"] += len(report.accelerated)
        counts["left to peft"] += len(report.skipped)
    return result


LoraModel.inject_adapter = inject_and_accelerate


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"layers: {counts}")
'''

STUB = """__version__ = "0.39.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
"""  # diffusers, which peft's helpers import and the tests chosen here never use


def failures(*options):
    """Names of the tests that fail, and how many passed."""
    folder = PEERS / f"peft-{version('peft')}"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent; `make test-peers` makes it")
    (folder / "tests" / "__init__.py").touch()
    (folder / "peers.ini").write_text("[pytest]\n")
    (PEERS / "stubs" / "diffusers").mkdir(parents=True, exist_ok=True)
    (PEERS / "stubs" / "diffusers" / "__init__.py").write_text(STUB)
    (PEERS / "stubs" / "ours.py").write_text(PLUGIN)
    path = [ROOT / "src", PEERS / "site", PEERS / "stubs"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
    }
    environment["HF_ENDPOINT"] = constants.ENDPOINT
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "peers.ini",
        "--rootdir",
        ".",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, "--tb=no", "-rfE", "-q", *options],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )
    print(done.stdout[-300:])
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    count = re.search(r"(\d+) passed", done.stdout)
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)), int(
        count[1]
    ) if count else 0


@pytest.mark.peers
def test_pefts_own_tests_find_nothing_that_plain_peft_does_not_have(monkeypatch):
    files = [f"tests/test_{name}.py" for name in FILES.split()]
    # that it has nothing is said at once; the real one is asked five times, with pauses
    with fake_hub(monkeypatch):
        failed, passed = failures("-p", "ours", "-n", "2", "-k", CHOSEN, *files)
        assert passed > 4000
        assert failed <= failures(*sorted(failed))[0] if failed else True
