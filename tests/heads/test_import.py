"""What importing costs."""

import subprocess
import sys

import pytest

LEAN = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1:]:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
"""


def imported(name, *blocked):
    done = subprocess.run(
        [sys.executable, "-c", LEAN + f"import {name}", *blocked], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_heads_needs_nothing():
    imported("heads", "torch", "transformers", "peft", "triton", "matplotlib", "datasets")


@pytest.mark.parametrize("name", ["lora", "pairwise"])
def test_heads_load_no_kernels_plots_or_datasets_of_their_own(name):
    code = (
        "import sys, peft; from transformers import Trainer; before = set(sys.modules)\n"
        f"import heads.{name}\n"
        "print({name.split('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"triton", "matplotlib", "datasets"} & eval(done.stdout)
