"""Training back: groups, schedules, distillation, resume, two processes."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from kronecker import (
    DistillConfig,
    FreezePretrained,
    KroneckerConfig,
    KroneckerLinear,
    KroneckerTrainer,
    LowRankConfig,
    PruneConfig,
    compare,
    convert_,
    from_pretrained,
    prune_,
)
from kronecker.report import perplexity
from kronecker.training.parameters import factor_parameters, parameter_groups
from tests.support.logs import logs_of
from tests.support.models import tiny
from tests.support.ranks import in_two_processes

SMALL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def rows(count=24, length=10):
    made = torch.randint(3, 96, (count, length), generator=torch.Generator().manual_seed(3))
    labels = made.clone()
    labels[::3, :4] = -100  # unequal numbers of tokens
    return [
        {"input_ids": i, "labels": y, "attention_mask": torch.ones_like(i)}
        for i, y in zip(made, labels, strict=True)
    ]


def student(kind="gpt2", init="van_loan", **named):
    model = tiny(kind, **(SMALL if kind == "gpt2" else {}))
    convert_(
        model, KroneckerConfig(b_shape=(2, 1), init=init, scales=True), progress=False, **named
    )
    return model


def arguments(out, **changes):
    common = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "optim": "sgd",
        "use_cpu": True,
    }
    common |= {
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    common |= {"logging_steps": 2, "max_grad_norm": 0.0, "weight_decay": 0.0}
    return TrainingArguments(str(out), **common | changes)


def train(model, out, callbacks=None, resume=None, **named):
    own = {
        k: named.pop(k)
        for k in list(named)
        if k in ("teacher", "distill", "pretrained_learning_rate")
    }
    trainer = KroneckerTrainer(
        model, arguments(out, **named), train_dataset=rows(), callbacks=callbacks, **own
    )
    set_seed(0)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(a, b, **close):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda m, name=name: f"{name}: {m}", **close)


def test_groups_have_their_rates_and_only_factors_decay():
    model = student()
    groups = {
        g["name"]: g
        for g in parameter_groups(model, learning_rate=1.0, pretrained_learning_rate=0.1)
    }
    assert {n: (g["lr"], g["weight_decay"]) for n, g in groups.items()} == {
        "factors": (1.0, 0.1),
        "scales": (1.0, 0.0),
        "pretrained": (0.1, 0.0),
    }
    assert sum(len(g["params"]) for g in groups.values()) == len(list(model.parameters()))
    assert "pretrained" not in {
        g["name"] for g in parameter_groups(model, learning_rate=1.0, pretrained_learning_rate=0)
    }
    assert [g["name"] for g in parameter_groups(tiny("gpt2"), learning_rate=1.0)] == ["pretrained"]


def dense_loss(model, teacher, batch, config):
    """The distillation loss position by position."""
    ours, theirs = (
        m(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            output_hidden_states=True,
        )
        for m in (model, teacher)
    )
    t, kl, ce, hidden, count = config.temperature, 0.0, 0.0, 0.0, 0
    for row in range(len(batch["labels"])):
        for i in range(batch["labels"].shape[1] - 1):
            label = batch["labels"][row, i + 1]
            if label == -100:
                continue
            p, q = (F.log_softmax(z.logits[row, i] / t, -1) for z in (theirs, ours))
            kl, count = kl + t * t * (p.exp() * (p - q)).sum(), count + 1
            ce = ce - F.log_softmax(ours.logits[row, i], -1)[label]
            pairs = list(zip(ours.hidden_states, theirs.hidden_states, strict=True))
            errors = [
                (a[row, i] - b[row, i]).square().sum() / b[row, i].square().sum() for a, b in pairs
            ]
            hidden = hidden + sum(errors) / len(errors)
    return (config.logits * kl + config.labels * ce + config.hidden * hidden) / count


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_loss_is_the_dense_one(kind, tmp_path):
    model, teacher = student(kind), tiny(kind)
    config = DistillConfig(logits=0.7, labels=0.3, hidden=0.5, temperature=1.5)
    trainer = KroneckerTrainer(
        model, arguments(tmp_path), teacher=teacher, distill=config, train_dataset=rows()
    )
    batch = {k: torch.stack([r[k] for r in rows()[:5]]) for k in rows()[0]}
    model.train()
    found = trainer.compute_loss(model, dict(batch))
    expected = dense_loss(model, teacher, batch, config)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    parameters = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad(found, parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_an_encoder_decoder_learns_from_its_decoders_tokens(tmp_path):
    """Source and target differ in length; without decoder_input_ids they are made of the labels, as
    the model does."""
    sizes = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)
    teacher, model = (
        transformers.T5ForConditionalGeneration(config),
        transformers.T5ForConditionalGeneration(config),
    )
    batch = {
        "input_ids": torch.randint(1, 32, (2, 6)),
        "labels": torch.tensor([[5, 6, 7, 1], [8, 1, -100, -100]]),
    }
    trainer = KroneckerTrainer(model.train(), arguments(tmp_path), teacher=teacher)
    loss = trainer.compute_loss(model, dict(batch))
    with torch.no_grad():
        shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        ours, theirs = (
            m(input_ids=batch["input_ids"], decoder_input_ids=shifted).logits
            for m in (model, teacher)
        )
    log_p, log_q = (F.log_softmax(z[batch["labels"] != -100] / 2, -1) for z in (theirs, ours))
    torch.testing.assert_close(
        loss.detach(), 4 * (log_p.exp() * (log_p - log_q)).sum(-1).mean(), rtol=1e-4, atol=1e-6
    )
    unlabeled = {"input_ids": batch["input_ids"], "decoder_input_ids": shifted}
    unlabeled["decoder_attention_mask"] = (batch["labels"] != -100).long()
    # what counts is what the mask says, on either side alone
    masked = trainer.compute_loss(model, unlabeled)
    with torch.no_grad():
        ours, theirs = (
            m(**unlabeled).logits[unlabeled["decoder_attention_mask"].bool()]
            for m in (model, teacher)
        )
    log_p, log_q = (F.log_softmax(z / 2, -1) for z in (theirs, ours))
    torch.testing.assert_close(
        masked.detach(), 4 * (log_p.exp() * (log_p - log_q)).sum(-1).mean(), rtol=1e-4, atol=1e-6
    )
    rows = {"input_ids": torch.randint(2, 32, (2, 5)), "labels": torch.tensor([0, 1])}
    small = {
        "vocab_size": 32,
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8,
        "num_labels": 2,
    }
    rows["input_ids"][:, -1] = 2  # its end, which a classifier reads
    classifiers = [
        transformers.BartForSequenceClassification(transformers.BartConfig(**small))
        for _ in range(2)
    ]
    trainer = KroneckerTrainer(classifiers[0].train(), arguments(tmp_path), teacher=classifiers[1])
    # without a way to make decoder_input_ids of labels
    assert trainer.compute_loss(classifiers[0], rows).isfinite()
    with pytest.raises(ValueError, match=r"KroneckerTrainer:.*T5ForCond"):
        KroneckerTrainer(
            model, arguments(tmp_path), teacher=teacher, distill=DistillConfig(hidden=1.0)
        )


@pytest.mark.parametrize(
    ("distill", "sizes", "message"),
    [
        (
            DistillConfig(),
            {"vocab_size": 120},
            "logits have 96 values per token and the teacher's have 120",
        ),
        (DistillConfig(logits=0, hidden=1), {"n_embd": 32}, "hidden states have 16 .* 32;"),
    ],
)
def test_a_teacher_of_another_size_is_refused(distill, sizes, message, tmp_path):
    teacher = tiny("gpt2", **SMALL, **sizes)
    with pytest.raises(ValueError, match=f"KroneckerTrainer: the student's {message}"):
        train(student(), tmp_path, teacher=teacher, distill=distill)


def test_what_a_teacher_would_freeze_or_replace_is_refused(tmp_path):
    model = tiny("gpt2")
    settings = arguments(tmp_path)
    part = tiny("gpt2")
    part.transformer.wte = model.transformer.wte
    frozen = tiny("gpt2").requires_grad_(False)
    smooth = arguments(tmp_path, label_smoothing_factor=0.1)
    own = {"compute_loss_func": lambda *given, **named: 0.0}
    for given, message in (
        ((model, settings, {"teacher": part}), "got one that shares 1 parameters with the model"),
        ((frozen, settings, {"teacher": part}), "expected a model with trainable parameters"),
        ((model, smooth, {"teacher": frozen}), "expected no label_smoothing_factor with a teacher"),
        ((model, settings, {"teacher": frozen, **own}), "expected no compute_loss_func with a"),
        ((model, settings, {"teacher": "models/base"}), "teacher is a str, expected a loaded mod"),
        ((model, settings, {"teacher": frozen, "distill": {}}), "distill is a dict, expected a D"),
    ):
        with pytest.raises(ValueError, match=f"KroneckerTrainer: .*{message}"):
            KroneckerTrainer(given[0], given[1], train_dataset=rows(), **given[2])
    model.transformer.wte.weight.requires_grad_(False)  # the teacher freezes it anyway
    assert KroneckerTrainer(model, settings, train_dataset=rows(), teacher=part)
    evaluated = KroneckerTrainer(frozen, settings, eval_dataset=rows(), teacher=tiny("gpt2"))
    assert evaluated.evaluate()["eval_loss"] > 0
    assert KroneckerTrainer(tiny("gpt2"), None, teacher=tiny("gpt2"))


def test_a_step_is_divided_by_its_items_on_each_of_several_gpus(tmp_path):
    trainer = KroneckerTrainer(
        tiny("gpt2"), arguments(tmp_path), train_dataset=rows(), teacher=tiny("gpt2")
    )
    for items, wanted in ((torch.full((2, 1), 20), 0.5), (20, 0.5), (0, 10.0), (0.5, 20.0)):
        share = trainer.share_of_step(torch.tensor(1.0), 10, items)
        torch.testing.assert_close(share, torch.full_like(share, wanted))


def test_a_step_without_labels_changes_nothing(tmp_path):
    model = tiny("gpt2", **SMALL)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    unlabeled = [row | {"labels": torch.full_like(row["labels"], -100)} for row in rows()]
    settings = arguments(tmp_path, max_steps=1)
    KroneckerTrainer(model, settings, train_dataset=unlabeled, teacher=tiny("gpt2")).train()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


@pytest.mark.parametrize("distill", [DistillConfig(labels=0.5), DistillConfig(hidden=1.0)])
def test_a_model_of_images_learns(distill, tmp_path):
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)
    teacher, model = (
        transformers.ViTForImageClassification(config),
        transformers.ViTForImageClassification(config),
    )
    rows = [{"pixel_values": torch.randn(3, 8, 8), "labels": torch.tensor(k % 3)} for k in range(8)]
    trainer = KroneckerTrainer(
        model,
        arguments(tmp_path, learning_rate=1e-3, optim="adamw_torch"),
        teacher=teacher,
        distill=distill,
        train_dataset=rows,
    )
    batch = {k: torch.stack([row[k] for row in rows]) for k in rows[0]}
    before = trainer.compute_loss(model.train(), batch).item()
    trainer.train()
    assert trainer.compute_loss(model.train(), batch).item() < before


def test_training_back_brings_the_loss_down(tmp_path):
    model, teacher = student(init="prune"), tiny("gpt2", **SMALL)
    trainer = train(
        model, tmp_path, teacher=teacher, max_steps=60, optim="adamw_torch", learning_rate=1e-2
    )
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.5 * losses[0]
    last = [row for row in trainer.state.log_history if "loss" in row][-1]
    assert {
        "norm/factors",
        "norm/scales",
        "norm/pretrained",
        "gradient/factors",
        "gradient/pretrained",
    } <= set(last)
    factors = [p for p in model.parameters() if id(p) in factor_parameters(model)]
    scales = [m.scales for m in model.modules() if isinstance(m, KroneckerLinear)]
    norm = (
        sum(float(p.detach().square().sum()) for p in factors if all(p is not s for s in scales))
        ** 0.5
    )
    assert last["norm/factors"] == pytest.approx(norm, rel=1e-4)


class Look(TrainerCallback):
    """What ``see(model)`` says after every step."""

    def __init__(self, see):
        self.see, self.seen = see, []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(self.see(kwargs["model"]))


@pytest.mark.parametrize(
    ("steps", "repeat", "moved"),
    [(3, False, [False, False, False, True]), (1, True, [False, True, False, True])],
)
def test_freezing_and_releasing(steps, repeat, moved, tmp_path):
    model = student()
    look = Look(lambda m: m.transformer.wte.weight.detach().clone())
    weights = [model.transformer.wte.weight.detach().clone()]
    train(model, tmp_path, callbacks=[FreezePretrained(steps, repeat=repeat), look], max_steps=4)
    weights += look.seen
    assert [not torch.equal(a, b) for a, b in pairwise(weights)] == moved
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match=r"FreezePretrained:.*steps.*0"):
        FreezePretrained(0)


def test_resumed_is_as_if_never_stopped(tmp_path):
    teacher = tiny("gpt2", **SMALL)
    common = {
        "teacher": teacher,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
    }
    whole = student()
    logs = [logs_of(train(whole, tmp_path / "whole", **common))]
    first = student()
    train(first, tmp_path / "parts", save_strategy="steps", save_steps=3, **common)
    again = student()
    checkpoint = str(tmp_path / "parts" / "checkpoint-3")
    logs.append(logs_of(train(again, tmp_path / "parts", resume=checkpoint, **common)))
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert logs[0] == logs[1]


PARTS = [
    DistillConfig(logits=1.0, labels=0.5),
    DistillConfig(logits=0.0, hidden=1.0),
]


@pytest.mark.parametrize("kind", ["labeled", "whole rows", "padded rows"])
@pytest.mark.parametrize("config", PARTS)
def test_accumulation_gives_the_same_step(config, kind, tmp_path):
    data = rows()
    if kind != "labeled":
        config = replace(config, labels=0.0)
        data = [{"input_ids": row["input_ids"]} for row in data]
    if kind == "padded rows":
        for number, row in enumerate(data):
            row["attention_mask"] = (torch.arange(10) <= number % 10).long()
    teacher, models = tiny("gpt2", **SMALL), []
    for batch, steps in ((8, 1), (2, 4)):
        models.append(student())
        options = arguments(
            tmp_path,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            max_steps=3,
        )
        set_seed(0)
        KroneckerTrainer(
            models[-1], options, teacher=teacher, distill=config, train_dataset=data
        ).train()
    same(*models, rtol=1e-4, atol=1e-6)
    assert not torch.equal(
        models[0].transformer.h[0].mlp.c_fc.a, student().transformer.h[0].mlp.c_fc.a
    )


def test_evaluation_is_the_models_own_loss(tmp_path):
    model, teacher = student(), tiny("gpt2", **SMALL)
    ours = KroneckerTrainer(
        model, arguments(tmp_path), teacher=teacher, eval_dataset=rows()
    ).evaluate()
    stock = Trainer(model, arguments(tmp_path), eval_dataset=rows()).evaluate()
    assert ours["eval_loss"] == pytest.approx(stock["eval_loss"], rel=1e-6)


def test_what_was_frozen_stays_frozen(tmp_path):
    model = student()
    model.transformer.wpe.weight.requires_grad_(False)
    train(model, tmp_path, callbacks=[FreezePretrained(2)], max_steps=3)
    assert not model.transformer.wpe.weight.requires_grad
    assert model.transformer.wte.weight.requires_grad


def test_checkpoints_of_tied_factors_are_compressed_models(tmp_path):
    def tied():
        model = tiny("gpt2", **SMALL)
        convert_(model, {"*.wte": LowRankConfig(keep=0.5, init="svd")}, progress=False)
        return model

    common = {
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    whole, again = tied(), tied()
    train(whole, tmp_path / "run", **common)
    saved = from_pretrained(tmp_path / "run" / "checkpoint-6")
    assert saved.lm_head.a is saved.transformer.wte.a
    train(again, tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-3"), **common)
    assert again.lm_head.a is again.transformer.wte.a
    for a, b, c in zip(whole.parameters(), again.parameters(), saved.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


RANK = """
from kronecker import FreezePretrained
from tests.kronecker.test_training import PARTS, SMALL, student, tiny, train
for part in map(int, cases):
    model = student()
    trainer = train(model, out, teacher=tiny("gpt2", **SMALL), distill=PARTS[part],
                    per_device_train_batch_size=2, ddp_backend="gloo", callbacks=[FreezePretrained(2)])
    if trainer.args.process_index == 0:
        torch.save(model.state_dict(), f"{out}/{part}.pt")
