"""What importing loads, in fresh processes: the layers load torch and nothing heavier."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

# One process runs the first statement of each group, which imports what the others of the group
# may load, and forks for each of these.
FORKS = """
import json, os, sys
for first, *statements in json.loads(sys.argv[1]):
    exec(first)
    for statement in statements:
        sys.stdout.flush()
        if not os.fork():
            before = {name.split(".")[0] for name in sys.modules}
            exec(statement)
            after = {name.split(".")[0] for name in sys.modules}
            print(json.dumps(sorted(after - before)), flush=True)
            os._exit(0)
        if os.wait()[1]:
            sys.exit(f"it failed: {statement}")
"""
OURS = {"heads", "kronecker", "mergekit_lite", "model_components", "thinker"}


def loaded(*groups):
    """Return the top-level packages that each statement loads beyond what the first of its group
    and of earlier groups do."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps(groups)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def strangers(packages):
    return packages - OURS - set(sys.stdlib_module_names)


def test_packages_load_nothing_until_a_name_is_asked_for():
    names = ["heads.lora", "heads.pairwise", "kronecker", "mergekit_lite.masks", "thinker"]
    for packages in loaded(["import sys", *(f"import {name}" for name in names)]):
        assert strangers(packages) <= {"lazy_loader"}


def test_layers_load_torch_and_nothing_heavier():
    layers = [
        "from kronecker import KroneckerLinear, LowRankLinear, LowRankEmbedding",
        "from mergekit_lite.masks import MaskedEmbedding, MaskedLayer",
        "from heads.pairwise import PairwiseHead",
    ]
    for statement, packages in zip(layers, loaded(["import torch", *layers]), strict=True):
        assert strangers(packages) <= {"einops", "lazy_loader"}, statement
        assert packages & OURS, statement


def test_layers_and_one_use_load_no_transformers():
    uses = [
        "import torch\nfrom kronecker import KroneckerLinear\n"
        "linear = torch.nn.Linear(4, 6)\n"
        "layer = KroneckerLinear.from_linear(linear, b_shape=(2, 1))\n"
        "layer(torch.ones(2, 4)).sum().backward()\nlayer.to_linear()",
        "import torch\nfrom mergekit_lite import AccurateMaskedLinear\n"
        "layer = AccurateMaskedLinear([torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)])\n"
        "layer(torch.ones(2, 4)).sum().backward()",
        "import torch\nfrom heads.pairwise import PairwiseHead\n"
        "PairwiseHead(4)(torch.ones(2, 4), torch.ones(2, 4)).sum().backward()",
    ]
    for statement, packages in zip(uses, loaded(["import torch", *uses]), strict=True):
        assert not {"transformers", "peft", "accelerate"} & packages, statement


def test_training_loads_what_its_base_classes_do_and_no_kernels_plots_or_datasets():
    """LatentThinker is a `PreTrainedModel`, LoraLinear a layer of peft's."""
    trained = [
        "import heads.lora; [getattr(heads.lora, name) for name in heads.lora.__all__]",
        "import heads.pairwise; [getattr(heads.pairwise, name) for name in heads.pairwise.__all__]",
        "import kronecker; [getattr(kronecker, name) for name in kronecker.__all__]",
        "import mergekit_lite.masks as m; [getattr(m, name) for name in m.__all__]",
        "import thinker; [getattr(thinker, name) for name in thinker.__all__]",
    ]
    model, layer, *rest = loaded(
        [
            "from transformers import AutoConfig, AutoModel, PreTrainedModel",
            "from thinker import LatentThinker",
        ],
        ["from peft.tuners import lora", "from heads.lora import LoraLinear"],
        ["import peft; from transformers import Trainer", *trained],
    )
    for packages in (model, layer):
        assert strangers(packages) <= {"lazy_loader"}
    for statement, packages in zip(trained, rest, strict=True):
        assert not {"triton", "matplotlib", "datasets"} & packages, statement


def test_kronecker_and_thinker_run_where_optional_packages_are_missing():
    missing = (
        "import sys\n"
        "for name in ('triton', 'peft', 'matplotlib', 'datasets', 'tltorch'):\n"
        "    sys.modules[name] = None  # as if it were not installed\n"
        "import torch"
    )
    kronecker = (
        "import torch, kronecker\n"
        "kronecker.kron_linear(torch.ones(1, 4), torch.ones(1, 2, 2), torch.ones(1, 1, 2))"
    )
    thinker = (
        "import torch, thinker\n"
        "model = thinker.LatentThinker(thinker.ThinkerConfig(vocab_size=4))\n"
        "model(torch.ones(1, 2, dtype=torch.long))"
    )
    loaded([missing, kronecker, thinker])


