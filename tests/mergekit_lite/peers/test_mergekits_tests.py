"""mergekit's own tests of merges, with its `run_merge` replaced by our `merge_models`.

`make test-peers` unpacks mergekit's sdist, which lacks the tests' helpers: `HELPERS` has them.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PEERS = ROOT / "build" / "peers"
FILES = "basic_merges chat_template embedding_truncation merge_dtypes tokenizer vocabulary_axis"
MERGES = 66  # tests of these files that reach a merge

HELPERS = '''"""Models and checks that mergekit's tests import."""

import os
import tempfile

import torch
from mergekit.architecture import arch_info_for_config, get_architecture_info
from mergekit.io.lazy_tensor_loader import ShardedTensorIndex
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def saved(model, path):
    model.save_pretrained(path)
    return str(path)


def make_picollama(path, vocab_size=64):
    config = LlamaConfig(vocab_size=vocab_size, num_attention_heads=16, **SIZES)
    return saved(LlamaForCausalLM(config), path)


def make_picogranite(path, vocab_size=64):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return saved(GraniteForCausalLM(GraniteConfig(vocab_size=vocab_size, **heads, **SIZES)), path)


def make_gpt2size(path):
    return saved(GPT2LMHeadModel(GPT2Config()), path)


def make_picoLlaVa(path):
    vision = CLIPVisionConfig(
        image_size=32, patch_size=4, num_hidden_layers=2, num_attention_heads=2,
        hidden_size=64, intermediate_size=128,
    )
    text = LlamaConfig(vocab_size=64, num_attention_heads=16, **SIZES)
    config = LlavaConfig(vision_config=vision, text_config=text, image_seq_length=16)
    return saved(LlavaForConditionalGeneration(config), path)


def run_and_check_merge(
    config, check_nan=True, check_tensors=True, validate=None, index_json_name=None, auto_arch=False
):
    with tempfile.TemporaryDirectory() as out:
        run_merge(config, out_path=out, options=MergeOptions())
        files = [os.path.join(out, name) for name in os.listdir(out)]
        weights = [path for path in files if path.endswith(".safetensors")]
        assert weights
        assert os.path.exists(os.path.join(out, "config.json"))
        if check_nan:
            for path in weights:
                assert not any(t.isnan().any() for t in load_file(path).values())
        if check_tensors:
            merged = AutoConfig.from_pretrained(out)
            if auto_arch:
                architecture = get_architecture_info(config, MergeOptions())
            else:
                architecture = arch_info_for_config(merged)
            written = ShardedTensorIndex.from_disk(out).tensor_paths
            for info in architecture.all_weights(merged):
                known = {info.name, *(info.aliases or ())}
                assert info.optional or known & written.keys(), info.name
        if validate:
            validate(out)
'''

PLUGIN = '''"""`mergekit.merge.run_merge` is our `merge_models`."""

import mergekit.merge

from mergekit_lite import load_recipe, merge_models

merges = set()


def run_merge(merge_config, out_path, options, config_source=None):
    merges.add(running[0])
    merge_models(
        load_recipe(merge_config.to_yaml()),
        out=out_path,
        progress=False,
        seed=options.random_seed or 0,
        allow_mixed=options.allow_crimes,
        truncate_embeddings=options.unsafe_truncate_embeddings,
        trust_remote_code=options.trust_remote_code,
        allow_pickle="weights_only" if options.lazy_unpickle else None,
    )


running = [""]
mergekit.merge.run_merge = run_merge


def pytest_runtest_setup(item):
    running[0] = item.nodeid


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"merges: {len(merges)}")
'''

# Tests that fail with ours, by the reason.
DEPARTURES = {
    "names of LLaVA's tensors stay as in the checkpoint; mergekit's are transformers' newer ones": (
        "linear_VLM_merge slerp_VLM_merge nuslerp_VLM_merges task_arithmetic_VLM_merge "
        "breadcrumbs_VLM_merge ties_VLM_merge dare_ties_VLM_merge model_stock_VLM_merge "
        "model_stock_filterwise_VLM_merge"
    ),
    "truncated vocabularies: vocab_size in config.json is the number of rows, in embedding and head "
    "alike, so that the model loads; mergekit's does not": (
        "truncation_preserves_donor_config[linear] truncation_preserves_donor_config[slerp] "
        "truncation_preserves_donor_config[task_arithmetic] "
        "truncation_copies_out_of_range_metadata[False] "
        "truncation_copies_out_of_range_metadata[True] "
        "embedding_and_head_are_truncated_independently"
    ),
    "the words of an error": (
        "default_and_allow_crimes_do_not_truncate[False] "
        "default_and_allow_crimes_do_not_truncate[True]"
    ),
}


@pytest.mark.peers
def test_mergekits_own_tests_fail_only_where_ours_departs_on_purpose():
    try:
        folder = PEERS / f"mergekit-{version('mergekit')}"
    except PackageNotFoundError:
        pytest.skip("mergekit is in the bench extra")
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent; `make test-peers` makes it")
    plugins = PEERS / "plugins"
    plugins.mkdir(exist_ok=True)
    (plugins / "ours_for_mergekit.py").write_text(PLUGIN)
    (folder / "tests" / "__init__.py").touch()
    (folder / "tests" / "common.py").write_text(HELPERS)
    (folder / "peers.ini").write_text("[pytest]\n")
    paths = [str(ROOT / "src"), str(plugins), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", "-c", "peers.ini", "--rootdir", "."]
    command += ["-p", "no:cacheprovider", "-p", "ours_for_mergekit", "--tb=no", "-rfE", "-q"]
    done = subprocess.run(
        [*command, *(f"tests/test_{name}.py" for name in FILES.split())],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    found = re.findall(r"^(FAILED|ERROR) \S+::test_(\S+)", done.stdout, re.M)
    departures = {name for names in DEPARTURES.values() for name in names.split()}
    assert {name for _, name in found} == departures, done.stdout[-3000:]
    assert f"merges: {MERGES}" in done.stdout, done.stdout[-300:]
