"""Patterns of module names are taken if matching them ends."""

from __future__ import annotations

import re
import time

import pytest

from model_components._patterns import pattern_problem

NAME = "base_model.model.model.layers.10.self_attn.q_proj" + ".a" * 40


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "model.layers.3.self_attn.q_proj",
        r"model\.layers\.([0-9]|1[0-5])\..*(q_proj|k_proj)",
        r".*\.(\d+)\..*proj",
        r".*[aq].*\.a.*\.b",
        r"layers\.(0|1)\.(mlp|attn)\.(up|down)_proj",
    ],
)
def test_what_peft_users_write_is_taken_and_matched_in_no_time(pattern):
    assert pattern_problem(pattern) == ""
    begin = time.perf_counter()
    re.match(rf"(.*\.)?({pattern})$", NAME)
    assert time.perf_counter() - begin < 1


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a+)+b", "repeats a group"),
        ("(.*a){20}", "repeats a group"),
        ("((a|b)*c)*d", "repeats a group"),
        (".*a.*a.*a.*a.*b", "more than 4 repeats"),
        ("(a|.)(a|.)(a|.)(a|.)(a|.)b", "more than 4 choices"),
        ("(", "no regular expression"),
        ("a{99999999999999999999}", "no regular expression"),
    ],
)
def test_what_may_take_for_ever_is_refused(pattern, message):
    assert message in pattern_problem(pattern)