"""


def test_two_processes_give_what_one_gives(tmp_path):
    in_two_processes(RANK, tmp_path, *range(len(PARTS)))
    for part, distill in enumerate(PARTS):
        single, double = student(), student()
        teacher = tiny("gpt2", **SMALL)
        train(
            single,
            tmp_path / "one",
            callbacks=[FreezePretrained(2)],
            teacher=teacher,
            distill=distill,
        )
        double.load_state_dict(torch.load(tmp_path / f"{part}.pt", weights_only=True))
        same(single, double, rtol=1e-4, atol=1e-6)
        assert not torch.equal(
            single.transformer.h[0].mlp.c_fc.a, student().transformer.h[0].mlp.c_fc.a
        )


def loss_of(model, teacher, out):
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    return KroneckerTrainer(model, arguments(out), teacher=teacher).compute_loss(
        model.train(), batch
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda out: KroneckerTrainer(tiny("gpt2"), arguments(out)),
            r"KroneckerTrainer:.*compressed",
        ),
        (
            lambda out: KroneckerTrainer(student(), arguments(out), distill=DistillConfig()),
            r"KroneckerTrainer:.*distill",
        ),
        (lambda out: DistillConfig(logits=0.0), r"DistillConfig:.*above 0"),
        (lambda out: DistillConfig(labels=-1.0), r"DistillConfig: labels is -1"),
        (lambda out: DistillConfig(temperature=0.0), "temperature is 0.0"),
        (lambda out: DistillConfig(logits=float("nan")), r"DistillConfig: logits is nan"),
        (
            lambda out: loss_of(student("bert"), tiny("bert"), out),
            r"KroneckerTrainer:.*DistillConfig\(logits=0, labels=0\)",
        ),
    ],
)
def test_bad_input_is_refused(call, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_learn_in_half_precision_are_warned_of(dtype, tmp_path):
    with pytest.warns(
        UserWarning, match=f"trainable weights have dtype {dtype}, in which small updates are lost"
    ):
        KroneckerTrainer(tiny("gpt2").to(dtype), arguments(tmp_path), teacher=tiny("gpt2"))


def test_what_a_pruned_model_cannot_learn_from_is_refused(tmp_path):
    teacher, model = tiny("gpt2"), tiny("gpt2")
    calibration = [torch.randint(3, 96, (2, 8))]
    prune_(model, PruneConfig(keep=0.5, method="blocks"), calibration=calibration, progress=False)
    distill = DistillConfig(hidden=1.0)
    with pytest.raises(ValueError, match=r"KroneckerTrainer:.*\d.*\d.*DistillConfig"):
        KroneckerTrainer(model, arguments(tmp_path), teacher=teacher, distill=distill)
    with pytest.raises(ValueError, match=r"KroneckerTrainer:.*teacher"):
        KroneckerTrainer(model, arguments(tmp_path), teacher=model)
    rows = [{"input_ids": row, "labels": row} for row in calibration[0]]
    freeze = [FreezePretrained(1)]
    trainer = KroneckerTrainer(
        model, arguments(tmp_path), teacher=teacher, train_dataset=rows, callbacks=freeze
    )
    with pytest.raises(ValueError, match=r"FreezePretrained: .* got GPT2LMHeadModel"):
        trainer.train()


def test_what_an_interrupted_run_froze_learns_in_the_next(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                raise KeyboardInterrupt

    model = student()
    rest = model.transformer.wpe.weight
    before = rest.clone()
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path / "a", [FreezePretrained(2), Stop()])
    assert not rest.requires_grad
    train(model, tmp_path / "b", [FreezePretrained(2)], max_steps=4)
    assert rest.requires_grad
    assert not torch.equal(rest, before)


def test_hidden_states_of_a_classifier_count_rows_where_labels_do(tmp_path):
    losses = []
    for labeled in (True, False):
        torch.manual_seed(0)
        teacher = transformers.BertForSequenceClassification(tiny("bert").config)
        model = transformers.BertForSequenceClassification(tiny("bert").config)
        data = []
        for number, ids in enumerate(torch.randint(3, 90, (8, 12)).tolist()):
            row = {"input_ids": ids, "attention_mask": [1] * 12}
            data.append(row | ({"labels": number % 2} if labeled else {}))
        trainer = KroneckerTrainer(
            model,
            arguments(tmp_path / str(labeled), max_steps=1, logging_steps=1),
            train_dataset=data,
            teacher=teacher,
            distill=DistillConfig(logits=0, hidden=1.0),
        )
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_gradients_of_every_step_are_known_where_epochs_are_logged(tmp_path):
    trainer = train(student(), tmp_path, max_steps=-1, num_train_epochs=2, logging_strategy="epoch")
    logged = [log["gradient/factors"] for log in trainer.state.log_history if "loss" in log]
    assert len(set(logged)) == 2


def test_an_encoder_has_no_perplexity_and_huge_losses_have_an_infinite_one():
    ids = torch.tensor([[3, 4, 5]])
    config = tiny("bert").config
    figures = compare({"encoder": transformers.BertModel(config).eval()}, [ids], runs=1)
    with pytest.raises(ValueError, match="compare: encoder has no perplexity"):
        _ = figures.models[0].perplexity
    model = tiny("gpt2")
    with torch.no_grad():
        model.transformer.ln_f.weight *= 1e5
    assert perplexity(model, [ids]) == float("inf")
