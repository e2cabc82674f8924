"""Whole models: what is converted, golden counts, starts, all or nothing, on disk and back."""

import copy
import json
from dataclasses import asdict, dataclass, replace

import pytest
import torch
import transformers
from accelerate import cpu_offload
from torch import nn

import kronecker.fitting.fit
import kronecker.surgery.convert
from kronecker import (
    PRESETS,
    KroneckerConfig,
    KroneckerLinear,
    LowRankConfig,
    LowRankLinear,
    PruneConfig,
    convert_,
    fold,
    from_pretrained,
    num_parameters,
    prune_,
    reference,
    revert_,
    save_pretrained,
)
from kronecker.config import Config, from_dict, to_dict
from kronecker.data.batches import batches
from kronecker.discovery.finding import COMPRESSED, blocks_of, resolve
from kronecker.discovery.mlps import find_mlps
from kronecker.fitting.block import blocks_with
from kronecker.fitting.calls import calls_of
from kronecker.fitting.stream import stream_kind
from kronecker.layers.weights import dense
from model_components._walk import outputs_of
from tests.kronecker.test_functional import made
from tests.support.equivalence import judge
from tests.support.models import auto_class, tiny

KINDS = ["gpt2", "llama", "llama-tied", "bert", "classifier", "qwen2", "gemma2", "mistral"]
VAN_LOAN = KroneckerConfig(b_shape=(2, 1), init="van_loan")


def ids(count=3, length=12, seed=0):
    return torch.randint(3, 96, (count, length), generator=torch.Generator().manual_seed(seed))


def output(model, batch=None):
    batch = ids() if batch is None else batch
    if next(model.parameters()).is_cuda:  # a Trainer moves a model to a GPU
        batch = batch.cuda()
    with torch.no_grad():
        y = model(input_ids=batch)[0]
    return y.cpu() if y.is_cuda else y


def compressed(model):
    return [n for n, m in model.named_modules() if isinstance(m, COMPRESSED)]


@pytest.mark.parametrize("init", ["sequential", "van_loan", "prune", "random"])
@pytest.mark.parametrize("kind", KINDS)
def test_mlps_of_any_architecture_become_smaller_and_run(kind, init):
    model = tiny(kind)
    before = output(model)
    config = KroneckerConfig(b_shape=(2, 1), init=init)
    report = convert_(model, config, calibration=[ids(4, seed=1)], progress=False)
    mlps = find_mlps(model)
    assert len(mlps) == model.config.num_hidden_layers
    assert (
        set(compressed(model))
        == {n for m in mlps for n in (*m.ups, m.down)}
        == {r.name for r in report.layers}
    )
    assert report.after == num_parameters(model) < report.before
    for mlp in mlps:
        up, down = model.get_submodule(mlp.ups[0]), model.get_submodule(mlp.down)
        assert up.b_shape == down.b_shape[::-1] == (2, 1)
    after = output(model)
    assert after.shape == before.shape
    assert torch.isfinite(after).all()
    assert f"{report.after:,} parameters" in str(report)


@pytest.mark.parametrize(("b_shape", "rank"), [((2, 2), 4), ((2, 1), 2)])
@pytest.mark.parametrize("init", ["van_loan", "sequential"])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_with_all_terms_the_model_is_the_original(kind, init, b_shape, rank):
    model = tiny(kind)
    before = output(model)
    config = KroneckerConfig(b_shape=b_shape, rank=rank, init=init)
    convert_(model, config, calibration=[ids(40, seed=1)], progress=False)
    torch.testing.assert_close(output(model), before, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_the_sequential_start_is_better_than_pruning_and_van_loan(kind):
    errors, batch = {}, ids(8, seed=5)
    before = output(tiny(kind), batch)
    for init in ("van_loan", "prune", "sequential"):
        model = tiny(kind)
        config = KroneckerConfig(b_shape=(2, 1), init=init)
        convert_(model, config, calibration=ids(64, seed=1).split(8), progress=False)
        errors[init] = float((output(model, batch) - before).norm())
    assert errors["sequential"] < min(errors["van_loan"], errors["prune"])


def test_padding_does_not_count():
    texts = ids(6, seed=1)
    mask = torch.ones_like(texts)
    mask[:, 8:] = 0
    other = texts.clone()
    other[:, 8:] = 7
    models = [tiny("bert"), tiny("bert")]
    for model, tokens in zip(models, (texts, other), strict=True):
        batch = {"input_ids": tokens, "attention_mask": mask}
        convert_(model, KroneckerConfig(b_shape=(2, 1)), calibration=[batch], progress=False)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


GOLDEN = {
    "gpt2-96m-model-dim": 96_128_304,
    "gpt2-82m": 81_972_576,
    "gpt2-80m": 80_400_048,
    "gpt2-68m": 68_213_376,
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_counts_of_the_presets(name):
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    assert num_parameters(model) == 124_439_808
    found = resolve(model, PRESETS[name], None)
    assert len(found) == 24
    for layer, config in found.items():
        kronecker.discovery.finding.put(
            model, layer, KroneckerLinear.like(model.get_submodule(layer), config)
        )
    assert num_parameters(model) == GOLDEN[name]


def test_golden_count_of_distilgpt2():
    with torch.device("meta"):
        assert (
            num_parameters(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=6)))
            == 81_912_576
        )


def test_a_tied_embedding_and_head_stay_tied(tmp_path):
    model = tiny("gpt2")
    # of full rank: the same table
    config = LowRankConfig(rank=model.config.n_embd, init="svd")
    before = output(model)
    convert_(model, {"*.wte": config}, progress=False)
    assert model.lm_head.a is model.transformer.wte.a
    assert compressed(model) == ["transformer.wte", "lm_head"]
    torch.testing.assert_close(output(model), before, rtol=1e-4, atol=1e-4)  # all terms
    save_pretrained(model, tmp_path / "small")
    again = from_pretrained(tmp_path / "small")
    assert again.lm_head.a is again.transformer.wte.a
    assert torch.equal(output(again), output(model))
    fold(model, tmp_path / "dense")
    dense = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "dense").eval()
    torch.testing.assert_close(output(dense), output(model), rtol=1e-4, atol=1e-4)
    revert_(model)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("kind", KINDS)
