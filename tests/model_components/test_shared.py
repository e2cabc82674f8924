"""What packages share: devices, modes of modules that come back, and trainers of one shape."""

import inspect
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from heads.pairwise import PairwiseTrainer
from kronecker import KroneckerTrainer
from mergekit_lite.masks import MaskTrainer
from model_components._cli import main
from model_components._devices import find_device, is_faster_in_bfloat16, warn_if_slow
from model_components._folders import NewFolder, OutputError, is_begun
from model_components._layers import ReadOnlyWeight
from model_components._modes import evaluating, in_mode
from model_components._trainer import StepTrainer, TrainerOptions
from tests.support.models import tiny
from thinker import (
    CurriculumDataset,
    LatentThinker,
    ThinkerConfig,
    ThinkerTrainer,
    evaluate_steps,
    make_task,
)
from thinker.schedules import Fixed

SLOW = r"encode_:.*bfloat16"
TRAINERS = (KroneckerTrainer, MaskTrainer, PairwiseTrainer, ThinkerTrainer)


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


@pytest.mark.parametrize("error", [None, KeyError])
def test_every_module_comes_back_in_its_own_mode(error):
    model = tiny("gpt2").train()
    model.transformer.h[1].eval()
    before = modes(model)
    for change, inside in ((evaluating(model), False), (in_mode(model, training=True), True)):
        try:
            with change:
                assert set(modes(model).values()) == {inside}
                if error is not None:
                    raise error
        except KeyError:
            pass
        assert modes(model) == before


def test_evaluating_a_thinker_thaws_nothing():
    model = LatentThinker(
        ThinkerConfig(vocab_size=16, max_input_length=6, max_output_length=6)
    ).train()
    model.layers[0].eval()
    before = modes(model)
    data = CurriculumDataset(make_task("copy"), Fixed(max_length=3), batch_size=4)
    evaluate_steps(model, data, [3], samples=8)
    assert modes(model) == before


def test_the_options_are_the_stock_trainers():
    stock = set(inspect.signature(transformers.Trainer.__init__).parameters) - {
        "self",
        "model",
        "args",
    }
    assert set(TrainerOptions.__annotations__) | {"train_dataset"} <= stock


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainers_have_one_shape(trainer):
    assert issubclass(trainer, StepTrainer)
    parameters = list(inspect.signature(trainer.__init__).parameters.values())[1:]
    assert [p.name for p in parameters[:3]] == ["model", "args", "train_dataset"]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[2:-1])
    assert parameters[-1].kind is parameters[-1].VAR_KEYWORD


def test_a_micro_batch_has_its_share_of_the_step(tmp_path):
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = StepTrainer(model=tiny("gpt2"), args=arguments)
    loss = torch.tensor(2.0)
    assert trainer.share_of_step(loss, 3, None) == loss
    parts = [trainer.share_of_step(loss, items, 8) for items in (3, 5)]
    assert sum(parts) == loss
    arguments.average_tokens_across_devices = True
    assert trainer.processes_of_mean() == 1


def test_an_optimizer_that_is_asked_for_is_taken(tmp_path):
    model = LatentThinker(ThinkerConfig(vocab_size=16, max_input_length=6, max_output_length=6))
    data = CurriculumDataset(make_task("copy"), Fixed(max_length=3), batch_size=4)
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", max_steps=1
    )
    asked = (torch.optim.SGD, {"lr": 0.5})
    trainer = ThinkerTrainer(model, arguments, train_dataset=data, optimizer_cls_and_kwargs=asked)
    assert isinstance(trainer.create_optimizer(), torch.optim.SGD)


@pytest.mark.parametrize("name", ["nonsense", "meta", "cuda:99"])
def test_a_device_that_cannot_be_used_is_refused_with_its_name(name):
    with pytest.raises(ValueError, match=rf"prune: device {name} cannot be used here \("):
        find_device(name, "prune")


