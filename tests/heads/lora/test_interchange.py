"""peft's checkpoints here, ours in peft; merged checkpoints and what rounding lost; golden counts;
bad checkpoints."""

import copy
import json
import math
import warnings

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora
from safetensors.torch import load_file, save_file

from heads.lora import (
    accelerate_lora_,
    load_lora,
    merge_lora,
    prepare_lora,
)
from model_components._folders import OutputError
from tests.heads.lora.test_accelerate import IDS, TARGETS, assert_same, run
from tests.support.models import tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings=True.*:UserWarning")

KINDS = {
    "llama": ("llama", {}),
    "patterns": (
        "llama",
        {"rank_pattern": {"q_proj": 2, "down_proj": 8}, "alpha_pattern": {"k_proj": 32}},
    ),
    "rslora": ("llama", {"use_rslora": True}),
    "trained head": ("llama", {"modules_to_save": ["lm_head"]}),
    "adapted head": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "tied": ("llama-tied", {}),
    "tied, trained head": ("llama-tied", {"modules_to_save": ["lm_head"]}),
    "tied, adapted head": ("llama-tied", {"target_modules": ["v_proj", "lm_head"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "gpt2": ("gpt2", {"target_modules": TARGETS["gpt2"], "fan_in_fan_out": True}),
    "gpt2, adapted head": ("gpt2", {"target_modules": [*TARGETS["gpt2"], "lm_head"]}),
    "biases": (
        "gpt2",
        {"target_modules": TARGETS["gpt2"], "fan_in_fan_out": True, "bias": "lora_only"},
    ),
    "classifier": ("classifier", {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}),
    "dora": ("llama", {"use_dora": True}),
}


def config_of(name):
    kind, changes = KINDS[name]
    return kind, LoraConfig(
        **{"target_modules": TARGETS["llama"], "r": 4, "lora_alpha": 8} | changes
    )


def spoken(model):
    """Adapters that say something, and heads that were trained."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += (torch.randn(parameter.shape, generator=generator) * 0.1).to(
                parameter.dtype
            )
    return model.eval()


def stock(config, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return spoken(get_peft_model(tiny(kind), config))


def files(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    return load_file(folder / "adapter_model.safetensors"), {
        k: sorted(set(v)) if isinstance(v, list) else v for k, v in config.items()
    }


def assert_same_files(a, b):
    (tensors, config), (others, other) = files(a), files(b)
    assert config == other
    assert set(tensors) == set(others)
    assert all(torch.equal(tensors[k], others[k]) for k in tensors)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_of_pefts_loads_here_and_one_of_ours_in_peft(name, tmp_path):
    kind, config = config_of(name)
    theirs = stock(copy.deepcopy(config), kind)
    theirs.save_pretrained(tmp_path / "theirs")
    if name == "biases" and tuple(map(int, peft.__version__.split(".")[:2])) < (0, 21):
        pytest.skip("peft before 0.21 does not read the biases of GPT-2 that it writes")
    ours = load_lora(tiny(kind), tmp_path / "theirs", is_trainable=True)
    assert_same(run(theirs), run(ours))  # to rounding: the order of sums is ours
    ours.save_pretrained(tmp_path / "ours")
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")
    back = PeftModel.from_pretrained(tiny(kind), tmp_path / "ours", is_trainable=True)
    expected, found = run(theirs), run(back)
    assert all(torch.equal(expected[k], found[k]) for k in expected | found)
    accelerate_lora_(back)
    expected, found = run(ours), run(back)
    assert all(torch.equal(expected[k], found[k]) for k in expected | found)


@pytest.mark.parametrize("name", KINDS)
def test_preparing_is_pefts_injection(name):
    kind, config = config_of(name)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = get_peft_model(tiny(kind), copy.deepcopy(config))
    torch.manual_seed(0)
    ours = prepare_lora(tiny(kind), config)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert all(
        torch.equal(a, b)
        for a, b in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True)
    )
    assert theirs.get_nb_trainable_parameters() == ours.get_nb_trainable_parameters()


@pytest.mark.parametrize("name", [n for n in KINDS if n != "classifier"])
def test_a_merged_checkpoint_says_what_the_model_says(name, tmp_path):
    kind, config = config_of(name)
    model = stock(config, kind)
    accelerate_lora_(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        expected = model(input_ids=IDS)[0]
    report = merge_lora(model, tmp_path / "out", max_shard_size=10_000, progress=False)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(abs(layer.lost) < 1e-5 and layer.update > 1e-3 for layer in report.layers)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    names = set(tiny(kind).state_dict())
    assert set(merged.state_dict()) == names
    with torch.no_grad():
        torch.testing.assert_close(merged.eval()(input_ids=IDS)[0], expected, rtol=1e-4, atol=1e-5)
    assert merged.config.tie_word_embeddings == (
        tiny(kind).config.tie_word_embeddings and "head" not in name
    )


def test_the_running_model_and_the_merged_one_share_an_adapter_added_later(tmp_path):
    model = prepare_lora(tiny("llama"), LoraConfig(target_modules=["q_proj"], r=2))
    model.add_adapter("other", LoraConfig(target_modules=["q_proj", "k_proj"], r=3))
    spoken(model.base_model), model.base_model.set_adapter(["default", "other"])
    spoken(model)
    with torch.no_grad():
        expected = model(input_ids=IDS)[0]
    merge_lora(model, tmp_path / "both", progress=False)
    both = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "both").eval()
    with torch.no_grad():
        torch.testing.assert_close(both(input_ids=IDS)[0], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"merge_lora:.*\['none'\]"):
        merge_lora(model, tmp_path / "none", adapters=["none"])


def test_half_precision_says_what_it_loses_and_refuses_to_lose_more(tmp_path):
    """A thousandth of W is mostly lost; of a hundredth noise alone is left, and no direction."""
    model = prepare_lora(
        tiny("llama").to(torch.bfloat16), LoraConfig(target_modules=["q_proj"], r=4)
    )
    for scale, lost, low, high in (
        (1e-3, 0.3, 0.4, 0.95),
        (1e-2, 0.02, 0.1, 0.3),
        (1e-1, 0.002, 0.005, 0.06),
    ):
        generator = torch.Generator().manual_seed(0)
        for module in model.modules():
            if hasattr(module, "lora_B") and "default" in module.lora_B:
                a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
                b.data = torch.randn(b.shape, generator=generator)
                update = (b.float() @ a.float()).norm() * module.scaling["default"]
                b.data *= scale * module.base_layer.weight.float().norm() / update
        if scale == 1e-3:
            with pytest.raises(
                ValueError,
                match=r"merge_lora:.*torch.bfloat16 loses .* of the updates, expected at most 25.0%",
            ):
                merge_lora(model, tmp_path / "out", progress=False)
            assert not list(tmp_path.iterdir())
        else:
            merge_lora(model, tmp_path / f"{scale}-default", progress=False)
        report = merge_lora(model, tmp_path / str(scale), max_lost=None, progress=False)
        assert all(low < one.noise < high for one in report.layers), report
        assert all((one.lost > lost) == (scale == 1e-3) for one in report.layers), report
        assert all(abs(one.update / scale - 1) < 0.01 for one in report.layers)
        assert "lost" in str(report)
        exact = merge_lora(model, tmp_path / f"{scale}-exact", dtype=torch.float32, progress=False)
        assert all(max(abs(one.lost), one.noise) < 1e-3 for one in exact.layers)
        weight = "model.layers.0.self_attn.q_proj.weight"  # as stored, it has lost what was said
        layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
        base = layer.base_layer.weight.float()
        update = layer.get_delta_weight("default").float()
        stored = load_file(tmp_path / str(scale) / "model.safetensors")[weight]
        assert stored.dtype == torch.bfloat16
        change = (stored.float() - base).detach()
        kept = ((change * update).sum() / update.square().sum()).detach()
        (one,) = (o for o in report.layers if o.name + ".weight" == weight)
        assert float(1 - kept) == pytest.approx(one.lost, abs=1e-3)


def test_new_tokens_that_are_trained_load_and_are_left_to_pefts_own_merge(tmp_path):
    model = prepare_lora(
        tiny("llama"), LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4])
    )
    model.save_pretrained(tmp_path / "adapter")
    loaded = load_lora(tiny("llama"), tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS)[0], model(input_ids=IDS)[0])
    with pytest.raises(ValueError, match=r"merge_lora:.*embed_tokens.*TrainableTokensWrapper"):
        merge_lora(model, tmp_path / "out")


def test_merging_refuses_what_it_cannot_take(tmp_path):
    model = spoken(prepare_lora(tiny("llama"), LoraConfig(target_modules=["q_proj"])))
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"merge_lora:.*q_proj"):
        merge_lora(model, tmp_path / "out")
    model = prepare_lora(tiny("llama"), LoraConfig(target_modules=["q_proj"]))
    for dtype in (torch.int8, "int8", "half precision"):
        with pytest.raises(ValueError, match=r"merge_lora:.*floating"):
            merge_lora(model, tmp_path / "out", dtype=dtype)
    with pytest.raises(ValueError, match=r"merge_lora:.*LlamaForCausalLM.*peft\.PeftModel"):
        merge_lora(tiny("llama"), tmp_path / "out")
    with pytest.raises(ValueError, match="merge_lora: max_lost is nan"):
        merge_lora(model, tmp_path / "out", max_lost=float("nan"))
    report = merge_lora(
        model, tmp_path / "out", dtype="bfloat16", adapters="default", progress=False
    )
    assert "4 layers did not change" in str(report)


def test_merging_refuses_a_folder_with_something_in_it_and_leaves_nothing_when_it_is_stopped(
    tmp_path, monkeypatch
):
    model = prepare_lora(tiny("llama"), LoraConfig(target_modules=["q_proj"]))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(ValueError, match="is not empty"):
        merge_lora(model, tmp_path / "full")
    monkeypatch.setattr(
        "heads.lora.storage.merge._write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        merge_lora(model, tmp_path / "out", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["full"]


def replicated():
    model = tiny("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    config = LoraConfig(target_modules=["q_proj"], layer_replication=[[0, 2], [1, 2]])
    return spoken(get_peft_model(model, config))


def sharing():
    model = tiny("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    return spoken(get_peft_model(model, LoraConfig(target_modules=["q_proj"])))


@pytest.mark.parametrize("make", [replicated, sharing])
def test_what_layers_share_without_a_declared_tie_is_written_for_each(make, tmp_path):
    model = make().eval()
    with torch.no_grad():
        expected = model(input_ids=IDS)[0]
        merge_lora(model, tmp_path / "out", max_lost=None, progress=False)
        merged, told = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", output_loading_info=True
        )
        torch.testing.assert_close(merged.eval()(input_ids=IDS)[0], expected)
    assert not any(told.values()), told


@pytest.mark.parametrize("kind", ["llama-tied", "bert"])
def test_ties_stay_in_another_dtype_and_a_head_that_was_trained_whole_is_its_own(kind, tmp_path):
    targets = ["q_proj"] if kind != "bert" else ["query"]
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=96,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
        )
        base, cls, head = (
            transformers.BertForMaskedLM(config),
            transformers.BertForMaskedLM,
            ["cls"],
        )
    else:
        base, cls, head = tiny(kind), transformers.AutoModelForCausalLM, None
    model = get_peft_model(base, LoraConfig(target_modules=targets, modules_to_save=head)).eval()
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
    merge_lora(model, tmp_path / "out", dtype="float64", max_lost=None, progress=False)
    merged = cls.from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    assert merged.config.tie_word_embeddings == (kind != "bert")
    with torch.no_grad():
        torch.testing.assert_close(
            merged(IDS).logits, model.double()(IDS).logits, rtol=1e-5, atol=1e-5
        )


def test_names_like_an_adapters_and_float64_are_written_as_they_are(tmp_path):
    base = torch.nn.ModuleDict(
        {"lora_mix": torch.nn.Linear(4, 4), "other": torch.nn.Linear(4, 4)}
    ).double()
    expected = {n: t.clone() for n, t in base.state_dict().items()}
    model = get_peft_model(torch.nn.Sequential(base), LoraConfig(target_modules=["other"], r=2))
    merge_lora(model, tmp_path / "out", progress=False)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {n.removeprefix("0."): t.dtype for n, t in stored.items()} == dict.fromkeys(
        expected, torch.float64
    )
    assert all(torch.equal(stored[f"0.{n}"], t) for n, t in expected.items())


def test_a_merged_model_keeps_how_it_generates_and_takes_no_other_adapters_head(tmp_path):
    base = tiny("llama")
    base.generation_config.max_new_tokens = 7
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(base, config, adapter_name="a")
    model.add_adapter("b", config)
    for name, parameter in model.named_parameters():
        if "lm_head.modules_to_save.b" in name:
            parameter.data.fill_(3.0)
    merge_lora(model, tmp_path / "a", adapters="a", progress=False)
    merge_lora(model, tmp_path / "b", adapters="b", progress=False)
    heads = [load_file(tmp_path / name / "model.safetensors")["lm_head.weight"] for name in "ab"]
    assert not (heads[0] == 3).any()
    assert (heads[1] == 3).all()
    assert type(base).from_pretrained(tmp_path / "a").generation_config.max_new_tokens == 7


def test_a_head_that_its_models_forward_needs_tied_is_refused(tmp_path):
    sizes = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_experts": 2,
        "vocab_size": 32,
    }
    base = transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(
            **sizes, num_sparse_encoder_layers=0, num_sparse_decoder_layers=0
        )
    )
    model = spoken(
        get_peft_model(base, LoraConfig(target_modules=["q"], modules_to_save=["lm_head"]))
    )
    with pytest.raises(ValueError, match=r"merge_lora:.*embedding"):
        merge_lora(model, tmp_path / "out", max_lost=None, progress=False)
    assert not (tmp_path / "out").exists()


def test_a_model_without_token_embeddings_is_merged(tmp_path):
    config = transformers.ResNetConfig(
        num_labels=2, embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1]
    )
    model = get_peft_model(
        transformers.ResNetForImageClassification(config),
        LoraConfig(target_modules=["classifier.1"]),
    )
    spoken(model)
    merge_lora(model, tmp_path / "out", max_lost=None, progress=False)
    pixels = torch.randn(1, 3, 32, 32)
    merged = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(merged(pixels).logits, model(pixels).logits, rtol=1e-4, atol=1e-5)


def test_weights_made_of_others_and_biases_without_a_place_are_refused(tmp_path):
    model = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(target_modules=["0"])
    )
    torch.nn.utils.parametrizations.weight_norm(model.base_model.model[0].base_layer)
    with pytest.raises(ValueError, match=r"merge_lora:.* of 0 to be a parameter"):
        merge_lora(model, tmp_path / "out")
    bare = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(bare, LoraConfig(target_modules=["0"], lora_bias=True))
    with pytest.raises(ValueError, match=r"merge_lora:.*adapter"):
        merge_lora(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_counters_of_a_module_that_is_saved_whole_load(tmp_path):
    def base():
        return torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.LSTM(4, 4)
        )

    model = get_peft_model(base(), LoraConfig(target_modules=["0"], modules_to_save=["1", "2"]))
    spoken(model).train()
    model.base_model.model[1](torch.randn(5, 4))
    model.save_pretrained(tmp_path / "a")
    loaded = load_lora(base(), tmp_path / "a")
    for name, tensor in model.state_dict().items():
        if "modules_to_save" in name:
            assert torch.equal(loaded.state_dict()[name], tensor), name


def test_numbers_that_the_dtype_cannot_hold_and_other_tuners_beneath_are_refused(tmp_path):
    model = spoken(get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"])))
    layer = next(m for m in model.modules() if isinstance(m, lora.Linear))
    layer.base_layer.weight.data.fill_(1e5)
    with pytest.raises(ValueError, match=r"merge_lora:.*numbers"):
        merge_lora(model, tmp_path / "out", dtype="float16", max_lost=None)
    layer.base_layer.weight.data = layer.base_layer.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"merge_lora:.*\(torch.float8_e4m3fn\)"):
        merge_lora(model, tmp_path / "out", max_lost=None)
    inner = get_peft_model(tiny("llama"), peft.LoHaConfig(target_modules=["q_proj"]))
    outer = get_peft_model(inner.base_model.model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"merge_lora:.*another"):
        merge_lora(outer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layer_of_zeros_is_merged_and_its_update_is_not_measured_by_it(tmp_path):
    base = torch.nn.Sequential(torch.nn.Linear(4, 4))
    torch.nn.init.zeros_(base[0].weight)
    report = merge_lora(
        spoken(get_peft_model(base, LoraConfig(target_modules=["0"]))), tmp_path / "out"
    )
    assert report.layers[0].update == float("inf")
    assert "inf" in str(report)


SIZES = {"medium": (1024, 24, 16), "large": (1280, 36, 20), "xl": (1600, 48, 25)}
TOTALS = {
    "medium": (406_286_336, 354_823_168),
    "large": (838_359_040, 774_030_080),
    "xl": (1_638_022_400, 1_557_611_200),
}
EVERYTHING = ["c_attn", "c_proj", "c_fc", "lm_head"]
TRAINABLE = [
    ("medium", 16, EVERYTHING, 7_111_952),
    ("large", 16, EVERYTHING, 12_621_072),
    ("medium", 16, "all-linear", 6_291_456),
    ("large", 16, "all-linear", 11_796_480),
]


def gpt2_without_memory(size, tied=False):
    width, layers, heads = SIZES[size]
    config = transformers.GPT2Config(
        n_embd=width, n_layer=layers, n_head=heads, tie_word_embeddings=tied
    )
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("size", SIZES)
def test_golden_totals(size):
    counts = tuple(
        sum(p.numel() for p in gpt2_without_memory(size, tied).parameters())
        for tied in (False, True)
    )
    assert counts == TOTALS[size]


@pytest.mark.parametrize(("size", "rank", "targets", "count"), TRAINABLE)
def test_golden_trainable_counts(size, rank, targets, count):
    model = prepare_lora(gpt2_without_memory(size), LoraConfig(r=rank, target_modules=targets))
    assert model.get_nb_trainable_parameters()[0] == count


BAD_CONFIGS = {
    "rank 0": (
        {"rank_pattern": {"q_proj": 0}},
        r"prepare_lora:.*rank_pattern\['q_proj'\].*0.*1",
    ),
    "too large": (
        {"r": 17},
        r"prepare_lora:.*17.*model.layers.0.self_attn.k_proj.*8.*16",
    ),
    "too large for one": (
        {"rank_pattern": {"k_proj": 9}},
        r"prepare_lora:.*9.*k_proj.*8.*16",
    ),
    "no target": (
        {"target_modules": ["q_proj", "k_porj"]},
        r"prepare_lora:.*target_modules.*'k_porj'.*k_proj",
    ),
    "no pattern": ({"target_modules": ".*attn.wq"}, "matches none of"),
    "no module to save": (
        {"modules_to_save": ["head"]},
        r"prepare_lora:.*modules_to_save.*'head'.*lm_head",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs_are_refused_before_the_model_is_touched(case):
    changes, message = BAD_CONFIGS[case]
    model = tiny("llama")
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        prepare_lora(
            model, LoraConfig(**{"target_modules": ["q_proj", "k_proj"], "r": 4} | changes)
        )
    assert list(model.state_dict()) == names
    assert all(p.requires_grad for p in model.parameters())


def test_a_rank_below_one_a_bad_name_and_a_model_with_adapters_are_refused():
    config = LoraConfig(target_modules=["q_proj"], r=4)
    for name in ("lora", "a.b", ""):
        with pytest.raises(ValueError, match="expected a non-empty name without dots"):
            prepare_lora(tiny("llama"), config, adapter_name=name)
    model = prepare_lora(tiny("llama"), config)
    with pytest.raises(ValueError, match=r"prepare_lora:.*adapters"):
        prepare_lora(model, config)
    config.r = 0
    with pytest.raises(ValueError, match=r"prepare_lora: r is 0, expected a whole number"):
        prepare_lora(tiny("llama"), config)
    with pytest.raises(ValueError, match=r"prepare_lora:.*config"):
        prepare_lora(tiny("llama"), {"r": 4})


WRONG = {
    "lora_alpha": [math.nan, math.inf, "16", None],
    "r": ["8", 2.5, True],
    "alpha_pattern": [{"q_proj": math.nan}],
    "rank_pattern": [{"q_proj": 0}],
    "lora_dropout": [-0.1, 1.0, "0.1"],
    "target_modules": [[1, 2], 7],
    "loftq_config": [{"loftq_iter": "five"}],
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in WRONG.items() for v in values], ids=str
)
def test_settings_that_are_no_numbers_or_names_are_refused(field, value, tmp_path):
    config = LoraConfig(target_modules=["q_proj"], r=4)
    model = prepare_lora(tiny("llama"), config)
    model.save_pretrained(tmp_path)
    setattr(config, field, value)
    with pytest.raises(ValueError, match=rf"prepare_lora: (loftq_iter|{field})\S* is .*, expected"):
        prepare_lora(tiny("llama"), config)
    if field == "loftq_config":  # of which peft's files keep nothing
        return
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {field: value}))
    with pytest.raises(ValueError, match=r"load_lora: .*adapter_config\.json"):
        load_lora(tiny("llama"), tmp_path)


def test_weights_of_eight_bits_are_refused(tmp_path):
    stock(config_of("llama")[1], "llama").save_pretrained(tmp_path)
    spoil(tmp_path, lambda t: t.update({KEY: t[KEY].to(torch.float8_e4m3fn)}))
    with pytest.raises(ValueError, match=r"load_lora:.*float8_e4m3fn, expected .* 16 bits"):
        load_lora(tiny("llama"), tmp_path)


def spoil(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def test_bad_checkpoints_are_refused_before_the_model_is_touched(tmp_path):
    good = tmp_path / "good"
    stock(config_of("llama")[1], "llama").save_pretrained(good)

    def refused(message, folder, kind="llama", **changes):
        model = tiny(kind, **changes)
        names = list(model.state_dict())
        with pytest.raises(ValueError, match=message):
            load_lora(model, folder)
        assert list(model.state_dict()) == names

    refused(r"load_lora:.*model.layers.2", good, num_hidden_layers=2)
    refused(r"load_lora:.*has shape.*\[16.*4\].*\[32.*4\].*43", good, hidden_size=32)
    refused(r"load_lora:.*does not match this GPT2LMHeadModel", good, kind="gpt2")
    cases = {
        "not finite": (lambda t: t[KEY].fill_(float("nan")), r"load_lora:.*numbers"),
        "shape": (
            lambda t: t.update({KEY: t[KEY][:2].clone()}),
            r"load_lora:.*q_proj.lora_A.weight.*\[2.*16\].*\[4.*16\]",
        ),
        "lacking": (lambda t: t.pop(KEY), f"lacks {KEY}, which its config requires"),
        "left over": (
            lambda t: t.update({f"{KEY.replace('q_proj', 'rotary')}": t[KEY].clone()}),
            r"load_lora:.*expected tensors for modules of the model, which has no .*rotary",
        ),
        "not named": (
            lambda t: t.update(
                {KEY.replace("layers.1.self_attn.q_proj", "embed_tokens"): t[KEY].clone()}
            ),
            r"load_lora:.*base_model.model.model.embed_tokens.lora_A.weight, .*target_modules of its config",
        ),
        "whole numbers": (
            lambda t: t.update({KEY: t[KEY].to(torch.int8)}),
            r"load_lora:.*torch.int8",
        ),
    }
    for name, (change, message) in cases.items():
        stock(config_of("llama")[1], "llama").save_pretrained(tmp_path / name)
        spoil(tmp_path / name, change)
        refused(message, tmp_path / name)
    path = good / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused("cannot be read", good)
    path.rename(good / "adapter_model.bin")
    refused(r"load_lora:.*pickle", good)
    with pytest.raises(ValueError, match="expected a non-empty name without dots"):
        load_lora(tiny("llama"), good, adapter_name="lora")
    refused(r"load_lora:.*folder", tmp_path / "none")
    (good / "adapter_model.bin").rename(path)
    stock(config_of("llama")[1], "llama").save_pretrained(good)
    model = load_lora(tiny("llama"), good)
    with pytest.raises(ValueError, match=r"load_lora:.*'default'"):
        load_lora(model, good)
    assert load_lora(model, good, adapter_name="second").peft_config.keys() == {"default", "second"}
    names = list(model.state_dict())
    for changes in ({"num_hidden_layers": 6}, {"hidden_size": 32}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            get_peft_model(tiny("llama", **changes), config_of("llama")[1]).save_pretrained(
                tmp_path / "other"
            )
        with pytest.raises(ValueError, match="load_lora: "):
            load_lora(model, tmp_path / "other", adapter_name="third")
        assert list(model.state_dict()) == names
        assert model.peft_config.keys() == {"default", "second"}
    for text in ("{", "[1]", '{"r": 4}'):
        (good / "adapter_config.json").write_text(text)
        refused(r"load_lora:.*adapter_config.json", good)


def test_what_came_to_be_there_during_a_merge_stays(tmp_path, monkeypatch):
    import heads.lora.storage.merge

    model = spoken(get_peft_model(tiny("llama"), config_of("llama")[1]))
    write = heads.lora.storage.merge._write

    def slow(*given):
        write(*given)
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "thesis").write_text("x")

    with monkeypatch.context() as patched:
        patched.setattr(heads.lora.storage.merge, "_write", slow)
        with pytest.raises(OutputError, match="something was put there meanwhile"):
            merge_lora(model, tmp_path / "m", progress=False)
    assert (tmp_path / "m" / "thesis").read_text() == "x"
    (tmp_path / "file").write_text("x")
    with monkeypatch.context() as patched:  # refused before any work
        patched.setattr(heads.lora.storage.merge, "_measured", lambda *given: 1 / 0)
        with pytest.raises(OutputError, match="a file is there"):
            merge_lora(model, tmp_path / "file", progress=False)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_ordinary_use_warns_of_nothing(kind, tmp_path):
    """Nor does peft through us, of names that transformers has deprecated or of what it sets right
    by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # peft 0.18, saving a tiny model
        warnings.filterwarnings("ignore", message="Could not find a config file in")
        config = LoraConfig(target_modules=[t for t in TARGETS[kind] if t != "lm_head"])
        model = spoken(prepare_lora(tiny(kind), config))
        model.save_pretrained(tmp_path / "adapter")
        load_lora(tiny(kind), tmp_path / "adapter")
        merge_lora(model, tmp_path / "merged", progress=False)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_whose_order_decides_are_refused(field):
    """peft sorts them when it saves, and then another one is the first that matches."""
    patterns = {"q_proj": 2, r"layers\.0\..*": 4}
    config = LoraConfig(r=4, target_modules=["q_proj"], **{field: patterns})
    with pytest.raises(ValueError, match=f"prepare_lora: {field} has .*q_proj.*layers.* all match"):
        prepare_lora(tiny("llama"), config)
    # the same value, or a module that is no target
    prepare_lora(tiny("llama"), LoraConfig(r=4, target_modules=["k_proj"], **{field: patterns}))


def test_two_trained_copies_of_a_head_cannot_be_merged(tmp_path):
    def config(target):
        return LoraConfig(r=2, target_modules=[target], modules_to_save=["lm_head"])

    model = prepare_lora(tiny("llama"), config("q_proj"))
    model.add_adapter("two", config("v_proj"))
    with pytest.raises(
        ValueError, match=r"one adapter with a trained copy of .*lm_head, got default, two"
    ):
        merge_lora(model, tmp_path / "out", adapters=["default", "two"], progress=False)
    merge_lora(model, tmp_path / "out", adapters="two", progress=False)
