"""Training: learns, resumes bit for bit, two processes give what one gives, and dead runs stop with
their reason."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.heads.pairwise.support import model_of, pairs_of
from tests.support.logs import logs_of
from tests.support.ranks import in_two_processes
from transformers import TrainerCallback, TrainingArguments

from heads.pairwise import DeadRunGuard, PairwiseTrainer, freeze_, pairwise_report
from heads.pairwise.inference import sides_of
from model_components import DeadRunError
from model_components._trainer import _SeededLengthSampler

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def data_of(model, count=64, seed=0):
    return model.dataset(pairs_of(count, seed), progress=False)


def arguments_of(folder, **changes):
    options = {
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 2,
        "seed": 3,
    }
    return TrainingArguments(str(folder), **options | changes)


def trained(folder, kind="bert", resume=None, count=64, trainer=(), still=False, **changes):
    model = model_of(kind, trained=False, dropout=0.0 if still else 0.1)
    for module in model.modules():
        if still and isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    made = PairwiseTrainer(
        model=model,
        args=arguments_of(folder, **changes),
        train_dataset=data_of(model, count),
        **dict(trainer),
    )
    made.train(resume_from_checkpoint=resume)
    return made


def state_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_it_learns_which_answer_is_better(tmp_path):
    model = model_of("bert", trained=False, hidden_features=8)
    data = data_of(model, 1000)
    trainer = PairwiseTrainer(
        model=model,
        train_dataset=data,
        eval_dataset=data_of(model, 100, seed=9),
        head_lr_ratio=2.0,
        args=arguments_of(
            tmp_path, max_steps=150, learning_rate=1e-2, per_device_train_batch_size=16
        ),
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert before["eval_accuracy"] < 0.7
    assert after["eval_accuracy"] > 0.97
    assert after["eval_log_loss"] < 0.4 < before["eval_log_loss"]
    assert abs(after["eval_loss"] - after["eval_log_loss"]) < 0.02
    report = pairwise_report(model, data_of(model, 100, seed=9), progress=False)
    assert report.metrics.accuracy == pytest.approx(after["eval_accuracy"])
    assert report.metrics.flip_rate == 0


def test_a_dimension_that_the_encoder_all_but_drops_does_not_stop_the_rest(tmp_path):
    """As in MiniLM's last norm."""
    model = model_of("bert", trained=False)
    last = model.encoder.encoder.layer[-1].output.LayerNorm
    with torch.no_grad():
        last.weight[3] = last.bias[3] = 1e-32
    trainer = PairwiseTrainer(
        model=model,
        train_dataset=data_of(model),
        args=arguments_of(tmp_path, logging_steps=1),
    )
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert len(norms) == 6
    assert max(norms) < 100


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_stopped_and_resumed_is_as_if_never_stopped(kind, tmp_path):
    # an epoch is 8 steps
    options = {"kind": kind, "max_steps": 13, "save_strategy": "steps", "save_steps": 5}
    whole = trained(tmp_path, **options)
    again = trained(tmp_path, resume=str(tmp_path / "checkpoint-10"), **options)
    assert all(torch.equal(v, state_of(again)[k]) for k, v in state_of(whole).items())
    assert logs_of(whole) == logs_of(again)
    done = trained(tmp_path, resume=str(tmp_path / "checkpoint-13"), **options)
    assert all(torch.equal(v, state_of(done)[k]) for k, v in state_of(whole).items())
    assert done.state.global_step == 13


