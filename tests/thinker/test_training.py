"""`ThinkerTrainer`: resume, accumulation, two processes, rewinding, what is logged, what is
refused."""

import copy
import math

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, set_seed

from model_components import DeadRunError
from tests.support.equivalence import ROWS, Row
from tests.support.logs import logs_of
from tests.support.ranks import in_two_processes
from thinker import (
    AllSteps,
    AtTokens,
    CurriculumDataset,
    FlowPlan,
    Frontier,
    LatentThinker,
    Reach,
    RewindOnPeak,
    RowsTask,
    ThinkerConfig,
    ThinkerTrainer,
    evaluate_grid,
    evaluate_steps,
    make_task,
    presets,
    solve,
    thinker_arguments,
)
from thinker.counters import seed_of
from thinker.flow import FlowRow
from thinker.losses import LastAndRandom, LearnedWeights
from thinker.report import Accuracy, Curves
from thinker.schedules import Fixed, Progressive
from thinker.tasks import TensorTask
from thinker.training import CurriculumCallback, parameter_groups

SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "num_heads": 2,
    "max_input_length": 6,
    "max_output_length": 6,
    "num_latents": 4,
}


def model_of(**changes):
    torch.manual_seed(0)
    return LatentThinker(ThinkerConfig(**{**SIZES, **changes}))


def data_of(schedule=None, task=None, **options):
    return CurriculumDataset(
        task or make_task("copy"),
        schedule or Frontier(max_length=6),
        **{"batch_size": 8, **options},
    )


def trainer_of(out, model=None, data=None, **options):
    names = (
        "max_steps",
        "save_strategy",
        "save_steps",
        "gradient_accumulation_steps",
        "optim",
        "learning_rate",
        "logging_steps",
        "eval_strategy",
        "eval_steps",
        "ddp_backend",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "max_grad_norm",
        "dataloader_num_workers",
        "average_tokens_across_devices",
        "gradient_checkpointing",
    )
    given = {k: options.pop(k) for k in names if k in options}
    arguments = thinker_arguments(
        out, **{"max_steps": 6, "use_cpu": True, "disable_tqdm": True, "warmup_steps": 2, **given}
    )
    set_seed(0)
    return ThinkerTrainer(
        model or model_of(), arguments, train_dataset=data or data_of(), **options
    )


def same(a, b, **close):
    for (name, p), q in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda m, name=name: f"{name}: {m}", **close)


LOSSES = {
    "default": (None, {}),
    "learned": (lambda: LearnedWeights(8), {}),
    "default, memory": (None, {"memory": "grow", "num_static_tokens": 2}),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_resumed_is_as_if_never_stopped(loss, tmp_path):
    """Bit for bit: weights, schedule, rewinding, logs."""
    make, changes = LOSSES[loss]

    def fresh(out):
        return trainer_of(
            out,
            model_of(latent_init="noise", step_noise=0.1, **changes),
            data_of(
                Progressive(max_length=6, threshold=0.01, retreat=0.0, min_answers=1),
                n_latent=(2, 6),
            ),
            step_loss=make() if make else None,
            max_steps=24,
            save_strategy="steps",
            save_steps=12,
            logging_steps=5,
            callbacks=[RewindOnPeak(factor=1.0, margin=0.0, every=3), CurriculumCallback(every=1)],
        )

    whole = fresh(tmp_path / "whole")
    whole.train()
    again = fresh(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-12"))
    for a, b in zip(
        whole.model.state_dict().values(), again.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)
    same(whole.step_loss, again.step_loss, rtol=0, atol=0)
    assert whole.data.state_dict() == again.data.state_dict()
    hardest = max(r["difficulty"] for r in whole.state.log_history if "loss" in r)
    assert hardest > 1  # the frontier has moved
    assert logs_of(whole) == logs_of(again)
    rewinds = [
        next(c for c in t.callback_handler.callbacks if isinstance(c, RewindOnPeak)).count
        for t in (whole, again)
    ]
    assert rewinds[0] == rewinds[1] > 0
    ROWS.append(
        Row(
            "ThinkerTrainer",
            "resumed",
            "float32",
            f"{loss} loss",
            0.0,
            "every parameter, bit for bit",
        )
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memory": "grow", "positions": "random"},
        {"positions": "random", "memory": "grow"},
    ],
)
def test_resumed_in_the_middle_of_a_batch_is_as_if_never_stopped(changes, tmp_path):
    def fresh(out):
        return trainer_of(
            out, model_of(latent_init="noise", **changes), segments=4, max_steps=10, save_steps=6
        )

    whole, again = fresh(tmp_path / "whole"), fresh(tmp_path / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    same(whole.model, again.model, rtol=0, atol=0)


def test_the_last_latents_of_a_causal_flow_are_asked_for_the_last_answers(tmp_path):
    """As in Perceiver AR: all of the input is read, latents and losses are at its end."""
    task = AtTokens(make_task("copy"))
    model = model_of(
        causal=True, num_latents=3, vocab_size=17, max_input_length=7, max_output_length=7
    )
    data = data_of(Fixed(max_length=6), task)
    trainer = trainer_of(tmp_path, model, data, step_loss=AllSteps(), **SGD)
    batch = data.batch(0, details=True)
    noise = torch.Generator().manual_seed(seed_of(trainer.args.seed, 0, 0, 2))
    out = model.train()(
        batch["input_ids"],
        batch["attention_mask"],
        n_step=batch["n_step"],
        output_steps="all",
        generator=noise,
    )
    expected = torch.stack(
        [
            torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, -3:])
            for logits in out.step_logits
        ]
    )
    torch.testing.assert_close(trainer.compute_loss(model, batch), expected.mean())
    assert out.logits.shape == (8, 3, 17)
    trainer.train()
    found = evaluate_steps(model, data, [6], n_steps=[2], samples=64)
    held = data.held_out(64, 6, details=True)
    with torch.no_grad():
        right = (
            model.eval()(held["input_ids"], n_step=2).logits.argmax(-1) == held["labels"][:, -3:]
        )
    assert found.rows()[0]["symbols"] == pytest.approx(float(right.float().mean()))


def test_answers_in_reach_are_those_of_the_last_latents(tmp_path):
    task = AtTokens(make_task("prefix_sum"))
    sizes = {"vocab_size": 3, "output_size": 2, "max_input_length": 7, "max_output_length": 7}
    model = model_of(causal=True, num_latents=4, window=2, **sizes)
    loss, data = Reach(grad_steps=None), data_of(Fixed(max_length=6), task, n_step=4)
    trainer = trainer_of(tmp_path, model, data, step_loss=loss)
    batch = data.batch(0, details=True)
    noise = torch.Generator().manual_seed(seed_of(trainer.args.seed, 0, 0, 2))
    out = model.train()(batch["input_ids"], n_step=4, output_steps=[3, 4], generator=noise)
    expected = loss(out, batch["labels"][:, -4:], batch["distance"][:, -4:])
    torch.testing.assert_close(trainer.compute_loss(model, batch), expected)


