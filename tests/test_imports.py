"""What importing loads, in fresh processes: the layers load torch and nothing heavier."""

import ast
import json
import subprocess
import sys

import pytest

# One process imports what all statements may load, and forks for each of them.
FORKS = """
import json, os, sys
exec(sys.argv[1])
for statement in sys.argv[2:]:
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


def loaded(first, *statements):
    """Return the top-level packages that each statement loads beyond what the first one does."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, first, *statements], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def strangers(packages):
    return packages - OURS - set(sys.stdlib_module_names)


def test_packages_load_nothing_until_a_name_is_asked_for():
    names = ["heads.lora", "heads.pairwise", "kronecker", "mergekit_lite.masks", "thinker"]
    for packages in loaded("import sys", *(f"import {name}" for name in names)):
        assert strangers(packages) <= {"lazy_loader"}


def test_layers_load_torch_and_nothing_heavier():
    layers = [
        "from kronecker import KroneckerLinear, LowRankLinear, KroneckerEmbedding",
        "from mergekit_lite.masks import MaskedLinear, MaskedEmbedding",
        "from heads.pairwise import PairwiseHead",
    ]
    for statement, packages in zip(layers, loaded("import torch", *layers), strict=True):
        assert strangers(packages) <= {"einops", "lazy_loader"}, statement
        assert packages & OURS, statement


def test_layers_and_one_use_load_no_transformers():
    uses = [
        "import torch\nfrom kronecker import KroneckerConfig, KroneckerLinear\n"
        "linear = torch.nn.Linear(4, 6)\n"
        "layer = KroneckerLinear.from_linear(linear, KroneckerConfig(b_shape=(2, 1), init='van_loan'))\n"
        "layer(torch.ones(2, 4)).sum().backward()\nlayer.to_linear()",
        "import torch\nfrom mergekit_lite.masks import MaskConfig, MaskedLinear\n"
        "layer = MaskedLinear([torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)], MaskConfig())\n"
        "layer(torch.ones(2, 4)).sum().backward()",
        "import torch\nfrom heads.pairwise import PairwiseHead\n"
        "PairwiseHead(4)(torch.ones(2, 4), torch.ones(2, 4)).sum().backward()",
    ]
    for statement, packages in zip(uses, loaded("import torch", *uses), strict=True):
        assert not {"transformers", "peft", "accelerate"} & packages, statement


@pytest.mark.parametrize(
    ("base", "layer"),
    [
        ("from peft.tuners import lora", "from heads.lora import LoraLinear"),
        ("from transformers import PreTrainedModel", "from thinker import LatentThinker"),
    ],
)
def test_layers_on_a_base_class_load_what_it_does(base, layer):
    """LoraLinear is a layer of peft's, LatentThinker a `PreTrainedModel`."""
    (packages,) = loaded(base, layer)
    assert strangers(packages) <= {"lazy_loader"}


def test_training_loads_no_kernels_plots_or_datasets():
    trained = [
        "import heads.lora; [getattr(heads.lora, name) for name in heads.lora.__all__]",
        "import heads.pairwise; [getattr(heads.pairwise, name) for name in heads.pairwise.__all__]",
        "import kronecker; [getattr(kronecker, name) for name in kronecker.__all__]",
        "import mergekit_lite.masks as m; [getattr(m, name) for name in m.__all__]",
        "import thinker; [getattr(thinker, name) for name in thinker.__all__]",
    ]
    all_loaded = loaded("import peft; from transformers import Trainer", *trained)
    for statement, packages in zip(trained, all_loaded, strict=True):
        assert not {"triton", "matplotlib", "datasets"} & packages, statement


def test_kronecker_and_thinker_run_where_optional_packages_are_missing():
    missing = (
        "import sys\n"
        "for name in ('triton', 'peft', 'matplotlib', 'datasets', 'tltorch'):\n"
        "    sys.modules[name] = None  # as if it were not installed\n"
        "import torch"
    )
    loaded(
        missing,
        "import torch, kronecker\n"
        "kronecker.kron_linear(torch.ones(1, 4), torch.ones(1, 2, 2), torch.ones(1, 1, 2))",
        "import torch, thinker\n"
        "model = thinker.LatentThinker(thinker.ThinkerConfig(vocab_size=4))\n"
        "model(torch.ones(1, 2, dtype=torch.long))",
    )


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
