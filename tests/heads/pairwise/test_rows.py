"""Rows of every format to pairs: files, turns, verdicts in every spelling, and what is left out or
refused."""

import csv
import gzip
import json

import datasets
import numpy as np
import pytest
import torch

from heads.pairwise import Pair, Turn, read_pairs, split_pairs
from heads.pairwise.data.rows import each_pair
from heads.pairwise.pairs import check_label

ARENA = {
    "prompt": "p",
    "response_a": "x",
    "response_b": "y",
    "winner_model_a": 0,
    "winner_model_b": 1,
    "winner_tie": 0,
}
PLAIN = {"prompt": "p", "a": "x", "b": "y"}


def one(row, **options):
    (pair,), _ = read_pairs([row], **options)
    return pair


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_names_of_sides_are_labels():
    sides = {
        0: "a A model_a response_a answer_a output_1 left 0 0.0",
        1: "b B model_b response_b answer_b output_2 right 1 1.0",
        2: "tie tied draw both neither equal same bothbad both_good 2 2.0",
    }
    for side, names in sides.items():
        assert [check_label(name) for name in names.split()] == [side] * len(names.split())
    assert check_label("Tie (both bad)") == check_label("both good") == 2


def test_files_of_every_kind_hold_the_same(tmp_path):
    rows = [ARENA, ARENA | {"prompt": "q, \n2", "winner_model_b": 0, "winner_tie": 1}]
    texts = {"json": json.dumps(rows), "jsonl": "".join(json.dumps(row) + "\n" for row in rows)}
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(ARENA))
        writer.writeheader()
        writer.writerows(rows)
    texts["csv"] = (tmp_path / "a.csv").read_bytes().decode()
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    sources = [rows, tmp_path / "a.csv", tmp_path / "a.parquet", pandas.DataFrame(rows)]
    for kind, text in texts.items():
        (tmp_path / f"a.{kind}").write_bytes(text.encode())
        (tmp_path / f"a.{kind}.gz").write_bytes(gzip.compress(text.encode()))
        sources += [tmp_path / f"a.{kind}", str(tmp_path / f"a.{kind}.gz")]
    for source in sources:
        pairs, report = read_pairs(source)
        assert pairs == [Pair("p", "x", "y", 1), Pair("q, \n2", "x", "y", 2)], source
        assert str(report) == "2 of 2 rows (A 0, B 1, tie 1)"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ARENA | {"model_a": "m", "model_b": "n"}, Pair("p", "x", "y", 1, ("m", "n"))),
        (
            {"id": 3, "prompt": '["p"]', "response_a": '["x"]', "response_b": '["y"]'},
            Pair("p", "x", "y"),
        ),
        (
            {"prompt": "p", "response_a": "x", "response_b": "y", "winner": "model_b"},
            Pair("p", "x", "y", 1),
        ),
        (
            {
                "conversation_a": [user("p"), assistant("x")],
                "conversation_b": [user("p"), assistant("y")],
                "winner": "tie (bothbad)",
                "model_a": "m",
                "model_b": "n",
            },
            Pair("p", "x", "y", 2, ("m", "n")),
        ),
        ({"prompt": "p", "chosen": "x", "rejected": "y"}, Pair("p", "x", "y", 0)),
        (
            {"chosen": [user("p"), assistant("x")], "rejected": [user("p"), assistant("y")]},
            Pair("p", "x", "y", 0),
        ),
        (
            {"prompt": "p", "chosen": [assistant("x")], "rejected": [assistant("y")]},
            Pair("p", "x", "y", 0),
        ),
        (
            {"prompt": [user("p")], "chosen": [assistant("x")], "rejected": [assistant("y")]},
            Pair("p", "x", "y", 0),
        ),
        (
            {
                "chosen": "\n\nHuman: p\n\nAssistant: x",
                "rejected": "\n\nHuman: p\n\nAssistant: y\n\nz",
            },
            Pair("p", "x", "y\n\nz", 0),
        ),
        (
            {
                "instruction": "p",
                "output_1": "x",
                "output_2": "y",
                "generator_1": "m",
                "generator_2": "n",
            }
            | {"preference": 2},
            Pair("p", "x", "y", 1, ("m", "n")),
        ),
        (
            {"prompt": "p", "a": "x", "b": "y", "gen_a": "m", "gen_b": None, "preference": 1.25},
            Pair("p", "x", "y", (0.75, 0.25, 0.0), ("m", None)),
        ),
        (PLAIN | {"label": "model_a"}, Pair("p", "x", "y", 0)),
        (PLAIN, Pair("p", "x", "y")),
    ],
)
def test_formats(row, expected):
    assert one(row) == expected


