"""Tables of embeddings of low rank: fitted to how tokens use them, tied heads, saved and back."""

import pytest
import torch
import transformers
from torch import nn

from kronecker import (
    KroneckerTrainer,
    LowRankConfig,
    LowRankEmbedding,
    LowRankLinear,
    PruneConfig,
    convert_,
    fold,
    from_pretrained,
    prune_,
    revert_,
)
from kronecker.fitting.tables import READ_IN, TableUse, low_rank_table, uses_of
from tests.kronecker.test_convert import ids, output
from tests.kronecker.test_functional import made
from tests.support.equivalence import judge
from tests.support.models import tiny

TABLES = {
    "gpt2": "transformer.wte",
    "llama-tied": "model.embed_tokens",
    "bert": "embeddings.word_embeddings",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_low_rank_table_is_its_dense_weight(dtype):
    table = LowRankEmbedding(11, 7, rank=3, dtype=dtype)
    looked_up = torch.tensor([[0, 10, 3], [3, 3, 5]])

    def fast(a, b):
        return torch.func.functional_call(table, {"a": a, "b": b}, (looked_up,))

    def reference(a, b):
        return nn.functional.embedding(looked_up, b @ a)

    inputs = {"a": made(3, 7, seed=1), "b": made(11, 3, seed=2)}
    judge(
        "low_rank_embedding",
        "eager",
        fast,
        reference,
        inputs,
        dtype=dtype,
        case="rank 3",
        device="cpu",
    )


@pytest.mark.parametrize("tied", [False, True])
def test_the_fit_is_the_truncated_svd_of_the_weighted_table(tied, monkeypatch):
    monkeypatch.setattr("kronecker.fitting.tables._ROWS", 7)  # in several pieces
    weight, counts = made(40, 12, dtype=torch.float64), torch.arange(40.0, dtype=torch.float64)
    x = made(100, 12, seed=1, dtype=torch.float64) * torch.linspace(0.1, 3, 12, dtype=torch.float64)
    a, b, error = low_rank_table(weight, 5, TableUse(counts, x.T @ x if tied else None))
    shares = (counts / counts.sum() + 1 / 40) / 2
    metric = torch.eye(12, dtype=torch.float64)
    if tied:
        metric = READ_IN * metric + (1 - READ_IN) * (x.T @ x) / (x.T @ x).diagonal().mean()
    root = torch.linalg.cholesky(metric)
    u, s, v = torch.linalg.svd(shares.sqrt().diag() @ weight @ root, full_matrices=False)
    best = (1 / shares.sqrt()).diag() @ (u[:, :5] * s[:5]) @ v[:5] @ root.inverse()
    torch.testing.assert_close(b @ a, best, rtol=1e-9, atol=1e-9)
    assert error == pytest.approx(float(s[5:].square().sum() / s.square().sum()), rel=1e-9)
    torch.testing.assert_close(b.norm(dim=0), a.norm(dim=1))  # of one size, for an optimizer


def test_a_table_is_seen_as_its_tokens_use_it_without_padding():
    model, batch = tiny("llama-tied"), ids(2, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    name, heard = TABLES["llama-tied"], []
    handle = model.lm_head.register_forward_pre_hook(
        lambda module, given: heard.append(given[0].detach())
    )
    use = uses_of(
        model, {name: ["lm_head"]}, [{"input_ids": batch, "attention_mask": mask}] * 2, "convert_"
    )[name]
    handle.remove()
    assert torch.equal(use.counts, 2 * torch.bincount(batch[mask.bool()], minlength=96).double())
    x = heard[0][mask.bool()].double()
    torch.testing.assert_close(use.inputs, 2 * x.T @ x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("init", ["sequential", "svd"])
@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_saved_trained_folded_and_reverted(kind, init, tmp_path):
    model, name = tiny(kind), TABLES[kind]
    original = output(model)
    report = convert_(
        model, {name: LowRankConfig(keep=0.5, init=init)}, calibration=[ids(seed=1)], progress=False
    )
    (row,) = report.layers
    assert row.name == name
    assert row.init == init
    assert row.after < 0.6 * row.before
    assert 0 < row.error < 1
    seen = f"{name}: the calibration tokens look up {len(ids(seed=1).unique())} of 96 rows"
    seen += "; the error says nothing about the other rows"
    assert (seen in report.remarks()) == (init == "sequential")
    table = model.get_submodule(name)
    after = output(model)
    assert isinstance(table, LowRankEmbedding)
    assert not torch.equal(after, original)
    if kind != "bert":
        assert isinstance(model.lm_head, LowRankLinear)
        assert model.lm_head.a is table.a
        assert model.lm_head.b is table.b
    model.save_pretrained(tmp_path / "small")
    again = from_pretrained(tmp_path / "small")
    assert torch.equal(output(again), after)
    if kind != "bert":
        assert again.lm_head.b is again.get_submodule(name).b
    fold(model, tmp_path / "dense")
    dense = type(model).from_pretrained(tmp_path / "dense").eval()
    torch.testing.assert_close(output(dense), after, rtol=1e-4, atol=1e-4)
    output_of = model(input_ids=ids())[0]
    output_of.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in (table.a, table.b))
    revert_(model)
    torch.testing.assert_close(output(model), after, rtol=1e-4, atol=1e-4)


def test_a_pattern_for_the_head_means_its_table_too():
    models = tiny("gpt2"), tiny("gpt2")
    for model, pattern in zip(models, ("lm_head", "*.wte"), strict=True):
        convert_(model, {pattern: LowRankConfig()}, calibration=[ids(seed=1)], progress=False)
        assert isinstance(model.transformer.wte, LowRankEmbedding)
    assert torch.equal(output(models[0]), output(models[1]))


def test_what_is_looked_up_often_is_kept_best():
    model = tiny("bert")
    weight = model.embeddings.word_embeddings.weight.detach().clone()
    often = torch.full((8, 16), 7)
    often[0] = torch.arange(3, 19)
    convert_(
        model, {"*word_embeddings": LowRankConfig(rank=4)}, calibration=[often], progress=False
    )
    wrong = (model.embeddings.word_embeddings.dense_weight() - weight).norm(dim=1) / weight.norm(
        dim=1
    )
    assert wrong[7] < 0.3 * wrong.mean()


def test_tables_and_mlps_in_one_call_and_a_stock_trainer(tmp_path):
    model = tiny("gpt2")
    configs = {"*.wte": LowRankConfig(), "*.mlp.*": LowRankConfig(keep=0.5)}
    report = convert_(model, configs, calibration=[ids(8, seed=1)], progress=False)
    assert {type(row.init) for row in report.layers} == {str}
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-2,
    )
    rows = [{"input_ids": row, "labels": row} for row in ids(8)]
    before = model.transformer.wte.b.detach().clone()
    KroneckerTrainer(model, arguments, train_dataset=rows, teacher=tiny("gpt2")).train()
    assert not torch.equal(model.transformer.wte.b, before)
    assert model.lm_head.b is model.transformer.wte.b


def test_neurons_go_before_a_table_does(tmp_path):
    model, data = tiny("bert"), [ids(8, seed=1)]
    convert_(model, {"*word_embeddings": LowRankConfig()}, calibration=data, progress=False)
    with pytest.raises(
        ValueError,
        match=r"prune_:.*word_embeddings.*convert_",
    ):
        prune_(model, PruneConfig(), calibration=data, progress=False)
    model = tiny("bert")
    prune_(model, PruneConfig(), calibration=data, progress=False)
    convert_(model, {"*word_embeddings": LowRankConfig()}, calibration=data, progress=False)
    model.save_pretrained(tmp_path / "small")
    assert torch.equal(output(from_pretrained(tmp_path / "small")), output(model))


@pytest.mark.parametrize(
    ("calibration", "config", "message"),
    [
        (
            None,
            LowRankConfig(),
            "expected calibration= with batches of token ids for LowRankConfig",
        ),
        ([ids()], LowRankConfig(rank=17), r"convert_:.*17.*weight"),
        (
            [{"inputs_embeds": torch.ones(1, 3, 16)}],
            LowRankConfig(),
            r"convert_:.*calibration",
        ),
    ],
)
def test_tables_that_cannot_be_fitted_are_left_as_they_were(calibration, config, message):
    model = tiny("gpt2")
    before = output(model)
    with pytest.raises(ValueError, match=message):
        convert_(model, {"*.wte": config}, calibration=calibration, progress=False)
    assert torch.equal(output(model), before)
    assert model.lm_head.weight is model.transformer.wte.weight
