"""Tuning under TRL's trainer: what a log says, exact losses, packing, resuming, LoRA+, and peft's
own forward."""

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from heads.lora import answer_loss, prepare_lora, tuning_report
from heads.lora.data import check_packed_examples
from tests.support.models import save_tokenizer, tiny

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = ["<unk>", "<end>", "<pad>", *"abcdefghijklmnopqrstuvwxyz", "<user>", "<bot>"]
ROWS = [
    {"prompt": f"{a} {b} {a} ", "completion": " ".join([b, a, b][: 1 + i % 3])}
    for i, (a, b) in enumerate(zip("abcdefghijkl", "lkjihgfedcba", strict=True))
]


def trainer_of(folder, rows, **changes):
    """TRL's trainer over rows, of a tiny model whose padding is its end token, as with GPT-2."""
    save_tokenizer(folder, WORDS)
    tokenizer = AutoTokenizer.from_pretrained(folder, eos_token="<end>", pad_token="<end>")
    model = changes.pop("model", None) or tiny("llama")
    options = {
        "max_length": 16,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    arguments = SFTConfig(str(folder / "out"), **options | changes)
    return SFTTrainer(
        model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )


def trained(folder, *, accelerate=True, resume=None, ratio=None, **changes):
    """A tiny model after a few steps, under a seed."""
    torch.manual_seed(0)
    dropout = changes.pop("dropout", 0)
    config = LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout
    )
    model = prepare_lora(tiny("llama"), config, accelerate=accelerate)
    options = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "seed": 3,
    }
    trainer = trainer_of(folder, ROWS, model=model, **options | changes)
    if ratio is not None:
        trainer.optimizer = create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=ratio
        )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def state_of(trainer):
    return {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}, {"dropout": 0.2}],
    ids=str,
)
def test_a_run_is_what_it_is_with_pefts_own_forward(options, tmp_path):
    """Few tokens: dropout is torch's in both."""
    ours = losses_of(trained(tmp_path / "ours", **options))
    theirs = losses_of(trained(tmp_path / "theirs", accelerate=False, **options))
    assert len(ours) == 6
    assert ours[-1] < ours[0]
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_resumed_run_is_as_if_it_had_not_stopped(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3, "dropout": 0.1}
    whole = trained(tmp_path / "a", ratio=4.0, **saving)
    again = trained(
        tmp_path / "b", ratio=4.0, resume=str(tmp_path / "a" / "out" / "checkpoint-3"), **saving
    )
    assert again.state.global_step == 6
    for name, value in state_of(whole).items():
        assert torch.equal(state_of(again)[name], value), name


def test_lora_plus_gives_b_its_own_rate(tmp_path):
    trainer = trained(tmp_path, ratio=16.0, lr_scheduler_type="constant")
    names = {id(p): n for n, p in trainer.model.named_parameters()}
    rates = {
        ("B" if "lora_B" in names[id(p)] else "A"): g["lr"]
        for g in trainer.optimizer.param_groups
        for p in g["params"]
    }
    assert rates == {"A": 1e-2, "B": pytest.approx(0.16)}


def test_the_loss_is_of_tokens_whatever_the_batch(tmp_path):
    trainer = trained(tmp_path)
    total = count = 0.0
    for example in trainer.train_dataset:
        ids, labels = torch.tensor([example["input_ids"]]), torch.tensor(example["labels"][1:])
        logs = torch.log_softmax(trainer.model.eval()(input_ids=ids).logits[0, :-1].double(), -1)
        kept = labels != -100
        total -= float(logs[kept].gather(1, labels[kept, None]).sum().detach())
        count += int(kept.sum())
    for size in (1, 5, 12):
        loss, perplexity = answer_loss(
            trainer.model,
            trainer.train_dataset,
            trainer.data_collator,
            batch_size=size,
            progress=False,
        )
        assert loss == pytest.approx(total / count, rel=1e-5)
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-9)
    trainer.model.train()
    answer_loss(trainer.model, trainer.train_dataset, trainer.data_collator, progress=False)
    assert trainer.model.training
    bare = [{"input_ids": [3, 4], "labels": [-100, -100]}]
    with pytest.raises(ValueError, match=r"answer_loss:.*supervised"):
        answer_loss(trainer.model, bare, trainer.data_collator, progress=False)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "qwen3"])
