"""Rows as tokens and labels: every layout, what is supervised, and what is refused."""

import json

import pandas
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from model_components._examples import TextExamples
from tests.support.models import tiny

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (  # drops what was thought before the last answer, as templates of reasoning models do
    "{% for m in messages %}<{{ m['role'] }}>"
    "{{ m['content'] if loop.last else m['content'].split('|')[-1] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = [
    ("system", "Be brief."),
    ("user", "One?"),
    ("assistant", "Two."),
    ("user", "And?"),
    ("assistant", "Three."),
    ("user", "Unanswered."),
]
MESSAGES = [{"role": role, "content": content} for role, content in TURNS]
GOOD = {"instruction": "a", "output": "b"}


def tokenizer(chat=CHAT):
    """One token a byte, and the marks of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", "<system>"]})
    made.chat_template = chat
    return made


@pytest.mark.parametrize(
    ("row", "chat", "expected"),
    [
        (
            {"instruction": "Add.", "input": "1 1", "output": "2"},
            CHAT,
            "<user>Add.\n\n1 1</s><assistant>⟦2</s>⟧",
        ),
        ({"instruction": "Add.", "input": None, "output": "2"}, CHAT, "<user>Add.</s><assistant>⟦2</s>⟧"),
        ({"messages": MESSAGES[1:3]}, None, "One?\n⟦Two.</s>⟧"),
        ({"prompt": "a ", "completion": "b"}, CHAT, "a ⟦b</s>⟧"),
        ({"prompt": "a ", "completion": "b", "text": None}, CHAT, "a ⟦b</s>⟧"),
        ({"text": "all of it"}, CHAT, "⟦all of it⟧"),
        ("all of it", CHAT, "⟦all of it⟧"),
        (
            {"messages": MESSAGES},
            CHAT,
            "<system>Be brief.</s><user>One?</s><assistant>⟦Two.</s>⟧"
            "<user>And?</s><assistant>⟦Three.</s>⟧",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "One?"},
                    {"from": "gpt", "value": "Two."},
                    {"from": "human", "value": "And?"},
                    {"from": "gpt", "value": "Three."},
                ]
            },
            CHAT,
            "<user>One?</s><assistant>⟦Two.</s>⟧<user>And?</s><assistant>⟦Three.</s>⟧",
        ),
        (  # the answers of a prompt are not supervised
            {"prompt": MESSAGES[1:4], "completion": MESSAGES[4:5]},
            CHAT,
            "<user>One?</s><assistant>Two.</s><user>And?</s><assistant>⟦Three.</s>⟧",
        ),
        (  # an empty answer is none
            {"messages": [*MESSAGES[1:2], {"role": "assistant", "content": " "}, *MESSAGES[3:5]]},
            CHAT,
            "<user>One?</s><assistant> </s><user>And?</s><assistant>⟦Three.</s>⟧",
        ),
    ],
)  # fmt: skip
def test_rows_of_every_kind(row, chat, expected):
    assert TextExamples([row], tokenizer(chat)).decoded(0) == expected


def test_alpacas_format_without_a_chat_template():
    rows = [{"instruction": "Add.", "input": "1 1", "output": "2"}, GOOD]
    first, second = (TextExamples(rows, tokenizer(None)).decoded(i) for i in range(2))
    assert first.endswith(
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 1\n\n### Response:\n⟦2</s>⟧"
    )
    assert "### Input" not in second
    assert second.endswith("### Instruction:\na\n\n### Response:\n⟦b</s>⟧")


def test_prompts_are_supervised_if_asked_for():
    examples = TextExamples([{"messages": MESSAGES}], tokenizer(), train_on_inputs=True)
    assert examples[0]["labels"] == examples[0]["input_ids"]


def test_a_template_that_rewrites_earlier_turns_gives_an_example_for_each_answer():
    turns = [("user", "q1"), ("assistant", "t1|a1"), ("user", "q2"), ("assistant", "t2|a2")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    examples = TextExamples([row], tokenizer(FORGETFUL))
    assert [examples.decoded(i) for i in range(len(examples))] == [
        "<user>q1</s><assistant>⟦t1|a1</s>⟧",
        "<user>q1</s><assistant>a1</s><user>q2</s><assistant>⟦t2|a2</s>⟧",
    ]


def test_a_token_that_begins_texts_is_kept_and_not_supervised():
    beginning = tokenizer(None)
    beginning.add_special_tokens({"bos_token": "<s>"})
    beginning._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", beginning.bos_token_id)]
    )
    examples = TextExamples([{"prompt": "a ", "completion": "b"}], beginning)
    assert examples.decoded(0) == "<s>a ⟦b</s>⟧"
    beginning.chat_template = "<s>" + CHAT  # a template writes its own
    assert TextExamples([GOOD], beginning).decoded(0) == "<s><user>a</s><assistant>⟦b</s>⟧"


def test_a_token_that_spans_the_end_of_a_prompt_is_supervised():
    """Else the first word of the answer would never be trained."""
    merged = Tokenizer(models.WordLevel({"ask:": 0, " yes": 1, "</s>": 2, "?": 3}, unk_token="?"))
    merged.pre_tokenizer = pre_tokenizers.Split("ask:", "isolated")
    merged = PreTrainedTokenizerFast(tokenizer_object=merged, eos_token="</s>")
    row = {"prompt": "ask: ", "completion": "yes"}
    examples = TextExamples([row], merged)
    assert examples.examples == [{"input_ids": [0, 1, 2], "labels": [-100, 1, 2]}]


def test_what_a_template_writes_before_an_opening_answer_is_not_supervised():
    chat = "<system>default</s>" + CHAT
    messages = [{"role": "assistant", "content": "Hello."}, MESSAGES[1], MESSAGES[2]]
    assert TextExamples([{"messages": messages}], tokenizer(chat)).decoded(0) == (
        "<system>default</s><assistant>⟦Hello.</s>⟧<user>One?</s><assistant>⟦Two.</s>⟧"
    )


def test_other_fields_of_a_message_do_not_replace_its_role_and_text():
    rows = [
        {"from": "human", "value": "a", "role": "assistant"},
        {"from": "gpt", "value": "b", "content": "other", "role": None},
    ]
    examples = TextExamples([{"conversations": rows}], tokenizer())
    assert examples.decoded(0) == "<user>a</s><assistant>⟦b</s>⟧"


def test_rows_and_pieces_have_numbers():
    turns = [("user", "q1"), ("assistant", "t1|a1"), ("user", "q2"), ("assistant", "t2|a2")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    examples = TextExamples([row, GOOD, "a" * 20], tokenizer(FORGETFUL), max_length=64)
    assert examples.rows[:3] == [1, 1, 2]
    pieces = TextExamples(["a" * 20], tokenizer(), max_length=8)
    assert len(set(pieces.rows)) == len(pieces) == 3
    assert all(row < 0 for row in pieces.rows)


def test_tools_and_their_calls():
    chat = "{{ tools | length }} tools;" + CHAT
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    row = {"messages": [MESSAGES[1], call], "tools": [{"type": "function"}]}
    chat = chat.replace("m['content']", "(m['content'] or m['tool_calls'][0]['function']['name'])")
    examples = TextExamples([row], tokenizer(chat))
    assert examples.decoded(0) == "1 tools;<user>One?</s><assistant>⟦f</s>⟧"


def test_bad_rows_are_named_in_one_error():
    called = {"role": "pilot", "content": "a"}
    rows = [
        GOOD,
        {"instruction": "a"},
        3,
        {"instruction": 1, "output": "b"},
        *[{"prompt": "a"}] * 7,
        {"messages": "a"},
        {"messages": [called]},
        {"messages": [MESSAGES[1]]},
        {"instruction": "a", "output": "\ud83d"},
        {"prompt": "a", "completion": MESSAGES[1:3]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": ["a"]},
        {"messages": [{"role": ["user"], "content": "a"}]},
        {"instruction": "a", "output": 0},
        {"instruction": "a", "input": 0, "output": "b"},
    ]
    with pytest.raises(ValueError, match="TextExamples: rows: ") as caught:
        TextExamples(rows, tokenizer())
    text = str(caught.value)
    for part in (
        "instruction without output in row 2;",
        "a value of type int in row 3;",
        "instruction that is not text in row 4;",
        "prompt without completion in row 5, 6, 7, 8, 9 and 2 more;",
        "messages that are not a list in row 12;",
        "the role 'pilot' (expected one of system,",
        "no message from the assistant in row 14;",
        "an unpaired surrogate in row 15;",
        "prompt and completion that are not both texts or both messages in row 16;",
        "a message whose content is not text in row 17;",
        "a str as a message in row 18;",
        "the role of type list (expected one of system,",
        "output that is not text in row 20;",
        "input that is not text in row 21",
    ):
        assert part in text
    refusing = "{{ raise_exception('turns must alternate') }}"
    with pytest.raises(
        ValueError, match=r"chat template refuses \(turns must alternate\) in row 1"
    ):
        TextExamples([GOOD], tokenizer(refusing))
    moved = "{% if add_generation_prompt %}x{% endif %}" + CHAT
    with pytest.raises(ValueError, match="does not put after its prompt in row 1"):
        TextExamples([GOOD], tokenizer(moved))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "expected rows that are not empty, got none from rows"),
        ("nowhere.json", {}, r"TextExamples:.*nowhere.json"),
        ({"train": ["a"]}, {}, r"TextExamples:.*file.*dict"),
        (None, {}, r"TextExamples:.*NoneType"),
        ([{"prompt": "long " * 9, "completion": "x"}], {"max_length": 9}, "none of 1 rows has an"),
        (["ab"], {"max_length": 1}, "max_length is 1, expected a whole number"),
        (["a"], {"train_on_inputs": "no"}, "train_on_inputs is 'no'"),
    ],
)
def test_bad_sources_and_settings_are_refused(source, options, message):
    with pytest.raises(ValueError, match=message):
        TextExamples(source, tokenizer(), **options)


def test_a_tokenizer_must_know_positions():
    with pytest.raises(ValueError, match=r"a fast tokenizer of transformers, .* got NoneType"):
        TextExamples(["a"], None)


def test_rows_without_an_answer_are_left_out_and_counted():
    rows = [GOOD, {"instruction": "a", "output": " "}, {"prompt": "a" * 20, "completion": "b"}]
    with pytest.warns(
        UserWarning, match=r"TextExamples: rows: 2 of 4 rows are left out.*20 tokens"
    ):
        examples = TextExamples([*rows, {"text": "a" * 30}], tokenizer(), max_length=20)
    assert (len(examples), examples.left_out) == (2, 2)
    long = [{"prompt": "a", "completion": "b" * 30}, {"text": "a" * 30}, GOOD]
    assert TextExamples(long, tokenizer(), max_length=20).cut == 2


def test_files(tmp_path):
    rows = [{"text": "one"}, {"text": "two"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "a.txt").write_text("a plain text, cut into pieces")
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "b.jsonl").write_text(json.dumps(GOOD) + "\n{\n")
    (tmp_path / "pairs.csv").write_text("a,b\n1,2\n")
    for name in ("a.json", "a.jsonl"):
        found = TextExamples(tmp_path / name, tokenizer())
        assert [found.decoded(i) for i in range(len(found))] == ["⟦one⟧", "⟦two⟧"]
    pieces = TextExamples(tmp_path / "a.txt", tokenizer(), max_length=8)
    assert [len(p["input_ids"]) for p in pieces] == [8, 8, 8, 5]
    assert "".join(pieces.decoded(i)[1:-1] for i in range(4)) == "a plain text, cut into pieces"
    for name, message in (
        ("b.json", r"TextExamples:.*JSON"),
        ("b.jsonl", r"invalid JSON.*in row 2"),
        (
            "pairs.csv",
            r"TextExamples:.*pairs\.csv: expected rows with .*, got the fields a, b in row 2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            TextExamples(tmp_path / name, tokenizer())


@pytest.mark.filterwarnings("ignore")
def test_trl_trains_what_is_supervised(tmp_path):
    words = tokenizer()
    words.pad_token = "</s>"
    examples = TextExamples([{"messages": MESSAGES}, GOOD], words)
    arguments = SFTConfig(
        str(tmp_path), max_length=512, bf16=False, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        tiny("llama"),
        args=arguments,
        train_dataset=Dataset.from_list(examples.examples),
        processing_class=words,
    )
    assert [row["labels"] for row in trainer.train_dataset] == [e["labels"] for e in examples]
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
    shorter = examples[1]["labels"]
    padding = len(examples[0]["labels"]) - len(shorter)
    assert batch["labels"][1].tolist() == [*shorter, *[-100] * padding]


def test_an_empty_cell_of_a_data_frame_is_no_text():
    frame = pandas.DataFrame([{"instruction": "a", "input": "b", "output": "c"}, GOOD])
    assert len(TextExamples(frame, tokenizer(), max_length=50)) == 2


def test_a_row_that_is_left_out_is_not_cut():
    rows = [{"prompt": "a" * 50, "completion": "b"}, GOOD]
    with pytest.warns(UserWarning, match="1 of 2 rows are left out"):
        examples = TextExamples(rows, tokenizer(), max_length=20)
    assert (examples.left_out, examples.cut) == (1, 0)


def test_a_first_answer_that_the_template_also_writes_is_found():
    made = tokenizer(
        "{% for m in messages %}{{ '<bob> ' if m.role == 'assistant' else '<user> ' }}"
        "{{ m.content }} {% endfor %}"
    )
    conversation = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}]
    examples = TextExamples([{"messages": conversation}], made, max_length=50)
    assert examples.decoded(0).startswith("<bob> ⟦b")


def test_rows_as_pandas_reads_parquet(tmp_path):
    pandas.DataFrame([{"messages": MESSAGES[1:3]}]).to_parquet(tmp_path / "m.parquet")
    frame = pandas.read_parquet(tmp_path / "m.parquet")
    assert len(TextExamples(frame, tokenizer(), max_length=50)) == 1
