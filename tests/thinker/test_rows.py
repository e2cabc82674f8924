"""Rows of one's own, from lists and files, and the presets that train on them."""

import json
import re

import numpy as np
import pytest
import torch

import thinker as th
from model_components._cli import main
from thinker.presets import PRESETS
from thinker.schedules import Fixed, Uniform
from thinker.tasks import TensorTask


def parity(lengths, repeats=1):
    """Every text of 0 and 1 of some lengths, with the parity of each prefix."""
    rows = []
    for length in lengths:
        for number in range(2**length):
            bits = f"{number:0{length}b}"
            answer = "".join(str(bits[: i + 1].count("1") % 2) for i in range(length))
            rows += [{"input": bits, "answer": answer}] * repeats
    return rows


@pytest.mark.parametrize(
    ("rows", "sizes", "decoded"),
    [
        ([("ab", "ba"), ("cab", "bac")], {2: 2, 7: 7}, "ba"),
        # a fixed number more, times as many, one for all
        ([("ab", "abc"), ("a", "ab")], {1: 2, 2: 3, 5: 6}, "abc"),
        ([([1, 2], [1, 2, 1, 2]), ([3], [3, 3])], {1: 2, 5: 10}, (1, 2, 1, 2)),
        ([("one two", "yes"), ("three", "no")], {1: 1, 9: 1}, "yes"),
        # with an end symbol: at most as many, and a multiple
        ([("ab", "a"), ("abb", "abb")], {2: 2, 3: 3}, "a"),
        ([("ab", "aab"), ("abb", "abb"), ("b", "b")], {1: 2, 3: 6}, "aab"),
    ],
)
def test_answers_have_a_length_that_the_rows_say(rows, sizes, decoded):
    task = th.RowsTask(rows)
    assert {n: task.output_length(n) for n in sizes} == sizes
    length = max(n for n in task.lengths if task.input_length(n) == len(task.encode(rows[0][0])))
    row = next(row for row in task.every(length).targets if task.decode(row.tolist()) == decoded)
    # what the end symbol leaves over is asked for, too
    assert (row[: task.output_length(length)] != -100).all()
    assert (row[task.output_length(length) :] == -100).all()


def test_rows_are_drawn_by_length_and_none_that_is_held_out():
    rows = parity([2, 4, 5])
    task = th.RowsTask(rows)
    data = th.CurriculumDataset(task, Uniform(max_length=4, min_length=2), holdout=0.3)
    every = {length: set(map(tuple, task.every(length).tokens.tolist())) for length in (2, 4, 5)}
    assert {length: len(inputs) for length, inputs in every.items()} == {2: 4, 4: 16, 5: 32}
    seen = {2: set(), 4: set()}
    for step in range(40):
        batch = data.batch(step, details=True)
        sizes = batch["attention_mask"].sum(1)
        # there are no rows of 3: those of 2 stand for them
        assert sizes.tolist() == [2 if n < 4 else 4 for n in batch["lengths"].tolist()]
        for row, size in zip(batch["input_ids"].tolist(), sizes.tolist(), strict=True):
            seen[size].add(tuple(row[:size]))
    held_out = set(map(tuple, data.held_out(99, 4)["input_ids"].tolist()))
    assert held_out
    assert seen[4] == every[4] - held_out
    # few rows: none is held out; longer than trained: all are
    assert seen[2] == every[2]
    assert len(data.held_out(99, 5)["input_ids"]) == 32
    assert [data.holds_out(n) for n in (2, 4, 5)] == [False, True, True]
    with pytest.raises(ValueError, match="expected held-out rows of length 2, got none among 4"):
        data.held_out(3, 2)
    with pytest.raises(ValueError, match=r"no row has length 3; expected one of \[2, 4, 5\]"):
        data.held_out(3, 3)


