"""MLPs are found by how numbers flow: in every family that was tried, and where there is none."""

import peft
import pytest
import torch
import transformers
from torch import nn

from kronecker import KroneckerConfig, LowRankConfig, PruneConfig, convert_, prune_
from kronecker.discovery.mlps import find_mlps
from kronecker.fitting.calls import calls_of
from tests.support.models import MAKERS, MIXTURES, tiny

DECODER = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"vocab_size": 96, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ENCODER_DECODER = {
    "vocab_size": 96,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
}
T5 = {"vocab_size": 96, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}
# class: (fields of its config, number of MLPs, layers that write hidden neurons, layout)
FAMILIES = {
    "FalconForCausalLM": (DECODER | {"ffn_hidden_size": 24}, 2, 1, "plain"),
    "BloomForCausalLM": (DECODER | {"n_layer": 2, "n_head": 4}, 2, 1, "plain"),
    "OPTForCausalLM": (DECODER | {"ffn_dim": 24, "word_embed_proj_dim": 16}, 2, 1, "plain"),
    "GPTJForCausalLM": (GPT | {"rotary_dim": 4}, 2, 1, "plain"),
    "GPTNeoXForCausalLM": (DECODER, 2, 1, "plain"),
    "GPTBigCodeForCausalLM": (GPT, 2, 1, "plain"),
    "PhiForCausalLM": (DECODER, 2, 1, "plain"),
    "Phi3ForCausalLM": (DECODER, 2, 1, "halves"),
    "GlmForCausalLM": (DECODER | {"head_dim": 4}, 2, 1, "halves"),
    "StableLmForCausalLM": (DECODER, 2, 2, "plain"),
    "CohereForCausalLM": (DECODER, 2, 2, "plain"),
    "OlmoForCausalLM": (DECODER, 2, 2, "plain"),
    "Olmo2ForCausalLM": (DECODER, 2, 2, "plain"),
    "Starcoder2ForCausalLM": (DECODER, 2, 1, "plain"),
    "GraniteForCausalLM": (DECODER, 2, 2, "plain"),
    "NemotronForCausalLM": (DECODER, 2, 1, "plain"),
    "HeliumForCausalLM": (DECODER | {"head_dim": 4}, 2, 2, "plain"),
    "Qwen2MoeForCausalLM": (DECODER | MOE | {"shared_expert_intermediate_size": 20}, 2, 2, "plain"),
    "T5ForConditionalGeneration": (T5 | {"decoder_start_token_id": 0}, 4, 1, "plain"),
    "UMT5ForConditionalGeneration": (T5 | {"decoder_start_token_id": 0}, 4, 2, "plain"),
    "BartForConditionalGeneration": (ENCODER_DECODER, 4, 1, "plain"),
    "ViTModel": (VISION, 2, 1, "plain"),
    "DeiTModel": (VISION, 2, 1, "plain"),
    "Dinov2Model": (VISION | {"mlp_ratio": 2}, 2, 1, "plain"),
    "CLIPTextModel": (DECODER, 2, 1, "plain"),
    "BigBirdModel": (DECODER | {"attention_type": "original_full"}, 2, 1, "plain"),
    "MobileBertModel": (
        DECODER
        | {"intra_bottleneck_size": 16, "embedding_size": 16, "num_feedforward_networks": 2},
        4,
        1,
        "plain",
    ),
}


def family(name):
    fields = FAMILIES[name][0]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**fields)).eval()


