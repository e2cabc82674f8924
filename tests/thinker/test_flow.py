"""`FlowPlan`: parsing, cutting to length, what is refused."""

import json

import pytest
import torch

from thinker import FlowPlan
from thinker.flow import FlowRow

ALL_THE_TIME = """
step | read_input | mem_lookup | mem_write  | output
-----|------------|------------|------------|-------
  1  |     1      |      1     |      1     |   1
  2  |     1      |      1     |      1     |   1
  3  |     1      |      1     |      1     |   1
"""
READ_ONCE = """
| step | read_input | mem_lookup | mem_write | output |
|------|:----------:|-----------:|-----------|--------|
| 1 | 1 | 0 | 1 | 0 |
| 2 | 0 | 1 | 1 | 0 |
| 3 | 0 | 1 | 1 | 0 |
| 4 | 0 | 1 | 0 | 1 |
"""


def test_the_two_strategies_of_the_early_notes_are_constructors():
    assert FlowPlan.from_table(ALL_THE_TIME) == FlowPlan.every_step(3)
    assert FlowPlan.from_table(READ_ONCE) == FlowPlan.read_once(4)


@pytest.mark.parametrize("n", [2, 3, 4, 9])
def test_one_plan_serves_any_number_of_steps(n):
    assert FlowPlan.read_once().rows(n) == FlowPlan.read_once(n).rows()
    assert FlowPlan.every_step().rows(n) == FlowPlan.every_step(n).rows()
    rows = FlowPlan.read_once().rows(n)
    assert [r.read_input for r in rows] == [True] + [False] * (n - 1)
    assert [r.output for r in rows] == [False] * (n - 1) + [True]


def test_a_loop_of_several_rows_is_cut():
    read, think, say = FlowRow(read_input=True), FlowRow(), FlowRow(output=True)
    plan = FlowPlan(loop=(read, think, say))
    assert plan.rows(6) == (read, think, say) * 2
    with pytest.raises(ValueError, match=r"FlowPlan:.*n_step.*4.*3"):
        plan.rows(4)
    assert FlowPlan((read,), (read, think), (say,)).rows(5) == (read, read, think, read, say)


@pytest.mark.parametrize(
    "plan",
    [
        FlowPlan.every_step(static=True),
        FlowPlan.read_once(),
        FlowPlan.every_step(self_attention=False),
        FlowPlan.random(0.5, 6, generator=torch.Generator().manual_seed(1)),
    ],
)
def test_round_trips(plan):
    assert FlowPlan(**json.loads(json.dumps(plan.to_dict()))) == plan
    assert FlowPlan.from_table(str(plan)) == plan
    assert FlowPlan.from_table(str(FlowPlan(plan.rows(6)))) == FlowPlan(plan.rows(6))
    assert hash(plan) == hash(FlowPlan(**plan.to_dict()))


def test_tables_with_other_marks():
    # a bar at the end alone
    table = "Step | Read_Input | OUTPUT |\n --- | --- | --- |\n 1 | 1 | 0 |\n 2 | 0 | 1 |"
    assert FlowPlan.from_table(table) == FlowPlan((FlowRow(True), FlowRow(output=True)))
    assert FlowPlan.from_table("read_input | output\n x | ✓\n | x") == FlowPlan(
        (FlowRow(True, output=True), FlowRow(output=True))
    )


def test_a_row_of_nothing_is_pure_thinking():
    table = "read_input | output\n--- | ---\n x | \n - | - \n | \n 0 | x"
    assert FlowPlan.from_table(table).rows() == (
        FlowRow(True),
        FlowRow(),
        FlowRow(),
        FlowRow(output=True),
    )


def test_self_attention_is_there_unless_it_is_said():
    plan = FlowPlan.from_table("read_input | self_attention | output\n 1 | 0 | 0\n 0 | 1 | 1")
    assert [r.self_attention for r in plan.rows()] == [False, True]
    assert "self_attention" in str(plan)
    assert "self_attention" not in str(FlowPlan.every_step(2))
    assert FlowPlan.every_step(self_attention=False).rows(2)[1] == FlowRow(
        True, True, True, False, True, False
    )


def test_random_plans():
    generator = torch.Generator().manual_seed(0)
    plans = [FlowPlan.random(0.3, 5, generator=generator) for _ in range(400)]
    assert all(p.rows()[0].read_input and p.rows()[-1].output for p in plans)
    inner = torch.tensor([[list(r) for r in p.rows()[1:-1]] for p in plans]).float().mean((0, 1))
    torch.testing.assert_close(inner, torch.full((6,), 0.3), rtol=0, atol=0.06)


def test_numbers_of_steps_end_in_an_output():
    # read, then think and answer
    once = FlowPlan(prologue=(FlowRow(True),), loop=(FlowRow(output=True),))
    assert once.min_steps == len(once.rows()) == 2
    two = FlowPlan(loop=(FlowRow(True), FlowRow(output=True)))
    assert [two.num_steps(n) for n in (1, 2, 3, 5)] == [2, 2, 4, 6]
    assert all(two.rows(two.num_steps(n))[-1].output for n in range(1, 9))
    with pytest.raises(ValueError, match=r"FlowPlan:.*n_step.*5.*2"):
        two.rows(5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FlowPlan((FlowRow(True),)), r"FlowPlan: expected output = 1 .* in 1 rows"),
        (lambda: FlowPlan(), r"FlowPlan: expected output = 1 .* in 0 rows"),
        (lambda: FlowPlan((FlowRow(output=True), FlowRow())), r"FlowPlan:.*output"),
        (lambda: FlowPlan.read_once(1), "n_step is 1; this plan needs 2 or more"),
        (lambda: FlowPlan.every_step(3).rows(4), "n_step is 4; this plan needs 3"),
        (
            lambda: FlowPlan.from_table("step | think\n1 | 1"),
            r"FlowPlan:.*read_input.*'think'",
        ),
        (lambda: FlowPlan.from_table("step | output\n1 | 2"), r"FlowPlan:.*'2'.*1.*0"),
        (
            lambda: FlowPlan.from_table("step | output\n1 | 1 | 1"),
            r"FlowPlan\.from_table:.*1.*3.*cells.*2",
        ),
        (
            lambda: FlowPlan([[0] * 7]),
            r"FlowPlan:.*\[0.*0.*0.*0.*0.*0.*0\].*6",
        ),
        (lambda: FlowPlan([1, 2]), r"FlowPlan:.*1.*6.*values"),
        (lambda: FlowPlan(["11111"]), r"FlowPlan:.*'11111'"),
        (lambda: FlowPlan.from_table(""), r"FlowPlan: expected output = 1 .* in 0 rows"),
        (lambda: FlowPlan.from_table("output | Output\n0 | 1"), r"FlowPlan\.from_table:.*'output'"),
        (lambda: FlowPlan.from_table("step | output\n1* | 0\n2 | 0\n3* | 1"), "expected one loop"),
        (lambda: FlowPlan.random(1.5, 3), "expected a probability"),
        (lambda: FlowPlan.random(0.5, 0), r"FlowPlan\.random:.*n_step.*0"),
    ],
)
def test_bad_plans_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