def test_a_resume_knows_other_rows():
    rows = parity([3, 4])
    data = th.CurriculumDataset(th.RowsTask(rows))
    other = th.CurriculumDataset(th.RowsTask([*rows[:-1], {"input": "1111", "answer": "1111"}]))
    assert data.schedule == th.Frontier(max_length=4, min_length=3)
    with pytest.raises(ValueError, match="the state was saved with task"):
        other.load_state_dict(data.state_dict())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "expected rows with answers, got no rows"),
        ([("a", "b"), ("a",)], r"row 2 is \('a',\); expected a pair"),
        (
            [{"input": "a", "output": "b"}],
            "row 1 is .*; expected a pair, or the keys 'input' and 'answer'",
        ),
        ([("a", 3)], "row 1 has 3; expected a text, or a list of texts or whole numbers"),
        ([([1.5], "a")], r"row 1 has \[1.5\]; expected a text"),
        ([("", "ab"), ("a", "a")], "row 1 has an empty input"),
        ([("ab", ""), ("a", "")], "expected rows with answers, got only empty answers"),
        (
            [*parity([2, 3, 4]), {"input": "01 1", "answer": "0 11"}],
            r"got 2 of 58 texts with a space, such as '01 1'",
        ),
    ],
)
def test_rows_that_are_no_pairs_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        th.RowsTask(rows)


def test_answers_have_the_form_of_the_answers_of_the_rows():
    assert th.RowsTask([("ab", [10, 2])]).decode([1, 0]) == (10, 2)
    assert th.RowsTask([([1, 2], "ab")]).decode([2, 3]) == "ab"
    # inputs of one length with shorter answers: of a fixed size
    assert th.RowsTask([("010101", "1"), ("111111", "0")]).output_length(7) == 1


def solver(task, longest=8, **fields):
    data = th.CurriculumDataset(task, Uniform(max_length=longest, min_length=task.min_length))
    torch.manual_seed(0)
    return th.LatentThinker(th.ThinkerConfig(**data.sizes(20), **fields)).eval()


def test_a_model_without_a_latent_for_each_token_takes_the_steps_of_its_config():
    """More may be worse: its latents need not settle."""
    task = th.make_task("copy")
    never = th.ExitRule(threshold=0.0)
    assert th.solve(solver(task, n_step=3), task, [[1, 2, 3]], exit_rule=never).steps == (3,)
    pointer = th.presets.pointer()
    looks = pointer.thinker(pointer.data(task, max_length=5))
    assert th.solve(looks, task, [[1, 2, 3]], exit_rule=never).steps == (6,)
    at_tokens = solver(th.AtTokens(task), causal=True, positions="rotary")
    assert th.solve(at_tokens, task, [[1, 2, 3]], exit_rule=never).steps == (30,)


def test_solve_refuses_rows_that_have_no_answer():
    texts = [("01101101" * 2)[k : k + n] for k in range(8) for n in range(3, 9)]
    task = th.RowsTask([(text, text[2:]) for text in texts])
    model = solver(task)
    for rows, message in (
        (["01"], "row 0 has 2 symbols; expected at least 3"),
        (["0110", ""], "row 1 is empty"),
        ([1, 0], "row 0 is 1; expected each row to be a string or a list"),
    ):
        with pytest.raises(ValueError, match=f"solve: {message}"):
            th.solve(model, task, rows)
    with torch.no_grad():
        model.readout.head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="solve: expected finite logits"):
        th.solve(model, task, ["0110"], max_steps=2)


@pytest.mark.parametrize("fields", [{"decoder_self_attention": True}, {"positions": "random"}])
def test_an_answer_does_not_depend_on_the_other_rows(fields):
    task = th.make_task("copy", symbols=6)
    model = solver(task, **fields)
    long = [5] * 20
    rows = [[1, 2, 3], long, [3, 1], [2, 2, 2]]
    together = th.solve(model, task, rows, max_steps=4)
    alone = [th.solve(model, task, [row], max_steps=4) for row in rows]
    assert together.answers == tuple(one.answers[0] for one in alone)
    assert together.steps == tuple(one.steps[0] for one in alone)


def test_only_models_without_parameters_for_each_position_take_any_length():
    data = th.presets.scan().data(th.make_task("copy"), max_length=5)
    lengths = {
        "scan": th.presets.scan().thinker(data).config.max_input_length,
        "exchange": th.presets.exchange().thinker(data).config.max_input_length,
        "mlp": th.presets.exchange(mixer="mlp", window=None).thinker(data).config.max_input_length,
    }
    assert lengths == {"scan": 10_001, "exchange": 10_001, "mlp": 6}
    pointer = th.presets.pointer(positions="rotary")
    looked_up = pointer.data(th.make_task("prefix_sum"), max_length=5)
    assert pointer.thinker(looked_up).config.max_output_length == 5