def test_a_search_begins_every_run_anew(tmp_path):
    optuna = pytest.importorskip("optuna", reason="needs optuna (extra search)")
    made, encoded = [], model_of("llama", trained=False)
    freeze_(encoded, "all")
    data = data_of(encoded, 200)

    def new_model(trial=None):
        link = (
            "davidson"
            if trial is None
            else trial.suggest_categorical("link", ["davidson", "antisymmetric"])
        )
        made.append(model_of("llama", trained=False, link=link))
        freeze_(made[-1], "all")
        data.encode_(made[-1], progress=False)
        return made[-1]

    def search(trials):
        trainer = PairwiseTrainer(
            args=arguments_of(tmp_path, eval_strategy="epoch", max_steps=50),
            model_init=new_model,
            train_dataset=data,
            eval_dataset=data,
        )
        return trainer.hyperparameter_search(
            lambda trial: {
                "learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True)
            },
            lambda found: found["eval_log_loss"],
            n_trials=trials,
            storage=f"sqlite:///{tmp_path / 'search.db'}",
            study_name="judge",
            load_if_exists=True,
            sampler=optuna.samplers.TPESampler(seed=0),
        )

    first, second = search(2), search(3)
    assert second.objective <= first.objective < 1.0
    assert int(second.run_id) < 5
    assert (
        len(
            optuna.load_study(
                study_name="judge", storage=f"sqlite:///{tmp_path / 'search.db'}"
            ).trials
        )
        == 5
    )
    assert len(made) == 2 + 5  # the trainer makes one at first
    assert all(
        not torch.equal(model.head.scale, torch.ones_like(model.head.scale)) for model in made
    )
    assert sum(not model.head.untrained for model in made) == 5


def test_accumulation_gives_the_same_step(tmp_path):
    options = {"optim": "sgd", "learning_rate": 0.1, "still": True, "count": 20, "max_steps": 3}
    whole = state_of(trained(tmp_path, per_device_train_batch_size=12, **options))
    parts = trained(
        tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=3, **options
    )
    for name, value in state_of(parts).items():  # the second step has 8 pairs, of 2 micro-batches
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-7, msg=name)


RANK = """
from tests.heads.pairwise.test_training import data_of, state_of, trained
for kind in cases:
    trainer = trained(out, kind, still=True, optim="sgd", learning_rate=0.1, per_device_train_batch_size=4,
                      ddp_backend="gloo", max_steps=8)
    # 11 pairs do not divide by two processes: the last batch is filled up
    loss = trainer.evaluate(data_of(trainer.judge, 11, seed=5))["eval_loss"]
    kept = state_of(trainer) | {"eval_loss": torch.tensor(loss)}
    torch.save(kept, f"{out}/{kind}{trainer.args.process_index}.pt")
"""


def test_two_processes_give_what_one_gives(tmp_path):
    kinds = ("bert", "distilbert", "mpnet")
    in_two_processes(RANK, tmp_path, *kinds)
    for kind in kinds:
        one, other = (
            torch.load(tmp_path / f"{kind}{rank}.pt", weights_only=True) for rank in (0, 1)
        )
        single = trained(tmp_path, kind, still=True, optim="sgd", learning_rate=0.1, max_steps=8)
        alone = single.evaluate(data_of(single.judge, 11, seed=5))["eval_loss"]
        for loss in (one.pop("eval_loss"), other.pop("eval_loss")):
            assert float(loss) == pytest.approx(alone, rel=1e-4)
        start = state_of(
            trained(tmp_path, kind, still=True, max_steps=1, learning_rate=0.0, optim="sgd")
        )
        for name, value in state_of(single).items():
            assert torch.equal(one[name], other[name]), (kind, name)
            torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-6, msg=f"{kind} {name}")
        assert max(float((v - start[k]).abs().max()) for k, v in one.items()) > 1e-3


def test_padded_encoders_get_batches_of_like_length():
    lengths = torch.randint(1, 100, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = _SeededLengthSampler(8, lengths, seed=1)
    first = list(sampler)
    assert sorted(first) == list(range(256))
    spread = [
        max(part) - min(part) for part in zip(*[iter([lengths[i] for i in first])] * 8, strict=True)
    ]
    assert sum(spread) / len(spread) < 15  # of 90 in a batch drawn at random
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_frozen_parts_do_not_move_and_everything_frozen_is_refused(tmp_path):
    model = model_of()
    freeze_(model, "all")
    data, before = data_of(model), {n: p.clone() for n, p in model.named_parameters()}
    PairwiseTrainer(model=model, args=arguments_of(tmp_path), train_dataset=data).train()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"head.outer.weight", "head.tie"}  # a score's bias cancels
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"PairwiseTrainer:.*trainable"):
        PairwiseTrainer(model=model, args=arguments_of(tmp_path), train_dataset=data)


