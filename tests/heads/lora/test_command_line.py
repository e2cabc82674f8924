"""The command line: the same as the functions, errors in a line."""

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from heads.lora import LoraLinear, load_lora, merge_lora, prepare_lora
from model_components._cli import main
from tests.support.models import save_tokenizer, tiny


@pytest.fixture
def place(tmp_path):
    """A base, with a tokenizer, and an adapter that changes something."""
    tiny("llama").save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base", ["<unk>", "a", "b"])
    model = prepare_lora(
        tiny("llama"),
        LoraConfig(target_modules=["q_proj", "down_proj"], lora_alpha=24, init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "adapter")
    merge_lora(model, tmp_path / "wanted", progress=False)
    return tmp_path


def test_it_merges_as_the_function_does(place, capsys):
    given = [str(place / name) for name in ("base", "adapter", "out")]
    assert main(["lora", "merge", *given, "--no-progress"]) == 0
    assert "lost" in capsys.readouterr().out
    made, wanted = (
        AutoModelForCausalLM.from_pretrained(place / name).state_dict()
        for name in ("out", "wanted")
    )
    assert all(torch.equal(made[name], value) for name, value in wanted.items())
    assert len(AutoTokenizer.from_pretrained(place / "out")) == 3
    assert main(["lora", "merge", *given, "--no-progress"]) == 1
    assert "model-components: merge_lora to" in capsys.readouterr().err


def test_it_shows_what_an_adapter_holds(place, capsys):
    assert main(["lora", "show", str(place / "base"), str(place / "adapter")]) == 0
    told = capsys.readouterr().out
    assert "8 adapters of rank 8, scaling 3: 4 q_proj, 4 down_proj" in told
    sizes = [
        float((layer.get_delta_weight("default")).norm())
        for layer in load_lora(tiny("llama"), place / "adapter").modules()
        if isinstance(layer, LoraLinear)
    ]
    assert f"({min(sizes):.2g} to {max(sizes):.2g})" in told  # of the updates
    assert "warning" not in told
    assert "2,304" in told  # their parameters


@pytest.mark.parametrize(
    ("changes", "said"), [({2: "/nowhere"}, "nowhere"), ({3: "/nothing"}, "nothing")]
)
def test_what_is_wrong_is_said_in_a_line(changes, said, place, capsys):
    given = ["lora", "show", str(place / "base"), str(place / "adapter")]
    assert main([changes.get(k, part) for k, part in enumerate(given)]) == 1
    assert said in capsys.readouterr().err
