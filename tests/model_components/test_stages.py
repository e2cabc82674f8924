"""Parts of a run are read only if they are this run's and whole."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model_components._stages import Stage, hash_of

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor(3, dtype=torch.int64),
    "c": torch.ones(4, dtype=torch.bfloat16),
    "d": torch.empty(0, 2),
    "e": torch.arange(6.0).view(2, 3).T,  # not contiguous
}


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path, "key", "test")
    stage.store("part", TENSORS, {"error": 0.5})
    return stage


def test_a_part_comes_back(stage):
    tensors, notes = stage.load("part")
    assert notes == {"error": 0.5}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert stage.load("none") is None


def test_a_part_of_another_run_is_not_read(stage, tmp_path):
    assert Stage(tmp_path, "other", "test").load("part") is None
    save_file({"a": torch.zeros(1)}, stage.path("planted"))
    assert stage.load("planted") is None


def test_a_part_that_was_cut_or_changed_is_not_read(stage, tmp_path):
    path = stage.path("part")
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert stage.load("part") is None
    path.write_bytes(whole[:-3] + b"\0\0\1")
    assert stage.load("part") is None
    path.write_bytes(b"")
    assert stage.load("part") is None
    path.write_bytes(whole)
    assert stage.load("part") is not None
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    for change in ({"a": TENSORS["a"].T.contiguous()}, {"x": torch.zeros(1)}):
        save_file({**load_file(path), **change}, tmp_path / "changed.safetensors", metadata)
        assert stage.load("changed") is None


def test_a_hash_is_of_the_values_and_not_of_their_layout():
    wide = torch.arange(12).view(2, 6)
    for view in (wide[:, ::2], wide[:1].expand(3, 6), wide.T, wide[0, ::3]):
        assert hash_of([("a", view)]) == hash_of([("a", view.clone().contiguous())])
    complex_numbers = torch.arange(4).to(torch.complex64) * (1 + 2j)
    conjugate = complex_numbers.conj()
    assert hash_of([("a", conjugate)]) == hash_of([("a", conjugate.resolve_conj())])


def test_without_a_folder_nothing_is_stored():
    stage = Stage(None, "", "test")
    stage.store("part", TENSORS)
    assert stage.load("part") is None


def test_a_moved_folder_holds_the_same_parts(stage, tmp_path):
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert Stage(tmp_path / "copy", "key", "test").load("part") is not None