def test_save_load_fold_and_revert(kind, tmp_path):
    model = tiny(kind)
    convert_(model, KroneckerConfig(b_shape=(2, 1), scales=True, init="van_loan"), progress=False)
    after = output(model)
    save_pretrained(model, tmp_path / "small")
    assert torch.equal(output(from_pretrained(tmp_path / "small")), after)
    fold(model, tmp_path / "dense")
    assert compressed(model)
    dense = auto_class(kind).from_pretrained(tmp_path / "dense").eval()
    assert num_parameters(dense) == num_parameters(tiny(kind))
    torch.testing.assert_close(output(dense), after, rtol=1e-4, atol=1e-5)
    assert set(revert_(model)) == {n for m in find_mlps(dense) for n in (*m.ups, m.down)}
    torch.testing.assert_close(output(model), after, rtol=1e-4, atol=1e-5)
    assert type(model.get_submodule(find_mlps(model)[0].down)) is type(
        dense.get_submodule(find_mlps(dense)[0].down)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_a_folded_model_is_within_the_judges_budget(kind, dtype, tmp_path):
    """The stock checkpoint on disk, in its dtype, against the factors in float64."""
    model = tiny(kind).to(dtype)
    convert_(model, KroneckerConfig(b_shape=(2, 1), scales=True, init="prune"), progress=False)
    fold(model, tmp_path / "dense")
    stock = auto_class(kind).from_pretrained(tmp_path / "dense", dtype=dtype).eval()

    def factors(embeds):
        return copy.deepcopy(model).to(embeds.dtype)(inputs_embeds=embeds)[0]

    def fast(embeds):
        return stock(inputs_embeds=embeds)[0]

    inputs = {"embeds": made(2, 9, 16, seed=3)}
    judge(
        "fold",
        "stock checkpoint",
        fast,
        factors,
        inputs,
        dtype=dtype,
        gradients=False,
        case=kind,
        device="cpu",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folded_checkpoint_has_the_layers_results(dtype):
    layer = KroneckerLinear(12, 6, b_shape=(3, 2), rank=2, dtype=dtype)
    stock = layer.to_linear()
    factors = {"a": layer.a.detach(), "b": layer.b.detach(), "bias": made(6), "x": made(5, 12)}

    def fast(x, a, b, bias):
        layer.a.data, layer.b.data, layer.bias.data = a.detach(), b.detach(), bias.detach()
        return layer.to_linear()(x)

    judge(
        "to_linear",
        "eager",
        fast,
        reference.kron_linear,
        factors,
        dtype=dtype,
        gradients=False,
        device="cpu",
    )
    assert isinstance(stock, nn.Linear)


def test_a_weight_can_be_read_and_follows_its_factors():
    layer = KroneckerLinear(12, 6, b_shape=(3, 2), rank=2).eval()
    x = made(5, 12)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
            layer.a.data.mul_(2)  # torch does not count such a change
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", ["llama-tied", "bert"])
def test_a_stock_save_writes_factors_and_a_stock_load_refuses_them(kind, tmp_path):
    model = tiny(kind)
    if kind == "bert":
        configs = {"*dense": VAN_LOAN}
    else:
        configs = {"*_proj": VAN_LOAN, "*embed_tokens": LowRankConfig(keep=0.5, init="svd")}
    convert_(model, configs, progress=False)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.5)
    for place, one in (("original", model), ("copy", copied)):
        one.save_pretrained(tmp_path / place)  # as a stock Trainer does it
        torch.testing.assert_close(output(from_pretrained(tmp_path / place)), output(one))
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            auto_class(kind).from_pretrained(tmp_path / place)
    from_pretrained(tmp_path / "copy").save_pretrained(tmp_path / "again")
    torch.testing.assert_close(output(from_pretrained(tmp_path / "again")), output(copied))
    revert_(copied)
    copied.save_pretrained(tmp_path / "dense")
    torch.testing.assert_close(
        output(auto_class(kind).from_pretrained(tmp_path / "dense")), output(copied)
    )


def test_a_stock_trainer_saves_factors(tmp_path):
    model = tiny("gpt2")
    convert_(model, VAN_LOAN, progress=False)
    arguments = transformers.TrainingArguments(tmp_path, report_to=[])
    transformers.Trainer(model, arguments).save_model(str(tmp_path / "out"))
    torch.testing.assert_close(output(from_pretrained(tmp_path / "out")), output(model))
    model.save_pretrained(
        tmp_path / "zero", state_dict={n: 0 * t for n, t in model.state_dict().items()}
    )
    assert not any(p.any() for p in from_pretrained(tmp_path / "zero").parameters())


@pytest.mark.parametrize("kind", ["gpt2", "llama-tied"])
def test_a_stock_trainer_resumes_with_the_factors(kind, tmp_path):
    def converted(seed):
        model = tiny(kind, seed)
        convert_(model, VAN_LOAN, progress=False)
        return model

    rows = [{"input_ids": row, "labels": row} for row in ids(4)]
    arguments = transformers.TrainingArguments(
        tmp_path,
        max_steps=2,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
    )
    first = converted(0)
    transformers.Trainer(first, arguments, train_dataset=rows).train()
    other = converted(1)
    transformers.Trainer(other, arguments, train_dataset=rows).train(
        resume_from_checkpoint=f"{tmp_path}/checkpoint-2"
    )
    torch.testing.assert_close(output(other.eval()), output(first.eval()))


def test_t5_reads_a_weight_and_runs():
    config = transformers.T5Config(
        vocab_size=96,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    batch = {"input_ids": ids(), "decoder_input_ids": ids(seed=1)}
    report = convert_(model, VAN_LOAN, progress=False)
    assert len(report.layers) == 8
    with torch.no_grad():
        assert torch.isfinite(model(**batch).logits).all()


@pytest.mark.parametrize(
    "config", [KroneckerConfig(b_shape=(2, 1)), LowRankConfig(), PruneConfig()]
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_one_token_of_calibration_keeps_errors_in_reason(kind, config):
    model = tiny(kind)
    batch = torch.tensor([[5]])
    before = output(model, batch)
    change = prune_ if isinstance(config, PruneConfig) else convert_
    report = change(model, config, calibration=[batch], progress=False)
    assert all(0 <= r.error < 1 for r in report.layers)
    assert float((output(model, batch) - before).norm() / before.norm()) < 0.5


def test_scales_take_the_size_and_leave_the_function():
    linear = nn.Linear(8, 12)
    plain = KroneckerLinear.from_linear(linear, b_shape=(2, 2), rank=2)
    scaled = KroneckerLinear.from_linear(linear, b_shape=(2, 2), rank=2, scales=True)
    torch.testing.assert_close(plain.dense_weight(), scaled.dense_weight())
    assert scaled.scales[0] > scaled.scales[1] > 0
    assert set(scaled.state_dict()) == {"a", "b", "scales", "bias"}
    assert set(plain.state_dict()) == {"a", "b", "bias"}


def test_a_layer_alone_is_made_in_one_line():
    torch.manual_seed(0)
    linear, x = nn.Linear(12, 8), torch.randn(3, 50, 12)
    errors = {}
    for init in ("van_loan", "prune", "random", "fitted"):
        inputs = x if init == "fitted" else None
        layer = KroneckerLinear.from_linear(linear, init=init, b_shape=(2, 2), inputs=inputs)
        torch.testing.assert_close(layer.to_linear()(x), layer(x))
        errors[init] = float((layer(x) - linear(x)).detach().norm())
    assert min(errors, key=errors.get) == "fitted"
    assert errors["van_loan"] < errors["random"]
    half = KroneckerLinear.from_linear(linear, rank=0.5)
    assert half.a_shape == (2, 3)
    assert 0.25 < half.compression <= 0.5
    exact = LowRankLinear.from_linear(linear, rank=8)
    torch.testing.assert_close(exact(x), linear(x))
    pruned = KroneckerLinear.from_linear(linear, init="prune", b_shape=(2, 1), keep="odd")
    assert torch.equal(pruned.dense_weight()[1::2], linear.weight[1::2])
    assert not pruned.dense_weight()[::2].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "nearest"}, r"KroneckerLinear\.from_linear:.*'nearest'"),
        ({"init": "fitted"}, "without inputs"),
        ({"inputs": torch.ones(2, 12)}, "inputs"),
        ({"rank": 1.5}, "1.5"),
        ({"rank": 0.01, "b_shape": (2, 1)}, "0.52 or more"),
        ({"b_shape": (3, 5)}, "does not divide"),
    ],
)
def test_a_layer_alone_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        KroneckerLinear.from_linear(nn.Linear(12, 8), **options)


