"""Files that are not what they should be: the command line names them and the reason, and prints no
traceback."""

import json

import pytest
import torch
from safetensors.torch import save_file

from mergekit_lite import PlanError, merge_models
from mergekit_lite.__main__ import main

DEEP = "[" * 100_000


def model(folder, **files):
    folder.mkdir()
    save_file(
        {"w": torch.ones(4, 3), "embed_tokens.weight": torch.ones(4, 3)},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text("{}")
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(text) if isinstance(text, bytes) else path.write_text(text)
    if "model__safetensors__index__json" in files:  # which is read where no single file is
        (folder / "model.safetensors").unlink()
    return folder


def told(recipe, tmp_path, capsys):
    """What the command line says of a recipe, which must be an error and no traceback."""
    path = tmp_path / "recipe.yml"
    path.write_bytes(recipe) if isinstance(recipe, bytes) else path.write_text(recipe)
    assert (
        main(
            [
                "merge",
                str(path),
                str(tmp_path / "out"),
                "--no-progress",
                "--allow-pickle",
                "weights_only",
            ]
        )
        == 1
    )
    assert not (tmp_path / "out").exists()
    said = capsys.readouterr().err
    assert said.startswith("mergekit-lite: ")
    assert "Traceback" not in said
    return said


def passthrough(*names, more=""):
    return f"merge_method: passthrough\nmodels: [{', '.join(map(str, names))}]\n{more}"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config__json": "[1]"}, ["config.json", "expected a JSON object, got list"]),
        ({"config__json": DEEP}, ["config.json", "not valid JSON"]),
        ({"config__json": b"\xff\xfe"}, ["config.json", "not valid JSON"]),
        ({"config__json": '{"a": 1, "a": 2}'}, ["config.json", "'a' twice"]),
        ({"config__json": '{"quantization_config": "gptq"}'}, ["not quantized, got gptq"]),
        ({"config__json": '{"quantization_config": ["gptq"]}'}, ["not quantized"]),
        (
            {"model__safetensors__index__json": "[]"},
            ["index.json", "expected a JSON object, got list"],
        ),
        ({"model__safetensors__index__json": '{"weight_map": []}'}, ["expected a weight_map"]),
        (
            {"model__safetensors__index__json": '{"weight_map": {"w": ["x"]}}'},
            ["expected the name of a file in the same folder"],
        ),
        (
            {"model__safetensors__index__json": '{"weight_map": {"w": "a\\u0000b"}}'},
            ["which does not exist"],
        ),
        (
            {"model__safetensors__index__json": '{"weight_map": {"w": "' + "x" * 5000 + '"}}'},
            ["name too long"],
        ),
        ({"model__safetensors": b""}, ["truncated"]),
    ],
)
def test_a_model_folder(files, words, tmp_path, capsys):
    said = told(passthrough(model(tmp_path / "m", **files)), tmp_path, capsys)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    "config",
    [
        "[]",
        DEEP,
        '{"r": "two", "lora_alpha": 1}',
        '{"r": 0, "lora_alpha": 1}',
        '{"r": 1, "lora_alpha": NaN}',
        '{"r": 1, "lora_alpha": 1, "rank_pattern": [1]}',
        '{"r": 1, "lora_alpha": 1, "rank_pattern": {"(": 1}}',
        '{"r": 1, "lora_alpha": 1, "alpha_pattern": {"w": "x"}}',
    ],
)
def test_an_adapter(config, tmp_path, capsys):
    base = model(tmp_path / "m")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text(config)
    pair = {"m.lora_A.weight": torch.ones(1, 3), "m.lora_B.weight": torch.ones(4, 1)}
    save_file(pair, tmp_path / "a" / "adapter_model.safetensors")
    assert "adapter" in told(passthrough(f"{base}+{tmp_path / 'a'}"), tmp_path, capsys)


@pytest.mark.parametrize(
    "pair", [(torch.ones(3), torch.ones(4, 1)), (torch.ones(1, 3).int(), torch.ones(4, 1).int())]
)
def test_an_adapter_of_other_tensors(pair, tmp_path, capsys):
    base = model(tmp_path / "m")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text('{"r": 1, "lora_alpha": 1}')
    tensors = dict(zip(("w.lora_A.weight", "w.lora_B.weight"), pair, strict=True))
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    assert "expected a matrix of a floating-point dtype" in told(
        passthrough(f"{base}+{tmp_path / 'a'}"), tmp_path, capsys
    )


@pytest.mark.parametrize(
    "content",
    [b"no pickle", b"", b"\x80\x02cos\nsystem\n.", b"PK\x03\x04 no zip"],
    ids=["text", "empty", "code", "zip"],
)
def test_a_pickle(content, tmp_path, capsys):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(content)
    assert "pytorch_model.bin: cannot be loaded" in told(
        passthrough(tmp_path / "m"), tmp_path, capsys
    )


