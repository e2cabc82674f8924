"""Examples, how-to pages and notebooks run, with few steps (`make test-examples`)."""

import csv
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mergekit_lite import METHODS
from tests.support.hub import fake_hub
from tests.support.models import save, save_tokenizer, tiny
from tests.support.notebooks import NAMES as NOTEBOOKS
from tests.support.notebooks import cells as cells_of
from tests.support.users import users_files  # noqa: F401, a fixture
from tests.support.warm import run_script
from thinker import TASKS

pytestmark = pytest.mark.examples
ROOT = Path(__file__).parents[1]
# a row of the Arena's lists that is no pair, since it cannot be written as UTF-8
HALF_A_SURROGATE = {
    "prompt": '["\\ud83d"]',
    "response_a": '["a saw"]',
    "response_b": '["an axe"]',
}


HOWTO = sorted(path.stem for path in (ROOT / "docs" / "howto").glob("*.md"))


@pytest.mark.parametrize("page", HOWTO)
def test_a_how_to_page_runs_as_it_stands(page, users_files, monkeypatch):  # noqa: F811, the fixture
    """Its files, commands and Python, in order, with fewer steps, beside a hub of this machine."""
    text = (ROOT / "docs" / "howto" / f"{page}.md").read_text(encoding="utf-8")
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    )
    blocks = re.findall(r'```(\w+)(?: title="([^"]+)")?\n(.*?)```', text, re.S)
    assert blocks
    try:
        for kind, title, code in blocks:
            if title:
                Path(title).write_text(code)
            elif kind == "python":
                with fake_hub(monkeypatch):
                    exec(re.sub(r"max_steps=\d+", "max_steps=2", code), {})
            elif (
                kind == "text"
            ):  # too long to run: scripts that are there, and flags that they have
                for name, flags in re.findall(r"examples/(\w+\.py)([^#\n]*)", code):
                    source = (ROOT / "examples" / name).read_text(encoding="utf-8")
                    assert all(f'"{flag}"' in source for flag in re.findall(r"--[\w-]+", flags)), (
                        name,
                        flags,
                    )
            elif kind == "bash":
                for line in code.splitlines():
                    done = subprocess.run(
                        line,
                        shell=True,
                        env=environment,
                        capture_output=True,
                        text=True,
                        timeout=300,
                    )
                    assert done.returncode == 0, f"{line}\n{done.stderr[-2000:]}"
    finally:
        METHODS.pop("largest_change", None)
        TASKS.pop("running_maximum", None)
    assert f"howto/{page}.md\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def run_example(name, *options, absent=()):
    """What an example prints; ``absent``: modules that are not installed."""
    done = run_script(ROOT / "examples" / name, "--smoke", *options, absent=absent)
    assert done.returncode == 0, done.stderr[-2000:]
    if "matplotlib" in absent:  # said before any training starts, and nothing fails after it
        assert (
            "no plots will be drawn: matplotlib is missing; pip install 'model-components[plot]'"
            in done.stdout
        )
    return done.stdout


def test_the_merging_example_runs(tmp_path):
    rows = [
        line.split()
        for line in run_example("merge_checkpoints.py", "--out", tmp_path).splitlines()
        if "%" in line
    ]
    assert [r[0] for r in rows][-5:] == ["linear", "slerp", "task_arithmetic", "ties", "dare_ties"]
    assert all((tmp_path / f"merged-{r[0]}" / "model.safetensors").exists() for r in rows[-5:])


def test_the_masks_example_runs(tmp_path):
    printed = run_example("train_masks.py", "--out", tmp_path)
    assert all(f"masks, {kind}" in printed for kind in ("accurate", "efficient", "baked"))
    assert (tmp_path / "masks-accurate" / "masks.png").stat().st_size > 10_000
    assert (tmp_path / "merged-masks" / "model.safetensors").exists()


@pytest.mark.slow
def test_half_of_the_mlps_parameters_can_go_and_training_brings_the_loss_back(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "compress_gpt2.py"), "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--init", "prune", "sequential"], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    original = float(re.search(r"^the original +[\d,]+ +([\d.]+)", done.stdout, re.M)[1])
    rows = {
        name: list(
            map(
                float,
                re.search(rf"^{name} +[\d,]+ +([\d.]+) +([\d.]+)", done.stdout, re.M).groups(),
            )
        )
        for name in ("prune", "sequential")
    }
    assert rows["sequential"][0] < original + 0.05 < rows["prune"][0]
    assert rows["sequential"][1] <= original