@pytest.mark.parametrize(
    "word", ["tie", "Tie", "tie (bothbad)", "both_bad", "equal", "draw", "neither", "2", 2, 2.0]
)
def test_ties_are_spelled_in_many_ways(word):
    assert one(PLAIN | {"label": word}).label == 2


@pytest.mark.parametrize(
    ("value", "label"), [(1, 0), (2, 1), (0, 2), (1.5, 2), ("1.0", 0), ("model_b", 1), (None, None)]
)
def test_preferences(value, label):
    assert one(PLAIN | {"preference": value}).label == label


def test_turns_of_the_arena_stay_turns():
    row = ARENA | {
        "prompt": '["p", "q"]',
        "response_a": '["x", "same"]',
        "response_b": '["x", null]',
    }
    pair = one(row)
    assert pair.prompt == (Turn("user", "p"), Turn("assistant", "x"), Turn("user", "q"))
    assert (pair.a, pair.b) == ("same", "")
    pair = one(row | {"response_b": ["y", "z"]})
    assert pair.prompt == "p"
    assert pair.a == (Turn("assistant", "x"), Turn("user", "q"), Turn("assistant", "same"))
    assert pair.b == (Turn("assistant", "y"), Turn("user", "q"), Turn("assistant", "z"))
    assert one(row | {"prompt": np.array(["p", "q"], dtype=object)}) == one(row)
    system = [{"role": "system", "content": "s"}, {"from": "human", "value": "p"}]
    pair = one(
        {
            "conversation_a": [*system, assistant("x")],
            "conversation_b": [*system, {"from": "gpt", "value": "y"}],
        }
    )
    assert pair.prompt == (Turn("system", "s"), Turn("user", "p"))
    with pytest.raises(ValueError, match=r"read_pairs:.*answer"):
        one({"conversation_a": [user("p")], "conversation_b": [user("p")]})


def test_an_answer_that_is_a_json_list_is_an_answer():
    """Only where prompt and answers all are lists are they turns."""
    assert one({"prompt": "List two.", "a": '["x", "y"]', "b": "[not json"})[1:3] == (
        '["x", "y"]',
        "[not json",
    )
    uneven = one({"prompt": '["p", "q"]', "response_a": '["x"]', "response_b": '["y"]'})
    assert uneven[:3] == ("p\n\nq", "x", "y")


def test_empty_answers_are_answers_and_counted():
    lost = [None, "", "  ", float("nan")]
    pairs, report = read_pairs([ARENA] + [ARENA | {"response_b": value} for value in lost])
    assert len(pairs) == 5
    assert report.empty == 4
    assert "4 pairs have an empty answer" in str(report)