def test_rows_without_an_answer_are_neither_right_nor_wrong():
    tokens = torch.arange(12).view(6, 2)
    data = CurriculumDataset(TensorTask(tokens, tokens.masked_fill(tokens < 6, -100)), holdout=0.0)
    model = model_of(vocab_size=12, max_input_length=2, max_output_length=2)
    found = evaluate_steps(model, data, [1]).cells[0][0]
    with torch.no_grad():
        right = model.eval()(tokens[3:], out_len=2).logits.argmax(-1) == tokens[3:]
    assert (found.token, found.sequence) == (right.float().mean(), right.all(1).float().mean())
    none = AtTokens(TensorTask(tokens, tokens.masked_fill(tokens % 2 == 1, -100)))
    last = model_of(
        vocab_size=13, max_input_length=3, max_output_length=3, causal=True, num_latents=1
    )
    with pytest.raises(ValueError, match=r"accuracies:.*6.*answer"):
        evaluate_steps(last, CurriculumDataset(none, holdout=0.0), [1])


@pytest.mark.parametrize("loop", [(FlowRow(output=True),), (FlowRow(), FlowRow(output=True))])
def test_plans_that_do_not_output_at_each_step_train_at_every_draw_of_steps(loop, tmp_path):
    plan = FlowPlan(prologue=(FlowRow(read_input=True),), loop=loop)
    trainer = trainer_of(tmp_path, model_of(plan=plan), data_of(n_step=(1, 6)), max_steps=8)
    trainer.train()
    assert trainer.state.global_step == 8


def test_answers_that_fewer_latents_give_weigh_as_answers(tmp_path):
    """With 2 latents at the end of 6 tokens the loss is the mean over the answers that they give."""
    model = model_of(causal=True, num_latents=2, positions="rotary", vocab_size=17)
    data = CurriculumDataset(
        AtTokens(make_task("copy")), Fixed(max_length=3), batch_size=8, n_step=2
    )
    trainer = trainer_of(tmp_path, model, data, max_steps=1, logging_steps=1, step_loss=AllSteps())
    batch = trainer.data.batch(0, details=True)
    with torch.no_grad():
        out = model.train()(
            batch["input_ids"], batch["attention_mask"], n_step=2, output_steps="all"
        )
    trainer.train()
    answers = batch["labels"][:, -2:]
    expected = (
        sum(
            torch.nn.functional.cross_entropy(z.flatten(0, 1), answers.flatten())
            for z in out.step_logits
        )
        / 2
    )
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(expected), rel=0.05)