def test_a_computed_weight_cannot_be_changed_in_place():
    layer = KroneckerLinear.from_linear(nn.Linear(12, 8), b_shape=(2, 1))
    with pytest.raises(RuntimeError, match="computed"):
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="computed"):
        nn.init.normal_(layer.weight)
    assert torch.equal(layer.weight + 0, layer.dense_weight())


BAD = [
    (
        VAN_LOAN,
        {"filter_fn": lambda m, n: False},
        r"convert_:.*GPT2LMHeadModel",
    ),
    (
        {"*.mlp.c_fcc": VAN_LOAN},
        {},
        r"convert_:.*'\*\.mlp\.c_fcc'.*similar.*transformer\.h\.2\.mlp\.c_fc",
    ),
    (
        KroneckerConfig(b_shape=(3, 1), init="prune"),
        {},
        r"convert_:.*nearest.*1.*2.*4",
    ),
    (KroneckerConfig(b_shape=(2, 1), rank=3, init="prune"), {}, r"convert_:.*rank.*3.*2"),
    (KroneckerConfig(b_shape=(2, 1)), {}, "calibration"),
    (KroneckerConfig(b_shape=(2, 1)), {"calibration": []}, "calibration is empty"),
]


@pytest.mark.parametrize(("config", "named", "message"), BAD)
def test_bad_input_changes_nothing(config, named, message):
    model = tiny("gpt2")
    with pytest.raises(ValueError, match=message):
        convert_(model, config, progress=False, **named)
    assert not compressed(model)


def test_weights_that_cannot_be_converted_are_refused():
    def attempt(change, message):
        model = tiny("gpt2")
        change(model)
        with pytest.raises(ValueError, match=message):
            convert_(model, VAN_LOAN, progress=False)

    last = "transformer.h.2.mlp.c_fc"
    attempt(
        lambda m: m.get_submodule(last).weight.data.fill_(float("nan")),
        f"{last} returns NaN or infinity",
    )
    attempt(lambda m: m.get_submodule(last).weight.data.zero_(), r"convert_:.*finite")
    attempt(lambda m: m.to("meta"), r"kronecker:.*device")
    attempt(lambda m: convert_(m, VAN_LOAN, progress=False), "is already compressed")
    attempt(lambda m: setattr(m.get_submodule(last), "quant_state", 1), "quantized Conv1D")


def test_an_interrupted_conversion_changes_nothing_and_goes_on(tmp_path, monkeypatch):
    config, calibration = KroneckerConfig(b_shape=(2, 1)), [ids(8, seed=1)]
    whole = tiny("gpt2")
    convert_(whole, config, calibration=calibration, progress=False)
    model, before, fits = tiny("gpt2"), tiny("gpt2").state_dict(), []
    real = kronecker.fitting.fit.fit_part

    def interrupted(*given):
        fits.append(given)
        if len(fits) == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(kronecker.fitting.fit, "fit_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_(model, config, calibration=calibration, cache=tmp_path, progress=False)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    report = convert_(model, config, calibration=calibration, cache=tmp_path, progress=False)
    assert len(fits) == 4  # the first two blocks were not fitted again
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True)
    )
    assert all(r.error > 0 for r in report.layers)
    other = tiny("gpt2", 1)
    convert_(other, config, calibration=calibration, cache=tmp_path, progress=False)
    assert len(fits) == 7  # another model's


def test_a_whole_model_without_a_list_of_blocks_is_one_block():
    model = nn.Module()
    model.lin1, model.lin2 = nn.Linear(6, 12), nn.Linear(12, 6)
    model.forward = lambda input_ids: model.lin2(torch.relu(model.lin1(input_ids)))
    x = made(400, 6)
    before = model.forward(x).detach()
    report = convert_(
        model, KroneckerConfig(b_shape=(2, 1)), calibration=[{"input_ids": x}], progress=False
    )
    assert [r.name for r in report.layers] == ["lin1", "lin2"]
    assert float((model.forward(x).detach() - before).norm() / before.norm()) < 0.8


