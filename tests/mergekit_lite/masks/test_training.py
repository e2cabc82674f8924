"""Batches, the loss of a batch, cached teachers, and the trainer: alone, resumed, checkpointed and
on two processes."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import TrainingArguments

from mergekit_lite.masks import (
    KLConfig,
    MaskCollator,
    MaskConfig,
    MaskTrainer,
    Merger,
    TaskMixture,
    cache_teachers,
    masked_kl,
)
from tests.support.logs import logs_of
from tests.support.models import tiny
from tests.support.ranks import in_two_processes


def merger_of(kind="gpt2", count=2, **config):
    changes = {} if kind != "gpt2" else {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return Merger([tiny(kind, seed, **changes) for seed in range(count)], MaskConfig(**config))


def examples(count, seed, prompt=2):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(4, 12, (1,), generator=generator))
        ids = torch.randint(3, 90, (length,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return made


MIXTURE = TaskMixture([examples(9, 1), examples(7, 2)])
BATCH = MaskCollator(pad_token_id=0)([MIXTURE[i] for i in (0, 8, 9, 12, 15)])


def dense_loss(merger, batch, temperature=1.0):
    """What `distill` computes by task, with whole logits, position by position."""
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
    student, total, count = merger.eval()(**inputs).logits, 0.0, 0
    for row, task in enumerate(batch["task"].tolist()):
        with torch.no_grad(), merger.component(task):
            teacher = merger(**inputs).logits[row]
        for t in range(batch["labels"].shape[1] - 1):
            if batch["labels"][row, t + 1] != -100:  # the label at t + 1 belongs to the logits at t
                log_p = F.log_softmax(teacher[t] / temperature, -1)
                log_q = F.log_softmax(student[row, t] / temperature, -1)
                total = total + temperature**2 * (log_p.exp() * (log_p - log_q)).sum()
                count += 1
    return total / count


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "gemma3", "mixtral"])
def test_the_loss_of_a_batch_is_the_dense_one(kind, recwarn):
    merger = merger_of(kind, initial="random")
    found = merger.distill(KLConfig(temperature=2.0), **BATCH)
    capped = kind == "gemma2"  # a soft cap on the logits: found out, and said
    assert any("more than apply the head" in str(w.message) for w in recwarn) == capped
    assert (merger.output_head() is None) == capped
    expected = dense_loss(merger, BATCH, 2.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    masks = list(merger.masks().values())
    for a, b in zip(
        torch.autograd.grad(found, masks), torch.autograd.grad(expected, masks), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_only_the_teachers_with_a_share_run_and_only_on_their_rows():
    merger = merger_of(count=3)
    merger.output_head()  # looks once at what the head does
    seen = []
    for k in range(3):
        layer = merger.model.transformer.h[0].mlp.c_fc.components[k]
        layer.register_forward_hook(
            lambda module, given, out, k=k: seen.append((k, given[0].shape[0]))
        )
    merger.distill(KLConfig(), **BATCH)
    assert seen == [(0, 2), (1, 3)]
    seen.clear()
    merger.distill(KLConfig(coefficients="fixed", shares=(0.0, 1.0, 3.0)), **BATCH)
    assert seen == [(1, 5), (2, 5)]
    seen.clear()
    merger.distill(KLConfig(coefficients="confidence"), **BATCH)
    assert [k for k, _ in seen] == [0, 1, 2]


def test_teachers_do_not_drop_out_and_the_student_does():
    dropping = Merger(
        [tiny("gpt2", seed, resid_pdrop=0.5) for seed in range(2)],
        MaskConfig(initial="component:0"),
    )
    batch = {k: v[:2] for k, v in BATCH.items()}  # both of task 0, which the student is
    assert dropping.eval().distill(KLConfig(), **batch) < 1e-6
    assert dropping.train().distill(KLConfig(), **batch) > 1e-4
    assert dropping.training


def test_padding_and_prompts_never_count():
    merger = merger_of(initial="random")
    loss = merger.distill(KLConfig(), **BATCH)
    wider = MaskCollator(pad_token_id=7)(
        [*[MIXTURE[i] for i in (0, 8, 9, 12, 15)], {"input_ids": [1] * 20, "task": 0}]
    )
    wider = {k: v[:5] for k, v in wider.items()}
    torch.testing.assert_close(merger.distill(KLConfig(), **wider), loss)
    plain = {k: v for k, v in BATCH.items() if k != "labels"}
    every = merger.distill(KLConfig(), **plain)  # without labels: every token but padding
    labels = BATCH["input_ids"].masked_fill(BATCH["attention_mask"] == 0, -100)
    torch.testing.assert_close(every, merger.distill(KLConfig(), labels=labels, **plain))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
@pytest.mark.filterwarnings("ignore:.*more than apply the head")
def test_packed_is_padded(kind):
    merger = merger_of(kind, initial="random")
    chosen = [MIXTURE[i] for i in (0, 9, 3, 12, 15)]
    padded, packed = (MaskCollator(pad_token_id=0, pack=p)(chosen) for p in (False, True))
    assert packed["input_ids"].shape[0] == 2
    masks = list(merger.masks().values())
    losses = [merger.distill(KLConfig(), **batch) for batch in (padded, packed)]
    torch.testing.assert_close(*losses)
    for a, b in zip(*(torch.autograd.grad(loss, masks) for loss in losses), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-7)


def test_a_classifier_learns_from_its_components():
    merger = merger_of("classifier", initial="random")
    features = [{"input_ids": [3, 4, 5 + i], "label": i % 3, "task": i % 2} for i in range(4)]
    batch = MaskCollator(pad_token_id=0)(features)
    loss = merger.distill(KLConfig(), **batch)
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
    student = F.log_softmax(merger.eval()(**inputs).logits, -1)
    teachers = []
    for k in range(2):
        with merger.component(k), torch.no_grad():
            teachers.append(F.log_softmax(merger(**inputs).logits, -1))
    target = torch.stack([teachers[t][i] for i, t in enumerate(batch["task"])])
    torch.testing.assert_close(
        loss, (target.exp() * (target - student)).sum(-1).mean(), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("coefficients", ["task", "evidence", "confidence"])
@pytest.mark.parametrize("normalizer", [None, torch.tensor(0), torch.tensor(7)])
def test_a_batch_without_supervised_positions_warns_and_gives_zero(normalizer, coefficients):
    merger = merger_of()
    batch = BATCH | {"labels": torch.full_like(BATCH["labels"], -100)}
    with pytest.warns(UserWarning, match=r"Merger\.distill:.*supervised"):
        loss = merger.distill(
            KLConfig(l2=0.1, coefficients=coefficients), normalizer=normalizer, **batch
        )
    loss.backward()
    assert loss == 0
    assert all(
        torch.isfinite(mask.grad).all() for mask in merger.masks().values() if mask.grad is not None
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": torch.tensor([0, 1, 2, 0, 1])}, r"Merger\.distill:.*tasks.*0.*2.*0.*1"),
        ({"task": None}, r"Merger\.distill:.*example"),
        ({"teacher_hidden": torch.zeros(3, 1, 16)}, r"Merger\.distill:.*other examples"),
        (
            {"task": torch.tensor([0.0, 1, 1, 0, 1])},
            r"Merger\.distill:.*\[5\].*torch.float32.*\[5\]",
        ),
        ({"task": torch.tensor([0, 1])}, r"Merger\.distill:.*\[2\].*torch.int64"),
        (
            {"labels": torch.zeros(5, 2).long()},
            r"Merger\.distill:.*\[5.*9\].*\[5.*2\].*torch.int64",
        ),
        ({"labels": torch.zeros(5, 9)}, r"Merger\.distill:.*torch.float32"),
        (
            {"input_ids": torch.zeros(0, 4).long()},
            r"Merger\.distill:.*input_ids.*'input_ids'.*\[0.*4\]",
        ),
        ({"input_ids": None, "attention_mask": None}, r"Merger\.distill:.*input_ids"),
    ],
)
def test_bad_batches_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        merger_of().distill(KLConfig(), **BATCH | change)


def test_labels_outside_the_vocabulary_are_refused():
    batch = BATCH | {"labels": BATCH["labels"].masked_fill(BATCH["labels"] > 0, 10_000)}
    for name, kl in {
        "masked_kl": KLConfig(cross_entropy=1.0),
        "Merger.distill": KLConfig(coefficients="evidence"),
    }.items():
        with pytest.raises(ValueError, match=rf"{name}:.*10000.*10000.*0.*95"):
            merger_of().distill(kl, **batch)


def test_features_that_a_tokenizer_padded_are_cut():
    collator = MaskCollator(pad_token_id=9)
    whole = {"input_ids": [3, 4, 5], "token_type_ids": [0, 1, 1], "task": 0}
    padded = {
        "input_ids": [0, 3, 4, 5, 0],
        "token_type_ids": [0, 0, 1, 1, 0],
        "attention_mask": [0, 1, 1, 1, 0],
        "task": 0,
    }
    a, b = collator([whole]), collator([padded])
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert a["token_type_ids"].tolist() == [[0, 1, 1]]


def test_nothing_predicts_the_first_token_of_a_packed_example():
    """Not even the end of the example before it."""
    examples = [
        {"input_ids": [5, 6], "task": 0},
        {"input_ids": [7, 8, 9], "task": 0},
        {"input_ids": [4], "task": 1},
    ]
    batch = MaskCollator(pad_token_id=0, pack=True)(examples)
    assert batch["labels"].tolist() == [[-100, 6, -100, 8, 9], [-100, -100, -100, -100, -100]]
    with_labels = [e | {"labels": e["input_ids"]} for e in examples]
    assert MaskCollator(pad_token_id=0, pack=True)(with_labels)["labels"].equal(batch["labels"])


def test_packed_rows_are_refused_where_attention_would_leak():
    batch = MaskCollator(pad_token_id=0, pack=True)([MIXTURE[i] for i in (0, 1, 9)])
    with pytest.raises(ValueError, match=r"Merger\.distill:.*examples"):
        merger_of("classifier").distill(KLConfig(), **batch)
    flash = merger_of()
    flash.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"Merger\.distill:.*attention"):
        flash.distill(KLConfig(), **batch)


def test_modes_of_modules_survive_the_teachers():
    merger = merger_of().train()
    merger.model.transformer.drop.eval()  # a user's choice
    merger.distill(KLConfig(), **BATCH)
    assert merger.training
    assert not merger.model.transformer.drop.training


def test_bad_examples_and_shares_are_refused(tmp_path):
    collator = MaskCollator(pad_token_id=0)
    for wrong in (True, 0.0, -1, "0", [0]):
        with pytest.raises(ValueError, match=r"MaskCollator:.*example"):
            collator([{"input_ids": [1, 2], "task": wrong}])
    with pytest.raises(ValueError, match=r"MaskCollator:.*1.*2.*examples"):
        collator([{"input_ids": [1, 2], "task": 0}, {"input_ids": [1, 2]}])
    with pytest.raises(ValueError, match=r"MaskCollator:.*example"):
        collator([])
    with pytest.raises(ValueError, match=r"MaskTrainer:.*train_dataset"):
        MaskTrainer(
            merger_of(),
            TrainingArguments(str(tmp_path), use_cpu=True),
            train_dataset=[],
            data_collator=collator,
        )
    with pytest.raises(ValueError, match=r"MaskCollator:.*2.*tokens.*3"):
        collator([{"input_ids": [1, 2], "labels": [1, 2, 3], "task": 0}])
    with pytest.raises(ValueError, match="got 3"):
        merger_of().distill(KLConfig(coefficients="fixed", shares=(1.0, 1.0, 1.0)), **BATCH)
    with pytest.raises(ValueError, match=r"MaskTrainer:.*GPT2LMHeadModel"):
        MaskTrainer(tiny("gpt2"), None)
    with pytest.raises(ValueError, match=r"MaskTrainer:.*MaskCollator"):
        MaskTrainer(
            merger_of(), TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=MIXTURE
        )
    with pytest.raises(ValueError, match=r"MaskCollator:.*pad_token_id"):
        MaskCollator(pad_token_id=None)
    with pytest.raises(ValueError, match=r"TaskMixture:.*order"):
        TaskMixture({"a": [], "b": []})
    one = TaskMixture([examples(2, 1)])
    with pytest.warns(UserWarning, match="MaskTrainer:.*component.*1"):
        MaskTrainer(
            merger_of(),
            TrainingArguments(str(tmp_path), use_cpu=True),
            train_dataset=one,
            data_collator=collator,
        )
    three = TaskMixture([examples(2, 1)] * 3)
    with pytest.raises(ValueError, match=r"MaskTrainer:.*task.*\(2\).*3"):
        MaskTrainer(
            merger_of(),
            TrainingArguments(str(tmp_path), use_cpu=True),
            train_dataset=three,
            data_collator=collator,
        )


@pytest.mark.parametrize("coefficients", ["task", "confidence"])
@pytest.mark.parametrize("pack", [False, True])
def test_cached_teachers_give_the_very_loss(coefficients, pack, tmp_path, monkeypatch):
    monkeypatch.setattr("mergekit_lite.masks.data.teachers._SHARD", 6)
    merger, kl = merger_of(initial="random"), KLConfig(coefficients=coefficients)
    collator = MaskCollator(pad_token_id=0, pack=pack, max_length=9)
    cached = cache_teachers(
        merger, MIXTURE, collator, tmp_path / "c", kl=kl, batch_size=4, progress=False
    )
    assert len(cached) == len(MIXTURE)
    chosen = (0, 9, 3, 12, 15)
    live, stored = collator([MIXTURE[i] for i in chosen]), collator([cached[i] for i in chosen])
    expected = merger.distill(kl, **live)
    hooks = [
        part.register_forward_hook(lambda *_: pytest.fail("a teacher ran"))
        for part in merger.model.transformer.h[0].mlp.c_fc.components
    ]
    torch.testing.assert_close(merger.distill(kl, **stored), expected, rtol=1e-5, atol=1e-8)
    for hook in hooks:
        hook.remove()
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "c").iterdir()}
    (tmp_path / "c" / "hidden-00001.safetensors").unlink()
    cache_teachers(merger, MIXTURE, collator, tmp_path / "c", kl=kl, batch_size=4, progress=False)
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "c").iterdir()}
    # the rest was found
    assert [p.name for p in kept if kept[p] != times.get(p)] == ["hidden-00001.safetensors"]
    if coefficients == "task":  # it holds one teacher a position: of no use where all count
        with pytest.raises(ValueError, match=r"Merger\.distill:.*settings"):
            merger.distill(KLConfig(coefficients="fixed", shares=(0.5, 0.5)), **stored)
    if coefficients == "task":
        few = TaskMixture([[], [], examples(1, 1)])
        with pytest.raises(ValueError, match=r"cache_teachers:.*task.*2.*0.*1"):
            cache_teachers(
                merger, few, collator, tmp_path / "d", kl=kl, batch_size=4, progress=False
            )
        with pytest.raises(ValueError, match=r"cache_teachers:.*examples"):
            cache_teachers(merger, examples(2, 1), collator, tmp_path / "e", kl=kl, progress=False)
    with pytest.raises(ValueError, match=r"cache_teachers:.*components"):
        cache_teachers(merger_of(count=3), MIXTURE, collator, tmp_path / "c", kl=kl, progress=False)


@pytest.mark.parametrize("pack", [False, True])
def test_by_evidence_an_example_follows_whoever_finds_it_probable(pack):
    """Against sums of log probabilities made one example at a time; labels of tasks are not looked
    at."""
    merger = merger_of(initial="random").eval()
    chosen = [MIXTURE[i] for i in (0, 8, 9, 12)]
    shares = []
    for example in chosen:
        ids, labels = torch.tensor([example["input_ids"]]), torch.tensor(example["labels"])
        places = [t for t in range(len(labels) - 1) if labels[t + 1] != -100]
        logs = []
        for k in range(2):
            with torch.no_grad(), merger.component(k):
                log_p = merger(input_ids=ids).logits[0].double().log_softmax(-1)
            logs.append(torch.stack([log_p[t, labels[t + 1]] for t in places]))
        sums = torch.stack(logs, 1)
        shares.append(sums.sum(0).softmax(0).expand(len(places), -1))
    bare = [{k: v for k, v in e.items() if k != "task"} for e in chosen]
    batch = MaskCollator(pad_token_id=0, pack=pack)(bare)
    found = merger.distill(KLConfig(coefficients="evidence"), **batch)
    plain = MaskCollator(pad_token_id=0)(bare)
    assert "task" not in plain
    inputs = {k: v for k, v in plain.items() if k != "labels"}
    where = torch.zeros_like(plain["labels"], dtype=torch.bool)
    where[:, :-1] = plain["labels"][:, 1:] != -100
    with torch.no_grad():
        states = []
        for k in (0, 1, None):
            with merger.component(k) if k is not None else contextlib.nullcontext():
                states.append(merger(**inputs).logits[where])
    expected = masked_kl(states[2], states[:2], coefficients=torch.cat(shares))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_training_asks_for_no_labels_of_tasks(tmp_path):
    plain = [{"input_ids": MIXTURE[i]["input_ids"]} for i in range(len(MIXTURE))]
    data = TaskMixture([plain[:4], plain[4:8], plain[8:]])  # more data sets than components
    kl, collator = KLConfig(coefficients="evidence"), MaskCollator(pad_token_id=0)
    for dataset in (plain, data):
        merger = merger_of()
        before = {n: m.detach().clone() for n, m in merger.masks().items()}
        options = arguments(tmp_path, max_steps=2, save_strategy="no")
        MaskTrainer(merger, options, kl=kl, train_dataset=dataset, data_collator=collator).train()
        assert any(not torch.equal(m, before[n]) for n, m in merger.masks().items())


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_a_task_may_be_any_whole_number(kind):
    batch = MaskCollator(pad_token_id=0)(
        [{"input_ids": [1, 2], "task": kind(1)}, {"input_ids": [3], "task": kind(0)}]
    )
    assert batch["task"].tolist() == [1, 0]


def arguments(folder, **changes):
    options = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "optim": "sgd",  # which shows a loss of the wrong scale; AdamW would hide it
        "max_grad_norm": 0.0,
        "seed": 0,
    }
    return TrainingArguments(**options | changes)


def train(folder, merger=None, resume=None, dataset=MIXTURE, **changes):
    merger = merger or merger_of()
    collator = MaskCollator(pad_token_id=0)
    trainer = MaskTrainer(
        merger,
        arguments(folder, **changes),
        train_dataset=dataset,
        data_collator=collator,
        kl=KLConfig(l2=0.01),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def values(merger):
    return {n: m.detach().clone() for n, m in merger.masks().items()}


def same(a, b, **tolerance):
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=name, **tolerance)


def test_training_lowers_the_loss_and_changes_masks_alone(tmp_path):
    merger = merger_of()
    before = merger.hashes()
    trainer = train(tmp_path, merger, max_steps=40, learning_rate=3e-2, optim="adamw_torch")
    losses = [h["loss"] for h in trainer.state.log_history if "loss" in h]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    merger._hashes = None
    assert merger.hashes() == before


def test_resumed_is_never_stopped(tmp_path):
    whole = train(tmp_path / "a", save_strategy="steps", save_steps=3)
    files = sorted(p.name for p in (tmp_path / "a" / "checkpoint-3").iterdir())
    assert "masks.safetensors" in files
    assert "model.safetensors" not in files
    again = train(tmp_path / "a", resume=str(tmp_path / "a" / "checkpoint-3"))
    same(values(whole.merger), values(again.merger), rtol=0, atol=0)
    assert logs_of(whole) == logs_of(again)


def test_accumulated_and_checkpointed_steps_are_plain_steps(tmp_path):
    plain = values(train(tmp_path / "a").merger)
    accumulated = train(
        tmp_path / "b", per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    same(plain, values(accumulated.merger), rtol=1e-3, atol=1e-4)
    # its name since transformers 5.2x
    new = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    name = "activation_checkpointing" if new else "gradient_checkpointing"
    checkpointed = train(tmp_path / "c", **{name: True})
    assert checkpointed.merger.model.is_gradient_checkpointing
    same(plain, values(checkpointed.merger), rtol=1e-4, atol=1e-5)


def test_training_under_autocast(tmp_path):
    plain = values(train(tmp_path / "a", merger_of("llama")).merger)
    half = train(tmp_path / "b", merger_of("llama"), bf16=True).merger
    assert all(mask.dtype == torch.float32 for mask in half.masks().values())
    same(plain, values(half), rtol=0.05, atol=0.02)
    start = values(merger_of("llama"))
    moved = sum((plain[n] - start[n]).square().sum() for n in start)
    apart = sum((plain[n] - m).square().sum() for n, m in values(half).items())
    assert apart < moved / 10


def test_evaluation_is_task_by_task_and_the_best_masks_come_back(tmp_path):
    merger = merger_of()
    sets = {"first": TaskMixture([examples(4, 3)]), "second": TaskMixture([[], examples(4, 4)])}
    trainer = MaskTrainer(
        merger,
        arguments(
            tmp_path,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_second_loss",
            greater_is_better=False,
        ),
        train_dataset=MIXTURE,
        eval_dataset=sets,
        data_collator=MaskCollator(pad_token_id=0),
    )
    trainer.train()
    found = trainer.evaluate()
    assert {"eval_first_loss", "eval_second_loss"} <= set(found)
    history = [h["eval_second_loss"] for h in trainer.state.log_history if "eval_second_loss" in h]
    assert found["eval_second_loss"] == pytest.approx(min(history), rel=1e-5)


RANK = """
from mergekit_lite.masks import *
from tests.mergekit_lite.masks.test_training import MIXTURE, arguments, examples, merger_of
dist.init_process_group("gloo")
for mode in cases:
    merger = merger_of("llama")
    if mode == "sharded":
        blocks = shard_frozen_(merger, torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),)))
        assert len(blocks) == 4, blocks
        held = merger.model.model.layers[0].mlp.up_proj.components[0].weight
        assert held.to_local().numel() * 2 == held.numel()
    options = arguments(out, per_device_train_batch_size=2, ddp_backend="gloo")
    collator = MaskCollator(pad_token_id=0)
    trainer = MaskTrainer(merger, options, train_dataset=MIXTURE, data_collator=collator, kl=KLConfig())
    trainer.train()
    if trainer.args.process_index == 0:
        merger.save_masks(f"{out}/{mode}.safetensors")
