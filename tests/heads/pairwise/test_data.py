"""Rows of files to pairs, pairs to token ids, and batches: what is cut, counted and refused."""

import csv
import json

import numpy as np
import pytest
import torch
from tests.heads.pairwise.support import pairs_of, tokenizer_of, words
from tokenizers import normalizers, pre_tokenizers
from transformers import BertConfig

from heads.pairwise import Pair, PairwiseCollator, PairwiseConfig, PairwiseDataset, read_pairs
from heads.pairwise.collate import cut_middle

ARENA = {"prompt": "p", "response_a": "x", "response_b": "y", "winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0}


def config_of(**changes):
    return PairwiseConfig(encoder=BertConfig(vocab_size=96), **{"max_tokens": 16} | changes)


def test_formats_agree(tmp_path):
    rows = [ARENA, ARENA | {"prompt": "q, \n2", "winner_model_b": 0, "winner_tie": 1}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(ARENA))
        writer.writeheader()
        writer.writerows(rows)
    expected = [Pair("p", "x", "y", 1), Pair("q, \n2", "x", "y", 2)]
    for source in (rows, *(tmp_path / f"a.{kind}" for kind in ("json", "jsonl", "csv"))):
        pairs, report = read_pairs(source)
        assert pairs == expected
        assert str(report) == "2 of 2 rows (A 0, B 1, tie 1)"


def test_turns_and_plain_rows():
    rows = [ARENA | {"prompt": '["a", "b"]', "response_a": ["x", "y"], "response_b": "[not json"}]
    assert read_pairs(rows)[0] == [Pair("a\n\nb", "x\n\ny", "[not json", 1)]
    plain = [{"prompt": "p", "a": "x", "b": "y", "label": label} for label in (0, "B", "tie", "2", [0.2, 0.8, 0], None)]
    assert [pair.label for pair in read_pairs(plain)[0]] == [0, 1, 2, 2, (0.2, 0.8, 0.0), None]


def test_missing_answers_are_counted():
    lost = [None, "", "  ", "[null]", '["x", null]', [None], float("nan")]
    pairs, report = read_pairs([ARENA] + [ARENA | {"response_b": value} for value in lost])
    assert len(pairs) == 1
    assert report.missing == tuple(range(1, 8))
    assert "7 (rows 1, 2, 3, 4, 5, ...) had a missing or empty answer" in str(report)
    with pytest.raises(ValueError, match="none of 1 rows has two answers"):
        read_pairs([ARENA | {"response_b": None}])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ARENA, ARENA | {"winner_model_a": 1}], r"two winners: 1 \(row 1\)"),
        ([ARENA | {"winner_model_b": 0}] * 2, r"no winner: 2 \(rows 0, 1\)"),
        ([ARENA | {"winner_tie": "maybe"}], "winner_tie is 'maybe', needed 0 or 1"),
        ([ARENA | {"prompt": 7}], "prompt is a int, needed text"),
        ([ARENA | {"response_a": ["x", 3]}], "response_a is a list, needed text or a list of turns"),
        ([{"prompt": "p", "response_a": "x"}], "no response_b, winner_model_a"),
        ([{"prompt": "p", "a": "x", "b": "y", "label": 3}], r"a label is 3, needed 0 \(A\), 1 \(B\), 2 \(tie\)"),
        ([{"prompt": "p", "a": "x", "b": "y", "label": [0.5, 0.6, 0]}], "needed 3 shares that sum to 1"),
        (["text"], "a row is a str"),
        ([ARENA | {"prompt": '["\\ud83d"]'}], r"prompt has half of a surrogate pair, needed Unicode text: 1 \(row 0\)"),
        ([{"prompt": "p", "a": "x", "b": "y", "label": [float("nan"), 0.5, 0.5]}], "needed 3 shares that sum to 1"),
        ([{"prompt": "p", "a": "x", "b": "y", "label": [None, 1, 0]}], "needed 3 shares that sum to 1"),
    ],
)
def test_bad_rows_are_refused_with_their_numbers(rows, said):
    with pytest.raises(ValueError, match=said):
        read_pairs(rows)


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        read_pairs(tmp_path / "no.csv")
    (tmp_path / "a.jsonl").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        read_pairs(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a dict, needed a list of rows"):
        read_pairs(tmp_path / "a.json")


def sequences_of(pair, **changes):
    data = PairwiseDataset([pair], tokenizer_of(), config_of(**changes), progress=False)
    return [sequence.ids.tolist() for sequence in data[0]["sequences"]], data


def test_sequences_are_the_tokenizers_own():
    tokenizer, pair = tokenizer_of(), (words(1, 2), words(3), words(4, 5))
    made, data = sequences_of(pair)
    for sequence, ids, answer in zip(data[0]["sequences"], made, pair[1:], strict=True):
        expected = tokenizer(pair[0], answer)
        assert ids == expected["input_ids"]
        assert sequence.types.tolist() == expected["token_type_ids"]
    bare, _ = sequences_of(pair, append_prompt=False)
    assert bare == [tokenizer(answer)["input_ids"] for answer in pair[1:]]
    empty, _ = sequences_of(("", *pair[1:]))
    assert empty[0] == tokenizer("", pair[1])["input_ids"]


def test_both_answers_keep_the_same_budget():
    prompt, long, short = words(*range(10)), words(*range(20, 40)), words(50)
    made, data = sequences_of((prompt, long, short))  # 16 tokens: 3 are special, 4 the prompt's, 9 an answer's
    ids = {f"w{k}": k + 4 for k in range(90)}
    head, tail = [ids[f"w{k}"] for k in (0, 1)], [ids[f"w{k}"] for k in (8, 9)]
    kept = [ids[f"w{k}"] for k in (20, 21, 22, 23, 24, 36, 37, 38, 39)]
    assert made[0] == [1, *head, *tail, 2, *kept, 2]
    assert made[1] == [1, *head, *tail, 2, ids["w50"], 2]  # the same prompt for both
    assert str(data.report).splitlines() == [
        "1 pairs (without labels), 24 tokens",
        "1 prompts and 1 answers were too long: 17 tokens were cut from their middles",
    ]
    made, data = sequences_of((prompt, short, short))  # nothing need give way
    assert len(made[0]) == 14
    assert data.report.tokens_cut == 0
    made, _ = sequences_of((prompt, long, short), max_prompt_tokens=1)
    assert made[0][:3] == [1, ids["w0"], 2]


def test_cutting_keeps_head_and_tail():
    for count in range(1, 9):
        for room in range(1, 9):
            made = cut_middle(list(range(count)), room)
            assert len(made) == min(count, room)
            assert made[0] == 0
            assert made[-1] == count - 1 or room == 1
    assert cut_middle([1, 2, 3], 0) == []


def test_swapping_changes_nothing_but_the_order_of_pairs():
    pairs = [*pairs_of(20), ("w1", "w2", "w2", 2), ("w1", "w2", "w3", 0), ("w1", "w3", "w2", 1)]
    turned = [(p, b, a, label) for p, a, b, label in pairs]
    one, other = (PairwiseDataset(p, tokenizer_of(), config_of(), progress=False) for p in (pairs, turned))
    straight, back = (PairwiseCollator()([data[i] for i in range(len(data))]) for data in (one, other))
    assert torch.equal(straight["pairs"], back["pairs"].flip(1))
    assert all(torch.equal(straight[name], back[name]) for name in ("input_ids", "lengths", "token_type_ids", "labels"))
    assert straight["pairs"][20, 0] == straight["pairs"][20, 1]  # one answer twice is encoded once
    assert torch.equal(straight["pairs"][21], straight["pairs"][22].flip(0))
    assert len(straight["lengths"]) == 2 * 20 + 2
    assert next(iter(straight)) == "pairs"


def test_line_separators_inside_texts_are_text(tmp_path):
    texts = ["p\u2028q", "x\x0cy", "z\x85 \x1e"]
    (tmp_path / "a.jsonl").write_text(
        json.dumps(dict(zip(("prompt", "a", "b"), texts, strict=True)), ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (tmp_path / "a.CSV").write_text("prompt,a,b,label\n" + ",".join([*texts, "1.0"]) + "\n", encoding="utf-8")
    assert read_pairs(tmp_path / "a.jsonl")[0] == [Pair(*texts)]
    pairs, report = read_pairs(tmp_path / "a.CSV")
    assert pairs == [Pair(*texts, 1)]
    assert report.labels == (0, 1, 0)


def test_labels_of_numpy_and_torch_frames_and_what_was_not_read():
    labels = (np.int64(1), np.float64(1.0), torch.tensor(1))
    rows = [{"prompt": "p", "a": "x", "b": "y", "label": label, "judge": "me"} for label in labels]
    pairs, report = read_pairs(rows)
    assert [pair.label for pair in pairs] == [1, 1, 1]
    assert report.ignored == ("judge",)
    assert "not read: judge" in str(report)
    data = PairwiseDataset(rows, tokenizer_of(), config_of(), progress=False)
    assert data.labels == [1, 1, 1]
    assert str(data.report).startswith("3 pairs (A 0, B 3, tie 0)")

    class Frame:
        def __init__(self, rows):
            self.rows = rows

        def iterrows(self):
            return enumerate(self.rows)

        def to_dict(self, how):
            assert how == "records"
            return self.rows

    assert read_pairs(Frame(rows))[0] == pairs
    bare, report = read_pairs([{"prompt": "p", "a": "x", "b": "y", "preference": 1}])
    assert bare[0].label is None
    assert str(report) == "1 of 1 rows (A 0, B 0, tie 0, without a label 1)\nnot read: preference"


def test_prompts_keep_the_turns_that_they_have_and_missing_labels_are_none():
    rows = [ARENA | {"prompt": '["q", null]'}, ARENA | {"prompt": np.array(["a", "b"], dtype=object)}]
    assert [pair.prompt for pair in read_pairs(rows)[0]] == ["q", "a\n\nb"]
    for label in (float("nan"), "  ", None):
        assert read_pairs([{"prompt": "p", "a": "x", "b": "y", "label": label}])[0][0].label is None
    with pytest.raises(ValueError, match="response_b has half of a surrogate pair"):
        read_pairs([ARENA | {"response_b": "[x \ud800"}])


def test_data_without_ties_need_no_column_for_them():
    row = {name: value for name, value in ARENA.items() if name != "winner_tie"}
    assert read_pairs([row])[0][0].label == 1


def test_special_tokens_in_texts_are_text():
    tokenizer = tokenizer_of()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    text = "w2 <sep> <pad> w3"
    data = PairwiseDataset([("w1", text, "w4")], tokenizer, config_of(max_tokens=30), progress=False)
    made = data[0]["sequences"][0].ids.tolist()
    assert made.count(2) == 2  # the template's own
    assert 0 not in made
    assert tokenizer("w1", text)["input_ids"].count(2) == 3


def test_answers_without_a_token_are_refused():
    tokenizer = tokenizer_of()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    with pytest.raises(ValueError, match="pair 0: an answer has no token that the tokenizer knows"):
        PairwiseDataset([("p", "~", "y")], tokenizer, config_of(), progress=False)


def test_soft_and_hard_labels_mix():
    pairs = [("p", "x", "y", (0.5, 0.5, 0.0)), ("p", "x", "y", 2)]
    data = PairwiseDataset(pairs, tokenizer_of(), config_of(), progress=False)
    made = PairwiseCollator()([data[0], data[1]])
    assert torch.equal(made["labels"], torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (("p", "x", " "), "pair 1: b is empty, needed an answer"),
        (("p", "x", None), "pair 1: b is None, needed text"),
        ((3, "x", "y"), "pair 1: prompt is 3, needed text"),
        (("p", "x"), "pair 1 is"),
        (("p", "x", "y", 5), "pair 1: a label is 5, needed 0"),
        (("p", "x", "y", True), "a label is True"),
        (("p", "x", "hi \ud83d"), "pair 1: b has half of a surrogate pair"),
        (("p", "x", "y", 0), "1 of 2 pairs have a label; needed all or none"),
    ],
)
def test_bad_pairs_are_refused_with_their_numbers(pair, said):
    with pytest.raises(ValueError, match=said):
        PairwiseDataset([("p", "x", "y"), pair], tokenizer_of(), config_of(), progress=False)


def test_labels_outside_two_classes_and_odd_tokenizers_are_refused():
    with pytest.raises(ValueError, match=r"a label is 2, needed 0 \(A\), 1 \(B\)$"):
        PairwiseDataset([("p", "x", "y", 2)], tokenizer_of(), config_of(ties=False), progress=False)
    with pytest.raises(ValueError, match="needed a fast one"):
        PairwiseDataset([("p", "x", "y")], object(), config_of(), progress=False)
    with pytest.raises(ValueError, match="max_tokens is 4, which special tokens fill"):
        PairwiseDataset([("p", "x", "y")], tokenizer_of(), config_of(max_tokens=4), progress=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"link": "bt"}, "link is 'bt'; needed one of davidson"),
        ({"pooling": "cls"}, "pooling is 'cls'; needed one of mean"),
        ({"dropout": 1.0}, "dropout is 1.0; needed a share"),
        ({"hidden_features": -1}, "hidden_features is -1"),
        ({"max_tokens": 0}, "max_tokens is 0; needed a number of tokens"),
        ({"swap_consistency": -1}, "swap_consistency is -1"),
        ({"swap_consistency": 1}, "0 for links that are fair"),
        ({"label_smoothin": 0.1}, "there is no 'label_smoothin'; perhaps 'label_smoothing'"),
        ({"encoder": {"model_type": "nothing"}}, "the encoder's model_type is 'nothing'"),
    ],
)
def test_configs_refuse(changes, said):
    with pytest.raises(ValueError, match=said):
        config_of(**{"max_tokens": 16} | changes) if "encoder" not in changes else PairwiseConfig(**changes)