def test_some_answers_may_be_empty():
    rows = [("12", "2"), ("13", ""), ("4", "4"), ("5", ""), ("246", "246")]
    task = th.RowsTask(rows)
    assert (task.output_length(3), task.output_size) == (3, task.vocab_size + 1)
    sample = task.every(2)
    answers = {}
    for given, target in zip(sample.tokens.tolist(), sample.targets.tolist(), strict=True):
        answers[task.decode(given)] = task.decode(target)
    assert answers == {"12": "2", "13": ""}
    # without the empty answer: one symbol, one more, one fewer
    for answers, sizes in (("x", [1, 1, 1]), ("{}x", [2, 3, 4]), ("{}", [0, 1, 2])):
        rows = [(text, answers.format(text)) for text in ("a", "ab", "abc")]
        if answers == "{}":
            rows = [("ab", "b"), ("abc", "bc"), ("abb", "bb")]
        filled = th.RowsTask([*rows, ("bb", "")])
        assert [filled.output_length(n) for n in (1, 2, 3)] == sizes, answers
        assert filled.output_size == len(filled.symbols) + 1
    found = th.solve(solver(th.AtTokens(task), 3, latent_init="tokens"), task, ["13", "2"])
    assert len(found.answers) == 2


def test_inputs_with_several_answers_are_told_of():
    with pytest.warns(
        UserWarning, match=r"several answers \(1 in all\); \['a', 'b'\] has .* and \['c'\]"
    ):
        th.RowsTask([("ab", "b"), ("c", "c"), ("ab", "c")])


def test_rows_of_another_layout_are_not_solved():
    rows = [(text, text + text[0]) for text in ("ab", "ba", "aab", "aba")]
    model = solver(th.AtTokens(th.RowsTask(rows)), 3, causal=True)
    other = th.RowsTask([*rows, ("aaaa", "")])  # of the same symbols
    with pytest.raises(ValueError, match=r"solve: the model's output_size is 2, but .* needs 3"):
        th.solve(model, other, ["ab"])


def test_a_row_shorter_than_those_of_training_is_solved():
    task = th.RowsTask(parity([3, 4]))
    assert len(th.solve(solver(task, 4), task, ["1"], max_steps=2).answers[0]) == 1


def test_a_trained_scan_solves_longer_texts(tmp_path):
    """Binary numbers plus one, smallest digits first: a scan, though each answer is one longer."""
    rows = []
    for length in range(1, 7):
        for number in range(2**length):
            rows.append((f"{number:0{length}b}"[::-1], f"{number + 1:0{length + 1}b}"[::-1]))
    task = th.RowsTask(rows)
    assert (task.input_length(3), task.output_length(3), task.vocab_size) == (4, 4, 3)
    assert task.encode("01") == [0, 1, 2]
    laid_out = th.AtTokens(task).every(2)
    assert laid_out.tokens.tolist()[0] == [3, 0, 0, 2]
    assert laid_out.targets.tolist()[0] == [-100, 1, 0, 0]
    preset = th.presets.scan()
    data = preset.data(task, max_length=5, seed=11, batch_size=32)
    model = preset.thinker(data)
    preset.trainer(
        model, data, str(tmp_path), max_steps=300, seed=11, use_cpu=True, save_strategy="no"
    ).train()
    found = th.solve(model, task, ["1" * 20, "011"])
    assert found.answers == ("0" * 20 + "1", "1110")
    assert "1110" in str(found)
    with pytest.raises(ValueError, match="got '2' in '012'"):
        th.solve(model, task, ["012"])