def test_what_would_train_apart_is_refused(tmp_path, monkeypatch):
    model = model_of()
    data = data_of(model)
    with pytest.raises(ValueError, match="PairwiseTrainer: compute_loss_func would not be called"):
        PairwiseTrainer(
            model=model,
            args=arguments_of(tmp_path),
            train_dataset=data,
            compute_loss_func=lambda outputs, labels, **rest: outputs.loss,
        )
    with pytest.raises(ValueError, match=r"PairwiseTrainer:.*label_smoothing"):
        PairwiseTrainer(
            model=model, args=arguments_of(tmp_path, label_smoothing_factor=0.1), train_dataset=data
        )
    arguments = arguments_of(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"PairwiseTrainer:.*processes"):
        PairwiseTrainer(model=model, args=arguments, train_dataset=data)
    monkeypatch.delenv("WORLD_SIZE")
    arguments._n_gpu = 2
    with pytest.raises(ValueError, match=r"PairwiseTrainer:.*DataParallel"):
        PairwiseTrainer(model=model, args=arguments, train_dataset=data)


def test_data_without_labels_are_refused(tmp_path):
    model = model_of()
    bare = model.dataset([pair[:3] for pair in pairs_of(4)], progress=False)
    for data in (bare, [1, 2]):
        with pytest.raises(ValueError, match=r"PairwiseTrainer:.*train_dataset.*PairwiseDataset"):
            PairwiseTrainer(model=model, args=arguments_of(tmp_path), train_dataset=data)
        with pytest.raises(ValueError, match="eval_dataset is"):
            PairwiseTrainer(
                model=model,
                args=arguments_of(tmp_path),
                train_dataset=data_of(model),
                eval_dataset=data,
            )


def dies(folder, said, prepare=lambda model: None, data=None, window=4, **changes):
    model = model_of(trained=False)
    prepare(model)
    held = data_of(model) if data is None else model.dataset(data, progress=False)
    trainer = PairwiseTrainer(
        model=model,
        args=arguments_of(folder, **changes),
        train_dataset=held,
        guard=DeadRunGuard(window=window),
    )
    with pytest.raises(DeadRunError, match=said) as caught:
        trainer.train()
    return str(caught.value)


def noise(count=64):
    draw = torch.Generator().manual_seed(4)
    return [(*pair[:3], int(torch.randint(0, 3, (), generator=draw))) for pair in pairs_of(count)]


def test_weights_too_coarse_for_the_rate_stop_the_run(tmp_path):
    options = {"max_steps": 40, "learning_rate": 1e-5, "lr_scheduler_type": "constant"}
    said = dies(
        tmp_path,
        r"step 10:.*weights",
        lambda model: model.to(torch.bfloat16),
        window=20,
        **options,
    )
    assert said.startswith("step 10: ")
    assert "is too small for bfloat16, or steps are skipped" in said
    trained(tmp_path, max_steps=12, learning_rate=1e-5)  # float32 is fine
    assert "too small for float32" in dies(
        tmp_path, "weights have changed", max_steps=40, learning_rate=1e-9
    )


def decided(model):
    """Nearly everything ties, whatever the features are."""
    torch.nn.init.normal_(model.head.outer.weight, std=0.01)
    model.head.set_tie_rate_(0.999)


def test_one_and_the_same_verdict_stops_the_run(tmp_path):
    said = dies(tmp_path, r"step 20:.*verdict", decided, learning_rate=1e-5, max_steps=30)
    assert said.startswith("step 20: ")  # three windows after three tenths
    assert "in 3 windows in a row" in said


def test_no_better_than_the_prior_stops_the_run(tmp_path):
    def wild(model):
        torch.nn.init.normal_(model.head.outer.weight, std=3.0)

    dies(
        tmp_path,
        r"step 24:.*which is not higher by more than the standard error",
        wild,
        noise(),
        learning_rate=1e-5,
        max_steps=40,
    )


