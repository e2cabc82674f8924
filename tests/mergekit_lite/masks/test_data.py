"""Mixtures of tasks, streams of them, and text as examples."""

import json
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mergekit_lite.masks import MaskCollator, TaskMixture, TextExamples

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def numbered(count, start=0):
    return [{"input_ids": [start + i]} for i in range(count)]


def tokenizer(chat=CHAT):
    """A token a byte, and the marks of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", "<system>"]})
    made.chat_template = chat
    return made


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
        (lambda: TaskMixture([numbered(2)], temperature=0), "temperature 0"),
        (lambda: TaskMixture([numbered(2)], temperature=1, weights=[1]), r"TaskMixture:.*one"),
        (lambda: TaskMixture([iter(numbered(2))]), r"TaskMixture:.*length"),
        (lambda: TextExamples([], tokenizer()), "has no rows"),
        (lambda: TextExamples([3], tokenizer()), r"TextExamples:.*rows.*1"),
        (
            lambda: TextExamples([{"prompt": "a"}], tokenizer()),
            r"TextExamples:.*1.*messages",
        ),
        (
            lambda: TextExamples([{"messages": "a"}], tokenizer()),
            "messages need roles and contents",
        ),
        (
            lambda: TextExamples([{"messages": [{"role": "user", "content": "a"}]}], tokenizer()),
            r"TextExamples:.*assistant",
        ),
        (lambda: TextExamples("nowhere.json", tokenizer()), r"TextExamples:.*nowhere.json"),
        (
            lambda: TextExamples(
                [{"prompt": "long " * 9, "completion": "x"}], tokenizer(), max_length=9
            ),
            "none has an",
        ),
        (
            lambda: TextExamples({"train": ["a"]}, tokenizer()),
            r"TextExamples:.*file.*dict",
        ),
        (lambda: TextExamples(None, tokenizer()), r"TextExamples:.*NoneType"),
        (lambda: TextExamples(["a"], tokenizer(), train_on_inputs="no"), "train_on_inputs is 'no'"),
        (
            lambda: MaskCollator(pad_token_id=0, max_length=-1),
            r"MaskCollator:.*max_length.*-1.*1",
        ),
        (lambda: TextExamples(["a"], None), r"TextExamples:.*tokenizer"),
        (lambda: TextExamples(["ab"], tokenizer(), max_length=1), "max_length 1"),
    ],
)
def test_bad_data_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_turn_of_the_assistant_is_supervised():
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "One?"},
                {"role": "assistant", "content": "Two."},
                {"role": "user", "content": "And?"},
                {"role": "assistant", "content": "Three."},
                {"role": "user", "content": "Unanswered."},
            ]
        }
    ]
    examples = TextExamples(rows, tokenizer())
    assert examples.decoded(0) == (
        "<system>Be "
        "brief.</s><user>One?</s><assistant>⟦Two.</s>⟧<user>And?</s><assistant>⟦Three.</s>⟧"
    )
    every = TextExamples(rows, tokenizer(), train_on_inputs=True)
    assert every[0]["labels"] == every[0]["input_ids"] == examples[0]["input_ids"]


def test_a_template_that_rewrites_earlier_turns_is_refused():
    """As those do that drop what was thought before: then nobody knows where an answer stands in
    the whole."""
    loop = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] if loop.last else "
        "m['content'].split('|')[-1] }}</s>"
    )
    forgetful = loop + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    turns = [
        ("user", "q1"),
        ("assistant", "long thought|a1"),
        ("user", "q2"),
        ("assistant", "thought|a2"),
    ]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    with pytest.raises(ValueError, match=r"TextExamples:.*changes"):
        TextExamples([row], tokenizer(forgetful))
    assert (
        TextExamples([{"messages": row["messages"][:2]}], tokenizer(forgetful))
        .decoded(0)
        .endswith("a1</s>⟧")
    )


@pytest.mark.parametrize(
    ("row", "chat", "expected"),
    [
        (
            {"instruction": "Add.", "input": "1 1", "output": "2"},
            CHAT,
            "<user>Add.\n1 1</s><assistant>⟦2</s>⟧",
        ),
        ({"instruction": "Add.", "output": "2"}, None, "Add.\n⟦2</s>⟧"),
        ({"prompt": "a ", "completion": "b"}, CHAT, "a ⟦b</s>⟧"),
        ({"prompt": "a ", "completion": "b", "text": None}, CHAT, "a ⟦b</s>⟧"),
        ({"text": "all of it"}, CHAT, "⟦all of it⟧"),
        ("all of it", CHAT, "⟦all of it⟧"),
    ],
)
def test_rows_of_every_kind(row, chat, expected):
    assert TextExamples([row], tokenizer(chat)).decoded(0) == expected


def test_files(tmp_path):
    rows = [{"text": "one"}, {"text": "two"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "a.txt").write_text("a plain text, cut into pieces")
    (tmp_path / "b.json").write_text("{")
    for name in ("a.json", "a.jsonl"):
        found = TextExamples(tmp_path / name, tokenizer())
        assert [found.decoded(i) for i in range(len(found))] == ["⟦one⟧", "⟦two⟧"]
    pieces = TextExamples(tmp_path / "a.txt", tokenizer(), max_length=8)
    assert [len(p["input_ids"]) for p in pieces] == [8, 8, 8, 5]
    assert "".join(pieces.decoded(i)[1:-1] for i in range(4)) == "a plain text, cut into pieces"
    with pytest.raises(ValueError, match=r"TextExamples:.*JSON"):
        TextExamples(tmp_path / "b.json", tokenizer())


def test_a_table_is_no_running_text(tmp_path):
    (tmp_path / "pairs.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        ValueError,
        match=r"TextExamples:.*pairs\.csv",
    ):
        TextExamples(tmp_path / "pairs.csv", tokenizer())