"""


def test_two_processes_give_the_masks_of_one(tmp_path):
    modes = ("ddp", "sharded")
    in_two_processes(RANK, tmp_path, *modes)
    single = merger_of("llama")
    options = arguments(tmp_path / "one", per_device_train_batch_size=4)
    MaskTrainer(
        single, options, train_dataset=MIXTURE, data_collator=MaskCollator(pad_token_id=0)
    ).train()
    for mode in modes:
        double = merger_of("llama")
        double.load_masks(tmp_path / f"{mode}.safetensors")
        same(values(single), values(double), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_no_blended_weight_outlives_the_forward(kind, monkeypatch):
    from mergekit_lite.masks import layers
    from mergekit_lite.masks._eager import blend, linear

    merger, made = merger_of(kind, initial="random"), []
    monkeypatch.setattr(layers, "_WORTH_REPEATING", 1)
    real = blend.blend_any
    for module in (blend, linear):

        def recorded(*arguments):
            blended = real(*arguments)
            if len(blended) != BATCH["input_ids"].numel():  # rows of an embedding are activations
                made.append(weakref.ref(blended.untyped_storage()))
            return blended

        monkeypatch.setattr(module, "blend_any", recorded)
    loss = merger(input_ids=BATCH["input_ids"]).logits.sum()
    gc.collect()
    assert len(made) > len(merger.masks()) // 2
    assert not [ref for ref in made if ref() is not None]
    loss.backward()
