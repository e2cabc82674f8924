"""The command line: each command does what the library's function does, and says what is wrong in a
line."""

import json

import pytest
import torch
from tests.heads.pairwise.support import model_of, pairs_of

from heads.pairwise import PairwiseModel
from model_components._cli import main


@pytest.fixture
def place(tmp_path):
    """A judge and pairs."""
    model_of(link="davidson").save_pretrained(tmp_path / "judge")
    rows = [
        dict(zip(("prompt", "a", "b", "label"), pair, strict=True), id=f"x{k}")
        for k, pair in enumerate(pairs_of(12))
    ]
    rows[3] = {"id": "x3", "prompt": "p"}
    (tmp_path / "pairs.jsonl").write_text(
        "\n".join([*map(json.dumps, rows[:5]), "{", *map(json.dumps, rows[5:])])
    )
    return tmp_path


def test_each_row_has_its_verdict_or_the_reason_why_not(place, capsys):
    assert (
        main(["judge", "pairs", str(place / "judge"), str(place / "pairs.jsonl"), "--no-progress"])
        == 0
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["line"] for line in lines] == list(range(1, 14))
    assert "expected columns of two answers" in lines[3]["error"]
    assert "invalid JSON" in lines[5]["error"]
    pairs = [pair for k, pair in enumerate(pairs_of(12)) if k != 3]
    model = PairwiseModel.from_pretrained(place / "judge").eval()
    found = model.predict(*([pair[k] for pair in pairs] for k in range(3)), progress=False)
    right = [line for line in lines if "error" not in line]
    assert [line["id"] for line in right] == [f"x{k}" for k in range(12) if k != 3]
    assert [line["verdict"] for line in right] == found.verdicts
    said = torch.tensor([[line[name] for name in ("A", "B", "tie")] for line in right])
    torch.testing.assert_close(said, found.probabilities, rtol=0, atol=1e-6)


def test_answers_are_put_in_order(place, capsys):
    answers = ["w3", "w7 w8", "w9 w1"]
    (place / "rows.json").write_text(json.dumps([{"prompt": "w1", "answers": answers}]))
    assert (
        main(
            [
                "judge",
                "rank",
                str(place / "judge"),
                str(place / "rows.json"),
                str(place / "out.jsonl"),
            ]
        )
        == 0
    )
    told = json.loads((place / "out.jsonl").read_text())
    found = PairwiseModel.from_pretrained(place / "judge").eval().rank("w1", answers)
    assert told["order"] == list(found.order)
    assert (
        main(
            [
                "judge",
                "rank",
                str(place / "judge"),
                str(place / "rows.json"),
                str(place / "rows.json"),
            ]
        )
        == 1
    )
    assert "rows.json exists" in capsys.readouterr().err
    (place / "rows.json").write_text(json.dumps([{"prompt": "w1"}]))
    assert (
        main(
            [
                "judge",
                "rank",
                str(place / "judge"),
                str(place / "rows.json"),
                str(place / "none.jsonl"),
            ]
        )
        == 1
    )
    assert "got {'prompt': 'w1'} in line 1" in capsys.readouterr().err
    assert not (place / "none.jsonl").exists()


def test_rows_that_cannot_be_ranked_say_why_and_the_others_are(place, capsys):
    rows = [
        {"prompt": "w1", "answers": []},
        {"prompt": "w1", "answers": ["w2", "w3"]},
        {"answers": ["w2"]},
    ]
    (place / "rows.json").write_text(json.dumps(rows))
    assert (
        main(["judge", "rank", str(place / "judge"), str(place / "rows.json"), "--no-progress"])
        == 0
    )
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["line"] for row in told] == [1, 2, 3]
    assert ["error" in row for row in told] == [True, False, True]
    assert sorted(told[1]["order"]) == [0, 1]


def test_a_file_without_lists_of_answers_is_one_error(place, capsys):
    (place / "rows.csv").write_text("prompt,a,b\n" + "q,x,y\n" * 3)
    assert main(["judge", "rank", str(place / "judge"), str(place / "rows.csv")]) == 1
    told = capsys.readouterr()
    assert not told.out
    assert "expected the fields prompt and answers (a list) in each row of" in told.err


def test_a_file_without_pairs_says_what_its_first_row_lacks(place, capsys):
    (place / "rows.csv").write_text("question,answer1,answer2\nq,x,y\n")
    assert (
        main(["judge", "pairs", str(place / "judge"), str(place / "rows.csv"), "--no-progress"])
        == 1
    )
    assert (
        "got question, answer1, answer2; for other names, use --columns" in capsys.readouterr().err
    )


def test_a_report_has_its_baselines(place, capsys):
    pairs = [dict(zip(("prompt", "a", "b", "label"), pair, strict=True)) for pair in pairs_of(40)]
    (place / "good.json").write_text(json.dumps(pairs))
    given = ["judge", "report", str(place / "judge"), str(place / "good.json"), "--no-progress"]
    assert main([*given, "--train", str(place / "good.json")]) == 0
    told, notes = capsys.readouterr()
    assert "40 of 40 rows" in notes
    assert "a curve of length" in told


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({3: "none.csv"}, "there is no file none.csv"),
        ({2: "/nowhere"}, "nowhere"),
        ({4: "--device=gpu"}, "gpu"),
        ({4: "--batch-size=0"}, "judge pairs: --batch-size is 0, expected 1 or more"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(changes, said, place, capsys):
    given = ["judge", "pairs", str(place / "judge"), str(place / "pairs.jsonl"), "--no-progress"]
    assert main([changes.get(k, part) for k, part in enumerate(given)]) == 1
    assert said in capsys.readouterr().err


def test_a_file_with_columns_of_its_own_is_judged(place, capsys):
    (place / "rows.csv").write_text("question,answer1,answer2\nw1,w2,w3\n")
    given = ["judge", "pairs", str(place / "judge"), str(place / "rows.csv"), "--no-progress"]
    assert main([*given, "--columns", "prompt=question", "a=answer1", "b=answer2"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] in ("A", "B", "tie")
    assert main([*given, "--columns", "question"]) == 1
    assert "expected --columns of the form FIELD=COLUMN, got 'question'" in capsys.readouterr().err
