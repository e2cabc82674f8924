"""What once gave a wrong result without a word: now it is right, or said, or refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import mergekit_lite.engine.output
from mergekit_lite import METHODS, PlanError, RecipeError, load_recipe, merge_method, merge_models
from mergekit_lite.files import CheckpointError
from mergekit_lite.files.headers import read_header
from tests.mergekit_lite.test_bad_input import header
from tests.mergekit_lite.test_outputs import interrupt_after
from tests.support.models import save, save_tokenizer, tiny


def folder_of(path, state, config=None):
    path.mkdir()
    save_file(state, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def test_tensors_outside_the_layers_take_the_first_value_of_a_gradient(tmp_path):
    paths = [Path(save(tiny("llama", i), tmp_path / str(i))) for i in range(2)]
    weights = [{"weight": [0, 1]}, {"weight": [1, 0]}]
    models = [{"model": str(p), "parameters": w} for p, w in zip(paths, weights, strict=True)]
    recipe = load_recipe(yaml.safe_dump({"merge_method": "linear", "models": models}))
    merged = merge_models(recipe, progress=False)
    states = [load_file(p / "model.safetensors") for p in paths]
    for name in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"):
        assert torch.equal(merged[name], states[1][name])
    assert torch.equal(
        merged["model.layers.3.mlp.up_proj.weight"], states[0]["model.layers.3.mlp.up_proj.weight"]
    )


def test_weights_too_large_for_float32_are_refused():
    states = [{"w": torch.ones(2)}, {"w": torch.ones(2)}]
    with pytest.raises(PlanError, match=r"1e\+308.*float32"):
        merge_models(states, weight=[1e308, 1e308])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", ["arcee_fusion", "tsv", "iso_c", "della"])
def test_no_method_takes_nan_or_infinity_for_an_answer(method, poison, tmp_path):
    model, base = {"w": torch.randn(6, 6)}, {"w": torch.randn(6, 6)}
    model["w"][2, 3] = poison
    needed = {"weight": 1.0, "density": 0.5, "epsilon": 0.1} if method == "della" else {}
    with pytest.raises(ValueError, match="NaN"):
        merge_models([model], method, base_model=base, out=tmp_path / "o", progress=False, **needed)
    assert not (tmp_path / "o").exists()


def test_a_key_twice_is_no_recipe():
    with pytest.raises(RecipeError, match=r"recipe:.*'weight'.*\(line.*4\)"):
        load_recipe("merge_method: linear\nmodels: [a, b]\nparameters:\n  {weight: 1, weight: 2}\n")
    anchors = (
        "x: &w {weight: 1}\nmerge_method: linear\nmodels: [{model: a, parameters: {<<: *w}}]\n"
    )
    assert load_recipe(anchors).models[0].parameters == {"weight": 1}


TWO = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header({"a": TWO}, b"12345678trailing"), "the last 8 bytes belong to no tensor"),
        (
            header({"a": TWO | {"data_offsets": [8, 16]}}, b"1" * 16),
            "8 bytes before a belong to no tensor",
        ),
        (
            header({"a": TWO | {"data_offsets": [0.5, 8.5]}}, b"1" * 9),
            "expected a list of non-negative integers",
        ),
        (
            header({"a": TWO | {"data_offsets": [0, float("inf")]}}),
            "expected a list of non-negative integers",
        ),
        (
            header({"a": TWO | {"data_offsets": [False, 8]}}, b"1" * 8),
            "expected a list of non-negative integers",
        ),
        (
            header({"a": TWO | {"data_offsets": [0, 8, 9]}}, b"1" * 8),
            "expected a begin and an end offset",
        ),
        (header({"a": TWO | {"shape": "2"}}, b"1" * 8), "expected a list of non-negative integers"),
        (header({"a": TWO | {"dtype": ["F32"]}}, b"1" * 8), "if the checkpoint is quantized"),
        (header({"a": [1]}), "expected an object with dtype, shape and data_offsets"),
        (
            header({"__metadata__": {"a": 1}, "a": TWO}, b"1" * 8),
            "expected __metadata__ with string values",
        ),
        (
            header({"__metadata__": [], "a": TWO}, b"1" * 8),
            "expected __metadata__ with string values",
        ),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "not valid JSON"),
        ((4).to_bytes(8, "little") + b"\xff\xfe\x00\x01", "not valid JSON"),
    ],
)
def test_headers_are_believed_in_nothing(data, message, tmp_path):
    (tmp_path / "f.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_header(tmp_path / "f.safetensors")


def test_parts_of_a_model_must_agree_too(tmp_path):
    state = {"w": torch.ones(2)}
    configs = [
        {"model_type": "x", "text_config": {"num_attention_heads": n, "rope_theta": n}}
        for n in (4, 8)
    ]
    paths = [folder_of(tmp_path / str(i), state, config) for i, config in enumerate(configs)]
    with pytest.raises(PlanError, match=r"text_config.num_attention_heads.*4.*8"):
        merge_models(paths, weight=1.0)
    (paths[1] / "config.json").write_text(
        json.dumps({"model_type": "x", "text_config": {"rope_theta": 5}})
    )
    report = merge_models(paths, weight=1.0, out=tmp_path / "o", progress=False)
    assert any("text_config.rope_theta" in note for note in report.notes)


def test_every_reason_is_found_at_once(tmp_path):
    left = folder_of(
        tmp_path / "l",
        {"w": torch.ones(2), "v": torch.ones(3)},
        {"n_head": 2, "hidden_act": "gelu"},
    )
    right = folder_of(tmp_path / "r", {"w": torch.ones(3)}, {"n_head": 4, "hidden_act": "relu"})
    with pytest.raises(PlanError) as caught:
        merge_models([left, right], weight=1.0)
    assert len(caught.value.problems) == 4
    said = " ".join(caught.value.problems)
    assert all(
        word in said for word in ("n_head", "hidden_act", "got all but 1: v", "shapes differ: w")
    )


def test_the_config_is_the_first_that_a_model_has(tmp_path):
    path = Path(save(tiny("llama", 1), tmp_path / "m"))
    state = load_file(path / "model.safetensors")
    merge_models([state, path], weight=1.0, out=tmp_path / "out", progress=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_a_resumed_run_reads_no_other_inputs_than_it_began_with(tmp_path, monkeypatch):
    states = [{f"layers.{i}.w": torch.randn(60, 70) for i in range(8)} for _ in range(2)]
    paths = [folder_of(tmp_path / str(i), state) for i, state in enumerate(states)]

    def merge(**extra):
        settings = {
            "weight": 0.5,
            "max_shard_size": "40KB",
            "out": tmp_path / "out",
            "progress": False,
        }
        return merge_models(paths, **settings, **extra)

    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        with pytest.raises(KeyboardInterrupt):
            merge()
    file = paths[0] / "model.safetensors"
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    with file.open("r+b") as handle:  # in place, the same size, and its time set back
        handle.write(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert merge().resumed == []


def test_a_merge_by_a_method_of_ones_own_starts_over(tmp_path, monkeypatch):
    states = [{f"layers.{i}.w": torch.randn(60, 70) for i in range(8)} for _ in range(2)]
    paths = [folder_of(tmp_path / str(i), state) for i, state in enumerate(states)]
    settings = {"max_shard_size": "40KB", "out": tmp_path / "out", "progress": False}
    factors = [2.0]
    try:
        merge_method("edited", elementwise=True)(lambda tensors, base: sum(tensors) * factors[-1])
        for factor in (2.0, 3.0):
            factors.append(factor)
            with monkeypatch.context() as patched:
                interrupt_after(patched, 2)
                with pytest.raises(KeyboardInterrupt):
                    merge_models(paths, "edited", **settings)
            recorded = json.loads((tmp_path / ".out.partial" / "progress.json").read_text())[
                "shards"
            ]
            assert len(recorded) == 2
        report = merge_models(paths, "edited", **settings)
    finally:
        METHODS.pop("edited", None)
    assert report.resumed == []
    merged = {name: value for path in report.paths for name, value in load_file(path).items()}
    for name, value in merged.items():
        assert torch.equal(value, (states[0][name] + states[1][name]) * 3.0)


def test_the_manifest_says_what_went_in_and_is_the_same_after_a_resume(tmp_path, monkeypatch):
    states = [{f"layers.{i}.w": torch.randn(60, 70) for i in range(8)} for _ in range(3)]
    paths = [folder_of(tmp_path / str(i), state) for i, state in enumerate(states)]

    def merge(models, out):
        settings = {"weight": 0.5, "density": 0.5, "max_shard_size": "40KB", "progress": False}
        merge_models(models[1:], "ties", base_model=models[0], out=tmp_path / out, **settings)
        return json.loads((tmp_path / out / "merge_manifest.json").read_text())

    whole = merge(paths, "whole")
    with monkeypatch.context() as patched:
        interrupt_after(patched, 3)
        with pytest.raises(KeyboardInterrupt):
            merge(paths, "out")
    assert merge(paths, "out") == whole
    again = merge([paths[0], tmp_path / "whole", paths[2]], "again")
    models = [str(paths[2]), str(paths[0])]
    assert [entry["model"] for entry in again["inputs"]] == [str(tmp_path / "whole"), *models]
    assert again["inputs"][0]["merged_from"] == whole["inputs"]


def test_tokenizers_that_differ_at_equal_size_are_said(tmp_path):
    words = ["<unk>", *(f"w{i}" for i in range(20))]
    paths = []
    for number, own in enumerate((words, [words[0], *words[:0:-1]])):
        paths.append(save(tiny("llama", number, vocab_size=21), tmp_path / str(number)))
        save_tokenizer(paths[-1], own)
    report = merge_models(paths, weight=1.0, out=tmp_path / "out", progress=False)
    assert any(
        "the tokenizers of" in note and "differ in 20 tokens" in note for note in report.notes
    )
    with pytest.warns(UserWarning, match="merge_models:.*tokenizers"):
        merge_models(paths, weight=1.0, progress=False)
    settings = (
        f"merge_method: linear\nmodels: [{paths[0]}, {paths[1]}]\nparameters: {{weight: 1}}\n"
    )
    aligned = load_recipe(settings + "tokenizer_source: base\n")
    assert not merge_models(aligned, out=tmp_path / "aligned", progress=False).notes


def test_the_disk_message_tells_the_two_figures_apart(tmp_path, monkeypatch):
    path = folder_of(tmp_path / "m", {"w": torch.zeros(1000)})
    free = shutil.disk_usage(tmp_path)._replace(free=3999)
    monkeypatch.setattr(mergekit_lite.engine.output.shutil, "disk_usage", lambda _: free)
    with pytest.raises(OSError, match=r"4\.0.*kB.* got 4\.0.*kB; free 1.* more"):
        merge_models([path], "passthrough", out=tmp_path / "o", progress=False)