BAD = [
    (ARENA | {"winner_model_a": 1}, "expected one winner, got several"),
    (ARENA | {"winner_model_b": 0}, "expected one winner, got none"),
    (ARENA | {"winner_tie": "maybe"}, "winner_tie is 'maybe', expected 0 or 1"),
    (ARENA | {"prompt": 7}, "prompt has type int, expected a string or a list of messages"),
    (
        ARENA | {"response_a": ["x", 3]},
        "response_a has type list, expected a string or a list of messages",
    ),
    (
        {"prompt": "p", "response_a": "x"},
        r"expected columns of two answers \(.*response_a, response_b; .*\), got prompt, response_a",
    ),
    ({"a": "x", "b": "y"}, "expected a prompt or instruction column besides a and b, got none"),
    (PLAIN | {"label": 3}, r"label is 3, expected one of 0 \(A\), 1 \(B\), 2 \(tie\)"),
    (PLAIN | {"label": [0.5, 0.6, 0]}, "expected 3 fractions that sum to 1"),
    (PLAIN | {"label": [float("nan"), 0.5, 0.5]}, "expected 3 fractions that sum to 1"),
    (PLAIN | {"label": [None, 1, 0]}, "expected 3 fractions that sum to 1"),
    (PLAIN | {"preference": 3}, "preference is 3, expected 0 \\(tie\\), or a number from 1"),
    ("text", "row has type str, expected a mapping"),
    (ARENA | {"prompt": "\ud83d"}, "prompt has a lone surrogate, expected valid Unicode text"),
    (
        {"conversation_a": "x", "conversation_b": "y"},
        "conversation_a is plain text, expected a list of messages",
    ),
    (
        {"conversation_a": [{"role": "judge", "content": "x"}], "conversation_b": []},
        "with role 'judge', expected one of user",
    ),
    (
        {"conversation_a": ["x"], "conversation_b": []},
        "has a message of type str, expected a mapping with role and content",
    ),
    (
        {
            "conversation_a": [{"role": "user", "content": [{"type": "image"}]}],
            "conversation_b": [],
        },
        "has a message with content of type dict, expected text",
    ),
]


@pytest.mark.parametrize(("row", "said"), BAD)
def test_bad_rows_are_left_out_up_to_a_limit_and_told_with_their_lines(row, said):
    with pytest.raises(
        ValueError,
        match=rf"1 of 2 rows are invalid, more than max_bad=1% allows: .*{said}.*: 1 \(line 2\)",
    ):
        read_pairs([PLAIN, row])
    pairs, report = read_pairs([PLAIN, row, PLAIN], max_bad=0.4)
    assert len(pairs) == report.kept == 2
    assert list(report.bad.values()) == [(2,)]
    assert str(report).splitlines()[0].startswith("2 of 3 rows")
    assert "left out: " in str(report)


def test_lines_of_files_are_told(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(PLAIN), "", "{", json.dumps(PLAIN)]))
    assert read_pairs(tmp_path / "a.jsonl", max_bad=0.5)[1].bad == {
        "invalid JSON (Expecting property name enclosed in double quotes)": (3,)
    }
    (tmp_path / "a.csv").write_text('prompt,a,b\n"p\nq",x,y\np,x,y,more\n')
    pairs, report = read_pairs(tmp_path / "a.csv", max_bad=0.5)
    assert pairs == [Pair("p\nq", "x", "y")]
    assert report.bad == {"1 more fields than the header": (4,)}


def test_parts_of_a_message_are_its_text():
    said = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    sides = [
        [{"role": "user", "content": "p"}, {"role": "assistant", "content": c}] for c in (said, "z")
    ]
    assert one({"conversation_a": sides[0], "conversation_b": sides[1]})[:3] == ("p", "x\n\ny", "z")


def test_what_is_no_file_may_be_on_the_hub(monkeypatch):
    asked = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, split: asked.append((name, split)) or [PLAIN]
    )
    assert len(read_pairs("argilla/OpenHermes2.5-dpo-alpha")[0]) == 1
    assert asked == [("argilla/OpenHermes2.5-dpo-alpha", "train")]


def test_packed_parquet_is_refused_by_its_name(tmp_path):
    (tmp_path / "a.parquet.gz").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"read_pairs:.*expected.*got .*a\.parquet\.gz"):
        read_pairs(tmp_path / "a.parquet.gz")
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"read_pairs:.*a\.parquet"):
        read_pairs(tmp_path / "a.parquet")