def test_a_model_knows_the_symbols_of_its_rows(tmp_path):
    task, other = th.RowsTask(parity([3])), th.RowsTask([("ab", "ba"), ("abb", "bba")])
    preset = th.presets.scan()
    model = preset.thinker(preset.data(task), max_input_length=4, max_output_length=4)
    model.save_pretrained(tmp_path)
    again = th.LatentThinker.from_pretrained(tmp_path)
    assert again.config.symbols == ["0", "1"]
    assert th.solve(again, task, ["011"], max_steps=2).answers
    with pytest.raises(ValueError, match=r"the model was made for, .*'0', '1'.*, got .*'a'"):
        th.solve(again, other, ["ab"])
    with pytest.raises(ValueError, match="the model was made for, None"):
        th.solve(preset.thinker(preset.data(th.make_task("prefix_sum"))), task, ["011"])
    with pytest.raises(ValueError, match="expected a list of inputs"):
        th.solve(again, task, "011")
    with pytest.raises(
        ValueError, match="the longest row takes 10 tokens, but the model accepts at most 4"
    ):
        th.solve(again, task, ["0" * 9])


def test_a_stopped_training_of_a_preset_goes_on(tmp_path):
    preset = th.presets.scan(hidden_size=16)
    data = preset.data(th.RowsTask(parity([3, 4])))
    preset.trainer(preset.thinker(data), data, tmp_path, max_steps=40, use_cpu=True).train()
    again = preset.trainer(preset.thinker(data), data, tmp_path, max_steps=50, use_cpu=True)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 50
    with pytest.raises(
        ValueError, match=r"expected a Task, such as RowsTask\(rows\) .* got 'rows.csv'"
    ):
        preset.data("rows.csv")


def test_a_scan_is_asked_only_for_what_its_tokens_can_tell(tmp_path):
    """A `RowsTask` does not say how far an answer's causes lie, but a causal flow looks back."""
    task = th.RowsTask(parity([3, 5]))
    preset = th.presets.scan()
    data = preset.data(task, holdout=0.0)
    trainer = preset.trainer(preset.thinker(data), data, str(tmp_path), max_steps=1, use_cpu=True)
    asked = []
    trainer.step_loss.register_forward_hook(lambda loss, given, result: asked.append(given[2]))
    batch = data.batch(0, details=True)
    trainer.compute_loss(trainer.model, batch)
    place = batch["attention_mask"].cumsum(1) - 1
    assert torch.equal(asked[0], place.masked_fill(batch["labels"] == -100, 0))


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_trains_and_thinks(name, tmp_path):
    torch.manual_seed(0)
    if name == "grid":
        cells = torch.randint(1, 5, (40, 16))
        task = TensorTask(cells, cells, grid=True)
    else:
        task = th.make_task("hops" if name == "pointer" else "sort")
    preset = PRESETS[name](hidden_size=16)
    data = preset.data(task, max_length=1 if name == "grid" else 4, holdout=0.1)
    model = preset.thinker(data)
    assert model.config.hidden_size == 16
    preset.trainer(
        model, data, str(tmp_path), max_steps=2, use_cpu=True, save_strategy="no", warmup_steps=0
    ).train()
    curves = th.evaluate_steps(model, data, [data.schedule.max_length], n_steps=[2], samples=4)
    assert 0 <= curves.cells[0][0].token <= 1


