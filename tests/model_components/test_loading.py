"""Our models load whole or not at all."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.pairwise import PairwiseConfig, PairwiseModel
from mergekit_lite import merge_models
from model_components import push_to_hub
from model_components._loading import read_config
from tests.support.models import tiny
from thinker import LatentThinker, ThinkerConfig


@pytest.fixture(params=["thinker", "judge"])
def saved(request, tmp_path):
    """A model's class and a folder that it wrote."""
    if request.param == "thinker":
        model = LatentThinker(ThinkerConfig(hidden_size=16, num_heads=2))
    else:
        model = PairwiseModel(PairwiseConfig(encoder=tiny("bert").config))
    model.save_pretrained(tmp_path / "model")
    return type(model), tmp_path / "model"


def changed(folder, change):
    """Change the tensors in a folder, and return the name of one of them."""
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[-1]
    change(tensors, name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return name


def remove(tensors, name):
    del tensors[name]


def add(tensors, name):
    tensors["stranger"] = torch.zeros(1)


def grow(tensors, name):
    tensors[name] = torch.zeros(3, 5, 7)


def spoil(tensors, name):
    tensors[name] = tensors[name] * float("nan")


def test_a_whole_folder_loads(saved):
    cls, folder = saved
    model, info = cls.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert isinstance(model, cls)
    assert isinstance(cls.from_pretrained(str(folder), attn_implementation="eager"), cls)


@pytest.mark.parametrize(
    ("change", "said"),
    [(remove, "lacks"), (add, "has unknown stranger"), (spoil, "has NaN or infinity in")],
)
def test_tensors_that_are_lost_unknown_or_not_finite_are_named(saved, change, said):
    cls, folder = saved
    name = changed(folder, change)
    with pytest.raises(
        ValueError, match=rf"from_pretrained: .*{cls.__name__} in .*{said}"
    ) as caught:
        cls.from_pretrained(folder)
    assert name in str(caught.value) or "stranger" in str(caught.value)


def test_shapes_that_may_differ_excuse_nothing_else(saved):
    cls, folder = saved
    changed(folder, spoil)
    with pytest.raises(ValueError, match="has NaN or infinity in"):
        cls.from_pretrained(folder, ignore_mismatched_sizes=True)


def test_a_tensor_of_another_shape_is_refused(saved):
    cls, folder = saved
    changed(folder, grow)
    with pytest.raises(
        (ValueError, RuntimeError), match=r"ize mismatch|has other shapes of|ignore_mismatched"
    ):
        cls.from_pretrained(folder)


def test_a_folder_that_is_not_there_is_named_with_its_neighbor(saved):
    cls, folder = saved
    wrong = folder.with_name("modle")
    with pytest.raises(ValueError, match=r"there is no such folder; did you mean .*model"):
        cls.from_pretrained(wrong)


def test_a_folder_without_the_models_own_config_is_refused(saved):
    cls, folder = saved
    file = folder / "config.json"
    for text, said in (("{}", "cannot be read"), ('{"model_type": "llama"}', "'llama'")):
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"from_pretrained: .*config\.json.* {said}"):
            cls.from_pretrained(folder)
    file.unlink()
    with pytest.raises(ValueError, match=r"expected model_type .*config\.json, got no config"):
        cls.from_pretrained(folder)


def test_a_tensor_of_another_shape_is_named(saved):
    cls, folder = saved

    def reshape(tensors, name):
        tensors[name] = torch.zeros(3, 3, 3)

    name = changed(folder, reshape)
    with pytest.raises(ValueError, match=f"but it has other shapes of .*{name}"):
        cls.from_pretrained(folder)


def test_integers_in_a_subfolder_are_refused(tmp_path):
    LatentThinker(ThinkerConfig(hidden_size=16, num_heads=2)).save_pretrained(tmp_path / "sub")
    file = tmp_path / "sub" / "model.safetensors"
    state = load_file(file)
    name = min(state)
    save_file({**state, name: state[name].int()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=name):
        LatentThinker.from_pretrained(tmp_path, subfolder="sub")


def test_a_run_s_folder_is_refused_with_the_folder_that_was_meant(tmp_path):
    (tmp_path / "model").mkdir()
    expected = re.escape(f"(did you mean {tmp_path / 'model'}?)")
    for load in (
        lambda: read_config(tmp_path, "kronecker"),
        lambda: merge_models([tmp_path], "passthrough", progress=False),
        lambda: push_to_hub(tmp_path, "me/model"),
        lambda: PairwiseModel.from_pretrained(tmp_path),
    ):
        with pytest.raises(ValueError, match=expected):
            load()