@pytest.mark.slow
def test_masks_keep_both_tasks_where_no_formula_does(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "train_masks.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {
        line[:24].strip(): [float(v) for v in re.findall(r"([\d.]+)%", line)]
        for line in done.stdout.splitlines()
        if line.count("%") == 2 and not line.startswith("The baked")
    }
    best = found["reverse specialist"][0], found["upper specialist"][1]
    kept = {
        name: min(a / b for a, b in zip(values, best, strict=True))
        for name, values in found.items()
    }
    assert kept["masks, baked"] >= 0.95
    assert all(
        kept[name] < 0.95 for name in ("linear", "slerp", "task_arithmetic", "ties", "dare_ties")
    )


WORDS = ["red", "green", "blue", "round", "square", "small", "large", "old", "new", "warm", "cold"]


def write_instructions(folder):
    """Instructions of two kinds, to rewrite and to write; returns the words that they are of."""
    rows = [
        {
            "instruction": f"{('rewrite', 'write')[i % 2]} {a} {b} {WORDS[i % 11]}",
            "input": (f"{a} {b}", "")[i % 2],
            "output": f"{a} and {b}",
        }
        for i, (a, b) in enumerate(itertools.product(WORDS, WORDS))
    ]
    (folder / "data.json").write_text(json.dumps(rows))
    return [*WORDS, "rewrite", "write", "and", "<|im_start|>user", "<|im_end|>"]


