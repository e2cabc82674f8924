"""Whole checkpoints: what transformers wrote goes in, what comes out transformers loads without a
word."""

import json
import logging
import re
import shutil
import subprocess
import sys

import numpy as np
import peft
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

import mergekit_lite.engine.fused
import mergekit_lite.engine.passes
from mergekit_lite import PlanError, load_recipe, make_plan, merge_models
from mergekit_lite.dtypes import BFLOAT16, FLOAT32, numbers, stored_as
from mergekit_lite.engine.hashing import hash_file
from mergekit_lite.files import DictSource, Source, TensorInfo
from mergekit_lite.files.experts import stacked
from mergekit_lite.methods import slerp
from mergekit_lite.planning.complete import (
    BIASES,
    LLAMA_LIKE,
    TIED,
    misplaced_layer,
    missing_tensors,
)
from mergekit_lite.recipe import MergeRecipe, ModelEntry, Slice
from tests.support.headers import llama_shapes, write_headers
from tests.support.models import MAKERS, auto_class, save, save_tokenizer, tiny


class Complaints(logging.Handler):
    """Collects what transformers warns of through its logger."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def said_of(folder, auto):
    complaints = Complaints()
    logging.getLogger("transformers").addHandler(complaints)
    try:
        auto.from_pretrained(folder)
    finally:
        logging.getLogger("transformers").removeHandler(complaints)
    return complaints.said


def load_strictly(folder, auto=transformers.AutoModelForCausalLM, like=None):
    """transformers' own loading, with nothing missing, unexpected or mismatched, and without a
    warning.

    ``like``: a folder that transformers wrote itself; what some versions say of that, they may say
    here.
    """
    usual, complaints = [] if like is None else said_of(like, auto), Complaints()
    logging.getLogger("transformers").addHandler(complaints)
    try:
        model, info = auto.from_pretrained(folder, output_loading_info=True)
    finally:
        logging.getLogger("transformers").removeHandler(complaints)
    assert complaints.said == usual
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_average_of_real_architectures(kind, dtype, tmp_path):
    a, b = tiny(kind, 1), tiny(kind, 2)
    paths = [save(a, tmp_path / "a", dtype, "20KB"), save(b, tmp_path / "b", dtype)]
    report = merge_models(
        paths, weight=[0.25, 0.75], out=tmp_path / "out", max_shard_size="6KB", progress=False
    )
    merged = load_strictly(tmp_path / "out", auto_class(kind), like=paths[0])
    assert merged.dtype == dtype
    assert merged.config.tie_word_embeddings == a.config.tie_word_embeddings
    states = a.state_dict(), b.state_dict(), merged.state_dict()
    for name, value in states[2].items():
        expected = (states[0][name].float() * 0.25 + states[1][name].float() * 0.75).to(dtype)
        # One rounding: in float32 a fused multiply-add may differ from two roundings in the last
        # bit.
        expected = expected.to(value.dtype)  # that of a few buffers is float32 in every model
        torch.testing.assert_close(
            value, expected, rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-7, msg=name
        )
    assert len(report.paths) > 1
    assert report.bytes_written == sum(
        t.numel() * t.element_size() for p in report.paths for t in load_file(p).values()
    )


def test_the_merge_of_a_model_with_itself_gives_its_logits(tmp_path):
    model = tiny("llama", 1)
    save(model, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    merge_models([tmp_path / "a", tmp_path / "b"], weight=0.5, out=tmp_path / "out", progress=False)
    ids = torch.arange(20)[None]
    assert torch.equal(load_strictly(tmp_path / "out")(ids).logits, model(ids).logits)


def test_modules_state_dicts_and_folders_mix(tmp_path):
    a, b, c = (tiny("llama-tied", i) for i in range(3))
    save(a, tmp_path / "a")
    state = {k: v for k, v in c.state_dict().items() if k != "lm_head.weight"}
    merged = merge_models([tmp_path / "a", b, state], weight=[1, 1, 1], progress=False)
    assert "lm_head.weight" not in merged
    for name, value in merged.items():
        expected = (a.state_dict()[name] + b.state_dict()[name] + c.state_dict()[name]) / 3
        torch.testing.assert_close(value, expected)


def test_a_tied_base_and_an_untied_expert_give_an_untied_model(tmp_path):
    base, expert = tiny("llama-tied", 1), tiny("llama", 2)
    paths = save(base, tmp_path / "base"), save(expert, tmp_path / "expert")
    merge_models(
        [paths[1]],
        "task_arithmetic",
        base_model=paths[0],
        weight=1.0,
        out=tmp_path / "out",
        progress=False,
    )
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    ids = torch.arange(10)[None]
    torch.testing.assert_close(
        load_strictly(tmp_path / "out")(ids).logits, expert(ids).logits, atol=1e-5, rtol=1e-5
    )


def test_dtype_and_out_dtype(tmp_path):
    a, b = (save(tiny("gpt2", i), tmp_path / str(i), torch.bfloat16) for i in range(2))
    for settings, expected in [
        ({}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": torch.float32, "out_dtype": torch.float16}, torch.float16),
        ({"dtype": "float64", "out_dtype": "bfloat16"}, torch.bfloat16),
    ]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        merge_models([a, b], weight=1.0, out=out, progress=False, **settings)
        assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {expected}
        assert json.loads((out / "config.json").read_text())["dtype"] == str(expected).removeprefix(
            "torch."
        )


_QV = {"target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
        (
            "llama",
            {
                "r": 4,
                "use_rslora": True,
                "target_modules": "all-linear",
                "modules_to_save": ["lm_head"],
            },
        ),
        (
            "llama",
            {
                "r": 4,
                "rank_pattern": {"1.self_attn.q_proj": 2},
                "alpha_pattern": {"v_proj": 32},
                **_QV,
            },
        ),
        ("llama", {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
        ("gpt2", {"r": 3, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    ],
)
def test_adapters_fold_in_as_peft_folds_them(kind, settings, tmp_path):
    base = tiny(kind, 1)
    path = save(base, tmp_path / "base")
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(
        tiny(kind, 1), peft.LoraConfig(init_lora_weights=False, **settings)
    )
    if settings.get("modules_to_save"):
        with torch.no_grad():
            wrapped.base_model.model.lm_head.modules_to_save["default"].weight.add_(0.1)
    wrapped.save_pretrained(tmp_path / "adapter")
    merge_models(
        [f"{path}+{tmp_path / 'adapter'}"], "passthrough", out=tmp_path / "out", progress=False
    )
    merged, expected = load_strictly(tmp_path / "out"), wrapped.merge_and_unload()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(
            value, expected.state_dict()[name], atol=1e-6, rtol=1e-5, msg=name
        )


@pytest.mark.parametrize(("size", "noted"), [(1e-4, True), (1.0, False)])
def test_a_note_says_what_rounding_loses_of_an_adapter(size, noted, tmp_path):
    base = tiny("llama", 1)
    path = save(base, tmp_path / "base", dtype=torch.bfloat16)
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=4, **_QV))
    exact = {}
    for name, layer in wrapped.named_modules():
        if isinstance(layer, peft.tuners.lora.Linear):
            factor = layer.lora_B["default"].weight.data.normal_(std=size)
            exact[name] = factor @ layer.lora_A["default"].weight.data
    wrapped.save_pretrained(tmp_path / "adapter")
    source = f"{path}+{tmp_path / 'adapter'}"
    for out, dtype in (("half", None), ("whole", "float32")):
        report = merge_models(
            [source], "passthrough", out=tmp_path / out, dtype=dtype, progress=False
        )
        notes = [note for note in report.notes if "rounding to bfloat16 loses about" in note]
        assert bool(notes) == (noted and dtype is None)
        if notes:
            claimed = int(re.search(r"about (-?\d+)%", notes[0])[1]) / 100
            before = {
                n: m.base_layer.weight.data.float()
                for n, m in wrapped.named_modules()
                if n in exact
            }
            kept = total = 0.0
            for name, change in exact.items():
                moved = (before[name] + change).bfloat16().float() - before[name]
                kept += float((moved * change).sum())
                total += float((change * change).sum())
            assert claimed == pytest.approx(1 - kept / total, abs=0.02)


def test_integer_buffers_are_copied_when_equal_and_refused_when_not(tmp_path):
    states = [
        {"w": torch.randn(4), "ids": torch.arange(5), "mask": torch.tensor([True, False])}
        for _ in range(2)
    ]
    merged = merge_models(states, weight=1.0, progress=False)
    assert torch.equal(merged["ids"], torch.arange(5))
    assert merged["mask"].dtype == torch.bool
    states[1]["ids"] = torch.arange(5) + 1
    with pytest.raises(PlanError, match=r"ids:.*int64"):
        merge_models(states, weight=1.0, progress=False)


def test_what_lies_beside_the_weights(tmp_path):
    a, b = (save(tiny("llama", i), tmp_path / str(i)) for i in range(2))
    words = ["<unk>", *(f"w{i}" for i in range(95))]
    save_tokenizer(tmp_path / "1", words, template="{{ messages }}")
    merge_models([a, b], weight=1.0, out=tmp_path / "out", progress=False)
    out = tmp_path / "out"
    names = {p.name for p in out.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "README.md",
        "mergekit_config.yml",
    } <= names
    assert "chat_template.jinja" in names
    assert transformers.AutoTokenizer.from_pretrained(out)("w3 w4")["input_ids"] == [4, 5]
    assert load_recipe(out / "mergekit_config.yml").merge_method == "linear"
    manifest = json.loads((out / "merge_manifest.json").read_text())
    assert manifest["files"]["model.safetensors"] == hash_file(out / "model.safetensors")
    assert not list(tmp_path.glob(".*"))


def test_code_of_a_model_is_copied_only_on_request(tmp_path):
    path = tmp_path / "m"
    save(tiny("llama", 1), path)
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.X"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "modeling_x.py").write_text("raise SystemExit")
    save_tokenizer(path, ["<unk>", *(f"w{i}" for i in range(95))])
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(
        json.dumps(settings | {"auto_map": {"AutoTokenizer": ["x.T", None]}})
    )
    report = merge_models([path], "passthrough", out=tmp_path / "plain", progress=False)
    assert any(
        "modeling_x.py), which was not copied; to copy it, set trust_remote_code=True" in note
        for note in report.notes
    )
    assert not list((tmp_path / "plain").glob("*.py"))
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((tmp_path / "plain" / name).read_text())
    options = {"out": tmp_path / "with", "progress": False, "trust_remote_code": True}
    report = merge_models([path], "passthrough", **options)
    assert any(
        "which was copied and runs when the output is loaded" in note for note in report.notes
    )
    assert (tmp_path / "with" / "modeling_x.py").exists()
    assert (
        json.loads((tmp_path / "with" / "config.json").read_text())["auto_map"]
        == config["auto_map"]
    )


def test_the_model_card_links_the_hub_and_names_no_folder(tmp_path, monkeypatch):
    cache = tmp_path / "models--someone--base" / "snapshots" / ("0123456789" * 4)
    own = tmp_path / "private" / "tuned"
    for number, path in enumerate((cache, own)):
        path.parent.mkdir(parents=True)
        save(tiny("llama", number), path)
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, **given: (asked.append((name, given["revision"])), cache)[1],
    )
    recipe = load_recipe(
        "merge_method: linear\nmodels: [{model: someone/base@v2}, {model: "
        f"{own}}}]\nparameters: {{weight: 1}}\n"
    )
    merge_models(recipe, out=tmp_path / "out", progress=False)
    assert asked == [("someone/base", "v2")]
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == ["someone/base"]
    assert "merge" in front["tags"]
    assert str(tmp_path) not in card
    assert "tuned" in card
    inputs = json.loads((tmp_path / "out" / "merge_manifest.json").read_text())["inputs"]
    assert inputs[0]["commit"] == "0123456789" * 4
    assert inputs[0]["hub_id"] == "someone/base"
    merge_models(["gpt-like"], "passthrough", progress=False)
    assert asked[-1] == ("gpt-like", None)


def test_the_model_card_keeps_a_name_that_holds_another(tmp_path):
    labels = ["/model", "org/model-b"]
    states = [DictSource({"w": torch.ones(2)}, label) for label in labels]
    template = tmp_path / "private" / "chat.jinja"
    template.parent.mkdir()
    template.write_text("{{ messages }}")
    recipe = MergeRecipe(
        merge_method="linear",
        models=[ModelEntry(model=state) for state in states],
        parameters={"weight": 1.0, "normalize": True},
        chat_template=str(template),
    )
    merge_models(recipe, out=tmp_path / "out", progress=False)
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    written = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert front["base_model"] == ["org/model-b"]
    assert "- model\n- org/model-b\n" in card
    assert written == recipe.to_dict() | {
        "models": [{"model": "model"}, {"model": "org/model-b"}],
        "chat_template": "chat.jinja",
    }


@pytest.mark.parametrize("name", ["alpaca", "chatml", "exaone", "llama3", "mistral"])
def test_named_chat_templates(name, tmp_path):
    path = tmp_path / "m"
    save(tiny("llama", 1), path)
    save_tokenizer(path, ["<unk>", *(f"w{i}" for i in range(95))])
    recipe = load_recipe(f"merge_method: passthrough\nmodels: [{path}]\nchat_template: {name}\n")
    merge_models(recipe, out=tmp_path / "out", progress=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        tmp_path / "out", bos_token="<s>", eos_token="</s>"
    )
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Bye."},
    ]
    said = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert (
        said
        == {
            "alpaca": "Be brief.\n\n### Instruction:\nHello?\n\n### Response:\nYes.</s>\n\n"
            "### Instruction:\nBye.\n\n### Response:\n",
            "chatml": (
                "<|im_start|>system\nBe "
                "brief.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nBye.<|im_end|>\n<|im_start|>assistant\n"
            ),
            "exaone": (
                "[|system|]Be "
                "brief.[|endofturn|]\n[|user|]Hello?\n[|assistant|]Yes.[|endofturn|]\n[|user|]Bye.\n[|assistant|]"
            ),
            "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHello?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nBye.<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "mistral": "<s>[INST] Be brief.\n\nHello? [/INST] Yes.</s>[INST] Bye. [/INST]",
        }[name]
    )


def test_frankenmerge_stacks_layers_and_tells_the_config(tmp_path):
    a, b = tiny("llama", 1), tiny("llama", 2)
    save(a, tmp_path / "a")
    save(b, tmp_path / "b")
    recipe = load_recipe(f"""
