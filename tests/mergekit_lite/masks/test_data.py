"""Mixtures of tasks."""

from collections import Counter

import pytest
import torch

from mergekit_lite.masks import MaskCollator, TaskMixture


def numbered(count, start=0):
    return [{"input_ids": [start + i]} for i in range(count)]


def test_components_may_have_alike_many_supervised_tokens():
    short = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}] * 30  # 2 a row
    long = [{"input_ids": list(range(11))}] * 30  # 10 a row: the first is never predicted
    tasks = [example["task"] for example in TaskMixture([short, long], weights="tokens")]
    assert (tasks.count(0), tasks.count(1)) == (50, 10)
    tensors = [{k: torch.tensor(v) for k, v in row.items()} for row in short]
    assert [
        e["task"] for e in TaskMixture([[tensors[:15], tensors[15:]], long], weights="tokens")
    ] == tasks
    with pytest.raises(ValueError, match=r"TaskMixture:.*'tokens'"):
        TaskMixture([short, long], weights="examples")


@pytest.mark.parametrize(
    ("name", "value"),
    [("task", 0), ("label", 1), ("token_type_ids", [0]), ("teacher_hidden", torch.zeros(1, 2, 3))],
)
def test_examples_of_a_batch_have_the_same_fields(name, value):
    plain = {"input_ids": [1]}
    for examples in ([plain, plain | {name: value}], [plain | {name: value}, plain]):
        with pytest.raises(ValueError, match=f"1 of 2 examples have {name}; expected all, or none"):
            MaskCollator(pad_token_id=0)(examples)


def test_examples_come_as_often_as_their_weights_say():
    parts = [numbered(4), [numbered(3, 10), numbered(2, 20)]]  # two data sets of one component
    plain = TaskMixture(parts)
    assert [(e["task"], e["input_ids"][0]) for e in plain] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 10),
        (1, 11),
        (1, 12),
        (1, 20),
        (1, 21),
    ]
    mixture = TaskMixture(parts, weights=[2, 1])
    counts = Counter(e["task"] for e in mixture)
    assert (len(mixture), counts) == (9, {0: 6, 1: 3})
    often = Counter(e["input_ids"][0] for e in mixture)
    assert sorted(often[i] for i in range(4)) == [1, 1, 2, 2]  # each once before any twice
    assert max(often[i] for i in (10, 11, 12, 20, 21)) == 1
    again = TaskMixture(parts, weights=[2, 1])
    assert [e["input_ids"] for e in again] == [e["input_ids"] for e in mixture]
    assert [e["input_ids"] for e in TaskMixture(parts, weights=[2, 1], seed=1)] != [
        e["input_ids"] for e in mixture
    ]


def test_a_temperature_makes_sizes_more_alike():
    parts = [numbered(90), numbered(10)]
    found = [
        Counter(e["task"] for e in TaskMixture(parts, temperature=t))[1] for t in (1.0, 2.0, 1e9)
    ]
    assert found == [10, 25, 50]  # 90^(1/2) : 10^(1/2) is 3 : 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TaskMixture([numbered(2)], weights=[1, 1]), r"TaskMixture:.*1.*numbers.*0"),
        (
            lambda: TaskMixture(["rows.json", numbered(2)]),
            r"TaskMixture:.*'rows.json'",
        ),
        (
            lambda: TaskMixture([numbered(2), []], weights=[1, 1]),
            r"TaskMixture:.*component.*1.*1",
        ),
        (lambda: TaskMixture([numbered(2)], weights=[0]), "not all 0"),
        (lambda: TaskMixture([numbered(2)], weights=[float("nan")]), r"weights are \[nan\]"),
        (lambda: TaskMixture([numbered(2)], temperature=0), "got weights=None and temperature=0"),
        (
            lambda: TaskMixture([numbered(2)], temperature=1, weights=[1]),
            r"TaskMixture:.*got weights=\[1\] and temperature=1",
        ),
        (lambda: TaskMixture([iter(numbered(2))]), r"TaskMixture:.*length"),
        (
            lambda: MaskCollator(pad_token_id=0, max_length=-1),
            r"MaskCollator:.*max_length.*-1.*1",
        ),
    ],
)
def test_bad_data_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_mixture_by_tokens_counts_a_classifiers_one_label():
    short = [{"input_ids": [1, 2], "labels": 1}] * 4
    long = [{"input_ids": [1, 2, 3, 4, 5], "labels": 0}] * 4
    tasks = [example["task"] for example in TaskMixture([short, long], weights="tokens")]
    assert tasks == [0] * 4 + [1] * 4


def test_long_answers_leave_their_component_some_examples():
    short = [{"input_ids": [1, 2], "labels": [-100, 2]} for _ in range(12)]
    long = [{"input_ids": [1] * 80, "labels": [1] * 80} for _ in range(12)]
    tasks = [example["task"] for example in TaskMixture([short, long], weights="tokens")]
    assert set(tasks) == {0, 1}
