"""A folder is one run's at a time, and only the same run goes on in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import save_file
from transformers import TrainerState

from model_components._checkpoints import newest_whole
from model_components._folders import OutputError
from model_components._runs import RunFolder
from model_components._stages import Stage

_HISTORIES = {
    "max_examples": 40,
    "stateful_step_count": 25,
    "deadline": None,
    "derandomize": True,  # the suite gives the same answer each time
    "database": None,
}
FACTS = {"seed": 0, "data": {"files": ["a"], "hash": "1f"}}


def open_run(folder, facts=FACTS, **options):
    return RunFolder(folder, facts, "train", **options)


def facts_in(folder):
    facts = json.loads((folder / "run.json").read_text())
    assert facts.pop("command") == "train"
    return facts


def test_the_same_run_goes_on(tmp_path):
    for _ in range(2):
        with open_run(tmp_path / "run"):
            assert facts_in(tmp_path / "run") == FACTS
        assert os.listdir(tmp_path / "run") == ["run.json"]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            {**FACTS, "seed": 1},
            r"train to .*run: the run in this folder has other settings: seed is 0 there, got 1; give",
        ),
        ({**FACTS, "data": {**FACTS["data"], "hash": "2e"}}, r"data\.hash is '1f' there, got '2e'"),
        (
            {**FACTS, "data": {"hash": "1f"}},
            r"has other settings: .*data\.files is \['a'\] there, got None",
        ),
        ({**FACTS, "more": 1}, "more is None there, got 1"),
    ],
)
def test_another_run_is_refused_by_what_differs(facts, message, tmp_path):
    with open_run(tmp_path / "run"):
        pass
    with pytest.raises(OutputError, match=message), open_run(tmp_path / "run", facts):
        pass
    with open_run(tmp_path / "run", facts, may_change=("seed", "more", "data.hash", "data.files")):
        pass
    with open_run(tmp_path / "run", facts, fresh=True):
        assert facts_in(tmp_path / "run") == facts


def test_data_that_changed_are_refused(tmp_path):
    with open_run(tmp_path / "run", contents={"a.txt": "1f"}):
        pass
    message = "a.txt changed since the run in this folder began; undo the change"
    changed = open_run(tmp_path / "run", contents={"a.txt": "2e"})
    with pytest.raises(OutputError, match=message), changed:
        pass


def test_notes_and_empty_settings_do_not_matter(tmp_path):
    with open_run(tmp_path / "run"):
        pass
    facts = json.loads((tmp_path / "run" / "run.json").read_text()) | {"note": "mine"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts))
    with open_run(tmp_path / "run", FACTS | {"options": {}}):
        pass


def test_the_second_of_two_runs_says_which_process_has_the_folder(tmp_path):
    code = (
        "import sys; from pathlib import Path; from model_components._runs import RunFolder\n"
        "with RunFolder(Path(sys.argv[1]), {}, 'train'):\n"
        "    print('open', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "open\n"
        message = rf"another run is writing to it now \(process {holder.pid} on .+\)$"
        with pytest.raises(OutputError, match=message), open_run(tmp_path / "run", {}):
            pass
        holder.kill()
    with open_run(tmp_path / "run", {}):  # which a killed run leaves free
        pass


def contents_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("mine", ["checkpoint-5/weights", "model/weights", "result.json"])
def test_folders_that_are_no_runs_are_left_alone(mine, fresh, tmp_path):
    (tmp_path / mine).parent.mkdir(exist_ok=True)
    (tmp_path / mine).write_text("years of work")
    before = contents_of(tmp_path)
    run = open_run(tmp_path, results=("model", "result.json"), fresh=fresh)
    with pytest.raises(OutputError, match="new folder or the folder of a run, got one"), run:
        pass
    (tmp_path / "run.json").write_text('{"sweep": 7}')
    with pytest.raises(OutputError, match=r"run\.json belongs to something else; choose"), run:
        pass
    assert contents_of(tmp_path) == sorted([*before, "run.json"])


def test_files_that_are_in_nobodys_way_are_allowed(tmp_path):
    (tmp_path / "train.log").touch()
    (tmp_path / ".model-components.lock").mkdir()  # somebody's, whatever it is
    with open_run(tmp_path):
        pass
    with open_run(tmp_path, fresh=True):
        pass
    assert contents_of(tmp_path) == [".model-components.lock", "run.json", "train.log"]


def test_a_fresh_run_removes_what_the_command_wrote_and_no_links(tmp_path):
    folder = tmp_path / "run"
    with open_run(folder, results=("done", "model")):
        for name in ("checkpoint-1", "checkpoint-2", "model"):
            (folder / name).mkdir()
        (folder / "checkpoint-1" / "trainer_state.json").touch()
        (folder / "done").touch()
    with open_run(folder, results=("done", "model"), fresh=True):
        pass
    # checkpoint-2 has no state of a trainer, and a model is replaced by the next
    assert contents_of(folder) == ["checkpoint-2", "model", "run.json"]
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "trainer_state.json").touch()
    (folder / "checkpoint-3").symlink_to(tmp_path / "scratch")
    with pytest.raises(OutputError, match="checkpoint-3 is a link"), open_run(folder, fresh=True):
        pass
    assert (tmp_path / "scratch" / "trainer_state.json").exists()


def test_of_several_processes_the_first_has_the_folder(tmp_path, monkeypatch):
    with open_run(tmp_path / "run"):
        monkeypatch.setenv("RANK", "1")
        with open_run(tmp_path / "run") as follower:
            follower.update()


def test_a_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with (
        pytest.raises(OutputError, match="folder cannot be made"),
        open_run(tmp_path / "thesis.tex"),
    ):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\0", "[" * 100_000])
def test_damaged_facts_are_refused(text, tmp_path):
    with open_run(tmp_path / "run"):
        pass
    (tmp_path / "run" / "run.json").write_text(text)
    for fresh in (False, True):
        with (
            pytest.raises(ValueError, match=r"train: expected a JSON object in .*run\.json, got"),
            open_run(tmp_path / "run", fresh=fresh),
        ):
            pass


class Runs(RuleBasedStateMachine):
    """Random operations on a run's folder, compared with a model of what it should hold."""

    def __init__(self):
        super().__init__()
        self.place = Path(tempfile.mkdtemp())
        self.copies = 0
        self.folder = self.place / "run"
        self.open: RunFolder | None = None
        self.facts: dict | None = None
        self.checkpoints: dict[int, bool] = {}  # whole or not
        self.parts: dict[str, tuple[int, float] | None] = {}  # seed and value; None where harmed
        self.finished = False

    def teardown(self):
        if self.open is not None:
            self.open.close()
        shutil.rmtree(self.place)

    @rule(seed=st.integers(0, 1), fresh=st.booleans())
    def start(self, seed=0, fresh=False):
        run = open_run(
            self.folder, {"seed": seed}, checkpoints="steps", results=("done",), fresh=fresh
        )
        if self.open is not None:
            self.refused(run, "another run is writing to it now")
        elif self.facts not in (None, {"seed": seed}) and not fresh:
            self.refused(run, "seed is")
        else:
            self.open = run.__enter__()
            if fresh and self.facts is not None:
                self.checkpoints = {}
                self.finished = False
            self.facts = {"seed": seed}

    def refused(self, run, message):
        with pytest.raises(OutputError, match=message):
            run.__enter__()

    @precondition(lambda self: self.open)
    @rule(step=st.integers(1, 12), whole=st.booleans())
    def save(self, step, whole):
        checkpoint = self.folder / "steps" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        TrainerState(global_step=step, max_steps=12, train_batch_size=1).save_to_json(
            str(checkpoint / "trainer_state.json")
        )
        for name in ("optimizer.pt", "scheduler.pt"):
            torch.save({}, checkpoint / name)
        weights = checkpoint / "model.safetensors"
        save_file({"a": torch.ones(2)}, weights)
        if not whole:
            weights.write_bytes(weights.read_bytes()[:-1])
        self.checkpoints[step] = whole

    @precondition(lambda self: self.open)
    @rule(name=st.sampled_from("ab"), value=st.floats(-2, 2, width=32))
    def store(self, name, value):
        self.stage(self.facts["seed"]).store(name, {"x": torch.tensor(value)})
        self.parts[name] = (self.facts["seed"], value)

    def stage(self, seed):
        return Stage(self.folder / "parts", f"seed {seed}", "train")

    @precondition(lambda self: self.open)
    @rule()
    def finish(self):
        (self.folder / "done").touch()
        self.finished = True

    @precondition(lambda self: self.open)
    @rule(killed=st.booleans())
    def end(self, killed):
        if killed:  # the system lets go of the lock, and the file that names the process stays
            self.open._lock.release()
        else:
            self.open.close()
        self.open = None

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def remove_a_checkpoint(self, data):
        step = data.draw(st.sampled_from(sorted(self.checkpoints)))
        shutil.rmtree(self.folder / "steps" / f"checkpoint-{step}")
        del self.checkpoints[step]

    @precondition(lambda self: any(self.parts.values()))
    @rule(data=st.data(), cut=st.booleans())
    def harm_a_part(self, data, cut):
        name = data.draw(st.sampled_from([n for n, kept in self.parts.items() if kept]))
        path = self.stage(0).path(name)
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] if cut else whole[:-1] + bytes([whole[-1] ^ 1]))
        self.parts[name] = None

    @precondition(lambda self: not self.open and self.facts)
    @rule()
    def copy(self):
        self.copies += 1
        there = self.place / f"copy-{self.copies}"
        shutil.copytree(self.folder, there)
        self.folder = there

    @invariant()
    def what_is_there_is_what_should_be(self):
        whole = [step for step, kept in self.checkpoints.items() if kept]
        newest = newest_whole(self.folder / "steps", "train")
        assert newest == (self.folder / "steps" / f"checkpoint-{max(whole)}" if whole else None)
        assert (self.folder / "done").exists() == self.finished
        for name in "ab":
            for seed in (0, 1):
                found = self.stage(seed).load(name)
                kept = self.parts.get(name)
                if kept is None or kept[0] != seed:
                    assert found is None
                else:
                    assert float(found[0]["x"]) == kept[1]


def test_random_histories_of_a_folder():
    run_state_machine_as_test(Runs, settings=settings(**_HISTORIES))


def test_a_file_in_the_place_of_checkpoints_is_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    with (
        pytest.raises(OutputError, match="checkpoints is a file, expected a folder"),
        RunFolder(tmp_path, {}, "train", checkpoints="checkpoints"),
    ):
        pass
    assert (tmp_path / "checkpoints").read_text() == "mine"