def test_bad_files_are_refused(tmp_path):
    for name in ("no.csv", "folder/no.json", "nothing"):
        with pytest.raises(ValueError, match=r"read_pairs:.*no file"):
            read_pairs(tmp_path / name)
    for name, held, said in (
        ("a.json", b"{", "cannot be read"),
        ("b.json", b"{}", r"read_pairs:.*columns of two answers"),
        ("a.csv", b"\xff", "cannot be read"),
        ("a.jsonl.gz", b"no", "cannot be read"),
        ("a.txt", b"x", r"read_pairs: expected.*\.parquet.*got .*a\.txt"),
        ("e.jsonl", b"", r"read_pairs: expected at least 1 row, got none"),
    ):
        (tmp_path / name).write_bytes(held)
        with pytest.raises(ValueError, match=said):
            read_pairs(tmp_path / name)


def test_line_separators_inside_texts_are_text(tmp_path):
    texts = ["p\u2028q", "x\x0cy", "z\x85 \x1e"]
    row = dict(zip(("prompt", "a", "b"), texts, strict=True))
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    (tmp_path / "a.CSV").write_text(
        "prompt,a,b,label\n" + ",".join([*texts, "1.0"]) + "\n", encoding="utf-8"
    )
    assert read_pairs(tmp_path / "a.jsonl")[0] == [Pair(*texts)]
    assert read_pairs(tmp_path / "a.CSV")[0] == [Pair(*texts, 1)]


def test_labels_of_numpy_and_torch_and_what_was_not_read():
    labels = (np.int64(1), np.float64(1.0), torch.tensor(1))
    pairs, report = read_pairs([PLAIN | {"label": label, "judge": "me"} for label in labels])
    assert [pair.label for pair in pairs] == [1, 1, 1]
    assert report.ignored == ("judge",)
    assert "not read: judge" in str(report)
    for label in (float("nan"), "  ", None):
        assert one(PLAIN | {"label": label}).label is None
    assert "without a label 1" in str(read_pairs([PLAIN])[1])


def test_data_without_ties_need_no_column_for_them():
    assert one({name: value for name, value in ARENA.items() if name != "winner_tie"}).label == 1


def test_pairs_without_a_prompt_are_split_one_by_one():
    pairs = [Pair(f"p{k}", "a", "b", 0) for k in range(40)] + [Pair("", "a", "b", 0)] * 60
    assert [len(part) for part in split_pairs(pairs)] == [80, 10, 10]


def test_chosen_and_rejected_need_no_pair_that_b_wins():
    _, report = read_pairs([{"prompt": "p", "chosen": "a", "rejected": "b"}] * 30)
    assert report.remarks() == []


def test_labels_that_are_not_read_cannot_be_wrong():
    row = {"prompt": "p", "a": "x", "b": "y", "label": 7}
    pairs = [pair for _, _, pair in each_pair([row], labels=False)]
    assert pairs == [Pair("p", "x", "y")]


def test_parts_have_no_prompt_in_common():
    pairs = [Pair(f"p{k % 40}", f"a{k}", "b", k % 2) for k in range(120)]
    parts = split_pairs(pairs, (0.5, 0.3, 0.2), seed=3)
    assert [len(part) for part in parts] == [60, 36, 24]
    asked = [{pair.prompt for pair in part} for part in parts]
    assert not asked[0] & asked[1] | asked[0] & asked[2] | asked[1] & asked[2]
    assert sorted(pair.a for part in parts for pair in part) == sorted(pair.a for pair in pairs)
    # in their order
    assert [pair.a for pair in parts[0]] == [pair.a for pair in pairs if pair in parts[0]]
    assert split_pairs(pairs, (0.5, 0.3, 0.2), seed=3) == parts
    assert split_pairs(pairs, (0.5, 0.3, 0.2), seed=4) != parts
    # one prompt: pairs are drawn
    few = split_pairs([Pair("p", f"a{k}", "b", 0) for k in range(10)])
    assert [len(part) for part in few] == [8, 1, 1]


