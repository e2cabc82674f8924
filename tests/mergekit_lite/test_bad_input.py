"""What bad input gets: a message that says what came and what was needed, before anything is read
or written."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mergekit_lite import PlanError, RecipeError, load_recipe, merge_models
from mergekit_lite.files import CheckpointError
from mergekit_lite.files.headers import read_header
from tests.support.models import save, tiny


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [save(tiny("llama", i), folder / str(i)) for i in range(3)]


@pytest.fixture
def out(tmp_path):
    yield tmp_path / "out"
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def refused(message, models, method="linear", error=(PlanError, ValueError), **kwargs):
    with pytest.raises(error, match=message):
        merge_models(models, method, progress=False, **kwargs)


def test_methods_and_parameters(paths, out):
    refused("did you mean slerp", paths, "slurp", out=out)
    refused(r"'wieght'.*did", paths, wieght=1, out=out)
    refused("'weight' is required", paths, out=out)
    refused(r"linear: expected 3 values in weight.*got 2", paths, weight=[1, 2], out=out)
    based = {"base_model": paths[0], "weight": 1, "out": out}
    refused(r"1.5.*\(0.*1\]", paths[1:], "ties", density=1.5, **based)
    refused(r"density is 0, expected", paths[1:], "dare_linear", density=0, **based)
    refused(
        r"2.*\[0.*1\]",
        [paths[1]],
        "slerp",
        base_model=paths[0],
        t=2,
        out=out,
    )
    refused(
        "normalize is 'maybe', expected true or false", paths, weight=1, normalize="maybe", out=out
    )
    refused("expected a finite number", paths, weight=float("nan"), out=out)
    refused("expected a whole number", paths, "karcher", max_iter=2.5, out=out)
    refused("sum to 0", paths[:2], weight=[1, -1], out=out)
    refused("density - epsilon", paths[1:], "della", density=0.9, **based)


@pytest.mark.parametrize("size", [True, "0.4B", 0, "5 gigs"])
def test_sizes_of_files_that_are_none(size, paths, out):
    with pytest.raises(ValueError, match=f"max_shard_size: expected .*, got {size!r}"):
        merge_models(paths, "linear", out=out, weight=1, max_shard_size=size)


def test_a_parameter_given_twice(paths, out):
    given = {"lambda": 0.5, "lambda_": 0.6}
    with pytest.raises(
        ValueError, match="task_arithmetic: expected either lambda or lambda_, got both"
    ):
        merge_models(paths[:1], "task_arithmetic", out=out, base_model=paths[1], **given)


def test_models_and_bases(paths, out):
    refused("expected a base model, got none", paths, "ties", weight=1, out=out)
    refused(r"linear:.*method", paths[1:], base_model=paths[0], weight=1, out=out)
    refused("expected each model once, got .* twice", [paths[0], paths[0]], weight=1, out=out)
    refused(
        r"exactly 1, got 2",
        paths[1:],
        "slerp",
        base_model=paths[0],
        t=0.5,
        out=out,
    )
    refused("at least 2", [paths[1]], "model_stock", base_model=paths[0], out=out)
    refused("no such folder", [paths[0], "./nowhere"], weight=1, out=out)
    refused("expected models as a list .*, got str", paths[0], weight=1, out=out)
    refused("as a model, got int", [paths[0], 3], weight=1, out=out)
    refused("maps names to tensors", [paths[0], {"a": 1}], weight=1, out=out)
    refused("threads is 0", paths, weight=1, threads=0, out=out)
    refused(r"merge_models:.*cannot", paths, weight=1, device="nonsense", out=out)
    refused("max_shard_size", paths, weight=1, max_shard_size="big", out=out)


def test_wrong_folders_names_and_values_are_said_together(paths, out):
    with pytest.raises(PlanError) as caught:
        merge_models(
            [paths[0], "./nowhere", "./elsewhere"],
            "ties",
            base_model=paths[1],
            desnity=0.5,
            density=1.5,
            out=out,
        )
    said = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    assert all(word in said for word in ("./nowhere", "./elsewhere", "'desnity'", "density is 1.5"))


def test_shapes_names_and_architectures_are_all_listed_at_once(paths, tmp_path, out):
    wide = save(tiny("llama", 5, intermediate_size=32), tmp_path / "wide")
    with pytest.raises(PlanError) as caught:
        merge_models([paths[0], wide], weight=1, out=out, progress=False)
    assert len(caught.value.problems) == 12  # three MLP matrices in four layers
    assert "mlp.up_proj.weight" in str(caught.value)
    assert "layers.3.mlp.up_proj.weight" in str(caught.value)
    assert str(PlanError(["x"] * 25)).endswith("and 5 more")
    assert "[24, 16]" in str(caught.value)
    assert "[32, 16]" in str(caught.value)
    deep = save(tiny("llama", 5, num_hidden_layers=6), tmp_path / "deep")
    refused("expected the tensors of .*, got all but 18: ", [paths[0], deep], weight=1, out=out)
    other = save(tiny("gpt2", 5), tmp_path / "gpt2")
    refused(r"different architectures: model_type.*'llama'", [paths[0], other], weight=1, out=out)
    heads = save(
        tiny("llama", 5, num_attention_heads=2, num_key_value_heads=1, head_dim=8),
        tmp_path / "heads",
    )
    refused("num_attention_heads", [paths[0], heads], weight=1, out=out)
    grown = save(tiny("llama", 5, vocab_size=100), tmp_path / "grown")
    refused("set tokenizer_source: base or union", [paths[0], grown], weight=1, out=out)


def header(entries, body=b""):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"\xff" * 20, "not a safetensors file"),
        (
            header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
            "the file is truncated, and a is incomplete",
        ),
        (
            header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678"),
            r"expected 12 bytes .*got 8",
        ),
        (
            header(
                {
                    "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                    "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
                },
                b"123456",
            ),
            "b overlaps",
        ),
        (
            header({"a": {"dtype": "F8_E5M2", "shape": [1], "data_offsets": [0, 1]}}, b"1"),
            "F8_E5M2.*quantized",
        ),
        (
            header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}),
            "expected a list of non-negative integers",
        ),
        (header({"a": {"dtype": "F32"}}), "shape None, expected a list"),
        (header([1]), "expected a JSON object, got list"),
        ((9).to_bytes(8, "little") + b'{"a": 1, "', "not valid"),
        (
            (18).to_bytes(8, "little") + b'{"a": {}, "a": {}}',
            "expected each key once, got .a. twice",
        ),
    ],
)
def test_unsound_files(data, message, tmp_path, paths, out):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_header(tmp_path / "m" / "model.safetensors")
    refused(message, [paths[0], tmp_path / "m"], weight=1, out=out)


def test_unsound_indexes(tmp_path, out):
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, folder / "x.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "outside.safetensors")

    def index(weight_map):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    for weight_map, message in [
        ({"a": "../outside.safetensors"}, "expected the name of a file in the same folder"),
        (
            {"a": str(tmp_path / "outside.safetensors")},
            "expected the name of a file in the same folder",
        ),
        ({"a": "y.safetensors"}, "which does not exist"),
        (
            {"a": "x.safetensors", "b": "x.safetensors", "c": "x.safetensors"},
            "expected c in x.safetensors, which does not hold it",
        ),
        ({"a": "x.safetensors"}, "holds b, which the index does not list there"),
        ({}, "expected a weight_map with at least one tensor"),
    ]:
        index(weight_map)
        refused(message, [folder], "passthrough", out=out)
    (folder / "model.safetensors.index.json").write_text("{")
    refused("not valid JSON", [folder], "passthrough", out=out)


def test_quantized_and_adapter_only_folders(paths, tmp_path, out):
    shutil.copytree(paths[0], tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    (tmp_path / "q" / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq"}})
    )
    refused(r"not quantized, got gptq", [tmp_path / "q"], "passthrough", out=out)
    (tmp_path / "adapter").mkdir()
    settings = {"r": 1, "lora_alpha": 1}

    def configure(**changes):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings | changes))

    configure()
    refused(
        "expected a model, got a LoRA adapter; pass it with its base",
        [tmp_path / "adapter"],
        "passthrough",
        out=out,
    )
    refused("has no adapter_model", [f"{paths[0]}+{tmp_path / 'adapter'}"], "passthrough", out=out)
    save_file(
        {"base_model.model.nowhere.lora_A.weight": torch.zeros(1, 2)},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    refused("expected an A and a B", [f"{paths[0]}+{tmp_path / 'adapter'}"], "passthrough", out=out)
    configure(use_dora=True, peft_type="LORA")
    refused(
        "adapter .* fits no parameter of",
        [f"{paths[0]}+{tmp_path / 'adapter'}"],
        "passthrough",
        out=out,
    )
    configure(init_lora_weights="pissa_niter_4")
    refused("also changed the base", [f"{paths[0]}+{tmp_path / 'adapter'}"], "passthrough", out=out)
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    refused(
        "no lora_alpha and no r", [f"{paths[0]}+{tmp_path / 'adapter'}"], "passthrough", out=out
    )


SLICED = "merge_method: x\nslices: [{sources:"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "merge_method: linear\nmodles: [a]",
            r"recipe:.*'modles'.*did",
        ),
        ("models: [a]", "expected merge_method, got none"),
        ("merge_method: linear\nmodels: []", r"recipe:.*models"),
        (
            "merge_method: linear\nmodels: [a]\nslices: [{sources: [{model: a, layer_range: [0, "
            "1]}]}]",
            "expected either models or slices, got both",
        ),
        ("merge_method: linear\nmodels: [{modell: a}]", "unknown key 'modell'"),
        (
            "merge_method: linear\nmodels: [{parameters: {weight: 1}}]",
            "expected a model in each entry, got an entry without one",
        ),
        ("merge_method: linear\nmodels: [a]\ndtype: int8", r"recipe dtype:.*'int8'"),
        (
            "merge_method: linear\nmodules: {a: {models: [a]}, b: {models: [b]}}",
            "recipe: expected one entry in modules, got 2",
        ),
        ("merge_method: linear\nmodels: [a]\nparameters: 3", "expected a mapping"),
        (
            f"{SLICED} [{{model: a}}]}}]",
            r"expected layer_range: .* in every source, got none for a",
        ),
        (f"{SLICED} [{{model: a, layer_range: [2, 1]}}]}}]", r"0.*<="),
        (
            "merge_method: x\nslices: [{sources: [{model: a, layer_range: [0, 1]}, {model: b, "
            "layer_range: [0, 2]}]}]",
            "slice: expected the same number of layers in every source, got 1 and 2",
        ),
        (
            "merge_method: x\nmodels: [a]\ntokenizer: {source: union}\ntokenizer_source: base",
            "expected either tokenizer or tokenizer_source, got both",
        ),
        ("merge_method: x\nmodels: [a]\ntokenizer: {sauce: union}", "unknown key 'sauce'"),
        (
            "merge_method: x\nmodels: [a]\ntokenizer: {pad_to_multiple_of: 0}",
            "tokenizer pad_to_multiple_of: expected an integer above 0, got 0",
        ),
        ("merge_method: x\nmodels: [a, b, a]", "expected each model once, got a twice"),
        ("a: [", "expected valid YAML, got an error"),
        ("- a\n- b", "expected a mapping"),
    ],
)
def test_recipes(text, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(text + "\n")


def test_a_file_that_is_no_recipe_is_named_and_not_shown_whole(tmp_path):
    for text, message in (
        ("word " * 10_000, "expected a mapping of names to values, got 'word .*'"),
        ("", "got an empty text"),
        ("a: 1", "merge_method"),
    ):
        (tmp_path / "recipe.yml").write_text(text)
        with pytest.raises(RecipeError, match=rf"recipe .*recipe\.yml: .*{message}") as caught:
            load_recipe(tmp_path / "recipe.yml")
        assert len(str(caught.value)) < 500
    with pytest.raises(ValueError, match=r"merge_models:.*load_recipe\('ties.yml'\)"):
        merge_models("ties.yml", out=tmp_path / "out")
    with pytest.raises(ValueError, match="'TIES' is unknown; did you mean ties"):
        merge_models([{}], "TIES")


def test_recipe_values_that_only_the_plan_can_judge(paths, out):
    def plan(text):
        merge_models(load_recipe(text), out=out, progress=False)

    head = f"merge_method: linear\nmodels: [{paths[0]}, {paths[1]}]\n"
    with pytest.raises(RecipeError, match=r"recipe nowhere\.yml:.*no such file"):
        load_recipe("nowhere.yml")
    with pytest.raises(PlanError, match="unknown parameter 'wight'"):
        plan(head + "parameters: {wight: 1}")
    with pytest.raises(PlanError, match="unknown key 'fliter'"):
        plan(head + "parameters: {weight: [{fliter: mlp, value: 1}]}")
    with pytest.raises(PlanError, match="'weight' is required"):
        plan(head + "parameters: {weight: [{filter: mlp, value: 1}]}")
    with pytest.raises(PlanError, match="weight is 'a', expected a finite number"):
        plan(head + "parameters: {weight: [a, b]}")
    with pytest.raises(PlanError, match=r"layer_range.*has 4 layers, got 9"):
        plan(
            f"merge_method: passthrough\nslices: [{{sources: [{{model: {paths[0]}, layer_range: "
            "[0, 9]}]}]"
        )
    with pytest.raises(
        PlanError, match=r"expected one of auto, .*, Jinja text or a file, got 'chatlm'"
    ):
        plan(head + "parameters: {weight: 1}\nchat_template: chatlm")
    with pytest.raises(PlanError, match=r"expected a tokenizer\.json, .* got none"):
        plan(head + "parameters: {weight: 1}\ntokenizer_source: union")
    with pytest.raises(
        ValueError, match=r"merge_models: expected no weight together with a MergeRecipe"
    ):
        merge_models(load_recipe(head + "parameters: {weight: 1}"), weight=2)


def test_files_that_are_no_models(paths, out, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    refused(r"m\.pt is a file, expected a folder", [str(tmp_path / "m.pt")], "passthrough", out=out)
    refused("got None in the list of models", [paths[0], None], "linear", weight=1, out=out)
    refused("argument 'base'; did you mean base_model", paths, "ties", base=paths[0], out=out)
    (tmp_path / "pointer").mkdir()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "pointer" / "model.safetensors").write_text(pointer)
    refused("run git lfs pull", [str(tmp_path / "pointer")], "passthrough", out=out)
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(paths[0]), LoraConfig(r=2))
    refused(r"pass model\.merge_and_unload\(\)", [wrapped], "passthrough", out=out)
    (tmp_path / "empty").mkdir()
    save_file({}, tmp_path / "empty" / "model.safetensors")
    refused("expected tensors", [str(tmp_path / "empty")], "passthrough", out=out)
    refused("seed is 'x', expected a whole number", paths, "linear", weight=1, seed="x", out=out)
    with pytest.raises(RecipeError, match="mixture of experts"):
        load_recipe("base_model: a\ngate_mode: hidden\nexperts: [{source_model: b}]")


def test_an_adapter_s_folder_may_have_a_plus_in_its_name(paths, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(paths[0])
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapter = tmp_path / "a+b"
    get_peft_model(model, config).save_pretrained(adapter)
    merged = merge_models([f"{paths[0]}+{adapter}"], "passthrough", progress=False)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged[name], load_file(f"{paths[0]}/model.safetensors")[name])


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel])
def test_wrapped_modules_are_the_models_inside(wrap, paths):
    model = AutoModelForCausalLM.from_pretrained(paths[0])
    merged = merge_models([wrap(model), model], "linear", weight=0.5, progress=False)
    assert merged.keys() == merge_models([model], "passthrough", progress=False).keys()


def test_a_buffer_that_is_a_transposed_view_is_kept():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(2, 2))
            self.register_buffer("turned", self.weight.data.t())

    merged = merge_models([Model(), Model()], "linear", weight=0.5, progress=False)
    assert merged.keys() == {"weight", "turned"}


@pytest.mark.parametrize("legacy", [False, True])
def test_damaged_pickles_are_named(legacy, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.ones(4)}, path, _use_new_zipfile_serialization=not legacy)
    whole = path.read_bytes()
    for size in (1, 50, len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:size])
        with pytest.raises(PlanError, match=r"cannot be loaded by torch\.load"):
            merge_models([tmp_path], "passthrough", allow_pickle="weights_only", progress=False)


def test_slices_of_other_vocabularies_are_refused(tmp_path):
    for name, rows in (("a", 96), ("b", 99)):
        save(tiny("llama", vocab_size=rows), tmp_path / name)
    pieces = [
        {"sources": [{"model": str(tmp_path / name), "layer_range": [0, 1]}]} for name in "ab"
    ]
    recipe = load_recipe(json.dumps({"merge_method": "passthrough", "slices": pieces}))
    with pytest.raises(
        PlanError, match=r"embed_tokens.weight with 96 rows and lm_head.weight with 99"
    ):
        merge_models(recipe, progress=False)
