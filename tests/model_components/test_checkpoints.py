"""A checkpoint that a kill or a full disk cut short is passed over, whatever file it was."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from model_components._checkpoints import newest_whole, problem_of
from model_components._trainer import StepTrainer
from tests.support.models import tiny

ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(3, 35).view(8, 4)]


class Begins(TrainerCallback):
    """Notes the step at which a training begins."""

    def __init__(self):
        self.steps = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


def trainer_of(folder, begins=None):
    arguments = TrainingArguments(
        str(folder),
        max_steps=3,
        save_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
    )
    callbacks = [] if begins is None else [begins]
    return StepTrainer(tiny("gpt2"), arguments, train_dataset=ROWS, callbacks=callbacks)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trainer_of(folder).train()
    return folder


FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.mark.parametrize("harm", ["cut", "empty"])
@pytest.mark.parametrize("name", FILES)
def test_the_newest_whole_checkpoint_is_taken(name, harm, trained, tmp_path, caplog):
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    file = out / "checkpoint-3" / name
    file.write_bytes(b"" if harm == "empty" else file.read_bytes()[:-50])
    assert newest_whole(out, "test") == out / "checkpoint-2"
    assert f"checkpoint-3 is not a complete checkpoint and is skipped: {name}" in caplog.text
    begins = Begins()
    trainer_of(out, begins).train(resume_from_checkpoint=True)
    assert begins.steps == [2]


def test_a_checkpoint_without_its_state_is_refused(trained, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    assert not problem_of(out / "checkpoint-3")
    assert problem_of(out / "checkpoint-3", ["own.pt"]) == "it has no own.pt"
    (out / "checkpoint-3" / "trainer_state.json").unlink()
    with pytest.raises(
        ValueError, match=r"expected a complete checkpoint, got .*trainer_state\.json"
    ):
        trainer_of(out).train(resume_from_checkpoint=str(out / "checkpoint-3"))
    shutil.rmtree(out / "checkpoint-1")
    shutil.rmtree(out / "checkpoint-2")
    with pytest.raises(ValueError, match="has no complete checkpoint to resume from"):
        trainer_of(out).train(resume_from_checkpoint=True)
    assert newest_whole(tmp_path / "none", "test") is None


def test_a_checkpoint_without_weights_is_not_whole(trained, tmp_path):
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(trained / "checkpoint-3", folder)
    (folder / "model.safetensors").unlink()
    assert problem_of(folder) == "it has no weights"


def test_files_that_torch_reads_are_whole(trained, tmp_path):
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(trained / "checkpoint-3", folder)
    (folder / "of_a_user.pt").mkdir()
    torch.save({}, folder / "old.pt", _use_new_zipfile_serialization=False)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(9)}, folder / "optimizer.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert not problem_of(folder)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_an_optimizer_is_not_whole(name, trained, tmp_path):
    shutil.copytree(trained / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / name).unlink()
    assert (
        problem_of(tmp_path / "checkpoint-3") == f"it has no {name} (save_only_model leaves it out)"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_step": 2}, "has global_step 2, expected 3"),
        ({"global_step": "x"}, "is damaged (global_step is 'x')"),
        ({"train_batch_size": None}, "is damaged (train_batch_size is None)"),
        ({"log_history": 3}, "is damaged (log_history is 3)"),
        ([], "is damaged (it holds a list)"),
    ],
)
def test_a_state_that_was_changed_by_hand_is_not_whole(change, message, trained, tmp_path):
    shutil.copytree(trained / "checkpoint-3", tmp_path / "checkpoint-3")
    file = tmp_path / "checkpoint-3" / "trainer_state.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps({**state, **change} if isinstance(change, dict) else change))
    assert problem_of(tmp_path / "checkpoint-3") == f"trainer_state.json {message}"


def test_what_an_optimizer_cannot_be_made_of_is_told(trained, tmp_path):
    shutil.copytree(trained / "checkpoint-3", tmp_path / "checkpoint-3")
    torch.save([3], tmp_path / "checkpoint-3" / "optimizer.pt")
    with pytest.raises(ValueError, match=r"StepTrainer: .*checkpoint-3 cannot be read"):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)


def test_numbers_of_checkpoints_are_compared_as_numbers(tmp_path, trained):
    for number in (9, 10):
        folder = tmp_path / f"checkpoint-{number}"
        shutil.copytree(trained / "checkpoint-1", folder)
        state = json.loads((folder / "trainer_state.json").read_text())
        (folder / "trainer_state.json").write_text(json.dumps({**state, "global_step": number}))
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_whole(tmp_path, "test") == tmp_path / "checkpoint-10"