def test_a_filter_reaches_attention_and_a_report_says_what_was_left():
    model = tiny("llama")
    report = convert_(
        model,
        KroneckerConfig(b_shape=(2, 2), rank=2, init="van_loan"),
        filter_fn=lambda m, n: n.endswith("q_proj"),
    )
    assert [r.name.rpartition(".")[2] for r in report.layers] == ["q_proj"] * 4
    assert report.skipped["lm_head"] == "not selected"


def test_bad_files_are_refused(tmp_path):
    model = tiny("gpt2")
    with pytest.raises(ValueError, match="compressed layers, got none"):
        save_pretrained(model, tmp_path / "out")
    with pytest.raises(ValueError, match="compressed layers, got none"):
        fold(model, tmp_path / "out")
    convert_(model, VAN_LOAN, progress=False)
    save_pretrained(model, tmp_path / "out")
    with pytest.raises(ValueError, match="the folder is not empty"):
        save_pretrained(model, tmp_path / "out")
    mark = json.loads((tmp_path / "out" / "kronecker.json").read_text())
    mark["layers"] = {n: c | {"b_shape": [4, 1]} for n, c in mark["layers"].items()}
    (tmp_path / "out" / "kronecker.json").write_text(json.dumps(mark))
    with pytest.raises(ValueError, match=r"from_pretrained:.*mlp\.c_fc\.a.*expected"):
        from_pretrained(tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"from_pretrained:.*cannot be read"):
        from_pretrained(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    model = tiny("gpt2")
    convert_(model, VAN_LOAN, progress=False)

    def full(*given, **named):
        raise OSError("No space left on device")

    monkeypatch.setattr("kronecker.storage.checkpoints.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_pretrained(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "a_shape is .* and b_shape is"),
        ({"a_shape": (1, 1), "b_shape": (1, 1)}, "a_shape is .* and b_shape is"),
        ({"b_shape": (0, 1)}, "_shape is"),
        ({"b_shape": (2, 1), "rank": 0}, "rank is 0"),
        ({"b_shape": (2, 1), "init": "svd"}, r"KroneckerConfig:.*sequential"),
        ({"b_shape": (2, 1), "keep": "all"}, r"KroneckerConfig:.*energy"),
        ({"b_shape": (2, 1), "init": "prune", "keep": ("x", "y")}, r"KroneckerConfig:.*energy"),
        ({"b_shape": (2, 1), "rounds": 0}, "rounds is 0"),
        ({"b_shape": (2, True)}, "_shape is"),
    ],
)
def test_bad_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        KroneckerConfig(**fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PruneConfig(keep=0.5, size=0.9), "keep is 0.5 and size is 0.9"),
        (lambda: PruneConfig(keep=True), "keep is True"),
        (lambda: PruneConfig(size=True), "size is True"),
        (lambda: LowRankConfig(keep=0.5, rank=3), "keep is 0.5 and rank is 3"),
        (lambda: KroneckerConfig(b_shape=3), "b_shape is 3"),
        (lambda: KroneckerConfig(b_shape=(2, 1), scales=3), r"KroneckerConfig:.*scales.*3"),
        (lambda: LowRankConfig(rank=True), "rank is True"),
    ],
)
def test_two_sizes_and_no_numbers_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gpt2", KroneckerConfig(b_shape=(2, 2), rank=2, init="van_loan")),
        # A has the shape of the weight
        ("llama-tied", {"*.down_proj": LowRankConfig(rank=16, init="svd")}),
    ],
)
def test_a_model_around_a_converted_one_writes_what_stock_loading_refuses(kind, config, tmp_path):
    model = tiny(kind)
    convert_(model.base_model, config, progress=False)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        auto_class(kind).from_pretrained(tmp_path)
    before = output(model)
    # finds the names of a state among parameters
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(output(model), before)


def test_patterns_that_earlier_ones_hide_and_experts_are_refused():
    config = KroneckerConfig(b_shape=(2, 1), init="van_loan")
    with pytest.raises(ValueError, match=r"convert_:.*'\*\.mlp\.c_fc'"):
        convert_(tiny("gpt2"), {"*.mlp.*": config, "*.mlp.c_fc": config}, progress=False)
    for refused in (config, LowRankConfig(init="svd")):
        with pytest.raises(ValueError, match=r"convert_:.*experts is a stack of experts.*prune_"):
            convert_(tiny("mixtral"), refused, progress=False)


def test_configs_round_trip():
    for configs in PRESETS.values():
        assert all(from_dict(to_dict(config)) == config for config in configs.values())
    with pytest.raises(ValueError, match=r"KroneckerConfig:.*unknown"):
        KroneckerConfig.from_dict({"b_shape": [2, 1], "rang": 1})


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_half_precision_models_are_fitted_as_well(kind):
    batch, found = ids(8, seed=5), {}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny(kind).to(dtype)
        before = output(model, batch).float()
        convert_(
            model,
            KroneckerConfig(b_shape=(2, 1)),
            calibration=ids(64, seed=1).split(8),
            progress=False,
        )
        assert all(p.dtype == dtype for p in model.parameters())
        found[dtype] = float((output(model, batch).float() - before).norm() / before.norm())
    assert found[torch.bfloat16] < 1.2 * found[torch.float32] + 0.02


def test_layers_with_a_forward_of_their_own_are_refused():
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return 2 * super().forward(ids)

    class Quantized(nn.Linear):
        def forward(self, x):
            return super().forward(x.half().float())

    for path, layer in (
        ("transformer.wpe", Scaled(32, 16)),
        ("transformer.h.0.mlp.c_fc", Quantized(16, 64)),
    ):
        model = tiny("gpt2")
        kronecker.discovery.finding.put(model, path, layer)
        with pytest.raises(ValueError, match=r"convert_:.*forward"):
            convert_(model, VAN_LOAN, filter_fn=lambda m, n, path=path: n == path)