merge_method: passthrough
slices:
- sources: [{{model: {tmp_path / "a"}, layer_range: [0, 3]}}]
- sources: [{{model: {tmp_path / "b"}, layer_range: [1, 4]}}]
""")
    merge_models(recipe, out=tmp_path / "out", progress=False)
    merged = load_strictly(tmp_path / "out")
    assert merged.config.num_hidden_layers == 6
    for out, (source, layer) in enumerate([(a, 0), (a, 1), (a, 2), (b, 1), (b, 2), (b, 3)]):
        left, right = merged.model.layers[out].state_dict(), source.model.layers[layer].state_dict()
        assert all(torch.equal(left[k], right[k]) for k in left)
    assert torch.equal(merged.model.embed_tokens.weight, a.model.embed_tokens.weight)
    assert torch.equal(merged.lm_head.weight, b.lm_head.weight)


def test_gradients_and_filters_reach_the_right_tensors(tmp_path):
    a, b = tiny("llama", 1), tiny("llama", 2)
    paths = save(a, tmp_path / "a"), save(b, tmp_path / "b")
    recipe = load_recipe(f"""
merge_method: slerp
base_model: {paths[0]}
models: [{{model: {paths[0]}}}, {{model: {paths[1]}}}]
parameters:
  t:
  - {{filter: self_attn, value: [0, 1]}}
  - {{filter: embed, value: 0}}
  - {{value: 1}}
