"""``model-components think``: what it writes, goes on with and finds; and what it refuses."""

import json
import re
from itertools import product

import pytest

from model_components._cli import main
from model_components._runs import RunFolder
from thinker import RewindOnPeak
from thinker.runs import read_json

SHORT = ["--iterations", "20", "--length", "4", "--samples", "64", "--no-progress"]


def test_a_fresh_training_begins_anew(tmp_path):
    out = tmp_path / "run"
    words = ["think", "train", "copy", str(out), *SHORT]
    assert main(words) == 0
    assert main([*words, "--seed", "1", "--fresh"]) == 0
    assert json.loads((out / "run.json").read_text())["seed"] == 1
    assert not json.loads((out / "result.json").read_text())["resumed"]


def test_train_resume_and_evaluate(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["think", "train", "copy", str(out), *SHORT, "--lengths", "6"]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"copy, length 4: 20 iterations.*\nheld out: [\d.]+% of symbols and [\d.]+% of rows are right",
        printed,
    )
    assert re.search(r"^6 +[\d.]+% +[\d.]+%  \(longer\)", printed, re.M)
    card = (out / "model" / "README.md").read_text()
    assert "# A thinker for copy" in card
    assert "- iterations: 20" in card
    found = json.loads((out / "result.json").read_text())
    assert found["by_length"].keys() == {"1", "2", "3", "4", "6"}
    assert not found["resumed"]
    options = [str(out), *SHORT, "--lengths", "6", "--iterations", "24"]
    assert main(["think", "train", "copy", *options]) == 0
    assert json.loads((out / "result.json").read_text())["resumed"]
    assert "24 iterations" in capsys.readouterr().out
    card = out / "model" / "README.md"
    assert "- iterations: 24" in card.read_text()  # the first training's card is replaced
    card.write_text("a person's own words")
    more = [*options, "--iterations", "26"]
    assert main(["think", "train", "copy", *more, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["iterations"] == 26
    assert card.read_text() == "a person's own words"
    options = more
    assert main(["think", "train", "copy", *options, "--seed", "1"]) == 1  # another run's folder
    assert "seed is 0 there" in capsys.readouterr().err
    with RunFolder(out, {}, "think train", may_change=tuple(read_json(out, "run.json"))):
        assert main(["think", "train", "copy", *options, "--iterations", "30"]) == 1
    assert "another run is writing to it now" in capsys.readouterr().err
    # as a kill leaves it, while it is written
    for checkpoint in (out / "checkpoints").glob("checkpoint-*"):
        (checkpoint / "thinker_state.pt").unlink()
    (out / "result.json").unlink()
    assert main(["think", "train", "copy", *options]) == 0
    assert not json.loads((out / "result.json").read_text())["resumed"]
    capsys.readouterr()
    options = [
        "--lengths",
        "2",
        "6",
        "--n-steps",
        "1",
        "4",
        "--samples",
        "64",
        "--json",
    ]
    assert main(["think", "evaluate", str(out), *options]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert {(row["length"], row["steps"]) for row in points} == {
        (2, 1),
        (2, 4),
        (6, 1),
        (6, 4),
    }
    # a note of the user's in the settings, and a result that was damaged
    settings = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(settings | {"note": "mine"}))
    assert main(["think", "evaluate", str(out), *options]) == 0


def test_a_table_of_steps_and_latents_from_noise(tmp_path, capsys):
    table = tmp_path / "plan.md"
    table.write_text(
        "step | read_input | mem_lookup | mem_write | output\n1 | 1 | 0 | 1 | 0\n2 | 0 | 1 | 0 | "
        "1\n"
    )
    options = [
        "--model",
        "latent_init=noise",
        "memory=grow",
        "--plan",
        str(table),
    ]
    assert main(["think", "train", "add", str(tmp_path / "run"), *options, *SHORT]) == 0
    assert "add, length 4: 20 iterations" in capsys.readouterr().out


def test_latents_at_the_tokens_are_asked_for_longer_inputs(tmp_path, capsys):
    out = str(tmp_path / "run")
    model = [
        "latent_init=tokens",
        "causal=true",
        "window=2",
        "positions=rotary",
        "hidden_size=32",
        "num_heads=2",
    ]
    options = ["--model", *model, "--lengths", "9", "12", "--options", "symbols=2"]
    assert main(["think", "train", "prefix_sum", out, *options, *SHORT]) == 0
    assert (
        main(
            ["think", "evaluate", out, "--lengths", "12", "--n-steps", "4", "24", "--samples", "16"]
        )
        == 0
    )
    assert re.search(r"^12 ", capsys.readouterr().out, re.M)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["by_length"].keys() >= {
        "4",
        "9",
        "12",
    }
    assert (
        json.loads((tmp_path / "run" / "model" / "config.json").read_text())["num_latents"] is None
    )


def test_a_preset_solves_inputs_longer_than_its_rows_and_its_card_names_no_path(tmp_path, capsys):
    rows = [("".join(bits), "".join(bits)) for n in range(1, 6) for bits in product("01", repeat=n)]
    lines = [json.dumps({"input": given, "answer": answer}) for given, answer in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    file, out = str(tmp_path / "rows.jsonl"), str(tmp_path / "run")
    options = ["--preset", "scan", "--length", "4", "--iterations", "20", "--no-progress"]
    assert main(["think", "train", file, out, *options]) == 0
    capsys.readouterr()
    assert main(["think", "solve", out, "01" * 10, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["answers"][0]) == 20
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "# A thinker for rows.jsonl" in card
    assert str(tmp_path) not in card


@pytest.mark.slow
def test_latents_at_the_tokens_go_on_being_right_on_longer_inputs(tmp_path):
    out = tmp_path / "run"
    model = [
        "latent_init=tokens",
        "causal=true",
        "window=2",
        "positions=rotary",
        "hidden_size=32",
        "num_heads=2",
    ]
    options = [
        "--model",
        *model,
        "--length",
        "5",
        "--lengths",
        "20",
        "--iterations",
        "500",
        "--samples",
        "64",
    ]
    assert main(["think", "train", "prefix_sum", str(out), *options, "--no-progress"]) == 0
    assert json.loads((out / "result.json").read_text())["by_length"]["20"][0] > 0.9


def test_a_folder_with_a_run_is_refused(tmp_path, capsys):
    out = str(tmp_path / "run")
    given = ["think", "train", "copy", out, *SHORT, "--length", "5", "--iterations", "2"]
    assert main(given) == 0
    assert main(given) == 1
    assert (
        "is finished, with 2 iterations; expected --iterations above 2" in capsys.readouterr().err
    )


def test_settings_reach_the_model(tmp_path):
    def config(*model, task="copy", options=()):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        few = ["--iterations", "2", "--length", "6", "--samples", "8", "--no-progress"]
        assert main(["think", "train", task, str(out), *few, "--model", *model, *options]) == 0
        return json.loads((out / "model" / "config.json").read_text())

    assert config("num_static_tokens=4", "step_noise=1e-1")["plan"] == {
        "prologue": [],
        "loop": [[1, 0, 0, 1, 1, 1]],
        "epilogue": [],
    }
    tokens = config(
        "causal=true", "positions=rotary", "memory=grow", options=["--plan", "read_once"]
    )
    assert tokens["latent_init"] == "tokens"
    assert tokens["plan"]["prologue"][0][0] == 1
    assert not tokens["plan"]["loop"][0][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["think", "train", "copy", "{tmp}/a", "--model", "heads=4"], "heads"),
        (
            ["think", "train", "copy", "{tmp}/a", "--options", "symbols"],
            "expected NAME=VALUE, got 'symbols'",
        ),
        (
            [
                "think",
                "train",
                "copy",
                "{tmp}/a",
                "--model",
                "causal=true",
                "--steps",
                "1",
                "3",
            ],
            "leave out --steps",
        ),
        (
            ["think", "train", "copy", "{tmp}/a", "--model", "num_static_tokens=abc"],
            "num_static_tokens is 'abc'",
        ),
        (["think", "train", "copy", "{tmp}/a", "--plan", "{tmp}/none.md"], "none.md"),
        (["think", "evaluate", "{tmp}/nothing"], "nothing (no such folder)"),
    ],
)
def test_what_is_refused(arguments, message, tmp_path, capsys):
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert main([*given, *(SHORT if given[1] == "train" else [])]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("option", ["--length", "--iterations"])
def test_nothing_is_not_the_default(option, tmp_path, capsys):
    assert main(["think", "train", "copy", str(tmp_path / "a"), *SHORT, option, "0"]) == 1
    assert "expected" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_what_is_damaged_does_not_stop_a_fresh_start(tmp_path):
    words = ["think", "train", "copy", str(tmp_path / "run"), *SHORT]
    assert main(words) == 0
    (tmp_path / "run" / "result.json").write_text("{")
    assert main([*words, "--fresh"]) == 0


@pytest.mark.parametrize("flags", [["--samples", "0"], ["--lengths", "0"]])
def test_numbers_are_checked_before_training(flags, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["think", "train", "copy", str(out), *SHORT, *flags]) == 1
    assert "expected" in capsys.readouterr().err
    assert not out.exists()


def test_a_run_that_stops_early_says_so(tmp_path, capsys, monkeypatch):
    """As after the last rewind: the result counts the iterations that were done."""

    def stop(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3

    monkeypatch.setattr(RewindOnPeak, "on_step_end", stop)
    words = ["think", "train", "copy", str(tmp_path / "run"), "--length", "3", "--no-progress"]
    assert main([*words, "--iterations", "12", "--samples", "8"]) == 0
    printed = capsys.readouterr()
    assert "stopped after 3 of 12 iterations" in printed.err
    assert "copy, length 3: 3 iterations" in printed.out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["iterations"] == 3