def test_what_was_left_alone_is_said():
    model = tiny("gpt2")
    report = convert_(model, VAN_LOAN, progress=False)
    assert (
        report.skipped["lm_head"]
        == report.skipped["transformer.h.0.attn.c_attn"]
        == "not part of an MLP"
    )
    assert "layers not converted, not part of an MLP: 9" in str(report)
    assert any("van_loan" in line for line in str(report).splitlines())


def test_a_failed_conversion_by_weights_gives_gradients_back(monkeypatch):
    model = tiny("gpt2")
    model.transformer.h[1].mlp.c_proj.weight.requires_grad_(False)
    wanted = [p.requires_grad for p in model.parameters()]
    real, calls = kronecker.surgery.convert._convert_alone, []

    def failing(*given):
        calls.append(0)
        if len(calls) == 3:
            raise RuntimeError("no more")
        return real(*given)

    monkeypatch.setattr(kronecker.surgery.convert, "_convert_alone", failing)
    with pytest.raises(RuntimeError, match="no more"):
        convert_(model, VAN_LOAN, progress=False)
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert not compressed(model)


@pytest.mark.parametrize("init", ["van_loan", "sequential"])
def test_modules_that_were_frozen_by_eval_stay_so(init):
    model = tiny("gpt2").train()
    model.transformer.h[0].eval()
    model.transformer.drop.eval()
    wanted = {n: m.training for n, m in model.named_modules()}
    convert_(model, KroneckerConfig(b_shape=(2, 1), init=init), calibration=[ids()], progress=False)
    assert {n: m.training for n, m in model.named_modules() if n in wanted} == wanted


def test_a_bias_that_is_tied_stays_tied():
    config = transformers.BertConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = transformers.BertForMaskedLM(config).eval()
    count = num_parameters(model)
    convert_(
        model,
        {"*.word_embeddings": LowRankConfig(rank=4, init="svd")},
        progress=False,
    )
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias
    assert num_parameters(model) == count - 96 * 16 + (96 + 16) * 4


def test_a_norm_between_the_matrices_keeps_neurons_in_their_order():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.norm, self.fc2 = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)
            self.norm.weight.data = torch.linspace(0.1, 3, 12)

        def forward(self, hidden_states):
            return hidden_states + self.fc2(self.norm(torch.relu(self.fc1(hidden_states))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Mlp(), Mlp()])

        def forward(self, input_ids):
            for layer in self.layers:
                input_ids = layer(input_ids)
            return input_ids

    torch.manual_seed(0)
    model, x = Model(), made(300, 6)
    before = model(x).detach()
    config = KroneckerConfig(b_shape=(2, 1), rank=2)
    # its hidden neurons are not independent
    with pytest.raises(ValueError, match=r"convert_:.*convert"):
        convert_(model, config, calibration=[x], progress=False)
    convert_(model, {"*.fc1": config, "*.fc2": config.opposite()}, calibration=[x], progress=False)
    # all terms: as it was
    torch.testing.assert_close(model(x).detach(), before, rtol=1e-2, atol=1e-2)


