"""The report's counts are what a step really keeps, and its warnings come when they should."""

import statistics

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from heads.lora import lora_report, prepare_lora
from tests.benchmarks.measure import saved_bytes
from tests.support.models import tiny


def prepared(kind="llama", dtype=torch.float32, accelerate=True, **changes):
    options = {"target_modules": ["q_proj", "k_proj"], "r": 4, "lora_alpha": 8} | changes
    return prepare_lora(tiny(kind).to(dtype), LoraConfig(**options), accelerate=accelerate)


def test_counts_and_bytes():
    model = prepared(modules_to_save=["lm_head"])
    report = lora_report(model)
    lora = 4 * (4 * (16 + 16) + 4 * (16 + 8))
    assert report.lora == lora
    assert report.trainable == lora + 96 * 16 == model.get_nb_trainable_parameters()[0]
    assert lora_report(model.requires_grad_(False)).trainable == 0
    with pytest.raises(ValueError, match=r"lora_report:.*3.*context"):
        lora_report(model, batch=3)
    assert report.parameters == sum(p.numel() for p in model.parameters())
    assert (report.gradient_bytes, report.optimizer_bytes) == (
        4 * report.trainable,
        8 * report.trainable,
    )
    assert report.activation_bytes is None
    assert not report.warnings
    assert f"{report.trainable:,}" in str(report)


@pytest.mark.parametrize("accelerate", [False, True])
@pytest.mark.parametrize(
    ("kind", "targets"), [("gpt2", ["c_attn", "c_fc"]), ("bert", ["query", "dense"])]
)
def test_activations_are_what_a_step_keeps(kind, targets, accelerate):
    model = prepared(kind, accelerate=accelerate, target_modules=targets, lora_dropout=0.1)
    counted = lora_report(model, batch=3, context=20).activation_bytes
    model.train()
    ids = torch.zeros(3, 20, dtype=torch.int64)
    resident = [*model.parameters(), *model.buffers()]
    labels = {"labels": ids} if kind == "gpt2" else {}
    step = lambda: model(input_ids=ids, use_cache=False, **labels)  # noqa: E731
    assert counted == saved_bytes(step, resident=resident)
    if labels:
        assert counted > saved_bytes(lambda: model(input_ids=ids), resident=resident)


def test_the_first_step_is_what_adam_does():
    """The largest change of an output in Adam's first step, over the learning rate, for inputs of
    size one."""
    rate, steps = 1e-3, {}
    for rank, alpha in ((4, 8), (16, 8), (16, 32)):
        torch.manual_seed(0)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=["0"])
        model = prepare_lora(nn.Sequential(nn.Linear(64, 32)), config)
        report = lora_report(model)
        x = torch.randn(256, 64)
        before = model(x).detach()
        optimizer = torch.optim.Adam(
            [p for n, p in model.named_parameters() if "lora_B" in n], lr=rate
        )
        for j in range(len(x)):  # each input's own direction: the step that moves it furthest
            with torch.no_grad():
                model.get_submodule("base_model.model.0").lora_B["default"].weight.zero_()
            optimizer.state.clear()
            optimizer.zero_grad()
            model(x[j : j + 1]).sum().backward()
            optimizer.step()
            moved = (model(x[j : j + 1]) - before[j]).abs().max().detach()
            steps.setdefault((rank, alpha), []).append(float(moved) / rate)
        mean = statistics.fmean(steps[rank, alpha])
        said = report.adapters[0].first_step
        assert 0.7 * said < mean < said  # a Gaussian's mean size is 0.8 of its deviation
    assert statistics.fmean(steps[16, 8]) == pytest.approx(statistics.fmean(steps[4, 8]), rel=0.2)


def test_the_size_of_an_update_is_that_of_what_a_merge_adds():
    model = prepared(lora_alpha=20)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    sizes = [float(layer.get_delta_weight("default").detach().norm()) for layer in layers]
    rows = lora_report(model).adapters
    assert [row.update for row in rows] == pytest.approx(sizes, rel=1e-5)


class Own(nn.Sequential):
    """No model of transformers: it has a table and a layer."""

    def __init__(self):
        super().__init__(nn.Embedding(5, 4), nn.Linear(4, 4))

    def get_input_embeddings(self):
        return self[0]


def test_warnings():
    def told(model, **options):
        return " | ".join(lora_report(model, **options).warnings)

    assert "scaling is 16 in 8 adapters (model.layers.0.self_attn.q_proj, ...)" in told(
        prepared(lora_alpha=64)
    )
    assert "scaling is 0.0625" in told(
        prepared("bert", target_modules=["query"], r=16, lora_alpha=1)
    )
    model = prepared()
    assert not told(model)
    assert "lora_B is still zero in 8 adapters" in told(model, trained=True)
    for module in model.modules():
        if hasattr(module, "lora_B") and "default" in module.lora_B and module.out_features == 8:
            nn.init.normal_(module.lora_B["default"].weight)
    assert "lora_B is still zero in 4 adapters (model.layers.0.self_attn.q_proj, ...)" in told(
        model
    )
    copied = prepared(dtype=torch.bfloat16, accelerate=False)
    assert "run peft's forward, which copies their input into float32" in told(copied)
    assert not told(prepared(dtype=torch.bfloat16))
    assert not told(prepared(), base_vocab_size=96)
    assert "the head is not trained" in told(prepared(), base_vocab_size=90)
    assert "the head" not in told(
        prepared(modules_to_save=["lm_head", "embed_tokens"]), base_vocab_size=90
    )
    next(p for n, p in model.named_parameters() if "lora_A" in n).data[0, 0] = float("nan")
    assert (
        "1 adapters (model.layers.0.self_attn.q_proj, ...) have numbers that are not finite"
        in told(model)
    )
    own = get_peft_model(Own(), LoraConfig(target_modules=["1"]))
    assert "the embedding is not trained" in told(own, base_vocab_size=4)
    assert "is not trained" not in told(own, base_vocab_size=5)
    unmatched = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj", "wq"], r=2))
    assert "has the target 'wq', which matched no layer" in told(unmatched)


def test_the_update_of_a_convolution_is_that_of_its_product():
    model = nn.Sequential(nn.Conv2d(3, 5, 3))
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    (row,) = lora_report(wrapped).adapters
    layer = wrapped.base_model.model[0]
    expected = layer.get_delta_weight("default").detach().norm()
    assert row.update == pytest.approx(float(expected), rel=1e-4)