""")
    merged = merge_models(recipe, progress=False)
    left, right = a.state_dict(), b.state_dict()

    def same(name, state):
        return torch.allclose(merged[name], state[name], atol=1e-6)

    assert same("model.layers.0.self_attn.q_proj.weight", left)
    assert same("model.layers.3.self_attn.q_proj.weight", right)
    middle = merged["model.layers.1.self_attn.q_proj.weight"]
    name = "model.layers.1.self_attn.q_proj.weight"
    torch.testing.assert_close(middle, slerp([right[name]], left[name], t=1 / 3))
    assert same("model.embed_tokens.weight", left)
    assert same("model.layers.0.mlp.up_proj.weight", right)


def test_results_do_not_depend_on_threads_or_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(mergekit_lite.engine.passes, "BLOCK", 64)
    monkeypatch.setattr(mergekit_lite.engine.fused, "BLOCK", 64)
    paths = [save(tiny("llama", i), tmp_path / str(i)) for i in range(3)]
    for method, extra in [
        ("ties", {"density": 0.3}),
        ("dare_ties", {"density": 0.3}),
        ("della", {"density": 0.5}),
        ("linear", {}),
    ]:
        base = None if method == "linear" else paths[0]
        runs = []
        for threads, shard in [(1, "5GB"), (4, "9KB"), (2, "30KB")]:
            out = tmp_path / f"{method}-{threads}"
            report = merge_models(
                paths[1:],
                method,
                base_model=base,
                weight=[0.5, 0.7],
                out=out,
                threads=threads,
                max_shard_size=shard,
                progress=False,
                **extra,
            )
            runs.append({k: v for p in report.paths for k, v in load_file(p).items()})
        for other in runs[1:]:
            assert other.keys() == runs[0].keys()
            assert all(torch.equal(other[k], runs[0][k]) for k in other), method


def test_a_subset_of_tensors_draws_the_same_masks():
    generator = torch.Generator().manual_seed(0)
    base = {k: torch.zeros(30, 4) for k in "abc"}
    model = {k: torch.randn(30, 4, generator=generator) for k in "abc"}
    options = {"weight": 1.0, "density": 0.4, "progress": False, "seed": 3}
    whole = merge_models([model], "dare_linear", base_model=base, **options)
    part = merge_models([{"b": model["b"]}], "dare_linear", base_model={"b": base["b"]}, **options)
    assert torch.equal(whole["b"], part["b"])
    other = merge_models([model], "dare_linear", base_model=base, **options | {"seed": 4})
    assert not torch.equal(whole["b"], other["b"])


def test_a_merge_of_405_billion_parameters_is_planned_at_once(tmp_path):
    """Sparse files: real headers, no data."""
    for model in ("base", "x", "y"):
        write_headers(
            tmp_path / model,
            llama_shapes(hidden=16384, mlp=53248, layers=126, vocabulary=128256, keys=1024),
        )
    recipe = load_recipe(f"""