def test_the_field_trial_runs_and_goes_on(tmp_path):
    from tests.heads.pairwise.support import tokenizer_of

    words = write_instructions(tmp_path)
    pairs = [
        {"prompt": f"p{k}", "a": "w1 w2 w3", "b": f"w4 w{k}", "label": k % 2} for k in range(60)
    ]
    with gzip.open(tmp_path / "alpaca_eval_pairs.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(pair) + "\n" for pair in pairs))
    given = [
        "--data",
        tmp_path,
        "--out",
        tmp_path / "out",
        "--model",
        tmp_path / "model",
        "--judge",
        tmp_path / "judge",
    ]
    assert "is not a model folder; run `make real`" in run_example("field_trial/run.py", *given)
    save(tiny("llama-tied"), tmp_path / "model")
    save_tokenizer(tmp_path / "model", words)
    save(tiny("bert"), tmp_path / "judge")
    tokenizer_of().save_pretrained(tmp_path / "judge")
    chapters = ("tune", "merge", "shrink", "judge", "think")
    printed = "".join(run_example(f"field_trial/{name}.py", *given) for name in chapters)
    for name in (
        "specialist edit",
        "regmean",
        "learn_merge",
        "ties, from a recipe, ours",
        "pruned",
        "pruned, trained back",
        "what is saved",
        "the judge",
        "pruned, trained back, against",
        "thinks as long as it needs",
        "a stock transformer",
    ):
        assert re.search(rf"^{re.escape(name)} .*\d", printed, re.M), name
    kept = [
        path
        for folder in ("rows", "figures")
        for path in (tmp_path / "out" / folder).rglob("*.json")
    ]
    before = {path: path.stat().st_mtime_ns for path in kept}
    assert len(before) > 20
    assert "best merge: " in run_example("field_trial/merge.py", *given)
    assert {path: path.stat().st_mtime_ns for path in kept} == before  # nothing twice
    assert not [path for path in (tmp_path / "out").rglob("*") if "partial" in path.name]


def test_the_instruction_example_runs(tmp_path):
    from tests.support.models import save_tokenizer, tiny

    words = write_instructions(tmp_path)
    asked = ["--data", tmp_path, "--out", tmp_path / "out", "--model", tmp_path / "model"]
    assert "is not a model folder; run `make real`" in run_example(
        "train_masks_on_instructions.py", *asked
    )
    save(tiny("llama-tied"), tmp_path / "model")
    save_tokenizer(tmp_path / "model", words)
    printed = run_example(
        "train_masks_on_instructions.py", *asked, "--only", "base", "spec*", "average", "ties"
    )
    assert [line[:12] for line in printed.splitlines() if ".json" not in line][1:5] == [
        "base        ",
        "specialist e",
        "specialist c",
        "average     ",
    ]
    done = {path.stem: path.stat().st_mtime_ns for path in (tmp_path / "out" / "rows").iterdir()}
    assert "masks, evidence, seed 0" not in done
    printed = run_example("train_masks_on_instructions.py", *asked)
    for name in (
        "slerp",
        "regmean++",
        "all weights, seed 0",
        "masks, whole weights, sum to",
    ):
        assert re.search(rf"^{re.escape(name)}.* +\d+\.\d+ +\d+\.\d+ ", printed, re.M), name
    rows = tmp_path / "out" / "rows"
    # none twice
    assert all((rows / f"{name}.json").stat().st_mtime_ns == when for name, when in done.items())


def test_the_example_of_six_modules_learns_and_folds():
    done = run_script(ROOT / "examples" / "modules.py", "--steps", "150")
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(re.search(r"right: ([\d.]+)%", done.stdout)[1]) > 85
    assert float(re.search(r"logit by (\S+)", done.stdout)[1]) < 1e-3


@pytest.mark.parametrize("task", ["parity", "add16", "reverse", "sort", "hops"])
def test_the_example_that_thinks_longer_runs(task, tmp_path):
    figures = tmp_path / "figures.json"
    options = ["--task", task, "--lengths", 4, 9, "--json", figures, "--out", tmp_path]
    printed = run_example(
        "think_longer.py", *options, absent=["matplotlib"] if task == "sort" else ()
    )
    assert re.search(
        r"^\d+ parameters, lengths up to \d+, 20 iterations, \d+ CPU s$", printed, re.M
    )
    points = json.loads(figures.read_text())
    assert {p["length"] for p in points} == {4, 9}
    assert all(0 <= p["rows"] <= p["symbols"] <= 1 and p["steps"] >= 1 for p in points)
    assert (tmp_path / f"{task}.svg").exists() == (task != "sort")


@pytest.mark.parametrize("puzzle", ["sudoku4", "maze", "sudoku9"])
def test_the_example_that_solves_puzzles_runs(puzzle, tmp_path):
    figures = tmp_path / "figures.json"
    printed = run_example(
        "solve_puzzles.py", "--puzzle", puzzle, "--json", figures, "--out", tmp_path
    )
    assert re.search(r"^\d+ parameters, 8 iterations, \d+ CPU s$", printed, re.M)
    points = json.loads(figures.read_text())
    assert len(points) >= 4
    assert f"{points[-1]['steps']} steps: {points[-1]['symbols']:.2%} of cells" in printed
    if puzzle != "maze":
        sys.path.insert(0, str(ROOT / "examples"))
        import solve_puzzles

        recipe = solve_puzzles.PUZZLES[puzzle](11, True)
        test = next(iter(recipe.tests.values()))
        seen, tested = (
            set(map(tuple, data.task.task.targets.tolist())) for data in (recipe.train, test)
        )
        assert not seen & tested
        assert 0 < len(tested) < len(seen)
    assert (tmp_path / f"{puzzle}.svg").exists()


def byte_level_model(folder):
    """A tiny Llama whose tokens are bytes and merges of them, and texts."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    texts = [f"Name a tool, please: a hammer (é{n}) or a saw." for n in range(40)]
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(texts, vocab_size=300, special_tokens=["<end>"], show_progress=False)
    PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, bos_token="<end>", eos_token="<end>"
    ).save_pretrained(folder)
    save(tiny("llama", vocab_size=300, max_position_embeddings=512), folder)
    return [{"instruction": text, "input": "", "output": 3 * text} for text in texts]


def test_the_distillation_example_runs_and_goes_on(tmp_path):
    rows = byte_level_model(tmp_path / "model")
    (tmp_path / "texts.json").write_text(json.dumps(rows))
    figures = tmp_path / "figures.json"
    given = [tmp_path / "model", tmp_path / "texts.json", "--out", tmp_path / "out"]
    command = ["distill_language_model.py", *given, "--json", figures]
    printed = run_example(*command)
    found = json.loads(figures.read_text())
    assert [point["steps"] for point in found["steps"]] == [1, 2, 4, 8, 16]
    assert f"the teacher: {found['teacher']:.3f} nats per byte" in printed
    teacher = tmp_path / "out" / "teacher.pt"
    before = teacher.stat().st_mtime_ns
    # but for the CPU seconds of the first line
    assert run_example(*command).splitlines()[1:] == printed.splitlines()[1:]
    assert teacher.stat().st_mtime_ns == before  # it is asked once
    assert (tmp_path / "out" / "thinker" / "model.safetensors").exists()


def test_a_teachers_bytes_are_its_tokens_sums(tmp_path):
    """Of all tokens that begin with the bytes so far, by their next byte."""
    sys.path.insert(0, str(ROOT / "examples"))
    import distill_language_model

    text = byte_level_model(tmp_path)[0]["output"]
    teacher = distill_language_model.NextByte(tmp_path)
    found = teacher(text)
    tokens = teacher.tokenizer(text)["input_ids"]
    with torch.no_grad():
        start = teacher.tokenizer.bos_token_id
        logits = teacher.model(torch.tensor([[start, *tokens[:-1]]])).logits[0].double()
    expected = []
    for token, shares in zip(tokens, logits.softmax(-1), strict=True):
        word = teacher.words[token]
        for place in range(len(word)):
            row = torch.zeros(256, dtype=torch.float64)
            # a model may have rows for more tokens than its tokenizer knows
            for other, share in zip(teacher.words, shares, strict=False):
                if len(other) > place and other[:place] == word[:place]:
                    row[other[place]] += share
            expected.append(row / row.sum())
    assert max(len(teacher.words[token]) for token in tokens) > 2
    torch.testing.assert_close(found, torch.stack(expected).float())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12, 13, 14, 15])
def test_parity_of_five_bits_becomes_parity_of_a_hundred(seed, tmp_path):
    """The figures that the guide promises, by the command that it shows."""
    figures, example = tmp_path / "figures.json", str(ROOT / "examples" / "think_longer.py")
    options = [
        "--task",
        "parity",
        "--train-length",
        "5",
        "--seed",
        str(seed),
        "--json",
        str(figures),
    ]
    command = [sys.executable, example, *options, "--samples", "128"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    ).stdout
    assert int(re.search(r"(\d+) CPU s$", printed, re.M)[1]) < 60
    right = {(p["length"], p["steps"]): p["symbols"] for p in json.loads(figures.read_text())}
    assert right[40, 48] >= 0.999
    assert right[100, 200] >= 0.999
    assert right[100, 1000] >= 0.999
    assert right[100, 25] < 0.8


def test_the_judge_example_trains_and_submits(tmp_path):
    rows = []
    for i in range(120):
        names = ("winner_model_a", "winner_model_b", "winner_tie")
        won = dict(zip(names, [i % 3 == k for k in range(3)], strict=True))
        asked = {"prompt": f'["Name a tool {i}."]', "response_a": "a saw"}
        rows.append(asked | {"response_b": f"an axe {i}"} | won)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with gzip.open(tmp_path / "test.csv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, ["id", "prompt", "response_a", "response_b"])
        writer.writeheader()
        asked = [rows[0], rows[1] | HALF_A_SURROGATE, *rows[2:5]]
        for i, row in enumerate(asked):
            writer.writerow({"id": 100 + i} | {k: row[k] for k in writer.fieldnames[1:]})
    out = tmp_path / "judge"
    options = ["--data", data, "--out", out, "--submit", tmp_path / "test.csv.gz"]
    printed = run_example("train_judge.py", *options, "--settings", "dropout=0.1")
    assert "120 of 120 rows" in printed
    assert "home (prompts): " in printed
    with (out / "submission.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row.pop("id") for row in found] == ["100", "101", "102", "103", "104"]
    assert all(abs(sum(map(float, row.values())) - 1) < 1e-4 for row in found)
    ties = [float(row["winner_tie"]) for row in found]
    others = [tie for k, tie in enumerate(ties) if k != 1]
    assert ties[1] == pytest.approx(sum(others) / 4, abs=2e-6)  # of the row that is no pair
    with pytest.raises(AssertionError, match=r"train_judge: the run in .* is finished"):
        run_example("train_judge.py", *options, "--settings", "dropout=0.1")


def test_the_search_for_a_judge_runs_and_goes_on(tmp_path):
    pytest.importorskip("optuna", reason="needs optuna (extra search)")
    printed = run_example("search_judge.py", "--trials", 2, "--out", tmp_path)
    assert "0 of 2 trials have been run" in printed
    assert re.search(r"^best: .*--dropout [\d.]+ .*--learning-rate [\d.e-]+", printed, re.M)
    printed = run_example("search_judge.py", "--trials", 3, "--out", tmp_path)
    assert "2 of 3 trials have been run" in printed


def test_the_fine_tuning_example_runs_and_goes_on(tmp_path):
    words = ["--out", tmp_path, "--steps", 4, "--base-steps", 4]
    done = run_script(ROOT / "examples" / "finetune_lora.py", *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^after +[\d.]+ +[\d.]+ +[\d.-]+$", done.stdout, re.M)
    assert "verdict: " in done.stdout
    assert (tmp_path / "lora" / "curves.png").stat().st_size > 5_000
    again = run_script(ROOT / "examples" / "finetune_lora.py", *words, absent=["matplotlib"])
    assert again.stdout == done.stdout
    alone = run_script(ROOT / "examples" / "finetune_lora.py", "--rows", "rows.json")
    assert "expected --model and --rows together" in alone.stderr


def test_the_sweep_example_runs(tmp_path):
    words = ["--out", tmp_path, "--ranks", 2, "--steps", 2, "--base-steps", 2]
    done = run_script(ROOT / "examples" / "sweep_lora.py", *words)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = list(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
    assert [row["batch_size"] for row in rows] == ["4", "8"] * 4
    assert "lowest held-out loss: r-2,lora_alpha-" in done.stdout
    assert (tmp_path / "sweep.png").stat().st_size > 5_000


def test_the_compression_example_runs(tmp_path):
    options = ["--out", tmp_path, "--init", "random", "--strategy", "in-turns", "labels"]
    printed = run_example("compress_gpt2.py", *options)
    rows = [line.split()[:5] for line in printed.splitlines() if line.startswith("random, ")]
    assert [row[1] for row in rows] == ["in-turns", "labels"]
    original = re.search(r"^the original +[\d,]+ +([\d.]+)", printed, re.M)[1]
    assert float(rows[0][3]) > float(original)
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    assert (tmp_path / "random, in-turns" / "folded" / "model.safetensors").exists()
    again = run_example("compress_gpt2.py", *options, "--resume", absent=["matplotlib"])
    lines = [line.split()[:5] for line in again.splitlines() if line.startswith("random, ")]
    assert lines == rows


def test_the_shrinking_example_writes_a_stock_model(tmp_path):
    from transformers import AutoModelForCausalLM

    words = ["<unk>", *(f"w{i}" for i in range(95))]
    model = tiny("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model", words)
    (tmp_path / "texts.jsonl").write_text(
        "\n".join(json.dumps({"text": " ".join(words)}) for _ in range(10))
    )
    options = [
        "--model",
        tmp_path / "model",
        "--calibration",
        tmp_path / "texts.jsonl",
        "--out",
        tmp_path / "small",
    ]
    printed = run_example(
        "shrink_model.py", *options, "--keep", 0.25, "--json", tmp_path / "figures.json"
    )
    told = json.loads((tmp_path / "figures.json").read_text())
    assert told["models"][0]["name"] == "original"
    assert told["models"][1]["parameters"] < told["models"][0]["parameters"]
    assert told["bytes"][1] < told["bytes"][0]
    assert "on disk:" in printed
    rows = [
        line.split()
        for line in printed.splitlines()
        if line.startswith(("original", str(tmp_path / "small")))
    ]
    assert [row[1] for row in rows] == ["10,896", "7,440"]
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert smaller.dtype == torch.bfloat16
    assert smaller.config.intermediate_size == 6


def test_accelerate_runs_an_example_in_two_processes(tmp_path):
    """By the file that the page on GPUs names."""
    from tests.heads.pairwise.support import tokenizer_of

    encoder = tmp_path / "encoder"
    tiny("bert").save_pretrained(encoder)
    tokenizer_of().save_pretrained(encoder)
    script = tmp_path / "judge.py"
    example = ROOT / "examples" / "train_judge.py"
    script.write_text(
        "import runpy, sys\nfrom accelerate import PartialState\nassert "
        "PartialState(cpu=True).num_processes == 2\nsys.path.insert(0, "
        f"{str(example.parent)!r})\nrunpy.run_path({str(example)!r}, run_name='__main__')\n"
    )
    file = ROOT / "examples" / "accelerate" / "two_processes.yaml"
    command = [
        str(Path(sys.executable).parent / "accelerate"),
        "launch",
        "--config_file",
        str(file),
        str(script),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = [
        *command,
        "--smoke",
        "--encoder",
        str(encoder),
        "--settings",
        "freeze=none",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(given, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_twice_in_one_folder(name, tmp_path, monkeypatch):
    """Cell by cell in one namespace, as a reader would run it, with fewer steps; what it says it
    found is stored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = cells_of(name)
    assert len(cells) >= 5
    assert "find_spec" in cells[0]  # what installs
    try:
        for _ in range(2):
            namespace = {}
            for cell in cells:
                exec(re.sub(r"^STEPS = \d+", "STEPS = 20", cell, flags=re.M), namespace)
    finally:
        METHODS.pop("equal_energy", None)
    assert list(tmp_path.iterdir()) == []  # all that it made is in a folder for what is temporary