def test_the_command_trains_on_a_file_and_tests_longer_rows(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, parity([1, 2, 3, 4, 6, 7]))))
    out = tmp_path / "run"
    words = ["think", "train", str(file), str(out), "--preset", "scan", "--length", "4"]
    short = ["--iterations", "12", "--samples", "16", "--no-progress"]
    assert main([*words, *short]) == 0
    result = json.loads((out / "result.json").read_text())
    # of 1 to 4 none is held out, for they have few rows
    # of the 16 inputs of length 4 one is held out
    assert result["by_length"].keys() == {"4", "6", "7"}
    assert main([*words, *short, "--iterations", "14"]) == 0
    assert json.loads((out / "result.json").read_text())["resumed"]
    capsys.readouterr()
    assert main(["think", "evaluate", str(out), "--samples", "8"]) == 0
    # as many steps as symbols, some more than twice, and four times
    points = re.findall(r"^(\d) +(\d+) ", capsys.readouterr().out, re.M)
    assert points == [(str(n), str(steps)) for n in (4, 6, 7) for steps in (n, 2 * n + 6, 4 * n)]
    assert main(["think", "solve", str(out), "0110", "111"]) == 0
    assert re.search(r"^0 +\d+ +[01]{4}$", capsys.readouterr().out, re.M)
    # a run's folder has its rows, and the file may go
    file.rename(tmp_path / "elsewhere.jsonl")
    assert main(["think", "solve", str(out), "0110"]) == 0
    assert main(["think", "evaluate", str(out), "--samples", "8"]) == 0
    capsys.readouterr()
    assert main(["think", "evaluate", str(out), "--n-steps", "0"]) == 1
    assert "n_steps is 0, expected a whole number, 1 or more" in capsys.readouterr().err
    file.write_text("\n".join(map(json.dumps, parity([1, 2, 3, 4, 6, 7], repeats=2))))
    assert main([*words, *short, "--iterations", "16"]) == 1
    assert "rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.jsonl"], "there is no file nothing.jsonl"),
        (["rows.jsonl", "--options", "symbols=3"], "takes no --options, got symbols=3"),
        (
            ["rows.jsonl", "--length", "9"],
            "max_length is 9, expected at most 7, the length of the longest row",
        ),
        (["rows.jsonl", "--preset", "grid"], "needs rows of one length, got lengths 5 to 7"),
        (["copy", "--preset", "scan", "--steps", "1", "6"], "--preset sets the steps, got --steps"),
        (["copy", "--preset", "grid"], "a task of grids of one size"),
        (["few.jsonl"], "expected held-out rows .*, got none in RowsTask"),
    ],
)
def test_the_command_refuses_what_a_preset_cannot_take(
    words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, parity([5, 7]))))
    (tmp_path / "few.jsonl").write_text('["ab", "ba"]\n["a", "a"]\n')
    assert main(["think", "train", words[0], "out", *words[1:]]) == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert re.search(message, printed)
    assert not (tmp_path / "out").exists()


def test_presets_reach_answers_that_follow_the_input_and_train_every_length():
    rows = [(text, text * 2) for text in ("ab", "ba", "aab", "aba", "abab", "bbaa") * 4]
    task = th.RowsTask(rows)
    data = th.presets.scan().data(task, holdout=0.0)
    # the last symbol of an answer is 3 * 4 tokens after the start, and is supervised
    assert int(data.batch(0, details=True)["distance"].max()) == 12
    assert data.most_steps == 12 + 6
    one = th.RowsTask([(text, text[0]) for text, _ in rows])
    pointer = th.presets.pointer().data(one, holdout=0.0)
    lengths = pointer.batch(0, details=True)["lengths"]
    assert set(lengths.tolist()) == {2, 3, 4}
    uniform = th.presets.scan().data(
        task, holdout=0.0, schedule=Uniform(max_length=3, min_length=2)
    )
    assert uniform.schedule.max_length == 3


def test_one_input_of_ten_or_more_is_held_out():
    texts = [f"{number:04b}" for number in range(16)]
    for part in range(6):
        task = th.RowsTask([(text, text) for text in texts[part : part + 10]] * 3)
        data = th.CurriculumDataset(task, Fixed(max_length=4, min_length=4))
        held = {tuple(row.tolist()) for row in data.held_out(30, 4)["input_ids"]}
        seen = {tuple(row.tolist()) for step in range(20) for row in data.batch(step)["input_ids"]}
        assert held
        assert not held & seen


def test_solve_takes_numpy_steps_and_refuses_rows_with_a_mask():
    task = th.make_task("copy")
    model = solver(task)
    assert th.solve(model, task, [[1, 2]], max_steps=np.int64(2)).steps <= (2,)
    rows = torch.ones(3, 4, dtype=torch.long)
    masked = TensorTask(rows, rows, mask=rows.bool())
    with pytest.raises(ValueError, match="solve: task is a TensorTask with a mask"):
        th.solve(model, masked, [[1, 1, 1, 1]])
    data = th.CurriculumDataset(task, Uniform(max_length=8))
    with pytest.raises(ValueError, match="n_steps is 4 at length 2; expected a list"):
        th.evaluate_steps(model, data, [2], n_steps=lambda length: 2 * length)
    with pytest.raises(ValueError, match=r"inputs of length 30 have 30 tokens, but .* most 20"):
        th.evaluate_steps(model, data, [30], n_steps=[2])