merge_method: ties
base_model: {tmp_path / "base"}
models: [{tmp_path / "x"}, {tmp_path / "y"}]
parameters: {{weight: 0.5, density: 0.2}}
""")
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    plan = make_plan(recipe, threads=4)
    sys.setprofile(None)
    assert calls < 500 * len(plan.tensors)
    text = str(plan)
    assert 400e9 < plan.parameters < 410e9
    assert "TB" in text
    assert plan.peak_memory < 200e6


def test_pickled_checkpoints_need_the_opt_in(tmp_path):
    (tmp_path / "m").mkdir()
    torch.save({"w": torch.ones(3)}, tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(PlanError, match="weights_only"):
        merge_models([tmp_path / "m"], "passthrough", progress=False)
    merged = merge_models(
        [tmp_path / "m"], "passthrough", allow_pickle="weights_only", progress=False
    )
    assert torch.equal(merged["w"], torch.ones(3))


def test_a_result_that_is_not_finite_is_refused(tmp_path):
    save_file({"w": torch.tensor([60000.0])}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"w:.*NaN"):
        merge_models(
            [tmp_path],
            "passthrough",
            scale=2.0,
            out_dtype="float16",
            out=tmp_path / "out",
            progress=False,
        )
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_hub_id_is_fetched_with_weights_and_texts_only(tmp_path, monkeypatch):
    """No network in a test: the download is played; what it is asked for is what counts."""
    model = tiny("llama", 1)
    save(model, tmp_path / "cache")
    asked = {}

    def snapshot_download(name, revision, allow_patterns):
        asked[name] = allow_patterns
        return str(tmp_path / "cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    merged = merge_models(["someone/model"], "passthrough", progress=False)
    assert torch.equal(merged["lm_head.weight"], model.lm_head.weight)
    assert "model*.safetensors" in asked["someone/model"]
    assert not any("bin" in pattern for pattern in asked["someone/model"])

    pickles = tmp_path / "cache"
    (pickles / "model.safetensors").unlink()
    with pytest.raises(
        PlanError,
        match=r'model.safetensors.*\(allow_pickle="weights_only" also reads pickled weights\)',
    ):
        merge_models(["someone/model"], "passthrough", progress=False)
    torch.save(model.state_dict(), pickles / "pytorch_model.bin")
    merged = merge_models(
        ["someone/model"], "passthrough", progress=False, allow_pickle="weights_only"
    )
    assert torch.equal(merged["lm_head.weight"], model.lm_head.weight)
    assert "pytorch_model*.bin" in asked["someone/model"]

    def offline(name, revision, allow_patterns):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(PlanError, match="there is no such folder, and it cannot be downloaded"):
        merge_models(["someone/other"], "passthrough", progress=False)


@pytest.mark.parametrize(("first", "last"), [("llama-tied", "llama"), ("llama", "llama-tied")])
def test_a_frankenmerge_of_tied_and_untied_models_has_a_head(first, last, tmp_path):
    a, b = tiny(first, 1), tiny(last, 2)
    save(a, tmp_path / "a")
    save(b, tmp_path / "b")
    recipe = load_recipe(f"""
