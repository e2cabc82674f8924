"""Pruned attention: which groups of heads go, what the others make up for, and that the result is a stock model."""

import pytest
import torch
import transformers
from torch import nn

from kronecker import PruneConfig, num_parameters, prune_
from kronecker.surgery.heads import config_with_heads, cut_heads_, find_attentions
from tests.support.models import auto_class, tiny

HALF = PruneConfig(keep=0.5, granularity="head")


def ids(count=8, length=16, seed=0):
    return torch.randint(3, 96, (count, length), generator=torch.Generator().manual_seed(seed))


def output(model, batch=None):
    with torch.no_grad():
        return model(input_ids=ids() if batch is None else batch)[0]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "mixtral"])
def test_without_some_heads_it_is_a_stock_model(kind, tmp_path):
    model = tiny(kind)
    names = {f"model.layers.{i}.self_attn.o_proj" for i in range(model.config.num_hidden_layers)}
    report = prune_(model, HALF, calibration=[ids(8, seed=1)], progress=False)
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (2, 1)
    assert {r.name for r in report.layers if (r.before, r.after) == (2, 1)} == names
    assert report.after == num_parameters(model) < report.before
    after = output(model)
    model.save_pretrained(tmp_path)
    stock = auto_class(kind).from_pretrained(tmp_path).eval()
    assert {n: p.shape for n, p in stock.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    torch.testing.assert_close(output(stock), after)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    texts = [
        m.generate(ids()[:, :4], **options, use_cache=c) for m, c in ((model, True), (model, False), (stock, True))
    ]
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def test_a_group_of_heads_that_says_nothing_goes_first():
    model = tiny("llama")
    silent = {0: 1, 1: 0, 2: 0, 3: 1}
    with torch.no_grad():
        for layer, group in silent.items():
            rows = model.model.layers[layer].self_attn.v_proj.weight.unflatten(0, (2, -1))
            rows[group] *= 1e-4
    before, kept = output(model), model.model.layers[0].self_attn.k_proj.weight[:4].clone()
    prune_(model, PruneConfig(granularity="head", refit="none"), calibration=[ids(8)], progress=False)
    torch.testing.assert_close(output(model), before, rtol=1e-2, atol=1e-3)
    assert torch.equal(model.model.layers[0].self_attn.k_proj.weight, kept)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_groups_of_heads_that_say_the_same_go_without_a_loss(kind):
    model = tiny(kind)
    with torch.no_grad():
        for module in model.modules():
            for name in ("q_proj", "k_proj", "v_proj"):
                if hasattr(module, name):
                    rows = getattr(module, name).weight.unflatten(0, (2, -1))
                    rows[1] = rows[0]
    before = output(model)
    prune_(model, PruneConfig(granularity="head", refit="writing", ridge=1e-6), calibration=[ids(16)], progress=False)
    torch.testing.assert_close(output(model), before, rtol=1e-2, atol=2e-3)


def test_what_stays_makes_up_for_the_heads_that_went():
    batch, errors = ids(16, seed=5), {}
    before = output(tiny("llama"), batch)
    for refit in ("none", "writing", "all"):
        model = tiny("llama")
        config = PruneConfig(keep=0.5, granularity="head", refit=refit)
        report = prune_(model, config, calibration=ids(64, seed=1).split(8), progress=False)
        assert {r.unit for r in report.layers if r.after < r.before} == {"groups of heads"}
        assert {r.unit for r in report.layers if r.after == r.before} <= {"neurons"}
        errors[refit] = float((output(model, batch) - before).norm())
    assert errors["writing"] < 0.95 * errors["none"]
    assert errors["all"] < 0.95 * errors["none"]


def test_heads_and_mlps_make_up_for_what_the_stream_has_lost(monkeypatch):
    batch = ids(16, seed=5)
    before = output(tiny("llama"), batch)

    def apart(**changes):
        model = tiny("llama")
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(f"kronecker.fitting.block.{name}", value)
            config = PruneConfig(keep=0.5, granularity="head", refit="writing")
            report = prune_(model, config, calibration=ids(64, seed=1).split(8), progress=False)
        return float((output(model, batch) - before).norm()), report

    error, report = apart()
    assert error < apart(attention_stream_kind=lambda *given: None)[0]
    mlps = {r.name for r in report.layers if r.before == r.after}
    assert mlps == {f"model.layers.{i}.mlp.down_proj" for i in range(4)}


def test_biases_of_the_writing_layer_take_care_of_means():
    model = tiny("llama", attention_bias=True)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.v_proj.bias.fill_(3.0)
    batch, errors = ids(16, seed=5), []
    before = output(model, batch)
    prune_(model, PruneConfig(granularity="head", refit="writing"), calibration=[ids(32)], progress=False)
    errors.append(float((output(model, batch) - before).norm()))
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.bias.add_(0.1)
    errors.append(float((output(model, batch) - before).norm()))
    assert errors[0] < 0.2 * float(before.norm())
    assert errors[0] < errors[1]


def test_a_width_of_heads_that_the_config_does_not_say_is_written_there(tmp_path):
    config = transformers.Qwen2Config(
        vocab_size=96, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    assert getattr(config, "head_dim", None) is None
    prune_(model, HALF, calibration=[ids()], progress=False)
    assert model.config.head_dim == 4
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(output(transformers.Qwen2ForCausalLM.from_pretrained(tmp_path).eval()), output(model))


def test_numbers_of_heads_that_a_family_refuses_are_refused_first():
    model = tiny("llama", num_key_value_heads=4)
    before = output(model)
    with pytest.raises(ValueError, match=r"LlamaConfig cannot say that 3 of 4 groups .* not a multiple .*"):
        prune_(model, PruneConfig(keep=0.75, granularity="head"), calibration=[ids()], progress=False)
    assert torch.equal(output(model), before)


def test_training_mode_changes_nothing():
    models = [tiny("llama", attention_dropout=0.5), tiny("llama", attention_dropout=0.5).train()]
    for model in models:
        prune_(model, HALF, calibration=[ids()], progress=False)
    assert models[1].training
    assert torch.equal(output(models[0]), output(models[1].eval()))


def test_heads_that_share_weights_are_refused():
    model = tiny("llama")
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(ValueError, match="needed layers that share no weight"):
        prune_(model, HALF, calibration=[ids()], progress=False)


def test_nothing_but_padding_is_refused():
    batch = {"input_ids": ids(), "attention_mask": torch.zeros(8, 16, dtype=torch.long)}
    with pytest.raises(ValueError, match="saw no calibration token"):
        prune_(tiny("llama"), PruneConfig(granularity="head", refit="none"), calibration=[batch], progress=False)


def test_padding_is_not_fitted_to():
    rows = ids(16, seed=1)
    padded = torch.cat([rows, torch.full((16, 5), 7)], 1)
    mask = torch.cat([torch.ones_like(rows), torch.zeros(16, 5, dtype=torch.long)], 1)
    models = [tiny("llama"), tiny("llama")]
    prune_(models[0], HALF, calibration=[rows], progress=False)
    prune_(models[1], HALF, calibration=[{"input_ids": padded, "attention_mask": mask}], progress=False)
    torch.testing.assert_close(output(models[0]), output(models[1]), rtol=1e-3, atol=1e-3)


def test_heads_by_budget_and_what_the_report_says():
    model = tiny("llama")
    attention = model.model.layers[0].self_attn
    group = num_parameters(attention) // 2 * model.config.num_hidden_layers
    budget = num_parameters(model) - group
    report = prune_(model, PruneConfig(budget=budget, granularity="head"), calibration=[ids()], progress=False)
    assert report.after == budget
    with pytest.raises(ValueError, match="all 2 groups of heads would stay"):
        prune_(tiny("llama"), PruneConfig(keep=0.8, granularity="head"), calibration=[ids()], progress=False)
    model = tiny("llama")
    report = prune_(
        model, PruneConfig(budget=budget + group - 1, granularity="head"), calibration=[ids()], progress=False
    )
    assert report.after == budget  # never above it
    for wrong in (10, 10**9):
        with pytest.raises(ValueError, match=rf"budget is {wrong:,}, needed .* one group of heads to all of them"):
            prune_(tiny("llama"), PruneConfig(budget=wrong, granularity="head"), calibration=[ids()], progress=False)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_families_that_cannot_have_fewer_heads_are_refused(kind):
    model = tiny(kind)
    before, config = output(model), model.config.to_dict()
    with pytest.raises(ValueError, match="has no attention whose queries, keys and values are layers of their own"):
        prune_(model, HALF, calibration=[ids()], progress=False)
    assert torch.equal(output(model), before)
    assert model.config.to_dict() == config


def test_heads_that_share_a_bias_by_position_are_refused():
    config = transformers.T5Config(
        vocab_size=96, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, pad_token_id=0, decoder_start_token_id=0
    )
    batch = {"input_ids": ids(), "decoder_input_ids": ids()}
    with pytest.raises(ValueError, match="T5Config cannot say that 2 of 4 groups of heads are left"):
        prune_(transformers.T5ForConditionalGeneration(config), HALF, calibration=[batch], progress=False)


def test_heads_that_are_read_are_not_cut():
    model = tiny("llama")
    attentions, before = find_attentions(model), output(model)
    config = config_with_heads(model, attentions, 1)
    with pytest.raises(ValueError, match="LlamaForCausalLM says something else without heads that nothing reads"):
        cut_heads_(model, attentions, 1, config, {"input_ids": ids()})
    assert model.config.num_attention_heads == 4
    assert model.model.layers[0].self_attn.num_key_value_groups == 2
    assert before.shape == output(tiny("llama")).shape


def test_an_error_puts_heads_back(monkeypatch):
    model = tiny("llama")
    before, config = output(model), model.config.to_dict()

    def fail(*given):
        raise KeyboardInterrupt

    for place in ("prune.cut_heads_", "heads._check_same"):
        monkeypatch.setattr(f"kronecker.surgery.{place}", fail)
        with pytest.raises(KeyboardInterrupt):
            prune_(model, HALF, calibration=[ids()], progress=False)
        assert torch.equal(output(model), before)
        assert model.config.to_dict() == config
        monkeypatch.undo()


def test_an_interrupted_fit_of_heads_goes_on(monkeypatch, tmp_path):
    whole, model = tiny("llama"), tiny("llama")
    prune_(whole, HALF, calibration=[ids()], progress=False)

    def fail(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kronecker.surgery.prune.cut_heads_", fail)
        with pytest.raises(KeyboardInterrupt):
            prune_(model, HALF, calibration=[ids()], cache=tmp_path, progress=False)
    monkeypatch.setattr("kronecker.fitting.fit.fit_part", fail)  # nothing is left to fit
    prune_(model, HALF, calibration=[ids()], cache=tmp_path, progress=False)
    assert torch.equal(output(model), output(whole))


def test_a_plain_module_has_no_heads_to_drop():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return (x,)

    with pytest.raises(ValueError, match="Plain has no attention"):
        prune_(Plain(), HALF, calibration=[{"x": torch.randn(4, 6, 4)}], progress=False)