def test_rows_that_trl_packs_are_as_if_alone(kind, tmp_path):
    model = tiny(kind).double()
    check_packed_examples(model)
    found = []
    for packing in (False, True):
        trainer = trainer_of(
            tmp_path / str(packing), ROWS, model=model, packing=packing, max_length=48
        )
        data = trainer.train_dataset
        batch = trainer.data_collator([data[i] for i in range(len(data))])
        assert batch["input_ids"].shape[0] == (1 if packing else 12)
        model.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        found.append(
            (loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        )
    torch.testing.assert_close(found[0][0], found[1][0])
    for name, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], value, msg=name)


def test_a_model_in_which_packed_examples_see_each_other_is_refused():
    class Forgetful(torch.nn.Module):
        """Ignores positions, as a recurrent model does."""

        def __init__(self):
            super().__init__()
            self.inner = tiny("llama")

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

        def forward(self, input_ids, position_ids, use_cache):
            return self.inner(input_ids=input_ids, use_cache=use_cache)

    with pytest.raises(ValueError, match=r"check_packed_examples:.*Forgetful"):
        check_packed_examples(Forgetful())
    with pytest.raises(
        ValueError, match=r"check_packed_examples:.*BertForSequenceClassification.*\[1.*3\].*16"
    ):
        check_packed_examples(tiny("classifier"))


def log_of(train, held=(), norms=None):
    """A trainer's log of losses from step 1 on, and of (step, loss) of held-out rows."""
    log = [{"step": i, "loss": float(loss)} for i, loss in enumerate(train, 1)]
    for entry, norm in zip(log, norms or (), strict=False):
        entry["grad_norm"] = norm
    return log + [{"step": step, "eval_loss": loss} for step, loss in held]


def test_training_logs_of_one_step_are_no_line_that_climbs():
    log = [{"step": 1, "eval_loss": 1.0}, {"step": 2, "eval_loss": 1.2}] + [
        {"step": 6, "loss": 1.0}
    ] * 3
    assert tuning_report(log).overfits_from == 1


def test_a_run_that_overfits_and_one_that_does_not():
    falling = [3 - i / 50 for i in range(100)]
    report = tuning_report(log_of(falling, [(0, 3.0), (25, 2.4), (50, 2.2), (75, 2.3), (100, 2.5)]))
    assert (report.overfits_from, report.diverges_from, report.breaks_at) == (50, None, None)
    assert report.largest_rise == pytest.approx(0.3)
    for held in (
        [(0, 3.0), (50, 2.2), (100, 2.1)],
        [(0, 3.0), (50, 2.2), (100, 2.205)],
        [(0, 3.0)],
        [],
    ):
        report = tuning_report(log_of(falling, held))
        assert report.overfits_from is report.diverges_from is None
    # no training loss was logged
    assert tuning_report(log_of([], [(0, 3.0), (50, 2.2), (100, 2.5)])).overfits_from == 50
    # few evaluations do not tell their noise, and .012 is little after a fall of .36
    few = [(0, 5.056), (1, 5.047), (2, 4.88), (3, 4.692), (4, 4.704)]
    assert tuning_report(log_of([], few)).overfits_from is None


def test_a_run_that_diverges():
    train = [3 - i / 50 for i in range(50)] + [2 + i / 5 for i in range(50)]
    report = tuning_report(log_of(train, [(0, 3.0), (50, 2.2), (100, 9.0)]))
    assert (report.overfits_from, report.diverges_from) == (None, 50)
    assert "the learning rate is too high" in str(report)
    start = tuning_report(log_of([3 + i / 10 for i in range(40)], [(0, 3.0), (20, 5.0), (40, 7.0)]))
    assert (start.overfits_from, start.diverges_from) == (None, 0)