def calibration(model):
    """A batch that the model can be run on."""
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(8, 3, 16, 16, generator=generator)}
    ids = torch.randint(3, 96, (8, 16), generator=generator)
    return {"input_ids": ids} | (
        {"decoder_input_ids": ids.flip(0)} if model.config.is_encoder_decoder else {}
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_mlps_are_found_pruned_and_stock(name, tmp_path):
    _, count, ups, layout = FAMILIES[name]
    model = family(name)
    mlps = find_mlps(model)
    assert [(len(m.ups), m.layout) for m in mlps] == [(ups, layout)] * count
    batch = calibration(model)
    if name in ("BloomForCausalLM", "Dinov2Model"):
        with pytest.raises(ValueError, match=r"prune_:.*family"):
            prune_(model, calibration=[batch], progress=False)
        return
    report = prune_(model, calibration=[batch], progress=False)
    assert all(0 < r.error < 1 for r in report.layers)
    model.save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(stock(**batch)[0], model(**batch)[0])


@pytest.mark.parametrize(
    "name", ["FalconForCausalLM", "Phi3ForCausalLM", "ViTModel", "BartForConditionalGeneration"]
)
def test_families_are_converted(name):
    model = family(name)
    batch = calibration(model)
    with torch.no_grad():
        before = model(**batch)[0]
        config = KroneckerConfig(b_shape=(2, 1), rank=2, init="van_loan")
        report = convert_(model, config, progress=False)  # all terms: as it was
        torch.testing.assert_close(model(**batch)[0], before, rtol=1e-3, atol=1e-4)
    assert len(report.layers) == 2 * FAMILIES[name][1]


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind not in MIXTURES])
def test_the_tiny_models_mlps_are_whole(kind):
    model = tiny(kind)
    layers = {"gpt2": "n_layer", "distilbert": "n_layers", "albert": "num_hidden_groups"}
    assert len(find_mlps(model)) == getattr(model.config, layers.get(kind, "num_hidden_layers"))


class Rows(nn.Module):
    """Two matrices with something between them."""

    def __init__(self, between, residual=False):
        super().__init__()
        self.first, self.second, self.between, self.residual = (
            nn.Linear(6, 10),
            nn.Linear(10, 6),
            between,
            residual,
        )
        self.beside = nn.Linear(6, 10)

    def forward(self, x):
        hidden = self.between(self.first(x))
        return self.second(
            hidden + torch.sin(torch.arange(10.0)) * x.sum(-1, keepdim=True)
            if self.residual
            else hidden
        )


@pytest.mark.parametrize(
    ("between", "residual", "count"),
    [
        (nn.ReLU(), False, 1),
        (nn.Sequential(nn.GELU(), nn.Dropout()), False, 1),
        (nn.LayerNorm(10), False, 0),  # each neuron depends on all
        (nn.Softmax(-1), False, 0),
        (nn.ReLU(), True, 0),  # what is read is not the hidden neurons alone
    ],
)
def test_only_what_is_independent_counts(between, residual, count):
    torch.manual_seed(0)
    assert len(find_mlps(Rows(between, residual), {"x": torch.randn(5, 6)})) == count


def test_mixing_tokens_is_no_mlp():
    class Mixed(Rows):
        def forward(self, x):
            return self.second(torch.relu(self.first(x)).cumsum(1))

    assert not find_mlps(Mixed(nn.ReLU()), {"x": torch.randn(2, 5, 6)})


def test_a_model_that_cannot_be_run_is_refused():
    with pytest.raises(ValueError, match=r"kronecker:.*Rows.*run.*batch"):
        find_mlps(Rows(nn.ReLU()))
    with pytest.raises(ValueError, match=r"kronecker:.*not be run"):
        find_mlps(Rows(nn.ReLU()), {"x": torch.randn(5, 7)})


def test_influence_takes_blocks_of_one_list():
    model = family("BartForConditionalGeneration")
    config = PruneConfig(keep=0.5, allocate="influence")
    with pytest.raises(
        ValueError, match=r"influence can be measured only with two or more blocks in one list"
    ):
        prune_(model, config, calibration=[calibration(model)], progress=False)


def test_batches_of_an_encoder_decoder_are_whole():
    model = family("BartForConditionalGeneration")
    batch = calibration(model)
    half = torch.ones(8, 16).tril()
    for bad, message in (
        ({"input_ids": batch["input_ids"]}, r"prune_:.*decoder_input_ids"),
        (
            {"input_ids": batch["input_ids"], "labels": batch["input_ids"]},
            "expected decoder_input_ids",
        ),
        (batch | {"attention_mask": half}, r"prune_:.*batches"),
        (batch | {"decoder_attention_mask": half}, r"prune_:.*batches"),
        (batch | {"decoder_input_ids": batch["input_ids"] + 96}, r"prune_:.*token"),
        (torch.tensor(5), "input_ids is a single number"),
    ):
        with pytest.raises(ValueError, match=message):
            prune_(model, calibration=[bad], progress=False)
    with pytest.raises(ValueError, match=r"prune_:.*calibration"):
        prune_(model, calibration=None, progress=False)
    prune_(model, calibration=[batch | {"attention_mask": torch.ones(8, 16)}], progress=False)


