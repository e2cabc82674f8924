"""Patterns of module names are taken if matching them ends."""

from __future__ import annotations

import time

import pytest

from model_components._patterns import pattern_problem

NAMES = [
    f"base_model.model.model.layers.{k}.{part}"
    for k in range(32)
    for part in ("self_attn.q_proj", "mlp.down_proj", "self_attn.rotary_emb")
]
VISION = (
    r"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:self_attn|attention|attn|mlp|feed_forward"
    r"|ffn|dense).*?(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers"
    r"\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|k_proj|v_proj"
    r"|o_proj|gate_proj|up_proj|down_proj)))"
)  # as tools for models of images and text write it


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "model.layers.3.self_attn.q_proj",
        r"model\.layers\.([0-9]|1[0-5])\..*(q_proj|k_proj)",
        r"(?:model\.)*layers\.(0|1)\.(mlp|attn)\.(up|down)_proj",
        r"[^.*+{]+.*\.q_proj",
        VISION,
    ],
)
def test_what_people_write_is_taken(pattern):
    assert pattern_problem([pattern], NAMES) == ""


@pytest.mark.parametrize("pattern", ["(a+)+b", ".?" * 40 + "Z", "(([a-z_.0-9]+)+)+Z"])
def test_what_never_ends_is_refused(pattern, monkeypatch):
    monkeypatch.setattr("model_components._patterns._SECONDS", 1)
    begin = time.monotonic()
    found = pattern_problem(["q_proj", pattern], [*NAMES, "a" * 60])
    assert found.startswith("matching '")
    assert found.endswith("' takes longer than 1 seconds")
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "*"])
def test_what_is_no_pattern_is_told(pattern):
    assert f"{pattern!r} is not a valid regular expression" in pattern_problem([pattern], NAMES)