def test_a_run_that_breaks():
    """As Trainer logs it: a loss that is not a number is written as 0."""
    log = log_of(
        [2.0] * 12 + [0.0] * 8, [(0, 2.0), (10, 1.9), (20, math.nan)], [1.0] * 12 + [math.nan] * 8
    )
    report = tuning_report(log)
    assert report.breaks_at == 13
    assert report.overfits_from is report.diverges_from is None
    assert "breaks at step 13" in str(report)
    assert tuning_report([{"step": 1, "eval_loss": math.nan}]).breaks_at == 1
    assert tuning_report(log_of([2.0, math.inf, 2.0])).breaks_at == 2
    # float16 finding its scale
    assert tuning_report(log_of([2.0] * 3, norms=[math.inf, 1.0, 1.0])).breaks_at is None


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"step": 1, "loss": "high"}, "loss 'high', expected a number"),
        ({"loss": 2.0}, "step None, expected a number"),
        ({"step": math.nan, "loss": 2.0}, "step nan, expected a finite number"),
        ({"step": 1, "loss": 2.0, "grad_norm": "big"}, "grad_norm 'big'"),
        ({"step": 1, "eval_loss": [1.0]}, r"eval_loss \[1.0\]"),
    ],
)
def test_text_in_a_log_is_refused(entry, words):
    with pytest.raises(ValueError, match=rf"tuning_report: .*{words}"):
        tuning_report([entry])


def test_several_held_out_sets_are_told_apart():
    log = [{"step": i, "eval_a_loss": 3 - i, "eval_b_loss": 3 + i} for i in range(3)]
    assert tuning_report(log, held_out="eval_b_loss").held_out == ((0, 3.0), (1, 4.0), (2, 5.0))
    with pytest.raises(
        ValueError, match=r"tuning_report:.*eval_loss.*held_out=.*eval_a_loss.*eval_b_loss"
    ):
        tuning_report(log)
    for wrong in ("log.json", {"loss": 1.0}, ["loss"]):
        with pytest.raises(
            ValueError, match=r"expected a list of dicts .trainer.state.log_history., got"
        ):
            tuning_report(wrong)


def test_spikes_are_told_with_step_and_norm_and_noise_is_not():
    false = 0
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        noisy = (
            1.5 + torch.exp(-torch.arange(400) / 80) + 0.1 * torch.randn(400, generator=generator)
        ).tolist()
        false += len(tuning_report(log_of(noisy)).spikes)
    assert false == 0
    for place, size in ((99, 4.0), (100, 6.0), (101, 5.0), (103, 5.5), (200, 2.6), (300, 9.0)):
        noisy[place] = size  # a single log of 2.6 is a hard batch
    spikes = tuning_report(log_of(noisy, norms=[float(i) for i in range(400)])).spikes
    assert [(s.step, s.loss, s.grad_norm) for s in spikes] == [(101, 6.0, 100.0), (301, 9.0, 300.0)]
    assert all(abs(s.usual - 1.7) < 0.3 for s in spikes)
    assert tuning_report(log_of([2.0] * 20 + [2.001] * 20)).spikes == ()  # no noise at all
    # too little is known yet
    assert tuning_report(log_of([2.0] * 2 + [9.0] + [2.0] * 9)).spikes == ()
    assert len(tuning_report(log_of([2.0] * 3 + [9.0] + [2.0] * 9)).spikes) == 1
    # two of three that are 8 and 10 deviations above: one spike, of which the higher is told
    (spike,) = tuning_report(log_of([2.0] * 20 + [2.16, 2.0, 2.2] + [2.0] * 10)).spikes
    assert (spike.step, spike.loss) == (23, 2.2)


STEPS = 600
CURVES = {  # the training loss's rise above a curve that settles, and the held-out loss by step
    "diverges": (
        lambda step: max(0.0, (step - 250) / 100),
        lambda step: 1.6 + max(0.0, (step - 250) / 100),
    ),
    "overfits": (lambda step: -step / 1000, lambda step: 1.6 + abs(step - 200) / 1000),
    "spikes": (
        lambda step: 2.5 * math.exp(-(((step - 320) / 10) ** 2)),
        lambda step: 1.6 + math.exp(-step / 60),
    ),
    "still improves": (lambda step: -step / 800, lambda step: 2.5 - step / 800),
    "no problem found": (lambda step: 0.0, lambda step: 1.6 + math.exp(-step / 40)),
}