def test_help_of_every_command_loads_no_torch():
    code = """
import contextlib, importlib.metadata, os, sys
from model_components._cli import GROUP, main
commands = sorted(entry.name.split(".") for entry in importlib.metadata.entry_points(group=GROUP))
for words in ([], ["doctor"], *commands):
    with contextlib.redirect_stdout(open(os.devnull, "w")), contextlib.suppress(SystemExit):
        main([*words, "--help"])
print(len(commands), sorted({name.split(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, names = done.stdout.split(" ", 1)
    assert int(count) >= 16
    assert not {"torch", "transformers", "numba", "peft"} & set(ast.literal_eval(names))


# Packages of others come first: they would see a system that is neither.
WINDOWS = """
import fcntl as real, os, sys, types
import numba, peft, psutil, torch, transformers
from transformers import PreTrainedModel, Trainer

def locking(descriptor, mode, count):
    real.flock(descriptor, real.LOCK_EX | real.LOCK_NB)

sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
for name in ("fcntl", "resource"):
    sys.modules[name] = None
for name in ("O_DIRECTORY", "O_NOFOLLOW", "geteuid", "sched_getaffinity", "posix_fadvise"):
    delattr(os, name)
"""


def test_packages_work_without_what_windows_lacks(tmp_path):
    """Merge, stop, resume and prune in a process from which POSIX modules were removed."""
    code = (
        WINDOWS
        + """
import torch, transformers
import heads.lora, heads.pairwise, kronecker, mergekit_lite, mergekit_lite.masks, thinker
from model_components._folders import NewFolder, OutputError, is_begun
from model_components._locks import FolderLock
assert FolderLock.__name__ == "WindowsLock"
from tests.support.models import save, tiny

models = [save(tiny("llama", seed), f"model{seed}") for seed in range(2)]
report = mergekit_lite.merge_models(models, "linear", weight=0.5, out="merged", progress=False)
assert report.peak_memory > 1_000_000
assert sorted(os.listdir()) == ["merged", "model0", "model1"]

os.mkdir("empty")
with NewFolder("empty", "write") as new:  # onto an empty folder
    (new.folder / "part").write_text("x")
assert os.listdir("empty") == ["part"]

held = NewFolder("out", "write", resumable=True).open()
(held.folder / "part").write_text("x")
try:
    NewFolder("out", "write", resumable=True).open()
except OutputError as error:
    assert "another run is writing to it now" in str(error)
else:
    raise AssertionError("two runs have one folder")
held.close()  # as a kill does
assert is_begun("out")
with NewFolder("out", "write", resumable=True) as again:
    assert (again.folder / "part").read_text() == "x"
assert os.listdir("out") == ["part"]

os.mkdir(".other.partial")
open(".other.partial/thesis", "w").close()
try:
    NewFolder("other", "write").open()
except OutputError as error:
    assert "not made by model-components" in str(error)
else:
    raise AssertionError("a folder that is not ours was taken")
assert os.listdir(".other.partial") == ["thesis"]

model = tiny("llama")
batches = [torch.randint(3, 90, (4, 8))]
kronecker.prune_(model, kronecker.PruneConfig(), calibration=batches, progress=False)
kronecker.convert_(model, kronecker.LowRankConfig(keep=0.5), calibration=batches, progress=False)
kronecker.save_pretrained(model, "small")
kronecker.from_pretrained("small")
"""
    )
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join([root, *(path for path in sys.path if path)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


def test_two_threads_may_use_names_for_the_first_time_at_once(tmp_path):
    code = """
import threading
import heads.lora, kronecker

names = [(kronecker, "prune_"), (heads.lora, "merge_lora"), (kronecker, "KroneckerTrainer")]
start = threading.Barrier(len(names))
errors = []

def first_use(package, name):
    start.wait()
    try:
        getattr(package, name)
    except ImportError as error:
        errors.append(error)

threads = [threading.Thread(target=first_use, args=pair) for pair in names]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
