"""Interrupted, doubled and starved runs: nothing half-written gets a final name; a second try
finishes the first."""

import errno
import fcntl
import gc
import json
import os
import random
import shutil
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import mergekit_lite.engine.output
from mergekit_lite import merge_models
from mergekit_lite.__main__ import main
from mergekit_lite.engine.hashing import hash_file
from model_components._folders import OutputError
from tests.support.kills import KILLS, run_killed

SCRIPT = f"""
import sys, mergekit_lite
{KILLS}
mergekit_lite.merge_models(sys.argv[2:4], "dare_ties", base_model=sys.argv[4], weight=0.5, density=0.5, seed=1,
    out=sys.argv[1], max_shard_size="40KB", threads=2, progress=False)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for number in range(3):
        (folder / str(number)).mkdir()
        generator = torch.Generator().manual_seed(number)
        state = {
            f"layers.{i}.w": torch.randn(60, 70, generator=generator).bfloat16() for i in range(24)
        }
        save_file(state, folder / str(number) / "model.safetensors")
    return [str(folder / str(n)) for n in range(3)]


def run(out, models, at=0):
    return run_killed([SCRIPT, out, models[1], models[2], models[0]], out.parent, at)


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}


def test_killed_at_random_points_then_finished(models, tmp_path):
    out = tmp_path / "out"
    changes = run(out, models)
    expected = contents(out)
    assert len(expected) > 4
    shutil.rmtree(out)
    partial, kept = tmp_path / ".out.partial", []
    for at in random.Random(0).sample(range(1, changes + 1), 8):
        run(out, models, at)
        if out.exists():  # killed after the end, or it went on from so much: whole
            assert contents(out) == expected
            assert json.loads((out / "merge_manifest.json").read_text())
            shutil.rmtree(out)
        else:
            record = partial / "progress.json"  # gone between its removal and the folder's renaming
            kept.append(len(json.loads(record.read_text())["shards"]) if record.exists() else 0)
    assert any(kept)  # some left whole files behind, which later ones went on from
    run(out, models)
    assert contents(out) == expected
    assert not partial.exists()


def merge(models, out, **extra):
    return merge_models(
        models[1:],
        base_model=models[0],
        method="task_arithmetic",
        weight=0.5,
        out=out,
        max_shard_size="40KB",
        progress=False,
        threads=1,
        **extra,
    )


def interrupt_after(monkeypatch, shards):
    """The run stops, as by Ctrl-C, when that many shards are recorded."""
    finish = mergekit_lite.engine.output.OutputFolder.finish
    done = []

    def finishing(self, name):
        finish(self, name)
        done.append(name)
        if len(done) == shards:
            raise KeyboardInterrupt

    monkeypatch.setattr(mergekit_lite.engine.output.OutputFolder, "finish", finishing)


def test_a_resumed_run_keeps_proved_shards_and_gives_the_same_bytes(models, tmp_path, monkeypatch):
    merge(models, tmp_path / "whole")
    with monkeypatch.context() as patched:
        interrupt_after(patched, 3)
        with pytest.raises(KeyboardInterrupt):
            merge(models, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    partial = tmp_path / ".out.partial"
    recorded = sorted(json.loads((partial / "progress.json").read_text())["shards"])
    assert len(recorded) == 3
    damaged = partial / "result" / recorded[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")  # its hash no longer proves it
    report = merge(models, tmp_path / "out")
    assert report.resumed == recorded[1:]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_another_merge_or_a_changed_input_starts_over(models, tmp_path, monkeypatch):
    for change in ({"fresh": True}, {"dtype": "float32"}, {"seed": 9}):
        with monkeypatch.context() as patched:
            interrupt_after(patched, 3)
            with pytest.raises(KeyboardInterrupt):
                merge(models, tmp_path / "out")
        report = merge(models, tmp_path / "out", **change)
        assert report.resumed == []
        shutil.rmtree(tmp_path / "out")


def test_two_runs_into_one_folder(models, tmp_path):
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    holder = os.open(partial, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(OutputError, match="another run is writing to it"):
        merge(models, tmp_path / "out")
    os.close(holder)
    merge(models, tmp_path / "out")


def test_a_folder_that_is_not_empty_is_left_alone(models, tmp_path):
    (tmp_path / "out").mkdir()
    merge(models, tmp_path / "out")  # empty: welcome
    before = contents(tmp_path / "out")
    with pytest.raises(OutputError, match="not empty"):
        merge(models, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_too_little_disk_is_seen_before(models, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(
        mergekit_lite.engine.output.shutil, "disk_usage", lambda path: usage(10**9, 10**9, 100)
    )
    with pytest.raises(OutputError, match="of free disk space"):
        merge(models, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up(models, tmp_path, monkeypatch):
    real, count = os.pwrite, iter(range(10**9))

    def filling(descriptor, data, position):
        if next(count) == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, position)

    monkeypatch.setattr(mergekit_lite.engine.output.os, "pwrite", filling)
    with pytest.raises(
        OutputError, match=r"No space left on device\); the files written so far were removed"
    ):
        merge(models, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["mkdir", "replace"])
def test_a_disk_that_is_full_before_the_first_tensor(models, tmp_path, monkeypatch, call):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OutputError, match=r"merge to .*out: .*No space left on device"):
        merge(models, tmp_path / "out")


def test_the_report_accounts_for_every_tensor(models, tmp_path):
    report = merge(models, tmp_path / "out")
    held = {k: v for p in report.paths for k, v in load_file(p).items()}
    assert {t["name"]: (t["shape"], t["dtype"]) for t in report.tensors} == {
        k: (list(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in held.items()
    }
    assert report.bytes_written == sum(v.nbytes for v in held.values())
    assert report.bytes_read == 3 * report.bytes_written
    assert report.peak_memory > 10**7
    assert "tensors" in str(report)


def test_a_late_failure_keeps_what_was_finished(models, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(mergekit_lite.engine.beside, "model_card", lambda plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge(models, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = merge(models, tmp_path / "out")
    assert len(report.resumed) == len(report.paths)


def test_the_command_line_leaves_what_is_not_ours(models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = {
        "models": [{"model": m} for m in models[:2]],
        "merge_method": "linear",
        "parameters": {"weight": 0.5},
    }
    (tmp_path / "r.yml").write_text(json.dumps(recipe))
    (tmp_path / ".m.partial").mkdir()
    (tmp_path / ".m.partial" / "thesis").write_text("x")
    command = ["merge", "r.yml", "m", "--no-progress"]
    assert main(command) == 1
    assert (
        ".m.partial was not made by model-components and is in the way" in capsys.readouterr().err
    )
    assert (tmp_path / ".m.partial" / "thesis").read_text() == "x"
    (tmp_path / ".m.partial").rename(tmp_path / "work")
    (tmp_path / ".m.partial").symlink_to("work")
    assert main(command) == 1
    assert (tmp_path / "work" / "thesis").read_text() == "x"
    assert not (tmp_path / "m").exists()
    assert main(["merge", "r.yml", "r.yml/out"]) == 1
    printed = capsys.readouterr().err
    assert "r.yml is a file, expected a folder" in printed
    assert "B/s" not in printed  # no bar was begun
    (tmp_path / ".m.partial").unlink()
    assert main(command) == 0


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"shards": []}', '{"fingerprint": 1, "shards": {"../x": "y"}}', "\x00"]
)
def test_a_record_that_is_none_starts_over(models, tmp_path, monkeypatch, text):
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        with pytest.raises(KeyboardInterrupt):
            merge(models, tmp_path / "out")
    (tmp_path / ".out.partial" / "progress.json").write_text(text)
    assert merge(models, tmp_path / "out").resumed == []


def test_a_small_disk_keeps_what_was_finished(models, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        with pytest.raises(KeyboardInterrupt):
            merge(models, tmp_path / "out")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr(
            mergekit_lite.engine.output.shutil, "disk_usage", lambda path: usage(10**9, 10**9, 100)
        )
        with pytest.raises(OutputError, match="of free disk space"):
            merge(models, tmp_path / "out")
    assert len(merge(models, tmp_path / "out").resumed) == 2  # and the lock was let go of


def test_a_merge_that_fails_lets_go_of_its_files(models, tmp_path, monkeypatch):
    counts = []
    for _ in range(4):
        with monkeypatch.context() as patched:
            interrupt_after(patched, 1)
            with pytest.raises(KeyboardInterrupt):
                merge(models, tmp_path / "out", fresh=True)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] == counts[1]


def test_a_record_cannot_name_a_file_that_the_plan_has_not(models, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        with pytest.raises(KeyboardInterrupt):
            merge(models, tmp_path / "out")
    partial = tmp_path / ".out.partial"
    record = json.loads((partial / "progress.json").read_text())
    (partial / "result" / "extra").write_text("x")
    record["shards"]["extra"] = hash_file(partial / "result" / "extra")
    (partial / "progress.json").write_text(json.dumps(record))
    assert len(merge(models, tmp_path / "out").resumed) == 2
    assert not (tmp_path / "out" / "extra").exists()
