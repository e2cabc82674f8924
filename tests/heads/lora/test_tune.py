"""`tune` and `sweep`: what they write, what they measure, and how they continue."""

import functools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from heads.lora import LikelihoodGain, TextExamples, sweep, tune
from heads.lora.training import TuneTrainer
from model_components._cli import _continue_hint, main
from model_components._examples import split_examples
from tests.support.models import save_tokenizer, tiny

WORDS = ["<unk>", "<end>", *"abcdefghijklmnopqrstuvwxyz", "<user>", "<bot>"]
CHAT = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content }}"
    "{{ ' <end>' if m.role != 'user' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)
ROWS = [{"instruction": f"{a} {b}", "output": a} for a in "abcde" for b in "fghij"]
SHORT = {
    "r": 4,
    "max_steps": 4,
    "batch_size": 4,
    "evaluations": 2,
    "answers": 3,
    "answer_length": 4,
}


@pytest.fixture
def base(tmp_path):
    """A folder of a tiny model with a tokenizer."""
    tiny("llama").save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base", WORDS, template=CHAT, eos_token="<end>")
    return tmp_path / "base"


def tuned(base, name, rows=ROWS, **settings):
    return tune(base, rows, out=base.parent / name, progress=False, **{**SHORT, **settings})


def adapter_of(out):
    from safetensors.torch import load_file

    return load_file(out / "adapter" / "adapter_model.safetensors")


@torch.no_grad()
def plain_loss(model, examples):
    """The mean loss of all supervised tokens, one example at a time, by its definition."""
    total, count = 0.0, 0
    for example in examples:
        ids, labels = (torch.tensor([example[k]]) for k in ("input_ids", "labels"))
        logits = model(input_ids=ids).logits[0, :-1].float()
        total += float(F.cross_entropy(logits, labels[0, 1:], reduction="sum"))
        count += int((labels[0, 1:] != -100).sum())
    return total / count