@pytest.mark.parametrize(
    ("count", "shares", "said"),
    [
        (20, (0.5, 0.6), "sum to 1"),
        (20, (1.5, -0.5), "positive"),
        (20, (), "positive"),
        (2, (0.8, 0.1, 0.1), "expected enough pairs"),
    ],
)
def test_parts_that_cannot_be(count, shares, said):
    with pytest.raises(ValueError, match=said):
        split_pairs([Pair(f"p{k}", "a", "b", 0) for k in range(count)], shares)


def test_parsing_does_not_depend_on_the_order():
    user, told = (
        [{"role": "user", "content": "u"}],
        lambda text: {"role": "assistant", "content": text},
    )
    a, b = [*user, told("a1")], [*user, {"role": "user", "content": "u2"}, told("a2")]
    one_way, other = (one({"conversation_a": x, "conversation_b": y}) for x, y in ((a, b), (b, a)))
    assert (one_way.prompt, one_way.a, one_way.b) == (other.prompt, other.b, other.a)


@pytest.mark.parametrize("text", ["[" * 200_000, "[" + "1" * 5000 + "]", "[]"])
def test_texts_that_begin_like_lists_are_texts(text):
    assert one(PLAIN | {"prompt": text, "a": text, "b": text})[:3] == (text, text, text)