def test_text_is_no_calibration():
    with pytest.raises(ValueError, match=r"convert_:.*calibration"):
        convert_(
            tiny("gpt2"), KroneckerConfig(b_shape=(2, 1)), calibration=["some text"], progress=False
        )


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "gemma2", "qwen3", "mixtral"])
def test_a_walk_through_the_blocks_is_the_models_own_forward_every_time(kind):
    model = tiny(kind)
    padded = {"input_ids": ids(2, 9, seed=2), "attention_mask": torch.ones(2, 9)}
    data = batches([ids(seed=1), padded, ids(seed=3)], model, "test")
    names = [
        n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and "expert" not in n
    ]
    blocks = blocks_of(model, [f"{names[0]}.0.x"])
    calls, first = calls_of(model, [block for _, block, _ in blocks], data)
    with torch.no_grad():
        for _ in range(3):
            # as a fit changes them, after the calls were taken
            for parameter in blocks[0][1].parameters():
                parameter.mul_(1.1)
            expected = [model(**batch, output_hidden_states=True).hidden_states for batch in data]
            states = first
            for index, (_, block, _) in enumerate(blocks[:-1]):  # after the last one comes a norm
                states = outputs_of(block, calls[index], states)
                for own, whole in zip(states, expected, strict=True):
                    torch.testing.assert_close(own, whole[index + 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [("gpt2", "output"), ("llama", "output"), ("bert", "read"), ("gemma2", None)],
)
def test_the_stream_is_found_and_read(kind, expected, dtype):
    """Pre-norm, post-norm, and a norm after the MLP, behind which what it says is not the stream's."""
    model = tiny(kind).to(dtype)
    mlp = find_mlps(model)[0]
    up, down = model.get_submodule(mlp.ups[0]), model.get_submodule(mlp.down)
    (block, *_), states = blocks_with(model, [mlp], [], batches([ids()], model, "test"))
    with torch.no_grad(), block.computing_in_float32():
        kind = stream_kind(block.module, up, down, block.calls[0], states[0])
        assert kind == expected
        if kind is None:
            return

        def stream():
            block.original(states)
            out, seen = block._run(block.calls[0], states[0])
            x, _, y = seen[mlp.down]
            return block._stream(mlp, x, y, out, block.calls[0])

        before = stream()
        for parameter in down.parameters():  # what the MLP says is no part of the stream it adds to
            parameter.mul_(-3)
        after = stream()
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_low_rank_layer_is_its_dense_weight(bias, dtype):
    layer = LowRankLinear(12, 7, rank=3, bias=bias, dtype=dtype)
    inputs = {"x": made(2, 5, 12), "a": made(3, 12, seed=1), "b": made(7, 3, seed=2)}
    inputs |= {"bias": made(7, seed=3)} if bias else {}

    def fast(x, a, b, bias=None):
        state = {"a": a, "b": b} | ({} if bias is None else {"bias": bias})
        return torch.func.functional_call(layer, state, (x,))

    def reference(x, a, b, bias=None):
        return nn.functional.linear(x, b @ a, bias)

    judge(
        "low_rank_linear",
        "eager",
        fast,
        reference,
        inputs,
        dtype=dtype,
        case=f"bias {bias}",
        device="cpu",
    )


@pytest.mark.parametrize("init", ["sequential", "svd"])
@pytest.mark.parametrize("kind", ["gpt2", "llama-tied", "bert"])
def test_low_rank_layers_are_saved_folded_and_reverted(kind, init, tmp_path):
    model = tiny(kind)
    report = convert_(
        model, LowRankConfig(keep=0.5, init=init), calibration=[ids(8, seed=1)], progress=False
    )
    layers = [m for m in model.modules() if isinstance(m, LowRankLinear)]
    assert len(layers) == len(report.layers) > 0
    assert all(
        r.init == init and r.after < 0.6 * r.before and 0 < r.error < 1 for r in report.layers
    )
    after = output(model)
    model.save_pretrained(tmp_path / "small")
    assert torch.equal(output(from_pretrained(tmp_path / "small")), after)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        auto_class(kind).from_pretrained(tmp_path / "small")
    fold(model, tmp_path / "dense")
    torch.testing.assert_close(
        output(auto_class(kind).from_pretrained(tmp_path / "dense").eval()),
        after,
        rtol=1e-4,
        atol=1e-5,
    )
    revert_(model)
    torch.testing.assert_close(output(model), after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_the_fit_of_low_rank_is_better_than_the_nearest_weight(kind):
    batch, errors = ids(8, seed=5), {}
    before = output(tiny(kind), batch)
    for config in (LowRankConfig(init="svd"), LowRankConfig(epochs=0), LowRankConfig()):
        model = tiny(kind)
        convert_(model, config, calibration=ids(64, seed=1).split(8), progress=False)
        errors[config] = float((output(model, batch) - before).norm())
    nearest, closed, descended = errors.values()
    assert closed < nearest
    assert descended < nearest


def test_with_all_ranks_the_model_is_the_original():
    model = tiny("llama")
    before = output(model)
    convert_(model, LowRankConfig(rank=16), calibration=[ids(40, seed=1)], progress=False)
    torch.testing.assert_close(output(model), before, rtol=1e-3, atol=2e-4)


def prune_to_(model, keep, calibration, monkeypatch):
    """Drop neurons of each MLP, by the name of its last layer, down to a number."""
    place = "kronecker.surgery.prune.neurons_by_influence"
    monkeypatch.setattr(place, lambda *given: dict(keep))
    config = PruneConfig(allocate="influence", epochs=0)
    return prune_(model, config, calibration=[calibration], progress=False)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_neurons_dropped_layer_by_layer_are_saved_with_their_sizes(kind, tmp_path, monkeypatch):
    model = tiny(kind)
    mlps = find_mlps(model)
    keep = {m.down: 4 * (k + 1) for k, m in enumerate(mlps)}
    report = prune_to_(model, keep, ids(8, seed=1), monkeypatch)
    assert report.after == num_parameters(model) < report.before
    sizes = {m.down: dense(model.get_submodule(m.down)).shape[1] for m in mlps}
    assert sizes == keep
    after = output(model)
    model.save_pretrained(tmp_path / "small")
    again = from_pretrained(tmp_path / "small")
    assert torch.equal(output(again), after)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(output(from_pretrained(tmp_path / "again")), after)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        auto_class(kind).from_pretrained(tmp_path / "small")
    fold(model, tmp_path / "stock")  # all MLPs get the size of the largest
    stock = auto_class(kind).from_pretrained(tmp_path / "stock").eval()
    torch.testing.assert_close(output(stock), after)
    assert {dense(stock.get_submodule(m.down)).shape[1] for m in mlps} == {max(sizes.values())}


def test_only_neurons_that_nothing_reads_go_in_low_precision(tmp_path):
    model = tiny("llama")
    with torch.no_grad():
        # the same function, one column much larger than the others
        for block in model.model.layers:
            block.mlp.down_proj.weight[:, 0] *= 1000
            block.mlp.up_proj.weight[0] /= 1000
    model = model.to(torch.bfloat16)
    convert_(model, {"*.q_proj": LowRankConfig(rank=8, init="svd")}, progress=False)
    fold(model, tmp_path / "stock")
    assert auto_class("llama").from_pretrained(tmp_path / "stock").config.intermediate_size == 24
    assert model.config.architectures is None  # the model is as it was


def test_gate_and_up_in_one_matrix_are_filled_up(tmp_path, monkeypatch):
    config = transformers.Phi3Config(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
    )
    model = transformers.Phi3ForCausalLM(config).eval()
    keep = dict(zip((m.down for m in find_mlps(model)), (6, 18), strict=True))
    prune_to_(model, keep, ids(), monkeypatch)
    fold(model, tmp_path)
    stock = transformers.Phi3ForCausalLM.from_pretrained(tmp_path).eval()
    assert stock.config.intermediate_size == 18
    torch.testing.assert_close(output(stock), output(model))


def test_a_stack_of_experts_beside_an_mlp_of_its_size_is_filled_up_to_what_runs(
    tmp_path, monkeypatch
):
    config = transformers.Qwen2MoeConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        shared_expert_intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
    )
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    keep = {m.down: 15 for m in find_mlps(model)} | {"model.layers.1.mlp.experts": 8}
    prune_to_(model, keep, ids(), monkeypatch)
    fold(model, tmp_path)
    stock = transformers.Qwen2MoeForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(output(stock), output(model))


def test_folding_says_when_it_needs_a_batch(tmp_path, monkeypatch):
    config = transformers.HubertConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        conv_dim=(8, 8),
        conv_stride=(2, 2),
        conv_kernel=(3, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    )
    model, batch = transformers.HubertModel(config).eval(), {"input_values": torch.randn(4, 400)}
    place = "encoder.layers.{}.feed_forward.output_dense"
    prune_to_(model, {place.format(0): 7, place.format(1): 17}, batch, monkeypatch)
    with pytest.raises(ValueError, match=r"fold:.*batch="):
        fold(model, tmp_path / "stock")
    fold(model, tmp_path / "stock", batch=batch)
    stock = transformers.HubertModel.from_pretrained(tmp_path / "stock").eval()
    with torch.no_grad():
        torch.testing.assert_close(stock(**batch)[0], model(**batch)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_neurons_that_nothing_reads_are_gone_from_a_folded_model(kind, tmp_path):
    model = tiny(kind)
    convert_(model, VAN_LOAN, progress=False)
    for name, factor in model.named_parameters():
        if name.endswith((".b", "_b")):  # one entry is 1, the others are 0
            factor.data.copy_(
                torch.eye(factor[0].numel())[-1].view(factor.shape[-2:]).expand_as(factor)
            )
    fold(model, tmp_path / "stock")
    stock = auto_class(kind).from_pretrained(tmp_path / "stock").eval()
    torch.testing.assert_close(output(stock), output(model))
    assert num_parameters(stock) < num_parameters(tiny(kind))
    next(p for n, p in model.named_parameters() if n.endswith("b") and p.shape[-1] == 2).data.fill_(
        0.5
    )
    fold(model, tmp_path / "whole")  # one MLP reads all of its neurons
    whole = auto_class(kind).from_pretrained(tmp_path / "whole").eval()
    torch.testing.assert_close(output(whole), output(model))
    assert num_parameters(whole) == num_parameters(tiny(kind))


def test_an_error_puts_dropped_neurons_back(monkeypatch):
    model = tiny("gpt2")
    before, real = output(model), kronecker.fitting.fit.fit_part
    calls = []

    def failing(*given):
        calls.append(given)
        if len(calls) == 3:
            raise RuntimeError("no more")
        return real(*given)

    monkeypatch.setattr(kronecker.fitting.fit, "fit_part", failing)
    with pytest.raises(RuntimeError, match="no more"):
        prune_(model, PruneConfig(), calibration=[ids()], progress=False)
    assert torch.equal(output(model), before)


def test_peft_adapts_what_is_left_dense_and_says_what_it_cannot():
    import peft

    model = tiny("llama")
    convert_(model, LowRankConfig(), calibration=[ids(8, seed=1)], progress=False)
    tuned = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    )
    tuned(input_ids=ids(), labels=ids()).loss.backward()
    assert all(p.grad is not None for n, p in tuned.named_parameters() if "lora_B" in n)
    with pytest.raises(ValueError, match="LowRankLinear"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["down_proj"]))