def test_a_plan_is_drawn_for_each_batch(tmp_path):
    plans, steps = [], []

    def draw(generator, n_step):
        plans.append(FlowPlan.random(0.5, n_step, generator=generator))
        steps.append(n_step)
        return plans[-1]

    trainer = trainer_of(
        tmp_path,
        model_of(memory="grow", num_static_tokens=2),
        data_of(n_step=(2, 5)),
        draw_plan=draw,
        max_steps=6,
    )
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    drawn = [trainer.data.batch(n, details=True)["n_step"] for n in range(6)]
    assert steps[-6:] == drawn
    assert len(set(map(str, plans[-6:]))) == 6
    assert all(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    found = evaluate_steps(
        trainer.model, trainer.data, [6], plan=FlowPlan.every_step(static=True)
    ).cells[0][0]
    assert trainer.evaluate()["eval_accuracy"] == found.token  # everything, in every step
    again = trainer_of(
        tmp_path,
        model_of(memory="grow", num_static_tokens=2),
        data_of(n_step=(2, 5)),
        draw_plan=draw,
    )
    again.train()
    same(trainer.model, again.model, rtol=0, atol=0)
    # the first were drawn to see whether the model has what they need
    assert plans[-6:] == plans[8:14]
    with pytest.raises(ValueError, match=r'LatentThinker:.*"none"'):
        trainer_of(tmp_path, draw_plan=lambda generator, n_step: FlowPlan.read_once())


def test_segments_are_steps_of_their_own_from_where_the_latents_had_come(tmp_path):
    """Against the loop that one would write: two batches, three optimizer steps each."""
    data = data_of(n_step=(2, 4))
    trainer = trainer_of(tmp_path, data=data, segments=3, step_loss=AllSteps(), **SGD)
    trainer.train()
    model, carry = model_of().train(), None
    rate = SGD["learning_rate"]
    optimizer = torch.optim.SGD(
        parameter_groups(model, learning_rate=rate, weight_decay=0.01), lr=rate
    )
    plain = data_of(n_step=(2, 4))
    seen = []
    for step in range(6):
        drawn, again = plain.batch(step - step % 3, details=True), data.batch(step, details=True)
        assert torch.equal(drawn["input_ids"], again["input_ids"])
        assert again["segment"] == step % 3
        n_step = again["n_step"]
        seen.append(n_step)
        noise = torch.Generator().manual_seed(seed_of(trainer.args.seed, 0, step, 2))
        out = model(
            drawn["input_ids"],
            drawn["attention_mask"],
            out_len=drawn["labels"].shape[1],
            n_step=n_step,
            output_steps="all",
            carry=carry if step % 3 else None,
            generator=noise,
        )
        AllSteps()(out, drawn["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        carry = out.carry.detach()
    assert len(set(seen)) > 1
    same(trainer.model, model)


def test_a_carry_is_of_the_batch_before_and_of_no_other(tmp_path, monkeypatch):
    """Not after going back, not of another process, not with other segments."""
    carried = []
    forward = LatentThinker.forward

    def spy(self, *inputs, **named):
        carried.append(None if named["carry"] is None else float(named["carry"].latents.sum()))
        return forward(self, *inputs, **named)

    monkeypatch.setattr(LatentThinker, "forward", spy)
    trainer = trainer_of(tmp_path, segments=4, max_steps=6, save_steps=6)
    trainer.train()
    monkeypatch.undo()
    assert [latents is None for latents in carried] == [True, False, False, False, True, False]
    trainer.restore(trainer.snapshot())
    assert trainer._carry is None
    trainer.load_progress(tmp_path / "checkpoint-6")
    assert trainer._carry is not None
    monkeypatch.setattr(type(trainer.args), "process_index", 1)  # it was not there
    trainer.load_progress(tmp_path / "checkpoint-6")
    assert trainer._carry is None
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"CurriculumDataset:.*segments.*4.*3"):
        trainer_of(tmp_path / "b", segments=3).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-6")
        )


def test_trainers_that_share_their_data_have_segments_of_their_own(tmp_path):
    data = data_of()
    first = trainer_of(tmp_path, data=data, segments=3, **SGD)
    trainer_of(tmp_path, data=data)
    first.train()
    alone = trainer_of(tmp_path, data=data_of(), segments=3, **SGD)
    alone.train()
    same(first.model, alone.model, rtol=0, atol=0)


def test_a_finished_run_that_is_resumed_stays_as_it_is(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=4, save_steps=4)
    trainer.train()
    again = trainer_of(tmp_path, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    same(trainer.model, again.model, rtol=0, atol=0)
    assert again.state.global_step == 4


def test_it_learns_to_copy(tmp_path):
    """The short twin of the example: four symbols, three places."""
    data = CurriculumDataset(make_task("copy", symbols=4), Frontier(max_length=3), batch_size=32)
    model = model_of(vocab_size=4, hidden_size=32)
    trainer = trainer_of(
        tmp_path, model, data, max_steps=150, learning_rate=3e-3, warmup_steps=20, eval_samples=64
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    assert before < 0.6
    assert trainer.evaluate()["eval_accuracy"] > 0.97
    last = [r for r in trainer.state.log_history if "loss" in r][-1]
    assert last["accuracy"] > 0.9
    assert last["difficulty"] == 3


@pytest.mark.slow
def test_it_learns_a_scan_and_runs_it_longer(tmp_path):
    """The short twin of `examples/think_longer.py`: parity of five bits becomes parity of twelve,
    and stays."""
    data = CurriculumDataset(
        AtTokens(make_task("prefix_sum")),
        Frontier(max_length=5),
        n_step=lambda length: (1, length + 6),
        holdout=0.0,
        seed=12,
    )
    config = ThinkerConfig(
        **data.sizes(12),
        hidden_size=32,
        num_heads=2,
        causal=True,
        window=2,
        positions="rotary",
        step_noise=0.1,
    )
    set_seed(12)
    model = LatentThinker(config)
    trainer = trainer_of(
        tmp_path, model, data, max_steps=450, learning_rate=4e-3, warmup_steps=50, step_loss=Reach()
    )
    trainer.train()
    logged = [r["accuracy"] for r in trainer.state.log_history if "loss" in r]
    assert logged[-1] > 0.95  # of answers within reach: a schedule that follows it must not stall
    curves = evaluate_steps(model, data, [12], n_steps=[3, 24, 240], samples=128)
    early, needed, longer = (point["symbols"] for point in curves.rows())
    assert early < 0.8
    assert needed > 0.95
    assert longer >= needed  # at ten times the steps
    rows = [[1], [1, 0, 1, 1], [1] * 12]
    found = solve(model, data.task, rows)
    assert found.answers == ((1,), (1, 1, 0, 1), (1, 0) * 6)  # the parity of every prefix
    assert all(found.settled)
    assert found.steps[0] < found.steps[2]  # longer rows think longer
    assert "rows not settled after 2 steps: " in str(solve(model, data.task, rows, max_steps=2))
    batch = data.held_out(64, 12, details=True)
    with torch.no_grad():
        thought = model.eval().think(
            model.encode(batch["input_ids"]), n_step=240, output_steps=[7, 240]
        )
    sizes = [thought.kept[step].square().mean().sqrt() for step in (7, 240)]
    assert 0.5 < sizes[1] / sizes[0] < 2
    assert thought.residuals[:, 200:].max() < 0.03 < thought.residuals[:, 3].min()  # it has arrived
    assert [(p["length"], p["steps"]) for p in curves.to_dict()["points"]] == [
        (12, 3),
        (12, 24),
        (12, 240),
    ]
    assert f"{100 * early:.4g}/" in str(curves)


def test_a_report_says_where_more_steps_hurt():
    cells = (Accuracy(0.9, 0.5), Accuracy(0.99, 0.955), Accuracy(0.98, 0.861))
    text = str(Curves((8,), ((1, 3, 12),), (cells,)))
    assert "99/95.5" in text
    assert "length 8: 86.1% of rows are right after 12 steps, but 95.5% after 3" in text
    assert "length" not in "".join(Curves((8,), ((1, 3),), (cells[:2],)).remarks())
    # lengths with other steps have a row for each point, without empty cells
    apart = Curves((8, 9), ((1, 3), (2,)), (cells[:2], cells[2:])).table()
    assert [row[:2] for row in apart.rows] == [("8", "1"), ("8", "3"), ("9", "2")]


def test_a_window_without_reach_warns(tmp_path, caplog):
    data = CurriculumDataset(AtTokens(make_task("copy")), Frontier(max_length=4))
    config = ThinkerConfig(**data.sizes(), causal=True, window=3)
    with caplog.at_level("WARNING"):
        trainer_of(tmp_path, LatentThinker(config), data, step_loss=Reach(window=3))
        assert "window" not in caplog.text
        trainer_of(tmp_path, LatentThinker(config), data)
    assert "Use step_loss=Reach(window=3)" in caplog.text


class Ranks(IterableDataset):
    """The batches of two ranks in turn, for one process that accumulates them."""

    def __init__(self, *data):
        self.data = data

    def __iter__(self):
        streams = [d.batches(details=True) for d in self.data]
        while True:
            for data, stream in zip(self.data, streams, strict=True):
                data.state = self.data[0].state  # in two processes, each has the same
                yield next(stream)


class Accumulating(ThinkerTrainer):
    """One process that takes the batches of two."""

    others: CurriculumDataset

    def get_train_dataloader(self):
        from torch.utils.data import DataLoader

        return DataLoader(Ranks(self.data, self.others), batch_size=None)

    @property
    def batches(self):  # of each rank
        return self.state.global_step


SGD = {
    "optim": "sgd",
    "learning_rate": 0.03,
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
}
STOPPED = """
from tests.thinker.test_training import SGD, data_of, model_of, trainer_of
from thinker import RewindOnPeak
from thinker.schedules import Progressive
schedule = Progressive(max_length=6, start=2, threshold=0.01, retreat=0.0, min_answers=1)
trainer = trainer_of(out, model_of(), data_of(schedule), ddp_backend="gloo", max_steps=30, logging_steps=10,
                     save_strategy="steps", save_steps=15, callbacks=[RewindOnPeak(every=8)], **SGD)
trainer.train(resume_from_checkpoint=cases[0] if cases else None)
logs = [{k: r[k] for k in ("step", "accuracy", "difficulty")} for r in trainer.state.log_history if "loss" in r]
state = {"model": trainer.model.state_dict(), "data": trainer.data.state_dict(), "logs": logs}
torch.save(state, f"{out}/state{trainer.args.process_index}.pt")
"""


def states(folder, name="state"):
    return [torch.load(folder / f"{name}{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_two_processes_resumed_are_as_if_never_stopped(tmp_path):
    whole = states(in_two_processes(STOPPED, tmp_path))
    again = states(in_two_processes(STOPPED, tmp_path / "again", tmp_path / "checkpoint-15"))
    for a, b in zip(whole, again, strict=True):
        assert all(torch.equal(v, b["model"][k]) for k, v in a["model"].items())
        assert a["data"] == b["data"]
    assert whole[0]["logs"] == again[0]["logs"]
    assert whole[0]["logs"][-1]["difficulty"] > 2


RANK = """
from tests.thinker.test_training import LOSSES, SGD, data_of, model_of, trainer_of
from thinker.schedules import Progressive
for number, loss in enumerate(cases):
    make, changes = LOSSES[loss]
    schedule = Progressive(max_length=6, start=3, threshold=0.01, retreat=0.0, min_answers=1)
    trainer = trainer_of(out, model_of(**changes), data_of(schedule), step_loss=make() if make else None,
                         ddp_backend="gloo", max_steps=18, **SGD)
    trainer.train()
    state = {"model": trainer.model.state_dict(), "loss": trainer.step_loss.state_dict()}
    state["data"] = trainer.data.state
    torch.save(state, f"{out}/{number}-{trainer.args.process_index}.pt")
"""


def test_two_processes_give_what_one_gives(tmp_path):
    losses = ("default", "learned", "default, memory")
    in_two_processes(RANK, tmp_path, *losses)
    for number, loss in enumerate(losses):
        compare_with_one_process(states(tmp_path, f"{number}-"), *LOSSES[loss], tmp_path)


def compare_with_one_process(found, make, changes, tmp_path):
    for name, value in found[0]["model"].items():
        assert torch.equal(value, found[1]["model"][name]), name
    for name, value in found[0]["loss"].items():
        assert torch.equal(value, found[1]["loss"][name]), name
    assert torch.equal(found[0]["data"], found[1]["data"])

    schedule = Progressive(max_length=6, start=3, threshold=0.01, retreat=0.0, min_answers=1)
    data = [data_of(schedule, rank=rank) for rank in (0, 1)]
    arguments = thinker_arguments(
        tmp_path,
        max_steps=18,
        use_cpu=True,
        disable_tqdm=True,
        gradient_accumulation_steps=2,
        **SGD,
    )
    single = Accumulating(
        model_of(**changes), arguments, train_dataset=data[0], step_loss=make() if make else None
    )
    single.others = data[1]
    single.train()
    assert torch.equal(found[0]["data"], data[0].state)
    assert float(found[0]["data"][0]) == 4
    for part, held in (("model", single.model), ("loss", single.step_loss)):
        for name, value in held.state_dict().items():
            message = f"{name}: {{}}".format
            torch.testing.assert_close(
                found[0][part][name], value, rtol=1e-4, atol=1e-6, msg=message
            )
    start = model_of(**changes).state_dict()["layers.0.mlp.down.weight"]
    assert not torch.allclose(
        single.model.state_dict()["layers.0.mlp.down.weight"], start, atol=1e-3
    )


def test_accumulation_gives_the_same_step(tmp_path):
    """Two half batches are one: the answers of a whole step are counted, not those of each part."""
    whole = data_of(batch_size=16).batch(0, details=True)
    halves = [
        {k: v[i * 8 : i * 8 + 8] if torch.is_tensor(v) else v for k, v in whole.items()}
        for i in (0, 1)
    ]
    items = (whole["labels"] != -100).sum()
    gradients = []
    for parts in ([whole], halves):
        trainer = trainer_of(tmp_path, model_of(step_noise=0.0), step_loss=AllSteps())
        for part in parts:
            trainer.compute_loss(trainer.model, part, num_items_in_batch=items).backward()
        gradients.append([p.grad for p in trainer.model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_peak_goes_back_to_the_best_point(tmp_path):
    """Weights are spoilt half-way; the run returns to what it had, with the optimizer, and goes on
    to learn."""
    held = {}

    def state_of(trainer):
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer).state_dict()["state"]
        return copy.deepcopy([trainer.model.state_dict(), optimizer])

    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            held[state.global_step] = state_of(trainer)
            if state.global_step == 42:
                with torch.no_grad():
                    model.readout.head.weight.mul_(-50)

    class After(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            held["after", state.global_step] = state_of(trainer)

    rewind = RewindOnPeak(every=10)
    schedule = Progressive(max_length=6, start=6, threshold=0.999)
    trainer = trainer_of(
        tmp_path,
        data=data_of(schedule),
        max_steps=80,
        callbacks=[Spoil(), rewind, After()],
    )
    trainer.train()
    peak = [r for r in trainer.state.log_history if "rewinds" in r]
    # the best is 31 to 40
    assert [(r["rewinds"], r["rewound_to_step"], r["step"]) for r in peak][:1] == [(1, 30, 50)]
    assert peak[0]["peak"] > 3
    for a, b, spoilt in zip(held[30], held["after", 50], held[50], strict=True):
        flat = [list(_tensors(x)) for x in (a, b, spoilt)]
        assert all(torch.equal(x, y) for x, y in zip(flat[0], flat[1], strict=True))
        assert not all(torch.equal(x, y) for x, y in zip(flat[0], flat[2], strict=True))
    assert rewind.best["step"] >= 50
    assert trainer.data.step == 80  # the stream went on
    quiet = trainer_of(tmp_path, max_steps=40, callbacks=[RewindOnPeak(every=10)])
    quiet.train()
    assert not [r for r in quiet.state.log_history if "rewinds" in r]


def _tensors(tree):
    if torch.is_tensor(tree):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)


def test_rewinding_gives_a_schedule_its_state_back(tmp_path):
    """Also where the curriculum reports at the same step; what was counted on the way given up is
    forgotten."""

    class After(TrainerCallback):
        seen = 0

        def on_step_end(self, args, state, control, **kwargs):
            if rewind.count > self.seen:
                self.seen = rewind.count
                assert torch.equal(curriculum.before["total"], trainer.tally.counts["total"])

    schedule = Progressive(max_length=6, threshold=0.02, retreat=0.0, min_answers=1)
    rewind = RewindOnPeak(factor=1.0, margin=0.0, every=10, limit=3)
    curriculum, after = CurriculumCallback(every=15), After()
    callbacks = [curriculum, rewind, after]
    trainer = trainer_of(tmp_path, data=data_of(schedule), max_steps=120, callbacks=callbacks)
    trainer.train()
    assert rewind.count == after.seen == 3


def test_a_curriculums_callback_of_ones_own_replaces_the_default(tmp_path):
    schedule = Progressive(max_length=6, threshold=0.01, retreat=0.0, min_answers=1)
    trainer = trainer_of(
        tmp_path,
        data=data_of(schedule),
        max_steps=30,
        callbacks=[CurriculumCallback(every=25)],
    )
    trainer.train()
    assert trainer.data.difficulty() == 2


def test_a_schedule_changes_only_between_batches_of_several_segments(tmp_path):
    rows, lengths = [], []

    class Watched(ThinkerTrainer):
        def compute_loss(self, model, inputs, *rest, **named):
            rows.append(inputs["input_ids"])
            lengths.append(self.data.difficulty())
            return super().compute_loss(model, inputs, *rest, **named)

    schedule = Progressive(max_length=6, threshold=0.01, retreat=0.0, min_answers=1)
    arguments = thinker_arguments(tmp_path, max_steps=48, use_cpu=True, disable_tqdm=True)
    callback = CurriculumCallback(every=3)
    Watched(
        model_of(), arguments, train_dataset=data_of(schedule), segments=4, callbacks=[callback]
    ).train()
    for first in range(0, 48, 4):
        assert all(torch.equal(rows[first], rows[first + i]) for i in range(4))
    changes = [step for step in range(1, 48) if lengths[step] > lengths[step - 1]]
    assert len(changes) > 2
    assert all(step % 4 == 0 for step in changes)


def test_training_on_goes_on_in_the_data(tmp_path):
    schedule = Progressive(max_length=6, threshold=0.01, retreat=0.0, min_answers=1)
    trainer = trainer_of(tmp_path, data=data_of(schedule), max_steps=20)
    trainer.train()
    assert (trainer.data.step, trainer.data.difficulty()) == (20, 3)
    trainer.train()
    assert (trainer.data.step, trainer.data.difficulty()) == (40, 5)
    workers = trainer_of(tmp_path / "workers", max_steps=20, dataloader_num_workers=1)
    workers.train()
    workers.train()
    assert workers.data.step == 40


def test_any_plan_trains_with_any_draw_of_steps(tmp_path):
    model = model_of(memory="grow", plan=FlowPlan.read_once())
    trainer, seen = trainer_of(tmp_path, model, max_steps=12, eval_samples=8), []
    supervised = trainer.step_loss.supervised
    trainer.step_loss.supervised = lambda n_step, *rest: (
        seen.append(n_step) or supervised(n_step, *rest)
    )
    trainer.train()
    drawn = [trainer.data.batch(i, details=True)["n_step"] for i in range(12)]
    assert 1 in drawn
    assert seen == [max(2, n) for n in drawn]  # a plan's fewest


def test_evaluation_is_on_the_data_that_was_given(tmp_path):
    other = CurriculumDataset(make_task("reverse"), Frontier(max_length=6), batch_size=8)
    trainer = trainer_of(tmp_path, eval_dataset=other, eval_samples=64)
    expected = evaluate_steps(trainer.model, other, [6], samples=64).cells[0][0].token
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(expected)
    assert trainer.evaluate(trainer.data)["eval_accuracy"] != pytest.approx(expected)
    with pytest.raises(ValueError, match=r"ThinkerTrainer:.*evaluate"):
        trainer.evaluate([1, 2])


class Broken(AllSteps):
    """Not finite at some calls, counted from 0."""

    def __init__(self, *bad):
        super().__init__()
        self.bad, self.calls = bad, 0

    def settings(self):  # a run may be continued with the loss that is not broken
        return LastAndRandom().settings()

    def forward(self, *arguments):
        self.calls += 1
        loss = super().forward(*arguments)
        return loss * math.nan if self.calls - 1 in self.bad else loss


def test_with_rewinds_a_step_whose_loss_is_not_finite_is_skipped_and_counted(tmp_path):
    trainer = trainer_of(
        tmp_path,
        max_steps=12,
        logging_steps=4,
        step_loss=Broken(5),
        callbacks=[RewindOnPeak(every=100)],
    )
    held = {}

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            held[state.global_step] = copy.deepcopy(model.state_dict())

    trainer.add_callback(Look())
    trainer.train()
    assert all(torch.equal(v, held[6][k]) for k, v in held[5].items())
    assert not all(torch.equal(v, held[7][k]) for k, v in held[6].items())
    logs = [r for r in trainer.state.log_history if "loss" in r]
    assert [r.get("losses_not_finite", 0) for r in logs] == [0, 1, 0]
    assert all(math.isfinite(r["loss"]) for r in logs)


def test_a_loss_that_is_not_finite_stops_a_run_without_rewinds(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=8, save_steps=2, step_loss=Broken(5))
    with pytest.raises(
        DeadRunError, match=r"the loss of step 6 is nan; the newest checkpoint is .*checkpoint-4;"
    ):
        trainer.train()
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    again = trainer_of(tmp_path, max_steps=8, save_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.resumed_from == tmp_path / "checkpoint-4"


@pytest.mark.parametrize("step", [8, 9, 12])
def test_with_rewinds_parameters_that_are_not_finite_are_never_saved(step, tmp_path):
    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == step:
                with torch.no_grad():
                    model.readout.head.weight[0, 0] = math.inf

    for every in (5, 20):
        out = tmp_path / str(every)
        rewind = RewindOnPeak(every=every)
        trainer = trainer_of(out, max_steps=12, save_steps=4, callbacks=[Spoil(), rewind])
        trainer.train()
        assert all(p.isfinite().all() for p in trainer.model.parameters())
        for path in out.glob("checkpoint-*/model.safetensors"):
            assert all(tensor.isfinite().all() for tensor in load_file(path).values())


def test_a_run_without_a_finite_loss_says_so_and_keeps_its_weights(tmp_path):
    trainer = trainer_of(
        tmp_path,
        max_steps=8,
        logging_steps=4,
        step_loss=Broken(*range(8)),
        callbacks=[RewindOnPeak(every=100)],
    )
    before = copy.deepcopy(trainer.model.state_dict())
    result = trainer.train()
    assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
    logs = trainer.state.log_history
    assert all(math.isnan(r["loss"]) for r in logs if "loss" in r)
    assert all(math.isnan(r["train_loss"]) for r in logs if "train_loss" in r)
    assert result.global_step == 8


def test_a_run_that_never_recovers_stops_at_its_limit(tmp_path, caplog):
    rewind = RewindOnPeak(every=2, limit=3)
    trainer = trainer_of(
        tmp_path, max_steps=40, callbacks=[rewind], step_loss=Broken(*range(6, 40))
    )
    trainer.train()
    assert rewind.count == 3
    # three windows were good, three were given up, one is too many
    assert trainer.state.global_step == 14
    assert "after 3 rewinds, the loss peaks again at step 14" in caplog.text
    assert trainer.lr_scheduler.state_dict()["base_lrs"][0] == pytest.approx(3e-3 / 8)
    assert trainer.state.log_history[-1]["rewound_to_step"] == rewind.best["step"] < 6


@pytest.mark.parametrize(
    "rate",
    [pytest.param(3.0, marks=pytest.mark.slow), 10.0, pytest.param(30.0, marks=pytest.mark.slow)],
)
def test_an_explosion_ends_at_or_below_the_best_loss_seen(rate, tmp_path):
    settings = {
        "max_steps": 300,
        "learning_rate": rate,
        "warmup_steps": 0,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "lr_scheduler_kwargs": None,
    }

    def trained(*callbacks):
        data = CurriculumDataset(
            make_task("copy", symbols=4), Frontier(max_length=3), batch_size=32
        )
        model = model_of(vocab_size=4, step_update="replace")  # whose latents grow
        trainer = trainer_of(tmp_path, model, data, callbacks=[*callbacks], **settings)
        trainer.train()
        return trainer

    def loss_of(trainer):
        trainer.model.eval()
        batch = trainer.data.held_out(256, 3, details=True)
        with torch.no_grad():
            return float(trainer.model(batch["input_ids"], n_step=3, labels=batch["labels"]).loss)

    rewind = RewindOnPeak(every=10)
    exploded, rewound = trained(), trained(rewind)
    assert rewind.count > 0
    assert loss_of(exploded) > 1.5  # chance is log 4, 1.39
    # which is of 10 training batches of 96 symbols
    assert loss_of(rewound) <= rewind.best["loss"] + 0.06


def test_a_wider_margin_makes_fewer_peaks(tmp_path):
    counts = []
    for margin in (0.0, 100.0):
        rewind = RewindOnPeak(factor=1.0, margin=margin, every=2)
        trainer_of(tmp_path, max_steps=12, callbacks=[rewind]).train()
        counts.append(rewind.count)
    assert counts[0] > counts[1] == 0


def test_a_peak_in_a_last_window_that_is_not_whole_is_seen(tmp_path):
    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 45:
                with torch.no_grad():
                    model.readout.head.weight.mul_(-50)

    trainer = trainer_of(tmp_path, max_steps=50, callbacks=[Spoil(), RewindOnPeak(every=20)])
    trainer.train()
    last = trainer.state.log_history[-1]
    assert (last["rewinds"], last["rewound_to_step"]) == (0, 20)
    assert trainer.model.readout.head.weight.abs().max() < 5


def test_an_easy_beginning_is_not_better_than_a_hard_end(tmp_path):
    """After one early rewind, a curriculum that has grown keeps what it has learned."""

    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 25:
                with torch.no_grad():
                    model.readout.head.weight.mul_(-50)

    class Growing(Frontier):
        """A frontier that moves from 1 to the longest in 50 batches."""

        def difficulty(self, step, state):
            return 1 + (self.max_length - 1) * min(1.0, step / 50)

        def lengths(self, generator, batch, step, state):
            return self._frontier(generator, batch, round(self.difficulty(step, state)), self.share)

    data = data_of(Growing(max_length=6))
    trainer = trainer_of(
        tmp_path, data=data, max_steps=60, callbacks=[Spoil(), RewindOnPeak(every=10)]
    )
    trainer.train()
    rewinds = [r["step"] for r in trainer.state.log_history if "rewinds" in r]
    assert rewinds == [30]


def test_what_callbacks_know_is_theirs_whatever_others_come(tmp_path):
    def run(out, *callbacks, **options):
        trainer = trainer_of(
            out, data=data_of(Progressive(max_length=6)), max_steps=24, callbacks=[*callbacks]
        )
        trainer.args.save_strategy, trainer.args.save_steps = "steps", 12
        trainer.train(**options)
        return trainer

    first = RewindOnPeak(every=5)
    run(tmp_path, first)
    again, new = RewindOnPeak(every=5), CurriculumCallback(every=7)
    run(tmp_path / "more", new, again, resume_from_checkpoint=tmp_path / "checkpoint-12")
    assert again.first == first.first
    known, unknown = RewindOnPeak(every=5), RewindOnPeak(every=5)  # the checkpoint knows of one
    run(tmp_path / "later", known, unknown, resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    assert known.first == first.first
    assert math.isfinite(unknown.best["loss"])


def test_a_second_run_begins_anew(tmp_path):
    rewind = RewindOnPeak(every=5)
    trainer = trainer_of(tmp_path, max_steps=10, callbacks=[rewind])
    trainer.train()
    before = rewind.best
    trainer.train()
    assert rewind.best is not before
    assert rewind.count == 0


def test_a_callback_that_is_added_later_knows_its_trainer(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=4)
    trainer.add_callback(RewindOnPeak())
    trainer.add_callback(RewindOnPeak)
    trainer.train()


def test_a_checkpoint_cut_short_is_passed_over(tmp_path, caplog):
    trainer_of(tmp_path, max_steps=6, save_strategy="steps", save_steps=2).train()
    state = tmp_path / "checkpoint-6" / "thinker_state.pt"
    state.write_bytes(state.read_bytes()[:100])
    begins = []

    class NotesBegin(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            begins.append(state.global_step)

    again = trainer_of(tmp_path, max_steps=6, callbacks=[NotesBegin()])
    again.train(resume_from_checkpoint=True)
    assert "checkpoint-6 is not a complete checkpoint and is skipped" in caplog.text
    assert begins == [4]
    with pytest.raises(ValueError, match=r"ThinkerTrainer:.*thinker_state[.]pt"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    with pytest.raises(ValueError, match=r"ThinkerTrainer:.*checkpoint"):
        trainer_of(tmp_path / "none").train(resume_from_checkpoint=True)


def test_a_users_arguments_stay_as_they_are(tmp_path):
    arguments = thinker_arguments(tmp_path, per_device_train_batch_size=3, use_cpu=True)
    trainer = ThinkerTrainer(model_of(), arguments, train_dataset=data_of())
    assert (arguments.per_device_train_batch_size, trainer.args.per_device_train_batch_size) == (
        3,
        8,
    )


def test_workers_change_nothing(tmp_path):
    models = []
    for workers in (0, 2):
        trainer = trainer_of(tmp_path, max_steps=30, dataloader_num_workers=workers)
        trainer.train()
        models.append(trainer.model)
    same(*models, rtol=0, atol=0)


def test_groups_decay_matrices_only():
    model = model_of(latent_init="table", num_static_tokens=2)
    decayed, rest = parameter_groups(model, learning_rate=1.0, weight_decay=0.3)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    names = {id(p): n for n, p in model.named_parameters()}
    spared = {names[id(p)] for p in rest["params"]}
    assert {"latents", "static_tokens", "embedding.weight", "positions.input.weight"} <= spared
    assert all("norm" in n or n in spared for n, p in model.named_parameters() if p.dim() == 1)
    assert {names[id(p)] for p in decayed["params"]} | spared == set(names.values())
    assert all(p.dim() == 2 for p in decayed["params"])


def test_grids_lengths_and_plots(tmp_path):
    model, data = model_of(latent_init="noise", n_step=2).train(), data_of(Frontier(max_length=4))
    grid = evaluate_grid(model, data, n_latents=[2, 5], n_steps=[3, 1], samples=32)
    assert model.training
    batch = data.held_out(32, 4, details=True)
    model.eval()
    for i, n in enumerate((2, 5)):
        for j, steps in enumerate((3, 1)):
            logits = model(
                batch["input_ids"], batch["attention_mask"], n_latent=n, n_step=steps, out_len=4
            ).logits
            right = logits.argmax(-1) == batch["labels"]
            assert grid.cells[i][j].token == pytest.approx(float(right.float().mean()))
            assert grid.cells[i][j].sequence == pytest.approx(float(right.all(1).float().mean()))
    whole = FlowPlan.read_once(memory=False)
    once = evaluate_grid(model, data, n_latents=[4], n_steps=[2, 3], samples=32, plan=whole)
    logits = model(
        batch["input_ids"], batch["attention_mask"], n_latent=4, plan=whole, n_step=3, out_len=4
    ).logits
    assert once.cells[0][1].token == pytest.approx(
        float((logits.argmax(-1) == batch["labels"]).float().mean())
    )
    curves = evaluate_steps(model, data, [4], n_latent=2, n_steps=[3], samples=32)
    assert curves.cells[0][0] == grid.cells[0][0]
    assert len(str(grid).splitlines()) == 3
    grid.plot().savefig(tmp_path / "grid.png")
    curves = {line.get_label(): list(line.get_ydata()) for line in grid.plot().axes[-1].get_lines()}
    for count, cells in zip(grid.n_latents, grid.cells, strict=True):
        assert curves[f"{count} latents"] == pytest.approx([cell.token for cell in cells])
    assert (tmp_path / "grid.png").stat().st_size > 5000
    with pytest.raises(ValueError, match=r"evaluate_grid:.*\[8\]"):
        evaluate_grid(model, data, n_latents=8, n_steps=[1])
    with pytest.raises(ValueError, match=r"evaluate_grid:.*n_latents.*\[\].*n_steps.*\[1\]"):
        evaluate_grid(model, data, n_latents=[], n_steps=[1])


def test_the_trainer_evaluates_and_logs(tmp_path):
    trainer = trainer_of(
        tmp_path,
        max_steps=8,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        eval_lengths=[2, 6],
        eval_samples=16,
    )
    trainer.train()
    history = trainer.state.log_history
    assert [r["step"] for r in history if "eval_accuracy_6" in r] == [4, 8]
    assert all(0 <= r["accuracy"] <= 1 for r in history if "loss" in r)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda out: trainer_of(out, model_of(vocab_size=8)),
            "vocab_size is 8, but the task Copy.* needs 16",
        ),
        (
            lambda out: trainer_of(out, model_of(max_input_length=5)),
            "max_input_length is 5, but .* needs 6",
        ),
        (
            lambda out: trainer_of(
                out, data=data_of(Progressive(max_length=6)), dataloader_num_workers=2
            ),
            r"ThinkerTrainer: dataloader_num_workers is 2; expected 0, since Progressive uses the",
        ),
        (lambda out: RewindOnPeak(factor=0.5), r"factor=0\.5"),
        (lambda out: RewindOnPeak(cooling=0.0), r"cooling=0\.0"),
        (
            lambda out: trainer_of(out, segments=0),
            r"ThinkerTrainer:.*segments.*0.*1",
        ),
        (
            lambda out: trainer_of(out, segments=2, gradient_accumulation_steps=2),
            r"ThinkerTrainer:.*one.*1",
        ),
        (
            lambda out: trainer_of(
                out,
                model_of(vocab_size=10, max_input_length=11),
                data_of(Fixed(max_length=2), make_task("hops")),
                segments=2,
            ),
            r"ThinkerTrainer:.*2.*Hops\(size=10.*permutation=True\)",
        ),
        (
            lambda out: trainer_of(
                out,
                model_of(
                    vocab_size=17,
                    latent_init="tokens",
                    num_latents=None,
                    window=2,
                    max_input_length=7,
                    max_output_length=7,
                ),
                data_of(task=AtTokens(make_task("copy"))),
                segments=2,
                step_loss=Reach(),
            ),
            r"ThinkerTrainer:.*1.*another",
        ),
        (
            lambda out: trainer_of(
                out,
                model_of(vocab_size=5, latent_init="tokens", num_latents=None, window=2),
                CurriculumDataset(
                    AtTokens(TensorTask(torch.ones(9, 5).long(), torch.ones(9, 5).long())),
                    n_step=4,
                    holdout=0.0,
                ),
                step_loss=Reach(),
            ),
            r"ThinkerTrainer:.*at least 5 positions away, but 4 steps reach only 4",
        ),
        (
            lambda out: evaluate_steps(model_of(), data_of(), [6], n_steps=4),
            r"evaluate_steps:.*n_steps.*4.*\[20\]",
        ),
        (
            lambda out: trainer_of(out, draw_plan=FlowPlan.read_once()),
            r"ThinkerTrainer:.*draw_plan.*FlowPlan",
        ),
        (
            lambda out: trainer_of(out).predict([]),
            r"ThinkerTrainer:.*model\(tokens.*mask\)",
        ),
        (
            lambda out: evaluate_steps(model_of(), data_of(), [6], plan=FlowPlan.random),
            r"LatentThinker:.*plan",
        ),
        (
            lambda out: evaluate_steps(model_of(), data_of(), [6], n_steps=[2], plan="x"),
            r"LatentThinker:.*'x'",
        ),
        (
            lambda out: trainer_of(out, draw_plan=lambda generator, n_step: None),
            r"ThinkerTrainer:.*draw_plan",
        ),
        (
            lambda out: trainer_of(
                out,
                draw_plan=lambda g, n: FlowPlan.random(0.3, n, generator=g),
            ),
            r'LatentThinker:.*"none"',
        ),
        (
            lambda out: trainer_of(out, model_of(causal=True)),
            r"ThinkerTrainer:.*Copy\(symbols=16\).*AtTokens\(task\)",
        ),
        (
            lambda out: trainer_of(out, data=data_of(task=AtTokens(make_task("copy")))),
            r"ThinkerTrainer:.*plain",
        ),
        (
            lambda out: trainer_of(out, data=data_of(n_latent=(2, 9))),
            r"ThinkerTrainer:.*4 latents.*9",
        ),
        (
            lambda out: trainer_of(out, model_of(plan=FlowPlan.read_once())),
            r"ThinkerConfig:.*'none'",
        ),
        (
            lambda out: trainer_of(out, step_loss=AllSteps),
            r"ThinkerTrainer:.*step_loss.*expected.*StepLoss",
        ),
        (lambda out: trainer_of(out, torch.nn.Linear(2, 2)), "model is Linear"),
        (lambda out: trainer_of(out, eval_lengths=5), "eval_lengths is 5"),
        (lambda out: trainer_of(out, eval_samples=0), "eval_samples is 0, expected"),
        (lambda out: data_of(n_step="3"), r"CurriculumDataset:.*n_step.*'3'.*1"),
        (lambda out: data_of(n_step=[1, 2, 3]), r"CurriculumDataset:.*n_step.*\[1.*2.*3\]"),
        (lambda out: data_of(n_step=lambda length: 0.5), r"CurriculumDataset:.*n_step.*0.5"),
        (lambda out: data_of(batch_size="8"), "batch_size is '8'"),
        (lambda out: data_of(holdout="0.1"), "holdout is '0.1'"),
        (
            lambda out: evaluate_steps(model_of(), make_task("copy"), [6], n_steps=[2]),
            r"evaluate_steps:.*data",
        ),
        (
            lambda out: evaluate_steps(
                model_of(vocab_size=17, latent_init="tokens", num_latents=None),
                data_of(),
                [6],
                n_steps=[2],
            ),
            r"evaluate_steps:.*latent_init=\"tokens\".*expected.*AtTokens",
        ),
        (
            lambda out: trainer_of(out, model_of(memory="static", memory_size=4)),
            r"LatentThinker:.*autograd",
        ),
    ],
)
def test_bad_input_is_refused(call, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


def test_a_foreign_checkpoint_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train()
    (tmp_path / "checkpoint-2" / "thinker_state.pt").unlink()
    with pytest.raises(ValueError, match=r"ThinkerTrainer:.*thinker_state[.]pt"):
        trainer_of(tmp_path, max_steps=4).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-2")
        )


def test_after_a_rewind_no_best_point_is_of_the_path_that_was_left(tmp_path):
    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                if state.global_step == 10:
                    model.readout.head.weight[0, 0] = math.inf
                if state.global_step == 17:
                    model.readout.head.weight.mul_(-50)

    rewind = RewindOnPeak(every=5)
    trainer_of(tmp_path, max_steps=30, save_steps=4, callbacks=[Spoil(), rewind]).train()
    for path in tmp_path.glob("checkpoint-*/model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())


def test_a_callback_that_is_added_later_goes_on_as_the_others_do(tmp_path):
    def run(folder, **options):
        rewind = RewindOnPeak(factor=1.0, margin=0.0, every=5)
        trainer = trainer_of(folder, max_steps=24, save_steps=12)
        trainer.add_callback(rewind)
        trainer.train(**options)
        return trainer.model.state_dict(), rewind.first

    whole, first = run(tmp_path / "a")
    resumed, again = run(
        tmp_path / "b", resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-12")
    )
    assert first == again
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_other_schedules_of_the_rate_train(kind, tmp_path):
    assert thinker_arguments(tmp_path, lr_scheduler_type=kind).lr_scheduler_kwargs in (None, {})
    usual = thinker_arguments(tmp_path, lr_scheduler_type="cosine_with_min_lr")
    assert usual.lr_scheduler_kwargs == {"min_lr_rate": 0.05}


def test_a_run_is_not_resumed_with_another_loss_or_model(tmp_path):
    trainer_of(tmp_path, max_steps=4, save_steps=2).train()
    other = trainer_of(tmp_path, max_steps=8, save_steps=2, step_loss=LastAndRandom(random=0.5))
    with pytest.raises(
        ValueError, match=r"the checkpoint was saved with loss random 0.3; expected 0.5"
    ):
        other.train(resume_from_checkpoint=True)
    other = trainer_of(tmp_path, max_steps=8, save_steps=2, step_loss=AllSteps())
    with pytest.raises(
        ValueError, match="saved with loss class 'LastAndRandom'; expected 'AllSteps'"
    ):
        other.train(resume_from_checkpoint=True)
    other = trainer_of(tmp_path, max_steps=8, save_steps=2)
    other._settings["step_noise"] = 0.5
    with pytest.raises(ValueError, match=r"saved with step_noise 0.1; expected 0.5"):
        other.train(resume_from_checkpoint=True)
    # a setting that did not exist when the checkpoint was written is taken to be the same
    file = tmp_path / "checkpoint-4" / "thinker_state.pt"
    state = torch.load(file)
    del state["settings"]["step_noise"]
    torch.save(state, file)
    other.train(resume_from_checkpoint=True)
    assert other.state.global_step == 8


def test_with_reach_a_first_batch_of_few_answers_is_no_bar(tmp_path):
    """Its loss is near 0, and every later one would be a peak beside it."""
    texts = [format(k, f"0{size}b") for size in (3, 4, 5) for k in range(2**size)]
    task = RowsTask([(text, "".join(2 * symbol for symbol in text)) for text in texts])
    preset = presets.scan()
    # answers follow the input: in three steps none of them is within reach
    data = next(
        found
        for found in (preset.data(task, batch_size=16, seed=seed) for seed in range(99))
        if found.batch(0)["n_step"] <= 3
    )
    torch.manual_seed(0)
    model = preset.thinker(data)
    rewind = RewindOnPeak(every=5)
    trainer = preset.trainer(model, data, tmp_path, max_steps=40, use_cpu=True)
    trainer.add_callback(rewind)
    trainer.train()
    assert rewind.count == 0


def test_few_rows_are_said_and_give_no_advice():
    few = Curves((6, 8), ((1, 2), (1, 2)), ((Accuracy(0.9, 0.5, 6), Accuracy(0.9, 0.34, 6)),) * 2)
    assert few.remarks() == [
        "few rows, so the percentages are imprecise: 6 at length 6, 6 at length 8"
    ]
    many = Curves((6,), ((1, 2),), ((Accuracy(0.9, 0.5, 512), Accuracy(0.9, 0.34, 512)),))
    assert "Use n_step=1" in many.remarks()[0]