def test_broken_json_is_a_bad_row_and_broken_files_are_named(tmp_path):
    lines = [json.dumps(PLAIN), "[" * 200_000, '{"prompt": ' + "1" * 5000 + "}"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    report = read_pairs(tmp_path / "a.jsonl", max_bad=0.9)[1]
    assert sorted(line for lines in report.bad.values() for line in lines) == [2, 3]
    (tmp_path / "a.json").write_text("[" * 200_000)
    packed = bytearray(gzip.compress(json.dumps(PLAIN).encode() * 50))
    packed[30:40] = b"\xff" * 10
    (tmp_path / "b.jsonl.gz").write_bytes(packed)
    for name in ("a.json", "b.jsonl.gz"):
        with pytest.raises(ValueError, match=rf"{name} cannot be read"):
            read_pairs(tmp_path / name)


def test_many_reasons_are_counted():
    rows = [ARENA | {"winner_tie": f"{k} " + "x" * 1000} for k in range(50)]
    with pytest.raises(ValueError, match=r"read_pairs:.*45.*reasons") as caught:
        read_pairs([PLAIN, *rows])
    assert len(str(caught.value)) < 2000
    assert "\ud83d" not in str(read_pairs([PLAIN | {"\ud83d": 1}])[1])


def test_columns_of_other_names():
    rows = [
        {"question": "q", "first": "x", "second": "y", "better": "b", "prompt": "not this", "id": k}
        for k in "cd"
    ]
    names = {"prompt": "question", "a": "first", "b": "second", "label": "better"}
    pairs, report = read_pairs(rows, columns=names)
    assert pairs == read_pairs([{"prompt": "q", "a": "x", "b": "y", "label": "b"}] * 2)[0]
    assert report.ignored == ("id",)
    with pytest.raises(ValueError, match=r"read_pairs:.*'answer'"):
        read_pairs(rows, columns={"answer": "first"})
    with pytest.raises(ValueError, match=r"read_pairs:.*'thrid'"):
        read_pairs(rows, columns=names | {"b": "thrid"})


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_columns_may_be_apart_by_other_signs(sign, tmp_path):
    rows = [["prompt", "a", "b", "winner"], ["p, q; r", "x\ty", "", "a"]]
    with (tmp_path / "pairs.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=sign).writerows(rows)
    assert read_pairs(tmp_path / "pairs.csv")[0] == [Pair("p, q; r", "x\ty", "", 0)]


@pytest.mark.parametrize("column", ["label", "winner"])
@pytest.mark.parametrize("kind", [int, str, float])
def test_verdicts_that_count_from_one(column, kind):
    """As in LLMBar: 1 is the first answer, and no verdict is 0."""
    rows = [
        {"instruction": "q", "output_1": "a", "output_2": "b", column: kind(1 + n % 2)}
        for n in range(4)
    ]
    pairs, report = read_pairs(rows)
    assert [pair.label for pair in pairs] == [0, 1, 0, 1]
    assert report.labels == (2, 2, 0)
    from_zero, _ = read_pairs([*rows, rows[0] | {column: kind(0)}])
    assert [pair.label for pair in from_zero] == [1, 2, 1, 2, 0]


def test_verdicts_whose_meaning_is_unclear_are_refused():
    rows = [{"prompt": "q", "a": "a", "b": "b", "label": 1 + n % 2} for n in range(20)]
    with pytest.raises(ValueError, match="got only 1 and 2 in 20 rows"):
        read_pairs(rows)
    pairs, _ = read_pairs(rows, columns={"preference": "label"})
    assert [pair.label for pair in pairs[:2]] == [0, 1]
    # both columns name one verdict of a row
    assert len(read_pairs([row | {"winner": row["label"]} for row in rows[:19]])[0]) == 19
    # of two labels the first answer may have lost both by chance
    few, _ = read_pairs([*rows[:2], *(row | {"label": None} for row in rows)])
    assert [pair.label for pair in few[:3]] == [1, 2, None]
    _, report = read_pairs([row | {"label": 1} for row in rows])
    assert "no label says that A is better" in str(report)


def numbered(*verdicts, **more):
    return [
        {"prompt": "q", "output_1": "x", "output_2": "y", "label": verdict, **more}
        for verdict in verdicts
    ]


def test_a_stray_verdict_does_not_change_what_the_others_mean():
    pairs, report = read_pairs(numbered(*[1, 2] * 100, 3))
    assert report.labels == (100, 100, 0)
    assert [pair.label for pair in pairs[:2]] == [0, 1]
    # the winner is read, not the label beside it
    _, report = read_pairs(
        [row | {"winner": 1 + i % 2} for i, row in enumerate(numbered(*[0] * 40))]
    )
    assert report.labels == (20, 20, 0)


@pytest.mark.parametrize("verdict", [1, 2])
def test_verdicts_of_one_number_are_refused(verdict):
    with pytest.raises(
        ValueError,
        match=f"all 5 numeric verdicts are {verdict}, so they may count from 0 or from 1",
    ):
        read_pairs(numbered(*[verdict] * 5))
    pairs, _ = read_pairs(numbered(*[verdict] * 5), columns={"preference": "label"})
    assert {pair.label for pair in pairs} == {verdict - 1}


def test_a_verdict_against_chosen_is_refused():
    row = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    assert read_pairs([row | {"label": 0}])[0][0].label == 0
    with pytest.raises(ValueError, match=r"chosen and rejected to have no other verdict, .* got 1"):
        read_pairs([row | {"label": 1}])


def test_the_system_turn_of_a_prompt_is_kept():
    def turn(role, content):
        return {"role": role, "content": content}

    row = {
        "prompt": [turn("system", "Be brief."), turn("user", "Why?")],
        "chosen": [turn("user", "Why?"), turn("assistant", "So.")],
        "rejected": [turn("user", "Why?"), turn("assistant", "Well ...")],
    }
    ((pair,), _) = read_pairs([row])
    assert [t.text for t in pair.prompt] == ["Be brief.", "Why?"]
    assert (pair.a, pair.b) == ("So.", "Well ...")
    other = row | {"rejected": [turn("user", "What?"), turn("assistant", "Well ...")]}
    with pytest.raises(ValueError, match=r"have the same prompt, got 'Why\?' and 'What\?'"):
        read_pairs([other])
