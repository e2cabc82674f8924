"""What is measured on a card decides what "auto" takes; without a card nothing is claimed."""

import json

import pytest
import torch
from safetensors.torch import save_file

from heads.lora import LoraLinear
from kronecker import KroneckerLinear
from mergekit_lite import AccurateMaskedLinear
from mergekit_lite.masks import blend, masked_linear
from model_components import _fused, measure_kernels, set_impl_
from model_components._cli import main

pytest.importorskip("triton")
WEIGHTS = [torch.randn(6, 4), torch.randn(6, 4)]
MASKS = torch.randn(2, 1, 4)


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A machine whose CPU passes for a card, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_fused, "device_name", lambda device: "Card 1")
    _fused.forget()
    yield tmp_path / "model-components" / "kernels.json"
    _fused.forget()


def write(file, **changes):
    entry = {"versions": _fused.versions(), "paths": {"masks.blend": {"fused": True}}} | changes
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"devices": {"Card 1": entry}}))
    _fused.forget()


def fused_calls(monkeypatch):
    """The calls of the kernel; it runs in Triton's interpreter."""
    from mergekit_lite.masks import _triton

    calls, kernel = [], _triton.launch_blend
    monkeypatch.setattr(_triton, "launch_blend", lambda *a: calls.append(1) or kernel(*a))
    return calls


def test_auto_takes_what_was_measured_to_pay_on_this_card_alone(card, monkeypatch):
    calls = fused_calls(monkeypatch)
    expected = blend(WEIGHTS, MASKS)
    assert not calls  # nothing was measured
    write(card)
    torch.testing.assert_close(blend(WEIGHTS, MASKS), expected)
    assert len(calls) == 1
    blend(WEIGHTS, MASKS, impl="eager")
    masked_linear(torch.randn(3, 4), WEIGHTS, MASKS)  # another path
    blend([w.double() for w in WEIGHTS], MASKS.double())  # which the kernel cannot
    for changes in (
        {"paths": {"masks.blend": {"fused": False}}},
        {"paths": None},
        {"versions": {**_fused.versions(), "torch": "1.0"}},
    ):
        write(card, **changes)
        blend(WEIGHTS, MASKS)
    for text in ("", "[]", '{"devices": []}', '{"devices": {"Card 1": 3}}'):
        card.write_text(text)
        _fused.forget()
        blend(WEIGHTS, MASKS)
    write(card)
    monkeypatch.setattr(_fused, "device_name", lambda device: "Card 2")
    blend(WEIGHTS, MASKS)
    assert len(calls) == 1


def test_a_measurement_is_written_beside_those_of_other_cards(card, monkeypatch):
    write(card)
    monkeypatch.setattr(_fused, "device_name", lambda device: "Card 2")
    times = iter([(2.0, 1.0), (1.0, 1.0)])
    monkeypatch.setattr("model_components.kernels._times", lambda *_: next(times))
    monkeypatch.setattr("model_components.kernels._is_timed", lambda device: True)
    report = measure_kernels(
        device="cpu", shapes=[(8, 8)], tokens=4, dtype="float32", progress=False
    )
    masks = [row for row in report.rows if row.path.startswith("masks")]
    assert [row.pays for row in masks] == [True, False]
    assert all(row.worst < 1 for row in masks)
    assert report.written == str(card)
    assert "uses masks.blend on this model of GPU" in str(report)
    devices = json.loads(card.read_text())["devices"]
    assert set(devices) == {"Card 1", "Card 2"}
    paths = devices["Card 2"]["paths"]
    assert [name for name, path in paths.items() if path["fused"]] == ["masks.blend"]


def test_a_path_that_is_wrong_never_pays(card, monkeypatch):
    calls = fused_calls(monkeypatch)
    from mergekit_lite.masks import _triton

    right = _triton.launch_blend
    monkeypatch.setattr(_triton, "launch_blend", lambda *a: right(*a) * 1.01)
    monkeypatch.setattr("model_components.kernels._times", lambda *_: (2.0, 1.0))
    monkeypatch.setattr("model_components.kernels._is_timed", lambda device: True)
    report = measure_kernels(
        device="cpu", shapes=[(8, 8)], tokens=4, dtype="float32", progress=False
    )
    row = next(row for row in report.rows if row.path == "masks.blend")
    assert row.problem.startswith("wrong:")
    assert not row.pays
    assert calls


def test_sizes_and_dtypes_that_a_path_does_not_take_do_not_count(card, monkeypatch):
    monkeypatch.setattr("model_components.kernels._times", lambda *_: (2.0, 1.0))
    monkeypatch.setattr("model_components.kernels._is_timed", lambda device: True)
    options = {"device": "cpu", "tokens": 4, "progress": False}
    measure_kernels(shapes=[(256, 256), (8, 8)], dtype="float16", **options)
    measure_kernels(shapes=[(256, 256)], dtype="float32", **options)  # not Kronecker's
    paths = json.loads(card.read_text())["devices"]["Card 1"]["paths"]
    assert paths["kronecker.kron_linear"]["fused"]
    assert len(paths["kronecker.kron_linear"]["times"]) == 1


def test_a_model_gives_its_most_frequent_sizes(tmp_path):
    tensors = {f"layers.{k}.up": torch.zeros(24, 8) for k in range(3)}
    tensors |= {f"layers.{k}.down": torch.zeros(8, 24) for k in range(2)}
    tensors |= {f"other.{k}": torch.zeros(2 + k, 3) for k in range(3)}
    save_file({**tensors, "norm": torch.zeros(8)}, tmp_path / "model.safetensors")
    report = measure_kernels(device="cpu", model=tmp_path, tokens=4, dtype="float32")
    shapes = [row.shape for row in report.rows if row.path == "masks.blend"]
    assert shapes[:2] == [(24, 8), (8, 24)]
    assert len(shapes) == 4
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"measure_kernels: .*model\.safetensors cannot be read"):
        measure_kernels(device="cpu", model=tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="measure_kernels: expected matrices"):
        measure_kernels(device="cpu", model=tmp_path)


def test_one_call_sets_the_path_of_all_layers():
    masked = AccurateMaskedLinear([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    model = torch.nn.ModuleDict(
        {"masked": masked, "kron": KroneckerLinear(256, 256), "plain": torch.nn.Linear(4, 4)}
    )
    assert set_impl_(model, "fused") == 2
    assert masked.impl == model["kron"].impl == "fused"
    with pytest.raises(ValueError, match=r"set_impl_: .*auto, eager.*, got 'fast'"):
        set_impl_(model, "fast")
    lora = LoraLinear.from_linear(torch.nn.Linear(4, 4), r=2)
    model["lora"] = lora
    assert set_impl_(model, "fused") == 2  # LoRA has no such path
    assert lora.impl == "auto"
    assert set_impl_(model, "eager") == 3
    lora.impl = "fast"
    with pytest.raises(ValueError, match=r"LoraLinear: .*'fast'"):
        lora(torch.zeros(2, 4))


def test_without_a_card_the_command_tests_and_times_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["kernels", "--dtype", "float32", "--shapes", "8", "8", "--tokens", "4"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "masks.masked_linear" in told
    assert 'impl="auto" chooses as before' in told
    file = tmp_path / "flags.yaml"
    file.write_text("dtype: float32\ntokens: 4\nshapes: [8, 8]\n")
    assert main(["kernels", "--config", str(file)]) == 0
    assert "masks.masked_linear" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]
    assert main(["kernels", "--dtype", "int8"]) != 0
    with pytest.raises(ValueError, match=r"measure_kernels:.*\(8,\)"):
        measure_kernels(device="cpu", shapes=[(8,)])