@pytest.mark.parametrize("config", [VAN_LOAN, LowRankConfig(), PruneConfig()])
def test_hooks_of_a_user_go_on_and_can_be_removed(config):
    model, calls = tiny("gpt2"), []
    layer = model.transformer.h[0].mlp.c_fc
    handles = [
        layer.register_forward_hook(lambda module, given, out: calls.append("after")),
        layer.register_forward_pre_hook(
            lambda module, given, named: calls.append("before"), with_kwargs=True
        ),
    ]
    change = prune_ if isinstance(config, PruneConfig) else convert_
    change(model, config, calibration=[ids()], progress=False)
    calls.clear()
    output(model)
    assert calls == ["before", "after"]
    for handle in handles:
        handle.remove()
    output(model)
    assert len(calls) == 2
    if not isinstance(config, PruneConfig):
        model.transformer.h[0].mlp.c_fc.register_forward_hook(
            lambda module, given, out: calls.append("dense")
        )
        revert_(model)
        output(model)
        assert calls[2:] == ["dense"]


def _apart(kind, config, monkeypatch, **patched):
    """How far a converted model is from the original, over some models, with parts of the fit
    replaced."""
    distances = []
    for seed in range(3):
        model = tiny(kind, seed)
        before = output(model, ids(64, seed=2))
        with monkeypatch.context() as patch:
            for name, value in patched.items():
                patch.setattr(f"kronecker.fitting.{name}", value)
            convert_(model, config, calibration=ids(256, seed=1).split(64), progress=False)
        distances.append(float((output(model, ids(64, seed=2)) - before).norm()))
    return sum(distances)


@pytest.mark.parametrize(
    "config", [LowRankConfig(epochs=0), KroneckerConfig(b_shape=(2, 1), epochs=0)]
)
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_fit_makes_up_for_what_the_stream_has_lost(kind, config, monkeypatch):
    nothing = {"block.Block._stream": lambda self, writer, x, y, out, call: torch.zeros_like(y)}
    assert _apart(kind, config, monkeypatch) < _apart(kind, config, monkeypatch, **nothing)


@pytest.mark.parametrize("config", [LowRankConfig(), KroneckerConfig(b_shape=(2, 2))])
def test_descent_on_all_matrices_is_better_than_each_by_itself(config, monkeypatch):
    assert _apart("llama", config, monkeypatch) < 0.98 * _apart(
        "llama", replace(config, epochs=0), monkeypatch
    )


def test_the_neurons_that_matter_come_first(monkeypatch):
    config = KroneckerConfig(b_shape=(2, 1), epochs=0)
    as_they_are = {"factors.neuron_order": lambda *given: None}
    assert _apart("llama", config, monkeypatch) < 0.98 * _apart(
        "llama", config, monkeypatch, **as_they_are
    )


def test_padding_does_not_count_for_experts_either():
    texts = ids(6, seed=1)
    mask = torch.ones_like(texts)
    mask[:, 8:] = 0
    models = [tiny("mixtral"), tiny("mixtral")]
    for model, filler in zip(models, (3, 50), strict=True):
        batch = {"input_ids": torch.where(mask.bool(), texts, filler), "attention_mask": mask}
        prune_(model, PruneConfig(epochs=0), calibration=[batch], progress=False)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_layers_by_their_weights_alone_leave_the_original_to_the_walk():
    """What a fitted layer should give is what the original gave, whatever else is converted in the
    same call."""
    maps = [{"*.mlp.*": KroneckerConfig(b_shape=(2, 1))}]
    maps.append({"*.attn.c_attn": KroneckerConfig(b_shape=(1, 2), init="van_loan")} | maps[0])
    reports = [convert_(tiny("gpt2"), m, calibration=[ids(8)], progress=False) for m in maps]
    alone, both = ({r.name: r.error for r in report.layers} for report in reports)
    assert {n: both[n] for n in alone} == pytest.approx(alone)