def windows(fair, gains, spread):
    """A guard that looks at windows whose log-losses are so much below that of the labels' shares;
    when it stops."""
    guard = DeadRunGuard(window=1, patience=3)
    guard._fair = fair
    draw = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.zeros(300), torch.ones(100)]).long()  # three quarters are A
    shares = torch.tensor([0.5, 0.5]) if fair else torch.tensor([0.75, 0.25])
    state = type("State", (), {"global_step": 10})()
    for number, gain in enumerate(gains):
        lost = -shares.log()[labels] - gain + spread * torch.randn(400, generator=draw)
        lost -= (lost - (-shares.log()[labels] - gain)).mean()  # so that the mean is the gain
        odds = torch.stack([-lost, torch.log1p(-(-lost).exp().clamp(max=1 - 1e-6))], 1)
        logits = torch.where(labels[:, None] == 0, odds, odds.flip(1))
        guard._seen = None
        guard.observe(logits, labels)
        try:
            guard._check_window(state, guard._seen.double(), 1)
        except DeadRunError:
            return number
    return None


@pytest.mark.parametrize("fair", [True, False])
def test_a_window_counts_by_more_than_its_error(fair):
    """Four hundred pairs whose losses scatter by .2 have a mean that is known to .01."""
    assert windows(fair, [0.05] * 5, 0.1) is None
    assert windows(fair, [0.001] * 5, 0.1) == 2
    assert windows(fair, [-0.05] * 5, 0.1) == 2
    assert windows(fair, [0.0, 0.0, 0.05, 0.0, 0.0, 0.0], 0.1) == 5  # counted anew


def test_a_new_head_starts_from_all_the_data(tmp_path):
    model = model_of(trained=False)
    data = model.dataset([*pairs_of(40, labels=2), *[("p", "w1", "w2", 2)] * 10], progress=False)
    PairwiseTrainer(model=model, args=arguments_of(tmp_path), train_dataset=data)
    found = model.predict(["w1"], ["w5"], ["w6"], progress=False).probabilities
    assert float(found[0, 2]) == pytest.approx(0.2, abs=1e-4)
    a, b = sides_of(model, data, range(50))[:2]
    torch.testing.assert_close(model.head.scale, torch.cat([a, b]).std(0))


def test_a_resumed_run_has_time_to_move(tmp_path):
    guard, state = DeadRunGuard(), type("State", (), {"global_step": 100, "max_steps": 200})()
    args = type("Arguments", (), {"get_warmup_steps": staticmethod(lambda steps: 5)})()
    model = model_of(trained=False)
    guard.on_train_begin(args, state, None, model=model)
    for step in range(101, 110):
        state.global_step = step
        guard.on_step_end(args, state, None)
    assert guard._start is not None  # not looked at yet: ten steps after it went on


def test_warm_up_is_waited_for(tmp_path):
    said = dies(
        tmp_path, "every verdict", decided, learning_rate=1e-5, max_steps=60, warmup_steps=30
    )
    assert said.startswith("step 40: ")


def test_a_weak_signal_is_not_a_dead_run(tmp_path):
    """Two thirds of the labels are noise, and nothing shows at first."""
    model = model_of(trained=False)
    drawn = noise(900)
    pairs = [drawn[k] if k % 3 else pair for k, pair in enumerate(pairs_of(900))]
    arguments = arguments_of(
        tmp_path, max_steps=300, per_device_train_batch_size=16, learning_rate=6e-3
    )
    data = model.dataset(pairs, progress=False)
    PairwiseTrainer(model=model, args=arguments, train_dataset=data, head_lr_ratio=0.1).train()
    held = model.dataset(pairs_of(200, seed=9), progress=False)
    assert pairwise_report(model, held, progress=False).metrics.accuracy > 0.7


