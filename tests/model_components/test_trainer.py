"""`StepTrainer` stops where numbers are not finite, and keeps the last good checkpoint."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from model_components import DeadRunError
from model_components._trainer import StepTrainer
from tests.support.logs import logs_of
from tests.support.models import tiny
from tests.support.ranks import in_two_processes

ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(3, 35).view(8, 4)]


class Spoils(TrainerCallback):
    """Puts an infinity into a gradient or its norm before a step, or into a parameter after it."""

    def __init__(self, what, step):
        self.what = what
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **rest):
        weight = model.transformer.wte.weight
        factors = {"gradient": math.inf, "norm": 1e30}
        if self.what in factors and state.global_step == self.step - 1:
            weight.register_hook(lambda gradient: gradient * factors[self.what])

    def on_step_end(self, args, state, control, model=None, **rest):
        if self.what == "parameter" and state.global_step == self.step:
            with torch.no_grad():
                model.transformer.wte.weight[0, 0] = math.inf


def trainer_of(folder, *callbacks, **changes):
    options = {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 2}
    options |= {"use_cpu": True, "report_to": "none", "logging_steps": 4, "disable_tqdm": True}
    arguments = TrainingArguments(str(folder), **options | changes)
    torch.manual_seed(0)
    model = tiny("gpt2", pad_token_id=0)
    return StepTrainer(model, arguments, train_dataset=ROWS, callbacks=[*callbacks])


@pytest.mark.parametrize("what", ["gradient", "norm", "parameter"])
def test_numbers_that_are_not_finite_stop_a_run_before_its_checkpoint(what, tmp_path):
    trainer = trainer_of(tmp_path, Spoils(what, 4), save_total_limit=1)
    with pytest.raises(DeadRunError, match=f"StepTrainer: expected finite numbers, .* {what}s? "):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    again = trainer_of(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert all(p.isfinite().all() for p in again.model.parameters())


@pytest.mark.parametrize("clipped", [1.0, 0.0])
def test_what_clipping_makes_of_gradients_is_seen(clipped, tmp_path):
    """A parameter that the optimizer does not have counts for the norm."""
    trainer = trainer_of(tmp_path, max_steps=2, max_grad_norm=clipped, save_strategy="no")
    trained = list(trainer.model.transformer.h.parameters())
    trainer.optimizer = torch.optim.SGD(trained, 0.1)
    before = [p.detach().clone() for p in trained]
    trainer.model.transformer.wpe.weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(DeadRunError, match="gradients of step 1 or their norm are not finite"):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trained, strict=True))


def test_a_training_step_needs_no_optimizer(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=2)
    batch = next(iter(trainer.get_train_dataloader()))
    assert trainer.training_step(trainer.model, batch, torch.tensor(8)).isfinite()


def test_a_run_that_ends_on_numbers_that_are_not_finite_says_so(tmp_path):
    trainer = trainer_of(tmp_path, Spoils("parameter", 6), save_strategy="no")
    with pytest.raises(
        DeadRunError, match="the parameters contain NaN or infinity at the end of training"
    ):
        trainer.train()


def test_batches_of_like_length_are_the_same_after_a_resume(tmp_path):
    changes = {"train_sampling_strategy": "group_by_length", "num_train_epochs": 3}
    changes |= {"max_steps": 10}  # an epoch is 4 steps
    whole = trainer_of(tmp_path, **changes)
    whole.train()
    again = trainer_of(tmp_path, **changes)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_frozen_parameter_may_be_infinite(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=2)
    weight = trainer.model.transformer.wpe.weight.requires_grad_(False)
    weight[-1] = -math.inf  # a position that no row has
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), 1e-3)
    trainer.train()


def test_a_step_that_overflows_in_float16_is_the_scalers(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=3)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    losses = iter([1.0, math.inf, 3.0])
    trainer._loss_of_step = next(losses)
    trainer.check_step()
    trainer._loss_of_step = next(losses)
    trainer.check_step()
    assert (trainer._losses.total, trainer._losses.steps) == (1.0, 1)


def test_a_loss_that_a_user_logs_stays(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.train()
    trainer.log({"loss": 123.0})
    assert trainer.state.log_history[-1]["loss"] == 123


@pytest.mark.parametrize("accumulated", [1, 2])
def test_losses_that_are_logged_are_the_stock_trainers_and_survive_a_resume(accumulated, tmp_path):
    changes = {"gradient_accumulation_steps": accumulated}
    whole = trainer_of(tmp_path, **changes)
    output = whole.train()
    losses = [row["loss"] for row in whole.state.log_history if "loss" in row]
    assert len(losses) == 1
    assert output.training_loss == output.metrics["train_loss"] > 0
    stock = trainer_of(tmp_path / "stock", **changes)
    stock.log = super(StepTrainer, stock).log
    stock.train()
    assert losses[0] == pytest.approx(stock.state.log_history[0]["loss"], rel=1e-6)
    assert output.training_loss == pytest.approx(
        stock.state.log_history[-1]["train_loss"], rel=1e-6
    )
    again = trainer_of(tmp_path, **changes)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logs_of(again) == logs_of(whole)
    done = trainer_of(tmp_path, **changes)
    assert done.train(resume_from_checkpoint=True).training_loss == output.training_loss


TWO = """
import math
from tests.model_components.test_trainer import trainer_of
from tests.support.models import tiny
from tests.support.ranks import in_two_processes

changes = {"train_sampling_strategy": "group_by_length", "max_steps": 9, "num_train_epochs": 3}
changes |= {"save_steps": 6, "per_device_train_batch_size": 1, "ddp_backend": "gloo"}
whole = trainer_of(out, **changes)  # an epoch is 4 steps of two processes
whole.train()
again = trainer_of(out, **changes)
again.train(resume_from_checkpoint=f"{out}/checkpoint-6")
parameters = [list(trainer.unwrapped().parameters()) for trainer in (whole, again)]
same = all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))

broken = trainer_of(out + "/broken", **changes | {"save_strategy": "no"})
broken._loss_of_step = math.inf if dist.get_rank() else 1.0
broken.create_optimizer()
said = ""
try:
    broken.check_step()
except Exception as error:
    said = str(error)
open(f"{out}/{dist.get_rank()}.txt", "w").write(f"{same} {'gradients' in said or 'loss' in said}")
"""


def test_two_processes_see_the_same_batches_after_a_resume_and_stop_together(tmp_path):
    in_two_processes(TWO, tmp_path / "out")
    for rank in range(2):
        assert (tmp_path / "out" / f"{rank}.txt").read_text() == "True True"
