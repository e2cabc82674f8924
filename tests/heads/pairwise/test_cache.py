"""Features that are made once: those of the model, kept by what they depend on, and a head that
trains on them."""

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.heads.pairwise.support import model_of, pairs_of
from transformers import TrainingArguments

from heads.pairwise import (
    PairwiseTrainer,
    fit_uncertainty_,
    freeze_,
    pairwise_report,
    predict_pairs,
)
from heads.pairwise.data import cache
from heads.pairwise.data.template import Tokens

KINDS = ("bert", "llama", "mpnet")


def frozen(kind="bert", **options):
    model = model_of(kind, **{"surface": ["length", "style"]} | options)
    freeze_(model, "all")
    return model


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(cache, "_TOKENS", 64)


@pytest.mark.parametrize("kind", KINDS)
def test_verdicts_are_those_of_the_encoder(kind):
    model = frozen(kind, pooling=["mean", "last"])
    data, plain = (model.dataset(pairs_of(40), progress=False) for _ in range(2))
    data.encode_(model, progress=False)
    assert data.encoded
    assert not plain.encoded
    found, wanted = (predict_pairs(model, d, parts=True, progress=False) for d in (data, plain))
    torch.testing.assert_close(found.log_probabilities, wanted.log_probabilities)
    for part in ("encoder", "length", "style"):
        torch.testing.assert_close(found.alike[part], wanted.alike[part])
        assert (found.alike[part] - found.log_probabilities).abs().max() > 1e-3 or part != "encoder"


def test_what_is_there_is_not_made_again(tmp_path, monkeypatch):
    model, pairs = frozen(), pairs_of(60)
    seen = []
    features = model.features
    monkeypatch.setattr(
        model, "features", lambda **given: seen.append(len(given["lengths"])) or features(**given)
    )
    first = model.dataset(pairs[:30], progress=False)
    first.encode_(model, cache=tmp_path, progress=False)
    made = sum(seen)
    assert made == len(
        {answer for pair in pairs[:30] for answer in zip([pair[0]] * 2, pair[1:3], strict=True)}
    )
    again = model.dataset(pairs, progress=False)
    again.encode_(model, cache=tmp_path, progress=False)
    assert np.array_equal(again._features[:60], first._features)
    assert made < sum(seen) <= 120
    held = sum(seen)
    model.dataset(pairs[20:50], progress=False).encode_(model, cache=tmp_path, progress=False)
    assert sum(seen) == held
    with torch.no_grad():
        next(model.encoder.parameters()).mul_(1.01)
    model.dataset(pairs[20:50], progress=False).encode_(model, cache=tmp_path, progress=False)
    assert sum(seen) > held  # another encoder's


def test_each_kind_of_pooling_is_kept_for_itself(tmp_path, monkeypatch):
    made, pairs = {}, pairs_of(20)
    for pooling in (["mean"], ["last"], ["last", "mean"]):
        model = frozen(pooling=pooling)
        seen = []
        features = model.features
        monkeypatch.setattr(
            model, "features", lambda f=features, s=seen, **given: s.append(1) or f(**given)
        )
        data, plain = (model.dataset(pairs, progress=False) for _ in range(2))
        data.encode_(model, cache=tmp_path, progress=False)
        assert bool(seen) == (pooling != ["last", "mean"])
        plain.encode_(model, progress=False)
        np.testing.assert_allclose(data._features, plain._features, rtol=1e-5, atol=1e-6)
        made[tuple(pooling)] = data._features
    assert np.array_equal(made["last", "mean"], np.concatenate([made["last",], made["mean",]], 1))


def test_an_encoder_of_another_config_finds_nothing(tmp_path):
    made = []
    for theta in (1e4, 1e2):
        model = frozen("llama")
        config = model.encoder.config
        config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
        data = model.dataset(pairs_of(20), progress=False)
        data.encode_(model, cache=tmp_path, progress=False)
        made.append(len(list(tmp_path.rglob("*.safetensors"))))
    assert made[1] == 2 * made[0]