def test_what_was_frozen_stays_so():
    model = tiny("llama")
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    convert_(model, LowRankConfig(), calibration=[ids()], progress=False)
    for index, layer in enumerate(model.model.layers):
        assert all(p.requires_grad == (index >= 2) for p in layer.parameters())


def test_a_model_within_a_converted_one_is_saved_with_its_factors(tmp_path):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.inner = None, tiny("llama")

        def forward(self, **named):
            return self.inner(**named)

    wrapper, model = Wrapper().eval(), tiny("bert")
    convert_(wrapper, {"*.mlp.*": LowRankConfig()}, calibration=[ids()], progress=False)
    wrapper.inner.save_pretrained(tmp_path / "inner")
    assert torch.equal(output(from_pretrained(tmp_path / "inner")), output(wrapper.inner))
    convert_(model, VAN_LOAN, progress=False)
    assert (tmp_path / "inner" / "kronecker.json").is_file()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"convert_:.*empty mapping"),
        (PruneConfig(), r"convert_: config is a PruneConfig,.*call prune_"),
        ("gpt2-82m", r"convert_: config is a str, expected a KroneckerConfig"),
        ({"*.mlp.*": {"keep": 0.5}}, r"convert_: config is a dict, expected a KroneckerConfig"),
        (0.5, r"convert_: config is a float, expected a KroneckerConfig"),
        ({"*.wte": PruneConfig()}, r"convert_: config is a PruneConfig,.*call prune_"),
        ({"*.wte": KroneckerConfig(b_shape=(1, 2))}, "expected LowRankConfig"),
    ],
)
def test_configs_that_make_no_sense_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        convert_(tiny("gpt2"), config, calibration=[ids()], progress=False)


def test_neurons_go_once_and_not_in_inference_mode(monkeypatch):
    model = tiny("llama")
    keep = {m.down: 4 * (k + 1) for k, m in enumerate(find_mlps(model))}
    prune_to_(model, keep, ids(), monkeypatch)
    with pytest.raises(ValueError, match=r"convert_:.*already pruned by an earlier call"):
        convert_(model, LowRankConfig(), calibration=[ids()], progress=False)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"convert_:.*inference_mode"):
        convert_(tiny("llama"), LowRankConfig(), calibration=[ids()], progress=False)


def test_blocks_that_give_tuples_are_passed_by():
    config = transformers.DebertaV2Config(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
    )
    model = transformers.DebertaV2ForSequenceClassification(config).eval()
    report = convert_(model, LowRankConfig(), calibration=[ids(), ids(seed=1)], progress=False)
    assert len(report.layers) == 4


@pytest.mark.parametrize("between", [1.0, 3.0])
def test_blocks_that_are_no_chain_are_fitted_on_what_they_really_read(between):
    """Something lies between the blocks: hidden states that are handed on from block to block would
    be wrong."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(6, 24), nn.Linear(24, 6)

        def forward(self, hidden_states):
            return hidden_states + self.fc2(torch.relu(self.fc1(hidden_states)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, input_ids):
            first, second = self.layers
            return second(first(input_ids) * between)

    torch.manual_seed(0)
    model, x = Model(), made(400, 6)
    names = [
        block.name
        for block in blocks_with(model, find_mlps(model, {"input_ids": x}), [], [{"input_ids": x}])[
            0
        ]
    ]
    assert names == ([""] if between != 1.0 else ["layers.0", "layers.1"])
    report = prune_(model, PruneConfig(epochs=0), calibration=[x], progress=False)
    assert all(0 < r.error < 0.5 for r in report.layers)


def test_a_model_that_is_the_layer_is_refused():
    config = LowRankConfig(rank=2, init="svd")
    for layer in (nn.Linear(4, 6), nn.Embedding(8, 6)):
        with pytest.raises(ValueError, match="convert_: the model is a single"):
            convert_(layer, config, filter_fn=lambda module, name: True, progress=False)
    with pytest.raises(ValueError, match="revert_: the model is a single KroneckerLinear"):
        revert_(KroneckerLinear(4, 6, b_shape=(2, 1)))


@pytest.mark.parametrize("pattern", ["*word_embeddings", "*predictions.decoder"])
def test_a_tied_bias_stays_tied_there_and_back(pattern):
    config = transformers.BertConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = transformers.BertForMaskedLM(config).eval()
    head = model.cls.predictions
    convert_(model, {pattern: LowRankConfig(rank=4, init="svd")}, progress=False)
    assert head.decoder.bias is head.bias
    revert_(model)
    assert head.decoder.bias is head.bias
    assert not any(module.training for module in model.modules())


def test_what_was_frozen_is_frozen_after_there_and_back():
    model = tiny("gpt2").requires_grad_(False)
    convert_(model, KroneckerConfig(b_shape=(2, 1), init="van_loan"), progress=False)
    revert_(model)
    assert not [name for name, p in model.named_parameters() if p.requires_grad]
    layer = model.transformer.h[0].mlp
    layer.c_fc.bias.requires_grad_(True)  # biases alone train (BitFit)
    convert_(model, KroneckerConfig(b_shape=(2, 1), init="van_loan"), progress=False)
    assert [n for n, p in layer.c_fc.named_parameters() if p.requires_grad] == ["bias"]
    revert_(model)
    assert [n for n, p in layer.c_fc.named_parameters() if p.requires_grad] == ["bias"]


def test_a_weight_that_pruning_gives_exactly_leaves_the_other_terms_to_be_learned():
    linear = nn.Linear(4, 6)
    with torch.no_grad():
        linear.weight[1::2] = 0
    layer = KroneckerLinear.from_linear(linear, init="prune", b_shape=(2, 1), rank=2)
    torch.testing.assert_close(layer.dense_weight(), linear.weight)


def test_a_subclass_of_a_config_is_converted_as_its_base():
    @dataclass(frozen=True, kw_only=True)
    class Named(KroneckerConfig):
        label: str = "mine"

    plain, named = tiny("gpt2"), tiny("gpt2")
    convert_(plain, VAN_LOAN, progress=False)
    convert_(named, Named(**asdict(VAN_LOAN)), progress=False)
    assert torch.equal(output(named), output(plain))
    with pytest.raises(ValueError, match="config is a Config, expected a KroneckerConfig or"):
        convert_(tiny("gpt2"), Config(), progress=False)
