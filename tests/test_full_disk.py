"""Where a disk is full, every writer says so by an `OutputError`, and the same command goes on.

No test can fill a disk. A limit on the size of files makes the same calls fail in the same places.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import TrainingArguments

from heads.pairwise import freeze_
from kronecker import KroneckerConfig, KroneckerTrainer, convert_, save_pretrained
from mergekit_lite import merge_models
from model_components._cli import main
from model_components._folders import NewFolder, OutputError, new_file
from model_components._stages import Stage
from tests.heads.pairwise.support import model_of, pairs_of
from tests.support.models import save, save_tokenizer, tiny

resource = pytest.importorskip("resource", reason="needs limits of POSIX systems")
WORDS = ["<unk>", *(f"w{i}" for i in range(95))]
THINK = ["think", "train", "copy", "run", "--iterations", "4", "--length", "3", "--samples", "8"]


@contextlib.contextmanager
def files_up_to(size):
    """Let no file grow beyond a number of bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Two models with tokenizers, and a text; the current folder."""
    monkeypatch.chdir(tmp_path)
    for k in range(2):
        save(tiny("gpt2", k), tmp_path / f"model{k}")
        save_tokenizer(tmp_path / f"model{k}", WORDS)
    ids = torch.randint(1, 96, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(WORDS[i] for i in ids))
    return tmp_path


def write_text(place):
    with new_file("out.txt", "write") as part:
        part.write_text("x" * 10_000)


def write_pickle(place):
    with new_file("out.pt", "write") as part:
        torch.save(torch.ones(10_000), part)


def write_part(place):
    Stage("parts", "key", "fit").store("part", {"x": torch.ones(10_000)})


def write_folder(place):
    with NewFolder("out", "save") as new:
        (new.folder / "model").write_bytes(bytes(10_000))


def compressed():
    model = tiny("gpt2")
    convert_(model, KroneckerConfig(b_shape=(2, 1), init="van_loan"), progress=False)
    return model


def write_compressed(place):
    save_pretrained(compressed(), "out")


def merge(place):
    merge_models(["model0", "model1"], weight=[0.5, 0.5], out="out", progress=False)


def merge_by_data(place):
    rows = [[{"input_ids": list(range(3, 20))}] * 2] * 2
    merge_models(["model0", "model1"], "regmean", calibration=rows, out="out", progress=False)


def encode(place):
    model = model_of("llama", trained=False)
    freeze_(model, "all")
    data = model.dataset(pairs_of(30, 0), progress=False)
    data.encode_(model, cache=place / "cache", progress=False)


def train(place):
    options = {"max_steps": 2, "save_steps": 1, "use_cpu": True, "report_to": "none"}
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(3, 35).view(8, 4)]
    KroneckerTrainer(compressed(), TrainingArguments("out", **options), train_dataset=rows).train()


@pytest.mark.parametrize(
    "write",
    [
        write_text,
        write_pickle,
        write_part,
        write_folder,
        write_compressed,
        merge,
        merge_by_data,
        encode,
        train,
    ],
    ids=lambda write: write.__name__,
)
def test_a_full_disk_is_told_as_one_kind_of_error(write, place):
    with (
        files_up_to(4000),
        pytest.raises(
            OutputError, match=r"cannot be written \((File too large|.*inline_container)"
        ),
    ):
        write(place)
    names = {path.name for path in place.iterdir()}
    assert "out" not in names or write is train
    assert not [path for path in place.rglob("*.partial") if path.is_file()]


@pytest.mark.parametrize(
    "words",
    [
        THINK,
        ["convert", "model0", "run", "--b-shape", "2", "1", "--init", "van_loan"],
        ["prune", "model0", "run", "--calibration", "text.txt", "--context", "16"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_on_a_full_disk_says_so_and_goes_on_when_there_is_room(words, place, capsys):
    with files_up_to(4000):
        assert main([*words, "--no-progress"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "cannot be written (File too large)" in said
    assert main([*words, "--no-progress"]) == 0
    assert (place / "run" / ("result.json" if words is THINK else "config.json")).is_file()