@pytest.mark.parametrize(
    "command",
    [
        ["prune", "model", "out", "--calibration", "text.txt"],
        ["compare", "model", "--text", "text.txt"],
        ["think", "evaluate", "out"],
        ["judge", "rank", "judge", "rows.json"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_commands_look_at_the_device_before_anything_else(command, capsys):
    assert main([*command, "--device", "nonsense"]) == 1
    assert "device nonsense cannot be used here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["prune", "model", "out", "--calibration", "none.txt"], "got none.txt"),
        (
            ["convert", "model", "out", "--low-rank", "0.5", "--calibration", "none.txt"],
            "got none.txt",
        ),
        (["prune", "model", "out", "--calibration", "text.txt"], "model has no tokenizer"),
        (["compare", "model", "--text", "none.txt"], "got none.txt"),
        (["lora", "show", "model", "adapter"], "expected adapter_model.safetensors in adapter"),
        (
            ["lora", "merge", "model", "adapter", "out"],
            "expected adapter_model.safetensors in adapter",
        ),
        (["judge", "pairs", "model", "none.csv"], "there is no file none.csv"),
        (["judge", "rank", "model", "none.json"], "there is no file none.json"),
        (["judge", "report", "model", "none.json"], "there is no file none.json"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_commands_look_at_files_before_weights(command, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny("llama").save_pretrained("model")
    Path("model", "model.safetensors").write_bytes(b"to read these weights is an error")
    Path("adapter").mkdir()
    Path("text.txt").write_text("some words")
    assert main(command) == 1
    assert said in capsys.readouterr().err


def test_a_run_is_begun_once_it_has_written_something(tmp_path):
    new = NewFolder(tmp_path / "out", "merge", resumable=True).open()
    assert not is_begun(tmp_path / "out")
    (new.folder / "part").write_text("x")
    new.close()
    assert is_begun(tmp_path / "out")
    assert not is_begun(tmp_path / "ou")
    new = NewFolder(tmp_path / "model.v2", "merge", resumable=True).open()
    (new.folder / "part").write_text("x")
    new.close()
    assert not is_begun(tmp_path / "model")


@pytest.mark.parametrize("computes", [True, False])
def test_a_dtype_that_a_processor_does_not_compute_in_is_said(computes, monkeypatch, recwarn):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: computes)
    warn_if_slow("encode_", torch.nn.Linear(2, 2))
    warn_if_slow("encode_", torch.nn.Linear(2, 2, dtype=torch.bfloat16, device="meta"))
    assert not recwarn
    if computes:
        warn_if_slow("encode_", torch.nn.Linear(2, 2, dtype=torch.bfloat16))
        assert not recwarn
    else:
        with pytest.warns(UserWarning, match=SLOW):
            warn_if_slow("encode_", torch.nn.Linear(2, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("machine", "bfloat16", "amx", "faster"),
    [
        ("x86_64", True, True, True),
        ("x86_64", True, False, False),
        ("AMD64", True, False, False),
        ("aarch64", True, False, True),
        ("aarch64", False, False, False),
    ],
)
def test_bfloat16_is_faster_on_x86_with_amx_alone(machine, bfloat16, amx, faster, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert is_faster_in_bfloat16(torch.device("cpu")) is faster


def test_a_result_that_cannot_be_published_lets_go_of_its_lock(tmp_path):
    new = NewFolder(tmp_path / "out", "save")

    def fail():
        with new:
            new.folder.rmdir()
            new.folder.write_text("x")

    for _ in range(2):  # the second is refused for the same reason, not for the first one's lock
        with pytest.raises(OutputError, match="got a link or a file"):
            fail()
        new.folder.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_a_peak_is_that_of_this_process_and_not_of_its_parent():
    held = bytearray(400_000_000)
    held[::4096] = b"x" * len(held[::4096])
    code = "from model_components._devices import peak_memory; print(peak_memory())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(said.stdout) < 400_000_000


def test_no_part_of_a_computed_weight_can_be_changed():
    weight = ReadOnlyWeight.of(torch.ones(4, 2))
    changes = [
        lambda: [row.zero_() for row in weight],
        lambda: weight.chunk(2)[0].zero_(),
        lambda: weight.split(2)[1].zero_(),
        lambda: weight.unbind(0)[0].zero_(),
        lambda: torch.max(torch.zeros(4, 3, 2), 1, out=(weight, torch.zeros(4, 2).long())),
    ]
    for change in changes:
        with pytest.raises(RuntimeError, match="cannot be changed in place"):
            change()
    assert weight.eq(1).all()
    assert type(weight.max(0).values) is torch.Tensor
