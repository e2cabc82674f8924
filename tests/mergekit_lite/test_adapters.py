"""Adapters extracted from tuned models and merged with each other, against peft and against merges
of whole models."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    T5Config,
    T5Model,
)

from mergekit_lite import (
    PlanError,
    extract_lora,
    merge_adapters,
    merge_models,
)
from mergekit_lite.adapters.storage import truncated
from model_components._cli import main
from tests.support.models import save, tiny

QVD = ["q_proj", "v_proj", "down_proj"]


def adapter(path, kind="llama", seed=0, **settings):
    """A random adapter of the tiny base number 1."""
    torch.manual_seed(seed)
    config = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": QVD,
        "init_lora_weights": False,
        **settings,
    }
    wrapped = peft.get_peft_model(tiny(kind, 1), peft.LoraConfig(**config))
    wrapped.save_pretrained(path)
    return wrapped


def updates(folder):
    """The change that every module of an adapter makes."""
    config = json.loads((folder / "adapter_config.json").read_text())
    state = {k: v.double() for k, v in load_file(folder / "adapter_model.safetensors").items()}
    changes = {}
    for key, down in state.items():
        if "lora_A" in key:
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            rank = (config.get("rank_pattern") or {}).get(module, config["r"])
            alpha = (config.get("alpha_pattern") or {}).get(module, config["lora_alpha"])
            assert down.shape[0] == rank
            changes[module] = alpha / rank * state[key.replace("lora_A", "lora_B")] @ down
    return changes


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (1, 4), (4, 1)])
def test_factors_are_the_best_of_their_rank(shape):
    change = torch.randn(shape, generator=torch.Generator().manual_seed(0)).numpy()
    u, s, v = torch.linalg.svd(torch.from_numpy(change).double(), full_matrices=False)
    for rank in range(1, min(shape) + 1):
        up, down = truncated(change, rank)
        assert up.shape == (shape[0], rank)
        best = (u[:, :rank] * s[:rank]) @ v[:rank]
        torch.testing.assert_close(torch.from_numpy(up @ down).double(), best, atol=1e-5, rtol=1e-5)
        # of equal length, so that neither factor loses more to rounding
        torch.testing.assert_close(
            torch.from_numpy(up).norm(dim=0),
            torch.from_numpy(down).norm(dim=1),
            atol=1e-5,
            rtol=1e-5,
        )
    energies = (s**2).cumsum(0) / (s**2).sum()
    for share in (0.3, 0.7, 0.95):
        assert truncated(change, 99, share)[1].shape[0] == 1 + int((energies < share).sum())


@pytest.mark.parametrize(
    ("kind", "targets"), [("llama", QVD), ("gpt2", ["c_attn", "c_proj", "c_fc"])]
)
def test_extraction_gives_back_the_adapter_and_peft_loads_it(kind, targets, tmp_path):
    base = save(tiny(kind, 1), tmp_path / "base")
    wrapped = adapter(tmp_path / "adapter", kind, target_modules=targets)
    merge_models(
        [f"{base}+{tmp_path / 'adapter'}"], "passthrough", out=tmp_path / "tuned", progress=False
    )
    report = extract_lora(tmp_path / "tuned", base, tmp_path / "out", rank=3, progress=False)
    assert max(module.error for module in report.modules) < 1e-5
    expected, found = updates(tmp_path / "adapter"), updates(tmp_path / "out")
    assert expected.keys() == found.keys()
    for name, change in expected.items():
        torch.testing.assert_close(found[name], change, atol=1e-5, rtol=1e-4)
    loaded = peft.PeftModel.from_pretrained(tiny(kind, 1), tmp_path / "out")
    ids = torch.arange(12)[None]
    torch.testing.assert_close(loaded(ids).logits, wrapped.eval()(ids).logits, atol=1e-5, rtol=1e-4)
    merge_models(
        [f"{base}+{tmp_path / 'out'}"], "passthrough", out=tmp_path / "again", progress=False
    )
    for name, value in load_file(tmp_path / "tuned" / "model.safetensors").items():
        torch.testing.assert_close(
            load_file(tmp_path / "again" / "model.safetensors")[name], value, atol=1e-6, rtol=0
        )


def test_what_is_no_product_is_left_with_a_figure_or_saved_whole(tmp_path):
    base, tuned = tiny("llama", 1), tiny("llama", 1)
    with torch.no_grad():
        tuned.model.norm.weight.mul_(1.5)
        tuned.model.embed_tokens.weight[3] += 1
        tuned.model.layers[0].mlp.up_proj.weight += 0.1
    paths = save(tuned, tmp_path / "tuned"), save(base, tmp_path / "base")
    report = extract_lora(*paths, tmp_path / "out", progress=False)
    assert [m.name for m in report.modules] == ["model.layers.0.mlp.up_proj"]
    assert report.modules[0].rank == 1
    assert report.left.keys() == {"model.norm.weight", "model.embed_tokens.weight"}
    assert report.left["model.norm.weight"] == pytest.approx(0.5)
    assert "model.norm.weight changed by 50.00% and is not in the adapter" in str(report)
    whole = extract_lora(*paths, tmp_path / "whole", save_others=True, progress=False)
    assert not whole.left
    loaded = peft.PeftModel.from_pretrained(tiny("llama", 1), tmp_path / "whole")
    ids = torch.arange(10)[None]
    torch.testing.assert_close(loaded(ids).logits, tuned.eval()(ids).logits, atol=1e-5, rtol=1e-4)


def test_a_linear_head_of_gpt2_and_a_table_of_biases_are_told_from_conv1d_and_products(tmp_path):
    """GPT-2's blocks store (in, out), its classifier (out, in); T5's relative biases are looked up."""
    torch.manual_seed(0)
    sizes = {
        "n_layer": 1,
        "n_embd": 8,
        "n_head": 2,
        "vocab_size": 16,
        "n_positions": 8,
        "pad_token_id": 0,
    }
    base, tuned = (GPT2ForSequenceClassification(GPT2Config(**sizes)) for _ in range(2))
    tuned.load_state_dict(base.state_dict())
    block = tuned.transformer.h[0]
    for weight in (tuned.score.weight, block.attn.c_proj.weight, block.mlp.c_fc.weight):
        weight.data += torch.randn_like(weight)
    extract_lora(tuned, base, tmp_path / "gpt2", rank=8, progress=False)
    base.save_pretrained(tmp_path / "base")
    ours = merge_models([f"{tmp_path / 'base'}+{tmp_path / 'gpt2'}"], "passthrough", progress=False)
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "gpt2").merge_and_unload()
    for name, weight in tuned.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], weight, rtol=0, atol=1e-5)
        if name in ours:
            torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-5)

    base, tuned = (
        T5Model(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)) for _ in range(2)
    )
    tuned.load_state_dict(base.state_dict())
    attention = tuned.encoder.block[0].layer[0].SelfAttention
    for weight in (attention.relative_attention_bias.weight, attention.q.weight):
        weight.data += 1
    report = extract_lora(tuned, base, tmp_path / "t5", progress=False)
    assert [m.name for m in report.modules] == ["encoder.block.0.layer.0.SelfAttention.q"]
    assert list(report.left) == [
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    ]


def test_a_tied_embedding_is_left_since_peft_would_untie_it(tmp_path):
    base, tuned = tiny("llama-tied", 1), tiny("llama-tied", 1)
    with torch.no_grad():
        tuned.model.embed_tokens.weight[3] += 1
        tuned.model.layers[0].mlp.up_proj.weight += 0.1
    paths = save(tuned, tmp_path / "tuned"), save(base, tmp_path / "base")
    report = extract_lora(*paths, tmp_path / "out", save_others=True, progress=False)
    assert report.left.keys() == {"model.embed_tokens.weight"}
    assert not report.saved


def test_extraction_refuses_before_it_writes(tmp_path, capsys):
    base = save(tiny("llama", 1), tmp_path / "base")
    grown = save(tiny("llama", 1, vocab_size=100), tmp_path / "grown")
    with pytest.raises(PlanError, match=r"the vocabularies differ: .*embed_tokens"):
        extract_lora(grown, base, tmp_path / "out")
    with pytest.raises(PlanError, match=r"has no model\.layers\.3"):
        extract_lora(
            save(tiny("llama", 1, num_hidden_layers=3), tmp_path / "short"), base, tmp_path / "out"
        )
    other = save(tiny("gpt2"), tmp_path / "other")
    # no name in common
    count = sum(len(load_file(Path(folder, "model.safetensors"))) for folder in (base, other))
    with pytest.raises(
        PlanError, match=rf"this extraction cannot be done \({count} problems\):"
    ) as refused:
        extract_lora(other, base, tmp_path / "out")
    assert len(refused.value.problems) == count
    with pytest.raises(PlanError, match="nothing to extract"):
        extract_lora(base, base, tmp_path / "out", progress=False)
    for settings, message in [
        ({"rank": 0}, "rank is 0"),
        ({"energy": 2}, "energy is 2"),
        ({"dtype": "int8"}, "int8"),
    ]:
        with pytest.raises(ValueError, match=message):
            extract_lora(base, base, tmp_path / "out", **settings)
    assert main(["lora", "extract", grown, base, str(tmp_path / "out")]) == 1
    assert "the vocabularies differ" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_line_extracts(tmp_path, capsys):
    base = save(tiny("llama", 1), tmp_path / "base")
    adapter(tmp_path / "adapter")
    merge_models(
        [f"{base}+{tmp_path / 'adapter'}"], "passthrough", out=tmp_path / "tuned", progress=False
    )
    arguments = [
        "lora",
        "extract",
        str(tmp_path / "tuned"),
        base,
        str(tmp_path / "out"),
        "--rank",
        "8",
        "--no-progress",
    ]
    assert main([*arguments, "--energy", "0.5", "--dtype", "bfloat16"]) == 0
    assert "relative error of a change" in capsys.readouterr().out
    assert (
        load_file(tmp_path / "out" / "adapter_model.safetensors").popitem()[1].dtype
        == torch.bfloat16
    )


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("linear", {"weight": [0.7, 0.3]}),
        ("task_arithmetic", {"weight": [0.7, -0.4], "lambda": 0.5}),
        ("ties", {"weight": [1.0, 0.5], "density": 0.4}),
        ("dare_ties", {"weight": [1.0, 0.5], "density": 0.4}),
    ],
)
def test_adapters_merge_as_the_models_that_they_make(method, parameters, tmp_path):
    base = save(tiny("llama", 1), tmp_path / "base")
    adapter(tmp_path / "x", seed=1)
    adapter(tmp_path / "y", seed=2, target_modules=["q_proj", "up_proj"], r=2, use_rslora=True)
    report = merge_adapters(
        [tmp_path / "x", tmp_path / "y"],
        method,
        out=tmp_path / "out",
        rank=99,
        seed=4,
        **parameters,
    )
    models = [f"{base}+{tmp_path / name}" for name in "xy"]
    named = {} if method == "linear" else {"base_model": base}
    settings = {("lambda_" if k == "lambda" else k): v for k, v in parameters.items()}
    merge_models(
        models, method, **named, seed=4, out=tmp_path / "whole", progress=False, **settings
    )
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    before = load_file(tmp_path / "base" / "model.safetensors")
    found = updates(tmp_path / "out")
    assert max(m.error for m in report.modules) < 1e-5
    for name, value in whole.items():
        change = (value - before[name]).double()
        module = name.removesuffix(".weight")
        if module not in found:
            assert change.abs().max() < 1e-6, name
        elif method in (
            "linear",
            "task_arithmetic",
        ):  # trimming near a threshold turns on the last bit of W + D - W
            torch.testing.assert_close(found[module], change, atol=1e-6, rtol=1e-4, msg=name)
        else:
            assert float((found[module] - change).norm() / change.norm()) < 0.2, name


def test_cat_is_exact_and_is_pefts(tmp_path):
    wrapped = adapter(tmp_path / "x", seed=1)
    adapter(tmp_path / "y", seed=2)
    wrapped.load_adapter(tmp_path / "y", "y")
    wrapped.add_weighted_adapter(["default", "y"], [0.7, 0.3], "both", combination_type="cat")
    wrapped.save_pretrained(tmp_path / "peft", selected_adapters=["both"])
    report = merge_adapters(
        [tmp_path / "x", tmp_path / "y"], "cat", weight=[0.7, 0.3], out=tmp_path / "out"
    )
    assert {m.rank for m in report.modules} == {6}
    theirs, ours = updates(tmp_path / "peft" / "both"), updates(tmp_path / "out")
    assert theirs.keys() == ours.keys()
    for name, change in theirs.items():
        torch.testing.assert_close(ours[name], change, atol=1e-5, rtol=1e-4)


def test_merged_adapters_refuse_what_has_no_factors(tmp_path):
    adapter(tmp_path / "x")
    adapter(tmp_path / "saved", modules_to_save=["lm_head"])
    adapter(tmp_path / "table", target_modules=["embed_tokens"])
    wide = peft.get_peft_model(
        tiny("llama", 1, intermediate_size=32),
        peft.LoraConfig(target_modules=QVD, init_lora_weights=False),
    )
    wide.save_pretrained(tmp_path / "wide")
    for other, message in [
        ("saved", "got a full copy of lm_head.weight"),
        ("table", "changes an embedding"),
        ("wide", r"down_proj.*\[16.*24\].*\[16.*32\]"),
        ("nowhere", "there is no such folder"),
    ]:
        with pytest.raises(PlanError, match=message):
            merge_adapters([tmp_path / "x", tmp_path / other], weight=1.0, out=tmp_path / "out")
    for method, parameters, message in [
        ("slerp", {"t": 0.5}, r"merge_adapters:.*breadcrumbs"),
        ("tyes", {}, "did you mean ties"),
        ("cat", {"density": 1}, r"merge_adapters:.*'density'"),
        ("cat", {"weight": [1, 2, 3]}, r"merge_adapters:.*number.*2"),
        ("ties", {"weight": [1]}, r"ties:.*weight.*1"),
    ]:
        with pytest.raises(ValueError, match=message):
            merge_adapters(
                [tmp_path / "x", tmp_path / "x"], method, out=tmp_path / "out", **parameters
            )
    assert not (tmp_path / "out").exists()


def test_single_files_and_diffusers_folders(tmp_path):
    states = [{"conv.weight": torch.randn(4, 3, 2, 2), "b": torch.randn(4)} for _ in range(2)]
    for number, state in enumerate(states):
        save_file(state, tmp_path / f"{number}.safetensors")
        (tmp_path / str(number)).mkdir()
        save_file(state, tmp_path / str(number) / "diffusion_pytorch_model.safetensors")
        (tmp_path / str(number) / "config.json").write_text(
            '{"_class_name": "UNet2DConditionModel"}'
        )
    # no adapter, where there is such a file
    (tmp_path / "0.safetensors").rename(tmp_path / "0+a.safetensors")
    merge_models(
        [tmp_path / "0+a.safetensors", tmp_path / "1"],
        weight=[1, 3],
        out=tmp_path / "one",
        progress=False,
    )
    settings = {"weight": [1, 3], "max_shard_size": 100, "progress": False}
    merge_models([tmp_path / "0", tmp_path / "1.safetensors"], out=tmp_path / "two", **settings)
    assert (tmp_path / "two" / "diffusion_pytorch_model.safetensors.index.json").exists()
    assert (
        json.loads((tmp_path / "two" / "config.json").read_text())["_class_name"]
        == "UNet2DConditionModel"
    )
    merged = merge_models([tmp_path / "two"], "passthrough", progress=False)
    for name, value in load_file(tmp_path / "one" / "diffusion_pytorch_model.safetensors").items():
        torch.testing.assert_close(value, states[0][name] / 4 + states[1][name] * 3 / 4)
        assert torch.equal(merged[name], value)


def test_an_adapter_without_a_base_takes_no_tokenizer_of_the_current_folder(tmp_path, monkeypatch):
    for name in ("x", "y"):
        adapter(tmp_path / name)
        config = tmp_path / name / "adapter_config.json"
        settings = json.loads(config.read_text()) | {"base_model_name_or_path": None}
        config.write_text(json.dumps(settings))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    merge_adapters([tmp_path / "x", tmp_path / "y"], weight=1, out=tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    with pytest.raises(
        ValueError, match=r"expected normalize=True for linear, got False.*use task_arithmetic"
    ):
        merge_adapters(
            [tmp_path / "x", tmp_path / "y"], weight=1, normalize=False, out=tmp_path / "other"
        )


def test_a_bias_that_was_zero_and_states_without_numbers(tmp_path):
    base = {"l.weight": torch.zeros(4, 3), "l.bias": torch.zeros(4)}
    tuned = {"l.weight": torch.ones(4, 3), "l.bias": torch.ones(4)}
    report = extract_lora(tuned, base, tmp_path / "out", rank=1, progress=False)
    assert "l.bias changed from all zeros and is not in the adapter" in str(report)
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] is None
    whole = {"n": torch.ones(2, dtype=torch.int64)}
    with pytest.raises(PlanError, match="nothing to extract"):
        extract_lora(whole, whole, tmp_path / "none", progress=False)


def test_adapters_that_are_not_finite_are_not_written(tmp_path):
    for name, value in (("a", 1.0), ("nan", float("nan"))):
        (tmp_path / name).mkdir()
        settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(settings))
        factors = {"lora_A": torch.full((2, 10), value), "lora_B": torch.full((12, 2), value)}
        state = {f"base_model.model.q.{side}.weight": t for side, t in factors.items()}
        save_file(state, tmp_path / name / "adapter_model.safetensors")
    both = [tmp_path / "a", tmp_path / "nan"]
    for adapters, method, options, said in (
        (both, "cat", {}, "q: the adapter's factors have NaN or infinity"),
        (both, "linear", {"weight": 1.0}, "the merge of q has NaN or infinity"),
        (both[:1], "cat", {"weight": 1e5, "dtype": "float16"}, "NaN or infinity in float16"),
        (both[:1], "cat", {"weight": 1e39}, "weight is 1e\\+39"),
        (both[:1] * 2, "iso_c", {}, "or full-rank changes"),
    ):
        with pytest.raises(ValueError, match=said):
            merge_adapters(adapters, method, out=tmp_path / "out", progress=False, **options)
    assert not (tmp_path / "out").exists()


def test_a_whole_head_of_an_adapter_unties_its_model(tmp_path):
    base = tiny("llama", 3, tie_word_embeddings=True)
    save(base, tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter))
    tokens = torch.tensor([[1, 2, 3]])
    expected = model(tokens).logits
    model.save_pretrained(tmp_path / "adapter")
    out = tmp_path / "out"
    merge_models(
        [f"{tmp_path / 'base'}+{tmp_path / 'adapter'}"], "passthrough", out=out, progress=False
    )
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert not merged.config.tie_word_embeddings
    torch.testing.assert_close(merged(tokens).logits, expected)