def test_an_interrupted_run_loses_nothing(tmp_path, monkeypatch):
    model, data = frozen(), None
    monkeypatch.setattr(cache, "_BATCHES", 1)
    data = model.dataset(pairs_of(60), progress=False)
    features, calls = model.features, []

    def stopped(**given):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return features(**given)

    monkeypatch.setattr(model, "features", stopped)
    with pytest.raises(KeyboardInterrupt):
        data.encode_(model, cache=tmp_path, progress=False)
    assert not data.encoded
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 4
    files[0].write_bytes(files[0].read_bytes()[:40])  # cut short by something else
    files[1].write_bytes(files[1].read_bytes()[:-8] + bytes(8))  # a torn write
    data.encode_(model, cache=tmp_path, progress=False)
    whole = model.dataset(pairs_of(60), progress=False)
    monkeypatch.setattr(model, "features", features)
    whole.encode_(model, progress=False)
    np.testing.assert_allclose(data._features, whole._features, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", [1, 17, -1])
def test_features_of_an_encoder_with_one_other_number_are_refused(place):
    model = frozen(link="antisymmetric")
    data = model.dataset(pairs_of(4), progress=False)
    data.encode_(model, progress=False)
    data.check_made_for("predict", model)
    with torch.no_grad():
        model.encoder.get_input_embeddings().weight.view(-1)[place] += 1
    with pytest.raises(ValueError, match=r"fit_uncertainty_: .* features of another encoder"):
        fit_uncertainty_(model, data, data)
    with pytest.raises(ValueError, match="features of another encoder"):
        data.check_made_for("predict", model)


def test_tokens_of_another_tokenizer_are_refused():
    model = model_of()
    data = model.dataset(pairs_of(4), progress=False)
    model.tokenizer.add_tokens(["Two"])
    with pytest.raises(ValueError, match=r"predict_pairs: .* made with the model's tokenizer, got"):
        predict_pairs(model, data, progress=False)
    model.tokenizer = None  # nothing to compare with
    predict_pairs(model, data, progress=False)


def test_what_trains_is_not_kept(tmp_path):
    model = model_of()
    data = model.dataset(pairs_of(4), progress=False)
    with pytest.raises(ValueError, match=r"encode_: expected a frozen encoder, got \d+"):
        data.encode_(model)
    model = frozen()
    data = model.dataset(pairs_of(4), progress=False)
    data.encode_(model, progress=False)
    freeze_(model, "none")
    with pytest.raises(ValueError, match=r"PairwiseTrainer:.*features"):
        PairwiseTrainer(
            model=model, args=TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=data
        )


def test_a_head_trains_on_features_as_on_tokens(tmp_path):
    losses = []
    for encode in (False, True):
        model = frozen(trained=False, surface=["length", "style", "overlap"], dropout=0.0)
        model.encoder.eval()
        for module in model.encoder.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        data = model.dataset(pairs_of(200), progress=False)
        if encode:
            data.encode_(model, progress=False)
        arguments = TrainingArguments(
            str(tmp_path / str(encode)),
            max_steps=40,
            learning_rate=3e-3,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=3,
        )
        PairwiseTrainer(model=model, args=arguments, train_dataset=data, head_lr_ratio=1.0).train()
        losses.append(pairwise_report(model, data, progress=False).metrics.log_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_adapters_are_part_of_the_encoder(tmp_path):
    """How much of them is added is in no state, and whether they are."""
    made, files = [], []
    for alpha, active in ((2, True), (200, True), (200, False)):
        torch.manual_seed(0)
        model = frozen()
        config = LoraConfig(
            target_modules=["query"], r=2, lora_alpha=alpha, init_lora_weights=False
        )
        model.encoder = get_peft_model(model.encoder, config)
        if not active:
            model.encoder.base_model.disable_adapter_layers()
        model.encoder.requires_grad_(False)
        data = model.dataset(pairs_of(12), progress=False)
        data.encode_(model, cache=tmp_path, progress=False)
        made.append(data._features)
        files.append(len(list(tmp_path.rglob("*.safetensors"))))
    assert files[2] == 3 * files[0]
    assert np.abs(made[0] - made[1]).max() > 1e-3
    assert np.abs(made[1] - made[2]).max() > 1e-3


@pytest.mark.parametrize("what", ["weights", "pooling"])
def test_features_of_another_encoder_are_refused(what, tmp_path):
    model, other = frozen(), frozen(pooling="last" if what == "pooling" else "mean")
    data = model.dataset(pairs_of(12), progress=False)
    data.encode_(model, progress=False)
    predict_pairs(model, data, progress=False)
    if what == "weights":
        with torch.no_grad():
            other.encoder.encoder.layer[0].attention.self.query.weight.mul_(1.01)
    with pytest.raises(ValueError, match=r"predict_pairs:.*features"):
        predict_pairs(other, data, progress=False)
    with pytest.raises(ValueError, match=r"PairwiseTrainer:.*features"):
        PairwiseTrainer(
            model=other, args=TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=data
        )


def test_labels_of_other_classes_are_refused(tmp_path):
    model, other = frozen(), frozen(ties=False)
    data = model.dataset(pairs_of(12), progress=False)
    with pytest.raises(ValueError, match=r"predict_pairs: expected labels of 2 classes.* for 3"):
        predict_pairs(other, data, progress=False)
    with pytest.raises(ValueError, match=r"PairwiseTrainer: expected labels of 2 classes"):
        PairwiseTrainer(
            model=other, args=TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=data
        )
    bare = model.dataset([pair[:3] for pair in pairs_of(2)], progress=False)
    assert predict_pairs(other, bare, progress=False).probabilities.shape == (2, 2)


def test_features_are_made_in_evaluation_and_in_full_precision(tmp_path):
    model = frozen()
    model.train()  # the tiny encoder has dropout
    data, plain = (model.dataset(pairs_of(12), progress=False) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        data.encode_(model, cache=tmp_path, progress=False)
    assert model.training
    plain.encode_(model.eval(), progress=False)
    np.testing.assert_allclose(data._features, plain._features, rtol=1e-5, atol=1e-6)


def test_the_same_ids_in_other_roles_are_other_sequences():
    ids, types = np.arange(5, dtype=np.int32), np.zeros(5, dtype=np.int8)
    other = types.copy()
    other[3:] = 1
    keys = {
        cache._key(Tokens(*given)) for given in ((ids, types, 1), (ids, types, 2), (ids, other, 1))
    }
    assert len(keys) == 3


def test_features_know_the_config_that_made_them():
    model = model_of()
    other = copy.deepcopy(model)
    other.encoder.config.num_attention_heads += 2
    assert cache.fingerprint(model) != cache.fingerprint(other)