def test_neurons_that_another_layer_reads_are_left_alone():
    class Two(Rows):
        def forward(self, x):
            hidden = torch.relu(self.first(x))
            return self.second(hidden) + self.side(hidden)

    torch.manual_seed(0)
    model = Two(nn.ReLU())
    model.side = nn.Linear(10, 6)
    assert not find_mlps(model, {"x": torch.randn(5, 6)})
    whole = nn.Sequential(Rows(nn.ReLU()), Two(nn.ReLU()), Rows(nn.ReLU()))
    whole[1].side = nn.Linear(10, 6)
    found = [m.down for m in find_mlps(whole, {"input": torch.randn(5, 6)})]
    assert found[0] == "0.second"
    assert "1.second" not in found


@pytest.mark.parametrize("changes", [True, False])
def test_hooks_that_change_what_a_layer_says_are_refused(changes):
    model = tiny("llama")
    model.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda m, given, out: 2 * out if changes else None
    )
    if not changes:
        assert len(find_mlps(model)) == model.config.num_hidden_layers
        return
    with pytest.raises(ValueError, match=r"kronecker:.*model\.layers\.0\.mlp\.down_proj"):
        find_mlps(model)


def test_adapters_are_merged_first():
    batch = torch.randint(3, 96, (2, 8))
    for target in ("down_proj", "q_proj"):
        config = peft.LoraConfig(
            target_modules=[target], r=2, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(tiny("llama"), config)
        with pytest.raises(ValueError, match=r"convert_:.*adapters"):
            convert_(
                model, KroneckerConfig(b_shape=(2, 1), rank=2, init="van_loan"), progress=False
            )
        with pytest.raises(ValueError, match=r"prune_:.*adapters"):
            prune_(model, calibration=[batch], progress=False)


def test_short_ids_are_refused_by_their_type():
    with pytest.raises(ValueError, match=r"prune_:.*torch\.int16.*32.*64"):
        prune_(tiny("llama"), calibration=[torch.randint(3, 96, (2, 8)).short()], progress=False)


def test_blocks_that_run_several_times_are_recorded_in_every_batch():
    model = tiny("albert").eval()
    generator = torch.Generator().manual_seed(0)
    model = getattr(model, model.base_model_prefix, model)
    groups = list(model.encoder.albert_layer_groups)
    data = [{"input_ids": torch.randint(3, 96, (2, 9), generator=generator)} for _ in range(2)]
    with torch.no_grad():
        _, states = calls_of(model, groups, data)
        runs = model.config.num_hidden_layers
        for number, batch in enumerate(data):
            true = model(**batch, output_hidden_states=True).hidden_states[:-1]
            for seen, state in zip(states[number * runs :], true, strict=False):
                torch.testing.assert_close(seen, state)


def test_a_layer_that_runs_twice_is_fitted_to_one_of_its_runs():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(torch.sin(3 * self.fc(x)))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(400, 8)
    expected = model(x).detach()
    convert_(model, {"fc": LowRankConfig(rank=7, epochs=0)}, calibration=[{"x": x}], progress=False)
    # the plain decomposition's is .042; of pairs that do not belong together it was .94
    assert (model(x) - expected).norm() < 0.1 * expected.norm()


def test_a_users_backward_hook_goes_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    seen = []
    model[2].register_full_backward_hook(lambda module, given, out: seen.append(module))
    convert_(model, {"2": KroneckerConfig(b_shape=(2, 1), init="van_loan")}, progress=False)
    model(torch.randn(5, 4, requires_grad=True)).sum().backward()
    assert seen == [model[2]]