@pytest.mark.parametrize("changes", [{}, {"warmup_steps": 20}, {"learning_rate": 2e-5}])
def test_adapters_that_wait_for_each_other_are_not_dead(tmp_path, changes):
    model = get_peft_model(
        model_of(trained=False),
        LoraConfig(target_modules=["query", "value"], modules_to_save=["head", "pool"], r=2),
    )
    options = {"max_steps": 40, "learning_rate": 1e-4, "per_device_train_batch_size": 16}
    trainer = PairwiseTrainer(
        model=model,
        args=arguments_of(tmp_path, **options | changes),
        train_dataset=model.dataset(pairs_of(200)),
    )
    trainer.train()
    assert trainer.state.global_step == 40


def test_a_run_that_is_well_is_left_alone(tmp_path):
    trainer = trained(
        tmp_path, max_steps=40, trainer={"guard": DeadRunGuard(window=8)}, learning_rate=3e-3
    )
    assert trainer.state.global_step == 40
    assert any(isinstance(c, DeadRunGuard) for c in trainer.callback_handler.callbacks)
    none = trained(tmp_path, trainer={"guard": False})
    assert not any(isinstance(c, DeadRunGuard) for c in none.callback_handler.callbacks)
    with pytest.raises(ValueError, match=r"DeadRunGuard:.*window.*0"):
        DeadRunGuard(window=0)


def test_the_guard_counts_every_micro_batch(tmp_path):
    seen = []

    class Spy(TrainerCallback):
        def on_step_end(self, args, state, control, **rest):
            seen.append(None)

    guard = DeadRunGuard(window=100)
    trained(
        tmp_path,
        trainer={"guard": guard, "callbacks": [Spy()]},
        gradient_accumulation_steps=2,
        max_steps=4,
    )
    assert len(seen) == 4
    assert guard._steps == 4
    assert float(guard._seen[1].sum()) == 4 * 16  # labels: two micro-batches of 8 a step


def test_layerwise_rates_reach_the_optimizer(tmp_path):
    trainer = trained(
        tmp_path,
        trainer={"layer_decay": 0.5, "head_lr_ratio": 4.0},
        max_steps=1,
        lr_scheduler_type="constant",
    )
    rates = {round(group["lr"] / 1e-3, 6) for group in trainer.optimizer.param_groups}
    assert rates == {0.25, 0.5, 1.0, 4.0}


def test_a_side_that_always_wins_is_refused_for_a_link_that_could_learn_it(tmp_path):
    chosen = [(*pair[:3], 0) for pair in pairs_of(8)]
    for link in ("davidson", "concat"):
        model = model_of(link=link, trained=False)
        given = {
            "model": model,
            "args": arguments_of(tmp_path),
            "train_dataset": model.dataset(chosen, progress=False),
        }
        if link == "davidson":
            PairwiseTrainer(**given)
            continue
        with pytest.raises(ValueError, match=r"PairwiseTrainer:.*'concat'"):
            PairwiseTrainer(**given)


def test_what_cannot_learn_is_refused_before_it_runs(tmp_path):
    model = model_of(trained=False)
    ties = model.dataset([(*pair[:3], 2) for pair in pairs_of(20)], progress=False)
    with pytest.raises(ValueError, match=r"PairwiseTrainer:.*label"):
        PairwiseTrainer(model=model, args=arguments_of(tmp_path), train_dataset=ties)
    model.head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"PairwiseTrainer:.*frozen"):
        PairwiseTrainer(
            model=model, args=arguments_of(tmp_path), train_dataset=model.dataset(pairs_of(20))
        )


def test_held_out_pairs_have_no_features_of_an_encoder_that_trains(tmp_path):
    model = model_of("bert", trained=False)
    held_out = model.dataset(pairs_of(8), progress=False)
    freeze_(model, "all")
    held_out.encode_(model, progress=False)
    freeze_(model, "none")
    with pytest.raises(ValueError, match="eval_dataset holds features"):
        PairwiseTrainer(
            model=model,
            args=TrainingArguments(str(tmp_path), report_to="none"),
            train_dataset=model.dataset(pairs_of(8), progress=False),
            eval_dataset=held_out,
        )
