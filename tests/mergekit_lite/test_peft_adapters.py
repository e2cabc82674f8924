"""Adapters of every kind, folded in as peft merges them."""

import copy
import json

import peft
import pytest
import torch
from safetensors.torch import load_file

from mergekit_lite import PlanError, merge_adapters, merge_models
from mergekit_lite.masks import Merger
from tests.support.models import tiny

LORA = {"r": 4, "init_lora_weights": False}
CONFIGS = {
    "dora": ("llama", peft.LoraConfig(use_dora=True, target_modules="all-linear", **LORA)),
    "dora of embedding and head": (
        "llama",
        peft.LoraConfig(use_dora=True, target_modules=["embed_tokens", "lm_head"], **LORA),
    ),
    "dora of Conv1D, and a layer saved whole": (
        "gpt2",
        peft.LoraConfig(
            use_dora=True, target_modules=["c_attn", "c_fc"], modules_to_save=["wpe"], **LORA
        ),
    ),
    "biases": (
        "gpt2",
        peft.LoraConfig(lora_bias=True, bias="all", target_modules=["c_attn", "c_proj"], **LORA),
    ),
    "lora and tokens": (
        "llama",
        peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 5], **LORA),
    ),
    "tokens": ("llama", peft.TrainableTokensConfig(token_indices=[1, 5])),
    "experts": (
        "mixtral",
        peft.LoraConfig(
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            target_modules=["q_proj"],
            **LORA,
        ),
    ),
    "loha": ("llama", peft.LoHaConfig(r=4, target_modules=["q_proj", "up_proj"])),
    "lokr": ("llama", peft.LoKrConfig(r=4, target_modules=["q_proj", "up_proj"])),
    "oft": ("llama", peft.OFTConfig(r=2, oft_block_size=0, target_modules=["q_proj"])),
    "boft": ("llama", peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"])),
    "hra": ("llama", peft.HRAConfig(r=4, target_modules=["q_proj"])),
    "fourier": ("llama", peft.FourierFTConfig(n_frequency=10, target_modules=["q_proj"])),
    "randlora": ("llama", peft.RandLoraConfig(r=4, target_modules=["q_proj"])),
    "adalora": ("llama", peft.AdaLoraConfig(r=4, target_modules=["q_proj"], total_step=10)),
    "vera": ("llama", peft.VeraConfig(r=4, target_modules=["q_proj"])),
    "norms": ("llama", peft.LNTuningConfig(target_modules=["input_layernorm"])),
    "ia3": (
        "llama",
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
}


def adapted(kind, config, folder):
    """Write a base and a random adapter; return what names both, and peft's merged weights."""
    base = tiny(kind, 1)
    base.save_pretrained(folder / "base")
    wrapped = peft.get_peft_model(copy.deepcopy(base), config)
    torch.manual_seed(0)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.3
    wrapped.save_pretrained(folder / "adapter")
    loaded = peft.PeftModel.from_pretrained(base, folder / "adapter")
    loaded.merge_and_unload().save_pretrained(folder / "merged")
    return f"{folder / 'base'}+{folder / 'adapter'}", load_file(folder / "merged/model.safetensors")


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_is_merged_as_peft_merges_it(name, tmp_path):
    model, expected = adapted(*CONFIGS[name], tmp_path)
    merge_models([model], "passthrough", out=tmp_path / "out", progress=False)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(tmp_path / "base" / "model.safetensors")
    assert merged.keys() == expected.keys() == before.keys()
    assert any(not torch.equal(merged[n], before[n]) for n in merged)
    for tensor, value in merged.items():
        torch.testing.assert_close(value, expected[tensor], rtol=0, atol=1e-6)


def test_bfloat16_is_merged_in_float32_and_rounded_once(tmp_path):
    model, expected = adapted(*CONFIGS["dora"], tmp_path)
    merged = merge_models([model], "passthrough", dtype="bfloat16", progress=False)
    for name, value in merged.items():
        assert torch.equal(value, expected[name].bfloat16())


def test_adapters_that_change_no_weight_or_do_not_fit_are_refused(tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    base = tiny("llama", 1)
    base.save_pretrained(tmp_path / "base")
    peft.get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path / "prompt")
    with pytest.raises(PlanError, match=r"expected one of LORA, .*, got peft_type .PROMPT_TUNING"):
        merge_models([f"{tmp_path / 'base'}+{tmp_path / 'prompt'}"], "passthrough", progress=False)
    tied = tiny("llama", 1, tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "tied")
    dora = peft.LoraConfig(use_dora=True, target_modules=["lm_head", "q_proj"], **LORA)
    peft.get_peft_model(copy.deepcopy(tied), dora).save_pretrained(tmp_path / "head")
    with pytest.raises(PlanError, match=r"changes lm_head.weight, which is not a tensor of"):
        merge_models([f"{tmp_path / 'tied'}+{tmp_path / 'head'}"], "passthrough", progress=False)
    wide = tiny("llama", 1, hidden_size=32, intermediate_size=48)
    peft.get_peft_model(wide, CONFIGS["dora"][1]).save_pretrained(tmp_path / "wide")
    with pytest.raises(PlanError, match=r"adapter .*wide: does not fit .*base \(size mismatch"):
        merge_models([f"{tmp_path / 'base'}+{tmp_path / 'wide'}"], "passthrough", progress=False)
    settings = json.loads((tmp_path / "wide" / "adapter_config.json").read_text())
    settings["init_lora_weights"] = "pissa"
    (tmp_path / "wide" / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(PlanError, match="also changed the base"):
        merge_models([f"{tmp_path / 'base'}+{tmp_path / 'wide'}"], "passthrough", progress=False)
    with pytest.raises(PlanError, match="expected a plain LoRA"):
        merge_adapters([tmp_path / "wide"], weight=1, out=tmp_path / "out")


def test_learned_masks_take_such_a_component(tmp_path):
    model, expected = adapted(*CONFIGS["dora"], tmp_path)
    merger = Merger.from_pretrained([model], base=str(tmp_path / "base"))
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(merger.state(0)[name], expected[name], rtol=0, atol=1e-6)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["use_dora"]