def test_a_run_writes_all_that_it_promises(base):
    report = tuned(base, "run", learning_rate=1e-2)
    out = base.parent / "run"
    tokenizer = AutoTokenizer.from_pretrained(base)
    ((_, held_out),) = split_examples([TextExamples(ROWS, tokenizer)], 0.1, 200)
    untuned, merged = (AutoModelForCausalLM.from_pretrained(f) for f in (base, out / "model"))
    assert report.loss_before == pytest.approx(plain_loss(untuned, held_out), rel=1e-5)
    assert report.loss == pytest.approx(plain_loss(merged, held_out), rel=1e-4)
    assert report.loss != report.loss_before
    assert (report.held_out_rows, report.train_rows, report.steps) == (2, 23, 4)
    adapted = PeftModel.from_pretrained(untuned, out / "adapter")
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        logits = [model(ids).logits for model in (adapted, merged)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    say = pipeline("text-generation", model=str(out / "model"))
    asked = [{"role": "user", "content": "a f"}]
    assert say(asked, max_new_tokens=2)[0]["generated_text"][-1]["role"] == "assistant"
    answers = json.loads((out / "answers.json").read_text())
    assert [set(row) for row in answers] == [{"prompt", "reference", "before", "after"}] * 2
    assert answers[0]["prompt"].endswith("<bot>")
    assert answers[0]["reference"].strip() in "abcde"
    assert (out / "curves.png").stat().st_size > 5_000
    for part in ("before", "after", "verdict: ", "in ", "answers.json", "learning rate 0.01"):
        assert part in str(report)


def test_an_adapter_of_a_model_of_the_hub_names_its_id_and_commit(base):
    """Not this machine's cache, whose newest commit may be another one."""
    snapshot = base.parent / "hub" / "models--org--m" / "snapshots" / ("a" * 40)
    shutil.copytree(base, snapshot)
    tune(snapshot, ROWS, out=base.parent / "run", progress=False, **SHORT)
    config = json.loads((base.parent / "run" / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/m", "a" * 40)
    card = (base.parent / "run" / "adapter" / "README.md").read_text()
    assert "# LoRA adapter of org/m" in card
    assert str(base.parent) not in card


def test_a_finished_run_is_not_made_again(base, monkeypatch):
    first = tuned(base, "run")
    monkeypatch.setattr(TuneTrainer, "train", None)
    again = tuned(base, "run")
    assert str(again) == str(first)
    assert again.curves == first.curves
    with pytest.raises(ValueError, match=r"learning_rate is None there, got 1\.0; .*another"):
        tuned(base, "run", learning_rate=1.0)
    with pytest.raises(ValueError, match="rows changed since the run"):
        tuned(base, "run", rows=ROWS[1:])
    (base.parent / "run" / "report.json").write_text("{")
    with pytest.raises(ValueError, match=r"report\.json or log\.json in .* cannot be read"):
        tuned(base, "run")


@pytest.mark.parametrize("settings", [{}, {"r": 0, "last_blocks": 1}])
def test_an_interrupted_run_goes_on_to_the_same_bits(base, settings, monkeypatch):
    whole = tuned(base, "whole", max_steps=6, **settings)
    step = TuneTrainer.training_step

    def stopped(self, *given, **named):
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return step(self, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(TuneTrainer, "training_step", stopped)
        with pytest.raises(KeyboardInterrupt):
            tuned(base, "run", max_steps=6, **settings)
    report = tuned(base, "run", max_steps=6, **settings)
    assert "continued from checkpoint-3" in str(report)
    assert report.loss == whole.loss
    assert report.curves == whole.curves
    first, second = (
        AutoModelForCausalLM.from_pretrained(base.parent / name / "model").state_dict()
        for name in ("whole", "run")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_all_parameters_or_those_of_the_last_blocks(base):
    report = tuned(base, "run", r=0, last_blocks=1, learning_rate=1e-2)
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    after = AutoModelForCausalLM.from_pretrained(base.parent / "run" / "model").state_dict()
    last = max(int(name.split(".")[2]) for name in before if ".layers." in name)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if f".layers.{last}." in name}
    assert report.trained_parameters == sum(before[name].numel() for name in changed)
    assert not (base.parent / "run" / "adapter").exists()
    half = tuned(base, "half", last_blocks=1, target_modules=["q_proj"], r=2, merge=False)
    assert not (base.parent / "half" / "model").exists()
    assert {name.split(".")[4] for name in adapter_of(half.out)} == {str(last)}
    every = tuned(base, "every", last_blocks=1, r=2, merge=False)
    assert {name.split(".")[4] for name in adapter_of(every.out)} == {str(last)}
    assert len(adapter_of(every.out)) == 2 * 7  # A and B of all linear layers of a block


def test_packed_rows_give_the_same_loss(base):
    reports = [tuned(base, f"run {pack}", pack=pack) for pack in (False, True)]
    assert reports[0].loss_before == pytest.approx(reports[1].loss_before, rel=1e-5)
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-3)


def test_checkpointed_activations_give_the_same_adapter(base):
    for name in ("plain", "checkpointed"):
        tuned(base, name, merge=False, gradient_checkpointing=name == "checkpointed")
    first, second = (adapter_of(base.parent / name) for name in ("plain", "checkpointed"))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("r", [4, 0])
def test_the_likelihood_judge_is_the_model_before_tuning(base, r):
    report = tuned(base, "run", r=r, judge="likelihood_gain", learning_rate=1e-2)
    judge = LikelihoodGain(
        AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    )
    rows = json.loads((base.parent / "run" / "answers.json").read_text())
    for key, score in (("before", report.score_before), ("after", report.score)):
        scores = [judge(row["prompt"], row[key]) for row in rows]
        assert score == pytest.approx(sum(scores) / len(scores), rel=1e-3, abs=1e-4)


def test_a_judge_of_ones_own_gets_the_references(base):
    seen = {}

    def make(references):
        seen.update(references)
        return lambda prompt, answer: float(prompt in references)

    report = tuned(base, "run", judge=make)
    assert (report.score_before, report.score) == (1.0, 1.0)
    assert {reference.strip() for reference in seen.values()} <= set("abcde")


def test_held_out_rows_of_ones_own(base):
    held_out = [{"instruction": "z y", "output": "x"}]
    report = tuned(base, "run", eval_rows=held_out)
    assert (report.train_rows, report.held_out_rows) == (25, 1)


@pytest.mark.filterwarnings("ignore:.*rows are left out")
def test_rows_that_are_cut_or_left_out_are_told(base):
    rows = [*ROWS, {"instruction": "a", "output": " ".join("abcdefghij" * 2)}]
    report = tuned(base, "run", rows=[*rows, {"instruction": "b", "output": ""}], max_length=12)
    assert "truncated to 12 tokens: 1 examples" in str(report)
    assert "left out because they have no answer within 12 tokens: 1 rows" in str(report)


def test_a_model_that_would_lose_the_adapter_to_rounding_is_written_in_float32(base):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.bfloat16().save_pretrained(base)
    report = tuned(base, "run", learning_rate=1e-9)
    assert "model is in float32, because rounding to the dtype of the base would lose" in str(
        report
    )
    written = AutoModelForCausalLM.from_pretrained(base.parent / "run" / "model")
    assert {tensor.dtype for tensor in written.parameters()} == {torch.float32}
    assert any(
        not torch.equal(a, b)
        for a, b in zip(written.parameters(), model.float().parameters(), strict=True)
    )
    # stopped before the report was written
    (base.parent / "run" / "report.json").unlink()
    again = tuned(base, "run", learning_rate=1e-9)
    assert [note for note in again.notes if note.startswith("model is in float32")]
    shutil.move(base.parent / "run", base.parent / "moved")
    assert "verdict" in str(again)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4}, "TuneConfig: unknown field rank"),
        ({"learning_rat": 4}, "did you mean learning_rate"),
        ({"learning_rate": -1.0}, r"learning_rate is -1\.0, expected a finite number, above 0"),
        ({"r": 0, "lora_alpha": 4.0}, r"lora_alpha is 4\.0 with r=0, .*expected no lora_alpha"),
        ({"last_blocks": 99}, "last_blocks is 99, expected at most"),
        ({"target_modules": ["nothing"]}, "nothing"),
        ({"judge": "gpt"}, "judge is 'gpt', expected 'likelihood_gain'"),
        (
            {"judge": "likelihood_gain", "answers": 0},
            "answers is 0, expected 1 or more, because a judge is given",
        ),
        ({"rows": ROWS[:1]}, "each of the 1 examples is held out"),
        ({"rows": [3]}, "a value of type int in row 1"),
        ({"optim": "adamx"}, "adamx"),
        ({"lr_scheduler_type": "cosinus"}, "lr_scheduler_type is 'cosinus', expected one of"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(base, settings, message):
    with pytest.raises(ValueError, match=message):
        tuned(base, "run", **settings)
    assert not (base.parent / "run").exists()


class Rows:
    """What `split_examples` reads of `TextExamples`."""

    tokenizer = SimpleNamespace(all_special_ids=[1])

    def __init__(self, examples, rows=None):
        self.examples = examples
        self.rows = list(range(len(examples))) if rows is None else rows


def test_prompts_are_not_split_between_training_and_held_out_rows():
    examples = [
        {"input_ids": [prompt, answer, 0], "labels": [-100, answer, 0]}
        for prompt in range(10, 15)
        for answer in range(20, 24)
    ]
    ((train, held_out),) = split_examples([Rows(examples)], 0.1, 200)
    assert len(held_out) == 2
    assert not {e["input_ids"][0] for e in train} & {e["input_ids"][0] for e in held_out}
    # all answers of a conversation are on one side
    rows = [n // 4 for n in range(20)]
    ((train, held_out),) = split_examples([Rows(examples, rows)], 0.2, 200)
    assert (len(train), len(held_out)) == (16, 4)
    # equal texts are on one side
    texts = [{"input_ids": [i % 4, i % 4], "labels": [i % 4, i % 4]} for i in range(20)]
    ((train, held_out),) = split_examples([Rows(texts)], 0.1, 200)
    assert not {e["input_ids"][0] for e in train} & {e["input_ids"][0] for e in held_out}
    # rows without a prompt, to which a tokenizer adds its first token, are different rows
    started = [{"input_ids": [1, i, 0], "labels": [-100, i, 0]} for i in range(10, 20)]
    ((train, held_out),) = split_examples([Rows(started)], 0.1, 200)
    assert (len(train), len(held_out)) == (9, 1)
    different = [{"input_ids": [i, i], "labels": [i, i]} for i in range(20)]
    assert [len(part) for part in split_examples([Rows(different)], 0.5, 4)[0]] == [16, 4]


@pytest.mark.parametrize("name", ["model", "adapter", "answers.json", "curves.png"])
def test_files_of_the_user_stay(base, name):
    out = base.parent / "run"
    out.mkdir()
    (out / name).write_text("mine")
    with pytest.raises(ValueError, match=f"got one with {name} and no run.json"):
        tuned(base, "run")
    assert (out / name).read_text() == "mine"


def test_another_model_in_the_same_folder_is_noticed(base):
    tuned(base, "run")
    tiny("llama", seed=5).save_pretrained(base)
    with pytest.raises(ValueError, match="model changed since the run"):
        tuned(base, "run")


def test_a_judge_that_fails_costs_nothing(base):
    calls = []

    def failing(references):
        def judge(prompt, answer):
            calls.append(prompt)
            if len(calls) > len(references):  # after training
                raise ConnectionError("503")
            return 1.0

        return judge

    with pytest.raises(ConnectionError):
        tuned(base, "run", judge=failing)
    assert (base.parent / "run" / "adapter" / "adapter_model.safetensors").exists()
    assert (base.parent / "run" / "model" / "config.json").exists()
    report = tuned(base, "run")
    assert report.score is None
    with pytest.raises(ValueError, match=r"expected the judge None of the finished run.*got test_"):
        tuned(base, "run", judge=failing)


def test_padding_at_the_left_changes_nothing(base):
    """Else a text's first token would be predicted from padding."""
    rows = [{"text": " ".join("abcdefghij"[: 2 + n % 7] + "k" * (n % 3))} for n in range(20)]
    before = tuned(base, "right", rows=rows, held_out=0.3)
    save_tokenizer(base, WORDS, template=CHAT, eos_token="<end>", padding_side="left")
    after = tuned(base, "left", rows=rows, held_out=0.3)
    assert (after.loss_before, after.loss) == (before.loss_before, before.loss)


def test_a_single_step_trains(base):
    report = tuned(base, "run", max_steps=1)
    assert report.loss != report.loss_before


def test_answers_end_where_trained_answers_end(base):
    """The template's end is not the end token of the model's own settings."""
    tiny("llama", eos_token_id=5).save_pretrained(base)
    rows = [{"instruction": f"{a} {b}", "output": "x y"} for a in "abcde" for b in "fghij"]
    settings = {"r": 0, "max_steps": 80, "learning_rate": 1e-2, "answer_length": 12}
    report = tuned(base, "run", rows=rows, **settings)
    assert report.loss < 0.1
    answers = json.loads((base.parent / "run" / "answers.json").read_text())
    assert {row["after"].strip() for row in answers} == {"x y"}
    written = AutoModelForCausalLM.from_pretrained(base.parent / "run" / "model")
    assert written.generation_config.eos_token_id == [5, WORDS.index("<end>")]


def test_tokens_without_an_embedding_are_refused(base):
    tiny("llama", vocab_size=29).save_pretrained(base)
    with pytest.raises(ValueError, match=r"expected token ids below 29 .*got 29 .'<bot>'"):
        tuned(base, "run")
    assert not (base.parent / "run").exists()


def test_rows_are_no_longer_than_the_model_has_positions(base):
    tiny("gpt2", n_positions=16).save_pretrained(base)
    rows = [*ROWS, {"instruction": "a", "output": " ".join("abcdefghij" * 4)}]
    report = tuned(base, "run", rows=rows, answer_length=14)
    assert "truncated to 16 tokens: 1 examples" in str(report)
    assert json.loads((base.parent / "run" / "answers.json").read_text()) == []  # no room


def test_a_template_that_writes_the_date_does_not_end_a_run(base):
    save_tokenizer(base, WORDS, template="a " + CHAT, eos_token="<end>")  # one day
    first = tuned(base, "run")
    save_tokenizer(base, WORDS, template="b " + CHAT, eos_token="<end>")  # the next
    assert tuned(base, "run").loss == first.loss


def test_a_sweep_compares_its_runs(base, capsys):
    grid = {"r": [2, 0], "learning_rate": 1e-3}
    out = base.parent / "sweep"
    options = {"out": out, "judge": None, "progress": False, **SHORT}
    report = sweep(base, ROWS, grid, **options)
    names = ["r-2,learning_rate-0.001", "r-0,learning_rate-0.001"]
    assert list(report.runs) == names
    assert not (out / names[0] / "model").exists()
    lines = (out / "runs.csv").read_text().splitlines()
    assert lines[0] == (
        "run,model,batch_size,epochs,max_steps,learning_rate,lr_scheduler_type,r,lora_alpha,"
        "loss,perplexity,judge,verdict,spikes,seconds,peak_mb"
    )
    settings = f'"{names[0]}",base,4,,4,0.001,cosine_with_min_lr,2,4'
    assert lines[1].startswith(f"{settings},{report.runs[names[0]].loss:.4f}")
    assert (out / "table.md").read_text().startswith("| run | model | batch_size |")
    assert (out / "sweep.png").stat().st_size > 5_000
    assert "lowest held-out loss: r-" in str(report)
    assert "all runs: model base, batch_size 4, max_steps 4, lr_scheduler_type" in str(report)
    assert report.table().header[:4] == ["run", "learning_rate", "r", "lora_alpha"]
    assert report.exit_status == 0
    before = (out / names[0] / "report.json").stat().st_mtime_ns
    more = sweep(base, ROWS, [grid, {"r": 2, "learning_rate": 1e30}], **options)
    assert (out / names[0] / "report.json").stat().st_mtime_ns == before
    assert list(more.failures) == ["r-2,learning_rate-1e+30"]
    assert more.rows()[-1]["verdict"] == "failed"
    assert more.exit_status == 1
    # a run that fails for any reason does not keep the others from running
    partly = sweep(base, ROWS, {"r": [64, 4]}, **{**options, "out": base.parent / "partly"})
    assert list(partly.runs) == ["r-4"]
    assert "r is 64, but the weight of" in partly.failures["r-64"]
    with pytest.raises(ValueError, match="r is 64, but the weight of"):
        sweep(base, ROWS, {"r": 64}, **{**options, "out": base.parent / "none"})
    with pytest.raises(ValueError, match="two runs with"):
        sweep(base, ROWS, [grid, grid], **options)
    for same in ([{"r": 2, "seed": 0}, {"seed": 0, "r": 2}], {"learning_rate": [1, 1.0]}):
        with pytest.raises(ValueError, match="two runs with"):
            sweep(base, ROWS, same, **options)
    for wrong in ([], {}, [{"rank": 2}], [{"r": []}, {"r": 2}]):
        with pytest.raises(ValueError, match=r"expected a grid|unknown field|values for each"):
            sweep(base, ROWS, wrong, **options)


def test_a_sweep_of_a_data_frame_and_of_many_settings(base):
    import pandas

    options = {"judge": None, "progress": False, **SHORT}
    grid = {"r": 2, "target_modules": [["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]]}
    grid |= {"lora_alpha": 4.0, "weight_decay": 0.01, "max_grad_norm": 0.5}
    report = sweep(base, pandas.DataFrame(ROWS), grid, out=base.parent / "frame", **options)
    (name,) = report.runs
    assert len(name) < 120
    assert report.runs[name].train_rows == 23
    mine = base.parent / "mine"
    mine.mkdir()
    (mine / "runs.csv").write_text("mine")
    with pytest.raises(ValueError, match=r"got one with runs\.csv and no run\.json"):
        sweep(base, ROWS, {"r": 2}, out=mine, **options)
    assert (mine / "runs.csv").read_text() == "mine"


def test_a_model_in_memory_and_rows_without_answers_are_told(base):
    with pytest.raises(ValueError, match="tune: expected a folder or a hub id, got a Linear; for"):
        tune(torch.nn.Linear(2, 2), ROWS, out=base.parent / "run")
    with pytest.raises(ValueError, match="instruction without output in row 1"):
        tuned(base, "run", rows=[{"instruction": "Name a color.", "output": None}, *ROWS])


def test_a_sweep_without_answers_has_no_score(base):
    options = {"out": base.parent / "sweep", "progress": False, **SHORT | {"answers": 0}}
    (report,) = sweep(base, ROWS, {"r": [2]}, **options).runs.values()
    assert report.score is None
    assert report.to_dict()["verdict"] == report.verdict


def test_the_commands_do_as_the_functions(base, capsys):
    (base.parent / "rows.json").write_text(json.dumps(ROWS))
    rows, out = base.parent / "rows.json", base.parent / "out"
    flags = ["--max-steps", "4", "--batch-size", "4", "--evaluations", "2", "--answers", "0"]
    words = ["lora", "tune", str(base), str(rows), str(out), "--r", "4", "--no-progress", *flags]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "verdict: " in printed
    report = tune(base, rows, out=base.parent / "run", progress=False, **SHORT | {"answers": 0})
    assert f"{report.loss:.4f}" in printed
    assert main([*words, "--r", "2"]) == 1
    assert "r is 4 there, got 2" in capsys.readouterr().err
    (base.parent / "grid.yml").write_text("- {r: 2, max-steps: 2, learning-rate: [1e-3, 2e-3]}\n")
    grid, out = base.parent / "grid.yml", base.parent / "sweep"
    words = ["lora", "sweep", *map(str, (base, rows, grid, out)), "--no-progress"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "learning_rate-0.001" in printed
    assert "learning_rate-0.002" in printed
    assert "all runs: " in printed
    # a stop in a later run has saved work in the folders of the runs
    hint = _continue_hint(functools.partial(lambda out: None, out))
    assert hint == "run the same command again to continue"
    grid.write_text("r")
    assert main(words) == 1
    assert "expected a YAML mapping of flags" in capsys.readouterr().err