def curve(rise, held_out, every, seed, noise=0.3):
    """A log of means over so many steps, as trainers write it."""
    generator = torch.Generator().manual_seed(seed)
    batch = (noise * torch.randn(STEPS, generator=generator)).tolist()
    losses = [1.5 + math.exp(-i / 40) + rise(i) + batch[i] for i in range(STEPS)]
    log = []
    for end in range(every, STEPS + 1, every):
        entry = {"step": end, "loss": sum(losses[end - every : end]) / every}
        log.append(entry | {"learning_rate": 1e-3, "grad_norm": 1.0})
    looks = 0.002 * torch.randn(13, generator=generator)
    return log + [
        {"step": s, "eval_loss": held_out(s) + float(looks[s // 50])} for s in range(0, 601, 50)
    ]


@pytest.mark.parametrize("every", [1, 10, 50])
@pytest.mark.parametrize("kind", CURVES)
def test_every_kind_of_run_gets_its_verdict(kind, every):
    for seed in range(20):
        report = tuning_report(curve(*CURVES[kind], every, seed))
        assert report.verdict == kind, (seed, str(report))
        assert f"verdict: {kind}" in str(report)
        if kind == "spikes":
            (spike,) = report.spikes
            assert abs(spike.step - 320) <= max(20, every)
            assert (spike.learning_rate, spike.grad_norm) == (1e-3, 1.0)


def test_a_training_loss_that_ends_above_its_start_diverges():
    log = log_of([2.0 - i / 100 for i in range(50)] + [1.5 + i * 1.3 / 50 for i in range(51)])
    report = tuning_report(log)
    assert report.verdict == "diverges"
    assert report.overfits_from is None


def test_what_trembles_from_look_to_look_is_no_overfitting():
    false = found = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        looks = torch.arange(20)
        noise = 0.01 * torch.randn(20, generator=generator)
        flat, turning = (
            1.5 + 0.5 * torch.exp(-looks / 4) + noise,
            (looks - 8).clamp(min=0) / 11 * 0.2,
        )
        train = (2 - torch.arange(200) / 400 + 0.2 * torch.randn(200, generator=generator)).tolist()
        for rises in (False, True):
            losses = (flat + turning if rises else flat).tolist()
            report = tuning_report(log_of(train, [(10 * i, loss) for i, loss in enumerate(losses)]))
            assert report.diverges_from is None
            false += not rises and report.overfits_from is not None
            found += rises and report.overfits_from is not None
    assert false <= 3
    assert found >= 97


def test_a_log_without_losses_is_refused_and_a_run_is_drawn(tmp_path):
    with pytest.raises(ValueError, match=r"tuning_report:.*eval_loss"):
        tuning_report([{"step": 1, "train_runtime": 3.0}])
    report = tuning_report(trained(tmp_path).state.log_history)
    assert "training: median loss" in str(report)
    assert report.to_dict()["overfits_from"] is None
    drawn = tuning_report(log_of([3.0] * 30 + [9.0], [(0, 2.0), (15, 1.0), (31, 2.0)])).plot()
    drawn.savefig(tmp_path / "curves.png")
    assert {"perplexity"} <= {axes.get_ylabel() for a in drawn.axes for axes in (a, *a.child_axes)}


def test_an_adapter_on_the_head_is_refused_by_trl_and_not_lost(tmp_path):
    """TRL multiplies by the head's weight itself: it must say so, or the guide is wrong."""
    model = prepare_lora(
        tiny("llama"), LoraConfig(r=2, target_modules=["lm_head", "q_proj"], task_type="CAUSAL_LM")
    )
    with pytest.raises(ValueError, match="lm_head"):
        trainer_of(tmp_path, ROWS, model=model)