def test_a_pickle_of_something_else(tmp_path, capsys):
    (tmp_path / "m").mkdir()
    torch.save([torch.ones(2)], tmp_path / "m" / "pytorch_model.bin")
    assert "expected a state dict, got list" in told(passthrough(tmp_path / "m"), tmp_path, capsys)
    torch.save({"w": torch.ones(2), "step": 3}, tmp_path / "m" / "pytorch_model.bin")
    assert "maps names to tensors, got 'step' with int" in told(
        passthrough(tmp_path / "m"), tmp_path, capsys
    )


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(2, dtype=torch.complex64), "complex64, which merges do not support"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "meta device"),
        (torch.ones(2).to(torch.float8_e5m2), "float8_e5m2, which merges do not support"),
    ],
)
def test_tensors_in_memory(tensor, reason):
    with pytest.raises(PlanError, match=reason):
        merge_models([{"w": tensor}, {"w": tensor}], weight=1)


@pytest.mark.parametrize(
    "tokenizer",
    [
        "[]",
        DEEP,
        "{}",
        '{"model": []}',
        '{"model": {"vocab": 3}}',
        '{"model": {"vocab": {"a": "b"}}}',
        '{"model": {"vocab": {"a": -1}}}',
        '{"model": {"vocab": {"a": 99999999999}}}',
        '{"model": {"vocab": [[]]}}',
        '{"model": {"vocab": {"a": 0}}, "added_tokens": [{}]}',
    ],
)
def test_a_tokenizer(tokenizer, tmp_path, capsys):
    folder = model(tmp_path / "m", tokenizer__json=tokenizer)
    assert "tokenizer.json" in told(
        passthrough(folder, more="tokenizer_source: union\n"), tmp_path, capsys
    )


@pytest.mark.parametrize(
    "recipe",
    [
        "merge_method: null\nmodels: [a]",
        "merge_method: linear\nmodels: [a]\ndtype: [1, 2]",
        "merge_method: linear\nmodels: [a]\nparameters: {weight: !!binary aGk=}",
        "merge_method: linear\nmodels: [~no-one/x]",
        "merge_method: passthrough\nslices: [{sources: [{model: ./a, layer_range: [0, "
        "9223372036854775808]}]}]",
        b"\xff\xfe\x00",
        "",
        "null",
        "3",
        "[" * 50_000,
        "merge_method: [linear]\nmodels: [a]",
        "merge_method: linear\nmodels: [a]\nparameters: &p {weight: *p}",
        "merge_method: linear\nmodels: &m [*m]",
        "? [a, b]\n: c",
        "merge_method: linear\nmodels: [a]\nchat_template: [x]",
        "!!python/object:os.system {}",
        "merge_method: linear\nmodels: [./a]\nparameters: {weight: {filter: x}}",
        "a: &a [*a]\nmerge_method: x",
        "name: x\nmerge_method: linear\nmodels: [y]\n---\nname: y\nmerge_method: linear\nmodels: "
        "[x]",
        "merge_method: linear\nmodels: [a]\n---\nmerge_method: linear\nmodels: [a]",
        "merge_method: linear\nmodels: [{model: a, weight: 1}]",
        "merge_method: linear\nmodels: [{model: 3}]",
        "merge_method: linear\nmodels: [a]\ntokenizer: union",
        "merge_method: linear\nmodels: [a]\ntokenizer: {tokens: 3}",
        "merge_method: linear\nmodels: [a]\nbase_model: {x: 1}",
        "merge_method: linear\nslices: [{sources: 3}]",
        "merge_method: linear\nslices: [{sources: [{model: a, layer_range: [0, .inf]}]}]",
    ],
)
def test_a_recipe(recipe, tmp_path, capsys):
    said = told(recipe, tmp_path, capsys)
    assert any(
        word in said
        for word in (
            "recipe",
            "models",
            "slice",
            "layer_range",
            "tokenizer",
            "./a",
            "base_model",
            "parameters",
            "~no-one",
        )
    ), said


def test_a_folder_where_a_file_should_be(tmp_path, capsys):
    (tmp_path / "m" / "model.safetensors").mkdir(parents=True)
    told(passthrough(tmp_path / "m"), tmp_path, capsys)
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "config.json").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "n" / "model.safetensors")
    told(passthrough(tmp_path / "n"), tmp_path, capsys)


def test_a_settings_file_of_the_donor(tmp_path, capsys):
    folder = model(tmp_path / "m", tokenizer_config__json=json.dumps([1]), tokenizer__json="{}")
    assert "tokenizer_config.json" in told(passthrough(folder), tmp_path, capsys)


def test_layers_beyond_all_counting(tmp_path, capsys):
    folder = model(tmp_path / "m")
    recipe = (
        f"merge_method: passthrough\nslices: [{{sources: [{{model: {folder}, layer_range: [0, "
        f"{1 << 63}]}}]}}]"
    )
    assert "has 0 layers" in told(recipe, tmp_path, capsys)


def test_devices_without_values():
    with pytest.raises(ValueError, match=r"merge_models:.*device"):
        merge_models([{"w": torch.ones(2)}], "passthrough", device="meta")
