"""Rows: the two layouts, what is refused with which numbers, and what TRL's trainer makes of them."""

import json
import warnings

import pytest
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from heads.lora import alpaca_template, chat_template, read_rows, row_report
from tests.support.models import save_tokenizer, tiny

WORDS = ["<unk>", "<end>", "<pad>", *"abcdefghijklmnopqrstuvwxyz", "<user>", "<bot>"]
CHAT = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content }}{{ ' "
    "<end>' if m.role != 'user' else ' ' }}{% endfor %}{% if add_generation_prompt %}<bot> {% "
    "endif %}"
)
GOOD = {"instruction": "a", "output": "b"}


def plain(row):
    return {"prompt": row["instruction"], "completion": f" {row['output']}"}


def trainer_of(folder, rows, **changes):
    """TRL's trainer over rows, of a tiny model whose padding is its end token, as with GPT-2."""
    save_tokenizer(folder, WORDS, template=CHAT)
    tokenizer = AutoTokenizer.from_pretrained(folder, eos_token="<end>", pad_token="<end>")
    model = changes.pop("model", None) or tiny("llama")
    options = {
        "max_length": 16,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    arguments = SFTConfig(str(folder / "out"), **options | changes)
    return SFTTrainer(
        model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )


def test_alpacas_layout():
    made = alpaca_template({"instruction": "Add.", "input": "", "output": "2"})
    assert "### Input" not in made["prompt"]
    assert made["prompt"].endswith("### Instruction:\nAdd.\n\n### Response:\n")
    assert made["completion"] == "2"
    given = alpaca_template({"instruction": "Add.", "input": "1 1", "output": "2"})
    assert "### Input:\n1 1\n\n### Response:\n" in given["prompt"]


def test_messages_layout():
    said = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    messages = [{"role": role, "content": content} for role, content in said]
    assert chat_template({"messages": messages}) == {
        "prompt": messages[:3],
        "completion": messages[3:],
    }
    made = chat_template({"instruction": "a", "input": "b", "output": "c"})
    assert made["prompt"] == [{"role": "user", "content": "a\n\nb"}]
    for last in (messages[:3], [*messages, {"role": "tool", "content": "e"}]):
        with pytest.raises(ValueError, match=r"chat_template:.*'(user|tool)'"):
            chat_template({"messages": last})
    assert chat_template({"messages": None, "instruction": "a", "output": "b", "tools": [1]})[
        "tools"
    ] == [1]
    given = {"instruction": "a", "input": None, "output": "b"}
    assert chat_template(given)["prompt"][0]["content"] == "a"
    assert "Input" not in alpaca_template(given)["prompt"]


def test_bad_rows_are_refused_with_their_numbers(tmp_path):
    bad = [
        GOOD,
        {"instruction": "a"},
        3,
        {"instruction": 1, "output": "b"},
        *[{"output": "b"}] * 7,
        {"messages": "a"},
    ]
    with pytest.raises(ValueError, match="read_rows: rows: ") as caught:
        read_rows(bad)
    text = str(caught.value)
    assert "no output in row 2;" in text
    assert "a int in row 3;" in text
    assert "instruction that is not text in row 4;" in text
    assert "no instruction in row 5, 6, 7, 8, 9 and 2 more;" in text
    assert "messages that are not a list of two or more roles and texts in row 12" in text
    for row in ({"instruction": None, "output": "a"}, {"instruction": "a", "output": None}):
        with pytest.raises(ValueError, match=r"read_rows:.*text.*1"):
            read_rows([row])
    with pytest.raises(ValueError, match=r"read_rows:.*0.*answer"):
        read_rows([])
    messages = {"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]}
    with pytest.raises(
        ValueError, match=r"read_rows:.*2.*alpaca_template.*'messages'.*chat_template"
    ):
        read_rows([GOOD, messages])
    mixed = {"prompt": "a", "completion": [{"content": "b"}]}
    for wrong in ("b", {"prompt": "a"}, mixed, {"prompt": [], "completion": []}):
        with pytest.raises(ValueError, match=r"read_rows:.*1.*completion"):
            read_rows([GOOD], lambda row, wrong=wrong: wrong)
    for wrong in (KeyError("text"), IndexError("out")):

        def failing(row, wrong=wrong):
            raise wrong

        with pytest.raises(
            ValueError, match=r"the template failed on row 1: (KeyError: 'text'|IndexError: out)"
        ):
            read_rows([GOOD], failing)
    for bad in (
        {"role": "human", "content": "a"},
        {"role": "user", "content": None},
        {"content": "a"},
        "a",
    ):
        with pytest.raises(ValueError, match=r"read_rows:.*messages.*1"):
            read_rows([{"messages": [bad, {"role": "assistant", "content": "b"}]}], chat_template)
    with pytest.raises(ValueError, match=r"read_rows:.*roles"):
        read_rows([{"messages": [{"role": "assistant", "content": "b"}]}], chat_template)
    with pytest.raises(ValueError, match=r"read_rows:.*2.*surrogate"):
        read_rows([GOOD, {"instruction": "a", "output": "\ud83d"}])
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert (
        len(read_rows([{"messages": [{"role": "user", "content": "a"}, called]}], chat_template))
        == 1
    )
    assert read_rows(
        [{"question": "a"}], lambda row: {"prompt": row["question"], "completion": "b"}
    ) == [{"prompt": "a", "completion": "b"}]


def test_files_of_both_kinds_and_empty_answers(tmp_path):
    path = tmp_path / "rows.json"
    for content in (json.dumps([GOOD, GOOD]), json.dumps(GOOD) + "\n\n" + json.dumps(GOOD) + "\n"):
        path.write_text(content)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert read_rows(path, plain) == [{"prompt": "a", "completion": " b"}] * 2
    path.write_text(json.dumps(GOOD) + "\n{\n")
    with pytest.raises(ValueError, match=r"read_rows:.*no JSON.*row 2"):
        read_rows(path)
    path.write_text('{"instruction": "a\u2028b", "output": "c"}\n   \n')
    assert len(read_rows(path)) == 1
    with pytest.warns(UserWarning, match="read_rows:.*1.*3.*answer"):
        assert len(read_rows([GOOD, {"instruction": "a", "output": " "}, GOOD], chat_template)) == 2


@pytest.mark.filterwarnings("ignore")
def test_what_trl_trains(tmp_path):
    """The answer and its end, not the prompt; padding is told from the end by its place."""
    rows = read_rows(
        [{"instruction": "a b", "output": "c"}, {"instruction": "d", "output": "e f g"}], plain
    )
    trainer = trainer_of(tmp_path, rows)
    a, end = 3, 1
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
    assert batch["labels"].tolist() == [
        [-100, -100, a + 2, end, -100],
        [-100, a + 4, a + 5, a + 6, end],
    ]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1] * 5]
    chat = trainer_of(tmp_path, read_rows([{"instruction": "a", "output": "b"}], chat_template))
    assert chat.train_dataset[0]["labels"] == [-100, -100, -100, a + 1, end]


@pytest.mark.filterwarnings("ignore")
def test_what_trl_cuts_and_leaves_out_is_counted(tmp_path):
    long = "a b c d e f g h i j"
    texts = ((long, "x"), ("a", long), ("a", "b"), ("b", "a"))
    rows = read_rows([{"instruction": asked, "output": said} for asked, said in texts], plain)
    trainer = trainer_of(tmp_path, rows, max_length=8)
    report = row_report(rows, trainer)
    assert (report.rows, report.kept, report.full) == (4, 3, 1)
    assert (report.tokens, report.trained_tokens) == (8 + 2 * 3, 7 + 2 * 2)
    assert "left out, since max_length leaves nothing of their answers: 1" in str(report)
    assert "as long as max_length, so that they are cut or just fit: 1" in str(report)
    trainer.train_dataset.set_format("torch")
    assert row_report(rows, trainer) == report
    trainer.train_dataset = trainer.train_dataset.select_columns(["input_ids", "labels"])
    assert row_report(rows, trainer) == report
    bare = read_rows([{"instruction": "", "output": "a b c"}], plain)
    # nothing predicts a first token
    assert row_report(bare, trainer_of(tmp_path, bare)).trained_tokens == 3
    for changes in ({"packing": True}, {"packing": True, "packing_strategy": "wrapped"}):
        with pytest.raises(ValueError, match=r"row_report:.*input_ids"):
            row_report(rows, trainer_of(tmp_path, rows, **changes))
    with pytest.raises(ValueError, match=r"row_report:.*columns"):
        row_report(rows, rows)
