"""Trained on short inputs, right on long ones: the short twin of `examples/think_longer.py`."""

import pytest
from transformers import set_seed

import thinker as th


@pytest.mark.parametrize(
    ("base", "iterations", "digits"),
    [(2, 300, 100), pytest.param(10, 2000, 400, marks=pytest.mark.slow)],
)
def test_thinking_goes_on_until_a_carry_has_passed_through_all_digits(
    base, iterations, digits, tmp_path
):
    """99...9 + 1: random digits would hide a model that stops early, since their carries are
    short."""
    set_seed(0)
    task = th.make_task("add_columns", base=base)
    preset = th.presets.scan()
    data = preset.data(task, max_length=5, holdout=0.0, batch_size=32 if base == 2 else 64)
    model = preset.thinker(data)
    preset.trainer(model, data, tmp_path, max_steps=iterations, use_cpu=True).train()
    nines = (base - 1) * base  # a column's id is first digit * base + second digit
    columns = [nines + 1, *[nines] * (digits - 1), 0]
    solved = th.solve(model, task, [columns], max_steps=2 * digits + 20)
    assert solved.answers[0] == (*[0] * digits, 1)
    assert solved.settled == (True,)
    assert solved.steps[0] > digits // 2  # no answer is known before the carry has come
    early = th.solve(model, task, [columns], max_steps=digits // 4)
    assert early.answers[0][-1] == 0