merge_method: passthrough
slices:
- sources: [{{model: {tmp_path / "a"}, layer_range: [0, 2]}}]
- sources: [{{model: {tmp_path / "b"}, layer_range: [2, 4]}}]
""")
    merge_models(recipe, out=tmp_path / "out", progress=False)
    merged = load_strictly(tmp_path / "out")
    if last == "llama":
        assert torch.equal(merged.lm_head.weight, b.lm_head.weight)
    else:
        assert merged.config.tie_word_embeddings
    assert torch.equal(merged.model.embed_tokens.weight, a.model.embed_tokens.weight)


def test_memory_stays_in_bounds_while_the_model_grows(tmp_path):
    """The largest resident size of a fresh process, for two models of which one is four times the
    other."""
    peaks = []
    for size in (3000, 12000):
        for number in range(3):
            folder = tmp_path / f"{size}-{number}"
            folder.mkdir()
            generator = torch.Generator().manual_seed(number)
            state = {
                f"layers.{i}.w": torch.randn(size, 512, generator=generator).bfloat16()
                for i in range(4)
            }
            save_file(state, folder / "model.safetensors")
        code = (
            "import sys, mergekit_lite as m; a = sys.argv\nr = m.merge_models(a[2:4], 'ties', "
            "base_model=a[1], weight=0.5, density=0.3, out=a[4], "
            "progress=False)\nprint(r.peak_memory)"
        )
        arguments = [str(tmp_path / f"{size}-{n}") for n in range(3)] + [
            str(tmp_path / f"out{size}")
        ]
        # Started by a process of its own: a child's first reading of its largest size is its
        # parent's.
        script = (
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}] + "
            "sys.argv[1:], check=True)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout))
    # of one more copy of the larger model's growth, bfloat16
    assert peaks[1] - peaks[0] < 0.25 * 12000 * 512 * 4 * 2


def test_a_config_that_its_tensors_contradict_is_refused(tmp_path):
    path = save(tiny("llama"), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    changes = {
        r"6 layers.*got no tensors of model\.layers\.4, model\.layers\.5": {"num_hidden_layers": 6},
        r"expected .* 9 rows, the vocab_size .*, got \d+ rows": {"vocab_size": 9},
    }
    for words, change in changes.items():
        (tmp_path / "m" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(PlanError, match=words):
            merge_models([path], "passthrough", progress=False)
        with pytest.warns(UserWarning, match=words):
            merge_models([path], "passthrough", progress=False, allow_incomplete=True)
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    state = load_file(tmp_path / "m" / "model.safetensors")
    state.pop("lm_head.weight", None)
    save_file(state, tmp_path / "m" / "model.safetensors")
    with pytest.raises(PlanError, match="expected a head"):
        merge_models([path], "passthrough", progress=False)


def test_a_layer_that_lacks_tensors_is_refused(tmp_path):
    path = save(tiny("llama", num_hidden_layers=6), tmp_path / "m")
    state = load_file(tmp_path / "m" / "model.safetensors")
    settings = tmp_path / "m" / "config.json"
    # a family that is not known may have no norm in the first layer
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_type": "other"}))
    lost = ["model.layers.3.mlp.up_proj.weight", "model.layers.4.self_attn.q_proj.weight"]
    first = "model.layers.0.input_layernorm.weight"
    kept = {name: value for name, value in state.items() if name not in [*lost, first]}
    save_file(kept, tmp_path / "m" / "model.safetensors")
    with pytest.raises(PlanError, match=rf"expected {lost[0]}, {lost[1]} as in .*, got none"):
        merge_models([path], "passthrough", progress=False)
    with pytest.warns(UserWarning, match=lost[0]):
        merge_models([path], "passthrough", progress=False, allow_incomplete=True)
    save_file(
        {name: value for name, value in state.items() if name != first},
        tmp_path / "m" / "model.safetensors",
    )
    merge_models([path], "passthrough", progress=False)


def test_a_lost_bias_alone_may_be_a_design(tmp_path):
    save(tiny("gpt2", n_layer=6), tmp_path / "m")
    names = ["h.5.mlp.c_fc.bias", "h.5.mlp.c_fc.weight"]
    stored = [
        name
        for name in load_file(tmp_path / "m" / "model.safetensors")
        if name.endswith(tuple(names))
    ]
    merge_models(
        [without(tmp_path / "m", tmp_path / "bias", stored[0])], "passthrough", progress=False
    )
    broken = without(tmp_path / "m", tmp_path / "both", *stored)
    with pytest.raises(
        PlanError, match=rf"expected {stored[0]}, {stored[1]} as in the other layers"
    ):
        merge_models([broken], "passthrough", progress=False)


@pytest.mark.parametrize("layers", [2, 4, 6])
@pytest.mark.parametrize("lost", ["0.input_layernorm", "0.mlp.up_proj", "1.self_attn.k_proj"])
def test_layers_of_a_known_family_are_alike(layers, lost, tmp_path):
    save(tiny("llama", num_hidden_layers=layers), tmp_path / "m")
    name = f"model.layers.{lost}.weight"
    broken = without(tmp_path / "m", tmp_path / "broken", name)
    with pytest.raises(PlanError, match=f"expected {name} as in the other layers"):
        merge_models([broken], "passthrough", progress=False)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("llama", {"hidden_size": 48}, "embed_tokens.weight with 48 columns, the hidden_size in"),
        ("llama", {"intermediate_size": 60}, "mlp.up_proj.weight with 60 rows, the intermediate"),
        (
            "llama",
            {"num_attention_heads": 8},
            "q_proj.weight with .*, the num_attention_heads times",
        ),
        (
            "llama",
            {"num_key_value_heads": 1},
            "k_proj.weight with .*, the num_key_value_heads times",
        ),
        (
            "llama",
            {"attention_bias": True},
            "self_attn.q_proj.bias, because config.json has attention_bias",
        ),
        ("llama", {"mlp_bias": True}, "mlp.up_proj.bias, because config.json has mlp_bias"),
        ("llama", {"num_hidden_layers": "2"}, "num_hidden_layers .* a whole number, got '2'"),
        ("llama", {"vocab_size": 96.0}, "vocab_size .* a whole number, got 96.0"),
        ("mixtral", {"num_local_experts": 9}, "expected .*experts.3.w1.weight, got none"),
    ],
)
def test_a_config_with_other_sizes_than_the_tensors_is_refused(kind, change, words, tmp_path):
    given = {"head_dim": 4} if kind == "llama" else {}
    save(tiny(kind, **given), tmp_path / "m")
    settings = tmp_path / "m" / "config.json"
    merge_models([tmp_path / "m"], "passthrough", progress=False)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | change))
    with pytest.raises(PlanError, match=words):
        merge_models([tmp_path / "m"], "passthrough", progress=False)
    with pytest.warns(UserWarning, match=words):
        merge_models([tmp_path / "m"], "passthrough", progress=False, allow_incomplete=True)


def test_a_matrix_of_an_expert_is_missed(tmp_path):
    save(tiny("mixtral"), tmp_path / "m")
    for number, matrix in enumerate(("0.w1", "1.w2")):
        name = f"model.layers.1.block_sparse_moe.experts.{matrix}.weight"
        broken = without(tmp_path / "m", tmp_path / str(number), name)
        with pytest.raises(PlanError, match=f"expected {name}, got none"):
            merge_models([broken], "passthrough", progress=False)


def sliced(path, *ranges):
    pieces = [{"sources": [{"model": str(path), "layer_range": list(r)}]} for r in ranges]
    return load_recipe(json.dumps({"merge_method": "passthrough", "slices": pieces}))


@pytest.mark.parametrize(
    ("settings", "fits", "fails"),
    [
        # lists say which layers have experts; the merge moves them with the layers
        ({"mlp_only_layers": [0]}, [(0, 2), (0, 4)], None),
        # every second layer has experts, whatever its origin
        ({"decoder_sparse_step": 2}, [(0, 2), (0, 4)], [(0, 2), (1, 4)]),
        # the first layer has none: only as the first layer of the output
        ({"decoder_sparse_step": 1}, [(0, 3), (1, 4)], None),
    ],
)
def test_slices_leave_each_layer_where_the_config_has_its_kind(settings, fits, fails, tmp_path):
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        **settings,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "m")
    merge_models(sliced(tmp_path / "m", *fits), out=tmp_path / "out", progress=False)
    load_strictly(tmp_path / "out")
    if fails is not None:
        with pytest.raises(PlanError, match=r"expected model.layers.2 to be a layer of the kind"):
            merge_models(sliced(tmp_path / "m", *fails), progress=False)


def test_only_the_first_layer_of_deepseek_may_be_dense(tmp_path):
    config = transformers.DeepseekV3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    )
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "m")
    merge_models(sliced(tmp_path / "m", (0, 3), (1, 4)), out=tmp_path / "out", progress=False)
    load_strictly(tmp_path / "out")
    with pytest.raises(PlanError, match=r"expected model.layers.2 to be a layer of the kind"):
        merge_models(sliced(tmp_path / "m", (0, 2), (0, 4)), progress=False)


def test_lists_and_positions_decide_the_kind_of_a_layer_together(tmp_path):
    """Lists say which layers have attention, and a number how many of the first ones are dense."""
    config = transformers.Lfm2MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_dense_layers=2,
        num_experts=2,
        num_experts_per_tok=1,
        layer_types=["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
    )
    transformers.Lfm2MoeForCausalLM(config).save_pretrained(tmp_path / "m")
    for number, ranges in enumerate([[(0, 4), (2, 6)], [(0, 6), (3, 6)], [(0, 3), (5, 6)]]):
        out = tmp_path / str(number)
        merge_models(sliced(tmp_path / "m", *ranges), out=out, progress=False)
        load_strictly(out)
    with pytest.raises(PlanError, match=r"expected model.layers.2 to be a layer of the kind"):
        merge_models(sliced(tmp_path / "m", (0, 2), (0, 6)), progress=False)


def test_lists_of_layers_follow_slices_without_a_number_of_layers(tmp_path):
    save(tiny("nemotron-h"), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert "num_hidden_layers" not in config
    count = len(config["layers_block_type"])
    merge_models(sliced(tmp_path / "m", (0, count), (1, count)), out=tmp_path / "o", progress=False)
    load_strictly(tmp_path / "o")


def test_settings_by_layer_follow_slices():
    state = {f"model.layers.{i}.w": torch.full((1,), float(i)) for i in range(3)}
    config = {"num_hidden_layers": 3, "per_layer_config": {"0": {"a": 1}, "2": {"a": 2}}}
    config["hybrid_override_pattern"] = "M*-"
    source = DictSource(state, "m", config)
    slices = [Slice(sources=(ModelEntry(model=source, layer_range=r),)) for r in [(0, 2), (1, 3)]]
    plan = make_plan(MergeRecipe(merge_method="passthrough", slices=tuple(slices)))
    assert plan.config["per_layer_config"] == {"0": {"a": 1}, "3": {"a": 2}}
    assert plan.config["hybrid_override_pattern"] == "M**-"


def test_one_layer_may_be_stacked_and_entries_may_be_lists():
    state = {"model.layers.0.w": torch.ones(1)}
    source = DictSource(state, "m", {"num_hidden_layers": 1, "layer_types": [["a", "b"]]})
    piece = Slice(sources=(ModelEntry(model=source, layer_range=(0, 1)),))
    plan = make_plan(MergeRecipe(merge_method="passthrough", slices=(piece,) * 3))
    assert plan.config["layer_types"] == [["a", "b"]] * 3


def test_buffers_that_transformers_computes_are_no_other_kind_of_layer(tmp_path):
    for name in "ab":
        save(tiny("llama", num_hidden_layers=4), tmp_path / name)
    state = load_file(tmp_path / "a" / "model.safetensors")
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(4)}
    save_file(state | buffers, tmp_path / "a" / "model.safetensors")
    pieces = [{"sources": [{"model": str(tmp_path / n), "layer_range": [0, 2]}]} for n in "ab"]
    recipe = load_recipe(json.dumps({"merge_method": "passthrough", "slices": pieces}))
    assert "model.layers.3.mlp.up_proj.weight" in merge_models(recipe, progress=False)


def test_one_model_may_have_more_rows_in_the_embedding_than_in_the_head():
    """As in Llama 3.2 with images."""
    state = {f"model.layers.{i}.w": torch.ones(1) for i in range(2)}
    state |= {"model.embed_tokens.weight": torch.ones(12, 2), "lm_head.weight": torch.ones(10, 2)}
    source = DictSource(state, "m", {"num_hidden_layers": 2, "vocab_size": 10})
    piece = Slice(sources=(ModelEntry(model=source, layer_range=(0, 2)),))
    plan = make_plan(MergeRecipe(merge_method="passthrough", slices=(piece,)))
    assert len(plan.tensors) == 4


@pytest.mark.parametrize(("wanted", "share"), [("lm_head", 1.0), ("embed_tokens", 0.0)])
def test_a_filter_calls_a_tied_head_a_head(wanted, share, tmp_path):
    tied, whole = tiny("llama", 0, tie_word_embeddings=True), tiny("llama", 1)
    save(tied, tmp_path / "tied")
    save(whole, tmp_path / "whole")
    weight = [{"filter": wanted, "value": 1.0}, {"value": 0.0}]
    models = [{"model": str(tmp_path / "tied"), "parameters": {"weight": weight}}]
    models.append({"model": str(tmp_path / "whole"), "parameters": {"weight": 0.0}})
    recipe = {"merge_method": "linear", "models": models, "parameters": {"normalize": False}}
    merged = merge_models(load_recipe(json.dumps(recipe)), progress=False)
    embedding = tied.get_input_embeddings().weight
    assert torch.equal(merged["lm_head.weight"], share * embedding)
    assert torch.equal(merged["model.embed_tokens.weight"], (1 - share) * embedding)


def test_a_single_file_beside_an_index_is_read_as_by_transformers(tmp_path):
    path = save(tiny("llama"), tmp_path / "m")
    for shard in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        save_file({"other": torch.zeros(1)}, tmp_path / "m" / shard)
    index = {"weight_map": {"other": "model-00001-of-00002.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.warns(UserWarning, match=r"holds model\.safetensors and an index"):
        merged = merge_models([path], "passthrough", progress=False)
    assert set(merged) == set(load_file(tmp_path / "m" / "model.safetensors"))


def test_a_whole_t5_is_whole(tmp_path):
    """Its blocks have layers inside, which are numbered, too."""
    config = {"num_layers": 6, "num_decoder_layers": 6, "d_model": 16, "d_ff": 16, "d_kv": 4}
    model = transformers.T5Model(transformers.T5Config(vocab_size=96, num_heads=4, **config))
    model.save_pretrained(tmp_path / "t5")
    merged = merge_models([tmp_path / "t5"], "passthrough", progress=False)
    assert "decoder.block.5.layer.2.layer_norm.weight" in merged


@pytest.mark.parametrize("listed", [True, False])
def test_lists_of_layers_follow_slices_of_a_deeper_model(listed, tmp_path):
    for name, count in (("a", 2), ("b", 4)):
        (tmp_path / name).mkdir()
        state = {f"model.layers.{i}.w": torch.full((2,), float(i)) for i in range(count)}
        save_file(state, tmp_path / name / "model.safetensors")
        config = {"num_hidden_layers": count}
        if listed or name == "a":
            config["layer_types"] = [f"{name}{i}" for i in range(count)]
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    text = f"""
merge_method: passthrough
slices:
- sources: [{{model: {tmp_path}/a, layer_range: [0, 2]}}]
- sources: [{{model: {tmp_path}/b, layer_range: [2, 4], parameters: {{scale: [{{filter: layers.3, value: 2}}, {{value: 1}}]}}}}]
"""
    if not listed:
        with pytest.raises(PlanError, match="expected at least 4 entries in layer_types, got 2"):
            make_plan(load_recipe(text))
        return
    plan = make_plan(load_recipe(text))
    assert plan.config["layer_types"] == ["a0", "a1", "b2", "b3"]
    # layers.3 is that of the model; in the output it is layers.3, too, and layers.2 before it
    assert not [note for note in plan.notes if "filter" in note]


def test_a_view_of_another_tensor_is_no_tied_tensor():
    model = torch.nn.Linear(4, 3)
    model.register_buffer("first_row", model.weight.data[0])
    assert merge_models([model], "passthrough", progress=False).keys() == {
        "weight",
        "bias",
        "first_row",
    }


def test_a_file_of_torch_before_1_6_is_read(tmp_path):
    (tmp_path / "m").mkdir()
    torch.save(
        {"w": torch.ones(2)},
        tmp_path / "m" / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )
    merged = merge_models(
        [tmp_path / "m"], "passthrough", allow_pickle="weights_only", progress=False
    )
    assert merged["w"].tolist() == [1.0, 1.0]


def test_nan_stays_nan_in_bfloat16():
    values = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(numbers(stored_as(values, BFLOAT16))).all()


def test_pickled_shards_are_those_of_the_index(tmp_path):
    """A shard or a tensor that is missing is named; a single file comes before an index."""
    first = tmp_path / "pytorch_model-00001-of-00002.bin"
    second = tmp_path / "pytorch_model-00002-of-00002.bin"
    index = tmp_path / "pytorch_model.bin.index.json"
    torch.save({"a": torch.ones(2)}, first)

    def merge():
        return merge_models([tmp_path], "passthrough", allow_pickle="weights_only", progress=False)

    with pytest.raises(PlanError, match=r"expected .*index.json, got only"):
        merge()
    index.write_text(json.dumps({"weight_map": {"a": first.name, "b": second.name}}))
    with pytest.raises(PlanError, match=f"lists {second.name}, which does not exist"):
        merge()
    torch.save({"c": torch.ones(2)}, second)
    with pytest.raises(PlanError, match=f"{second.name}: expected b, which the index lists"):
        merge()
    torch.save({"b": torch.zeros(2)}, second)
    assert {name: value.tolist() for name, value in merge().items()} == {
        "a": [1.0, 1.0],
        "b": [0.0, 0.0],
    }
    torch.save({"d": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert list(merge()) == ["d"]


def test_shards_without_an_index_are_named(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(PlanError, match=r"expected model.safetensors.index.json in the same"):
        merge_models([tmp_path], "passthrough", progress=False)


def without(folder, out, *gone):
    """A copy of a model in a folder, without tensors."""
    state = load_file(folder / "model.safetensors")
    for name in gone:
        del state[name]
    out.mkdir()
    save_file(state, out / "model.safetensors")
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    return out


def test_tensors_outside_the_layers_and_of_the_last_layer_are_missed(tmp_path):
    config = {"num_hidden_layers": 6, "tie_word_embeddings": True}
    whole = tmp_path / "whole"
    save(tiny("llama", 1, **config), whole)
    for number, name in enumerate(
        ("model.norm.weight", "model.embed_tokens.weight", "model.layers.5.self_attn.q_proj.weight")
    ):
        broken = without(whole, tmp_path / str(number), name)
        with pytest.raises(PlanError, match=f"expected {name}"):
            merge_models([broken], "passthrough", progress=False)
        with pytest.warns(UserWarning, match=f"expected {name}"):
            merge_models([broken], "passthrough", allow_incomplete=True, progress=False)


def test_layers_beyond_the_config_are_noted(tmp_path):
    folder = tmp_path / "model"
    save(tiny("llama", 1), folder)
    config = json.loads((folder / "config.json").read_text())
    count = config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count - 1}))
    report = merge_models([folder], "passthrough", out=tmp_path / "out", progress=False)
    assert f"expected {count - 1} layers, as in config.json" in str(report)


def test_families_are_as_the_checks_of_complete_models_know_them():
    for model_type in LLAMA_LIKE:
        config = transformers.CONFIG_MAPPING[model_type](num_hidden_layers=6)
        with torch.device("meta"):
            names = transformers.AutoModelForCausalLM.from_config(config).state_dict()
        assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(names), model_type
        layers = [{n for n in names if n.startswith(f"model.layers.{i}.")} for i in range(6)]
        assert len({len(layer) for layer in layers}) == 1, model_type
        assert bool(config.tie_word_embeddings) == (model_type in TIED), model_type
        for setting, (layer, families) in BIASES.items():
            changed = transformers.CONFIG_MAPPING[model_type](num_hidden_layers=1)
            setattr(changed, setting, True)
            with torch.device("meta"):
                with_biases = transformers.AutoModelForCausalLM.from_config(changed).state_dict()
            added = f"model.layers.0.{layer}.bias" in with_biases.keys() - names.keys()
            assert added == (model_type in families), (model_type, setting)


class Described(Source):
    """A model of which only names and shapes are known."""

    folder = None

    def __init__(self, model, label):
        self.label = label
        # as in a saved config.json
        self.config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        tied = set()
        if self.config.get("tie_word_embeddings"):
            tied = set(getattr(model, "_tied_weights_keys", None) or ())
        self.tensors = {
            name: TensorInfo(name, tuple(value.shape), FLOAT32)
            for name, value in model.state_dict().items()
            if name not in tied
        }

    def read(self, name, start, stop):
        raise NotImplementedError

    def fingerprint(self):
        raise NotImplementedError


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["CausalLM", "ImageTextToText"])
def test_no_family_of_transformers_is_refused_as_incomplete(kind):
    auto = getattr(transformers, f"AutoModelFor{kind}")
    built = 0
    for config_class in auto._model_mapping:
        try:
            with torch.device("meta"):
                model = auto.from_config(config_class())
        except Exception:  # some families have no default config, or require other packages
            continue
        source = stacked(Described(model, config_class.model_type))
        assert not missing_tensors(source)
        assert misplaced_layer(source, source.config, list(source.tensors)) is None
        built += 1
    assert built > 30


def test_single_buffers_in_float32_do_not_change_the_dtype_of_a_config(tmp_path):
    """As the bias of a router in files of DeepSeek-V3, which are in bfloat16."""
    state = {"w": torch.ones(40, 2, dtype=torch.bfloat16), "gate.bias": torch.ones(4)}
    source = DictSource(state, "m", {"dtype": "bfloat16"})
    plan = make_plan(MergeRecipe(merge_method="passthrough", models=(ModelEntry(model=source),)))
    assert plan.config["dtype"] == "bfloat16"
    assert {t.name: str(t.dtype) for t in plan.tensors} == {"w": "bfloat16", "gate.bias": "float32"}
