"""`learn_merge`: three students, what is delivered, how it continues, and what is refused."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PhiConfig, PhiForCausalLM

from mergekit_lite import learn_merge, merge_models
from mergekit_lite.learning import run as module
from mergekit_lite.learning.config import LearnConfig
from mergekit_lite.learning.student import Student
from mergekit_lite.learning.tasks import held_out_losses, read_tasks
from mergekit_lite.masks import KLConfig, MaskCollator, Merger, cache_teachers
from mergekit_lite.masks.training import DistillTrainer
from model_components._cli import main
from model_components._runs import RunFolder
from tests.support.models import save, save_tokenizer, tiny

MODELS = ["model0", "model1"]
DATA = ["task0.jsonl", "task1.jsonl"]
SHORT = {"max_steps": 4, "batch_size": 4, "max_length": 32, "progress": False}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Two models that speak differently, and rows of each."""
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate(MODELS):
        save(tiny("llama", k), tmp_path / name)
        save_tokenizer(tmp_path / name, [f"t{i}" for i in range(96)])
        generator = torch.Generator().manual_seed(k)
        rows = []
        for n in range(12):
            words = torch.randint(3, 90, (6,), generator=generator)
            completion = " ".join(f"t{i}" for i in words)
            rows.append({"prompt": f"t{n} ", "completion": completion})
        (tmp_path / DATA[k]).write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def tiny_phi(seed):
    """A model whose head has a bias."""
    torch.manual_seed(seed)
    config = PhiConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = PhiForCausalLM(config).eval()
    model.lm_head.bias.data.normal_()
    return model


def learned(out="out", **settings):
    return learn_merge(MODELS, DATA, out=out, **{**SHORT, **settings})


def held_out_rows(**settings):
    tokenizer = AutoTokenizer.from_pretrained("model0")
    config = LearnConfig(**{k: v for k, v in {**SHORT, **settings}.items() if k != "progress"})
    return [task.test for task in read_tasks(DATA, tokenizer, config)]


def load(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()


@torch.no_grad()
def plain_losses(model):
    """The mean loss of the supervised tokens of each task, by its definition."""
    means = []
    for examples in held_out_rows():
        losses = []
        for example in examples:
            ids, labels = (torch.tensor([example[k]]) for k in ("input_ids", "labels"))
            logits = model(input_ids=ids).logits[0, :-1]
            each = F.cross_entropy(logits, labels[0, 1:], reduction="none")
            losses += each[labels[0, 1:] != -100].tolist()
        means.append(sum(losses) / len(losses))
    return means


@pytest.mark.parametrize("train", ["masks", "lora", "all"])
@pytest.mark.parametrize("start", ["average", "regmean"])
def test_each_student_learns_and_the_table_is_right(train, start):
    report = learned(train=train, start=start, max_steps=12)
    student = f"{train} from {start}"
    assert report.student == student
    others = ["regmean"] if start == "average" else ["linear"]
    assert list(report.losses) == [*MODELS, start, *others, student]
    assert report.losses["model1"] == pytest.approx(plain_losses(load("model1")), rel=1e-5)
    merges = {name: report.mean(name) for name in (start, *others, student)}
    assert report.delivered == min(merges, key=merges.get)
    delivered = report.losses[report.delivered]
    assert delivered == pytest.approx(plain_losses(load("out")), rel=1e-5)
    assert report.losses[student] != report.losses[start]
    assert AutoTokenizer.from_pretrained("out").encode("t5") == [5]
    stored = json.loads((report.out.parent / "out.training" / "report.json").read_text())
    assert stored["losses"][student] == list(report.losses[student])
    assert f"{report.delivered} is in {report.out}" in str(report)


@pytest.mark.parametrize("train", ["masks", "lora", "all"])
def test_a_student_of_models_in_bfloat16_learns(train):
    report = learned(train=train, dtype="bfloat16", max_steps=8)
    assert report.losses[report.student] != report.losses["regmean"]
    assert load("out").dtype == torch.bfloat16


@pytest.mark.parametrize(("steps", "expected"), [(2, 8), (20, 22)])
def test_teachers_run_on_no_more_examples_than_the_steps_read(steps, expected, monkeypatch):
    """Of 22 training examples; those that are drawn come from both tasks."""
    seen = []

    def cached(merger, dataset, *arguments, **named):
        seen.extend(dataset[place] for place in range(len(dataset)))
        return cache_teachers(merger, dataset, *arguments, **named)

    monkeypatch.setattr(module, "cache_teachers", cached)
    learned(train="masks", start="average", compare=(), max_steps=steps)
    assert len(seen) == expected
    assert {example["task"] for example in seen} == {0, 1}


@pytest.mark.parametrize("kind", ["llama", "phi"])
def test_the_kl_of_a_student_is_that_of_the_definition(kind, folder):
    """Loss and gradients against softmax and sums over whole logits."""
    for k, name in enumerate(MODELS):
        save(tiny_phi(k) if kind == "phi" else tiny(kind, k), folder / name)
    teachers = Merger([load(name) for name in MODELS])
    student = load("model1")
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    ids = torch.randint(3, 90, (4, 7))
    task = torch.tensor([0, 1, 1, 0])
    hidden = []
    for k, name in enumerate(MODELS):
        hidden.append(load(name).model(ids)[0][:, :-1])
        hidden[k] = hidden[k].detach()
    cached = torch.stack([hidden[t][i] for i, t in enumerate(task)]).flatten(0, 1)[:, None]
    head = teachers.output_head()
    biases = head.frozen("bias")[:2] if kind == "phi" else None
    model = Student(student, head.frozen("weight")[:2], biases, None)
    loss = model(kl=KLConfig(temperature=2.0), input_ids=ids, task=task, teacher_hidden=cached).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.trained().items()}
    student.zero_grad()
    target = torch.cat([load(MODELS[t])(ids[i : i + 1]).logits[:, :-1] for i, t in enumerate(task)])
    target = (target.detach() / 2).log_softmax(-1)
    given = (student(ids).logits[:, :-1] / 2).log_softmax(-1)
    expected = 4 * (target.exp() * (target - given)).sum(-1).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.trained().items():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert not any("embed" in name or "lm_head" in name for name in gradients)


@pytest.mark.parametrize("train", ["lora", "all"])
def test_a_student_gets_the_biases_of_all_heads(train, folder, monkeypatch):
    for k, name in enumerate(MODELS):
        save(tiny_phi(k), folder / name)
    seen = []
    plain = Student.forward

    def watched(self, **batch):
        seen.append(self.head_options())
        return plain(self, **batch)

    monkeypatch.setattr(Student, "forward", watched)
    learned(train=train, start="average", compare=[])
    biases = [load(name).lm_head.bias for name in MODELS]
    assert all(map(torch.equal, seen[0]["teacher_biases"], biases))
    torch.testing.assert_close(seen[0]["bias"], sum(biases) / 2)


def test_several_processes_are_refused_before_anything_is_written(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"expected one process and at most one visible GPU, got 2"
    ):
        learned()
    assert not os.path.exists("out.training")


def test_masks_over_a_start_begin_there(monkeypatch):
    monkeypatch.setattr(DistillTrainer, "train", lambda self, **_: None)
    report = learned(start="regmean")
    assert report.losses["masks from regmean"] == pytest.approx(report.losses["regmean"], rel=1e-5)
    report = learned("other", start="average")
    assert report.losses["masks from average"] == pytest.approx(report.losses["average"], rel=1e-5)


@pytest.mark.parametrize("start", ["average", "regmean"])
def test_masks_of_embedding_and_head_stay(start):
    learned(start=start)
    masks = load_file("out.training/masks.safetensors")
    initial = 0.5 if start == "average" else 0.0
    tables = {name for name in masks if "embed" in name or "lm_head" in name}
    assert tables
    for name, mask in masks.items():
        assert bool((mask == initial).all()) == (name in tables), name


def test_masks_of_components_that_differ_in_the_embedding_alone_are_refused():
    model = load("model0")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    save(model, "model1")
    with pytest.raises(
        ValueError,
        match="differ from the starting merge at most in the embedding and the head",
    ):
        learned(start="model0", compare=())


@pytest.mark.parametrize("train", ["masks", "lora", "all"])
def test_a_start_in_another_dtype_is_read_in_that_of_the_components(train):
    merge_models(MODELS, "linear", weight=1.0, out="start", dtype="bfloat16", progress=False)
    report = learned(start="start", train=train, compare=())
    assert set(report.losses) == {*MODELS, "start", f"{train} from start"}
    # the start itself is copied as it is
    written = torch.bfloat16 if report.delivered == "start" else torch.float32
    merged = load_file("out/model.safetensors")
    assert {value.dtype for value in merged.values()} == {written}


def test_a_start_in_a_folder_is_delivered_if_training_spoils_it(monkeypatch):
    merge_models(MODELS, "slerp", base_model="model0", t=0.3, out="start", progress=False)

    def spoiled(self):
        with torch.no_grad():
            self.model.get_output_embeddings().weight.mul_(100)
        return self.model

    monkeypatch.setattr(Student, "finished", spoiled)
    report = learned(start="start", train="all", compare=())
    assert report.delivered == "start"
    assert "training made start worse" in str(report)
    given, copied = load_file("start/model.safetensors"), load_file("out/model.safetensors")
    assert all(torch.equal(given[name], copied[name]) for name in given)
    # another model in its place is not taken for it
    shutil.rmtree("out")
    shutil.rmtree("start")
    merge_models(MODELS, "slerp", base_model="model0", t=0.7, out="start", progress=False)
    with pytest.raises(ValueError, match="the models changed since"):
        learned(start="start", train="all", compare=())
    again = learned(start="start", train="all", compare=(), fresh=True)
    assert again.losses["start"] != report.losses["start"]


def test_methods_over_a_base():
    save(tiny("llama", 7), "base")
    report = learned(base="base", start="ties", compare=("task_arithmetic",), train="lora")
    assert list(report.losses)[2:4] == ["ties", "task_arithmetic"]


@pytest.mark.parametrize("coefficients", ["evidence", "confidence"])
@pytest.mark.parametrize("train", ["masks", "lora"])
def test_teachers_without_tasks(coefficients, train):
    report = learned(coefficients=coefficients, train=train, compare=())
    assert len(report.losses) == 4


@pytest.mark.parametrize("train", ["masks", "lora", "all"])
def test_it_goes_on_where_it_was_killed_to_the_same_bits(train, monkeypatch):
    whole = learned("whole", train=train, max_steps=6, compare=())
    real = DistillTrainer.compute_loss

    def killed(self, *arguments, **options):
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return real(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(DistillTrainer, "compute_loss", killed)
        with pytest.raises(KeyboardInterrupt):
            learned(train=train, max_steps=6, compare=())
    assert not os.path.exists("out")
    merges = module._Run._merge
    names = []
    monkeypatch.setattr(
        module._Run, "_merge", lambda self, name, out: names.append(name) or merges(self, name, out)
    )
    again = learned(train=train, max_steps=6, compare=())
    assert names in ([], ["regmean"])  # only to deliver it: the start is there
    assert again.losses == whole.losses
    first, second = (load_file(f"{name}/model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_checkpoints_of_another_run_are_not_taken_up(folder):
    learned()
    (folder / "out").rename(folder / "moved")
    with pytest.raises(ValueError, match="train is 'masks' there, got 'lora'"):
        learned(train="lora")
    rows = (folder / DATA[0]).read_text().splitlines()
    (folder / DATA[0]).write_text("\n".join([*rows[:-1], rows[0]]))
    with pytest.raises(ValueError, match="task0 changed since the run"):
        learned()
    learned(fresh=True)
    assert len(list((folder / "out.training").glob("checkpoint-*"))) == 1


def test_the_command_does_as_the_function(folder, capsys):
    words = ["--components", *MODELS, "--data", *DATA, "--max-steps", "4", "--batch-size", "4"]
    assert main(["learn", "out", *words, "--max-length", "32", "--progress"]) == 0
    printed = capsys.readouterr()
    assert "with the supervised text in brackets" in printed.err
    report = learned("other")
    assert f"{report.mean(report.student):.4f}" in printed.out
    (folder / "run.yml").write_text("start: average\ntrain: lora\nmax-steps: 2\n")
    words = ["--components", *MODELS, "--data", *DATA, "--config", "run.yml", "--no-progress"]
    assert main(["learn", "third", *words]) == 0
    assert "lora from average" in capsys.readouterr().out
    assert main(["learn", "third", *words]) == 1
    assert "not empty" in capsys.readouterr().err
    with RunFolder(folder / "fourth.training", {}, "learn"):
        assert main(["learn", "fourth", *words]) == 1
    assert f"another run is writing to it now (process {os.getpid()}" in capsys.readouterr().err


def test_no_task_trains_on_the_held_out_prompts_of_another(folder):
    rows = [json.loads(line) for line in (folder / DATA[0]).read_text().splitlines()]
    # the same prompts in another order, so that other ones are held out
    (folder / DATA[1]).write_text("\n".join(map(json.dumps, rows[::-1])))
    tokenizer = AutoTokenizer.from_pretrained("model0")
    tasks = read_tasks(DATA, tokenizer, LearnConfig(held_out=0.3))
    prompts = [{e["input_ids"][0] for e in part} for t in tasks for part in (t.train, t.test)]
    trained, held_out = prompts[0] | prompts[2], prompts[1] | prompts[3]
    assert prompts[1] != prompts[3]
    assert not trained & held_out


def test_the_average_may_be_compared_and_stands_in_the_table_once():
    report = learned(start="regmean", compare=("average",))
    assert list(report.losses)[2:4] == ["regmean", "average"]
    report = learned("other", start="average", compare=("average", "linear", "regmean"))
    assert list(report.losses)[2:4] == ["average", "regmean"]


def test_a_base_may_be_a_component(folder):
    """A model and its fine-tune: task_arithmetic merges the one change."""
    report = learned(base="model0")
    assert {"regmean", "linear", "task_arithmetic"} <= report.losses.keys()
    assert any("11 examples to train on, 1 held out" in note for note in report.notes)


def test_a_finished_run_says_where_its_report_is(folder):
    learned(compare=())
    with pytest.raises(ValueError, match=r"out is not empty: .*out\.training/report\.json"):
        learned(compare=())
    shutil.rmtree("out")
    assert learned(compare=()).out.name == "out"


def test_fresh_uses_nothing_of_an_earlier_run(folder):
    learned(compare=())
    for file in (folder / "out.training").glob("losses-*.json"):
        file.write_text(json.dumps({name: [0.0, 0.0] for name in ("regmean", *MODELS)}))
    shutil.rmtree("out")
    report = learned(compare=(), fresh=True)
    assert min(report.losses["regmean"]) > 1


@pytest.mark.parametrize("kind", ["mixtral", "nemotron-h"])
def test_mixtures_of_experts_are_learned_from_with_the_default_settings(kind, folder):
    """Their files name and stack the tensors of experts otherwise than transformers does."""
    for k, name in enumerate(MODELS):
        shutil.rmtree(folder / name)
        save(tiny(kind, k, vocab_size=96), folder / name)
        save_tokenizer(folder / name, [f"t{i}" for i in range(96)])
    report = learned()
    assert {"linear", "regmean"} <= report.losses.keys()
    load("out")


def test_a_component_called_like_the_student_keeps_its_row(folder):
    (folder / "masks from average").symlink_to(folder / "model1")
    models = ["model0", "masks from average"]
    report = learn_merge(models, DATA, out="out", start="average", compare=(), **SHORT)
    assert list(report.losses) == ["model0", "component 1", "average", "masks from average"]


def test_a_delivered_start_is_the_merge_that_was_measured(folder, monkeypatch):
    """It is not computed again, and its card names the components."""
    merged = []
    merge = module.merge_models
    monkeypatch.setattr(
        module, "merge_models", lambda *a, **k: merged.append(a[1]) or merge(*a, **k)
    )
    report = learned(start="regmean", train="all", learning_rate=1.0, compare=())
    assert report.delivered == "regmean"
    assert merged == ["regmean"]
    load("out")
    assert "regmean of model0 and model1" in (folder / "out" / "README.md").read_text()


def test_components_with_another_chat_template_are_named(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model1")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder / "model1")
    with pytest.warns(UserWarning, match="model1 has another chat template than model0"):
        learned(compare=())


def test_rows_in_memory_and_names_that_are_alike(folder):
    for k in range(2):
        (folder / f"run{k}").mkdir()
        (folder / f"model{k}").rename(folder / f"run{k}" / "final")
    rows = [[json.loads(line) for line in (folder / name).open()] for name in DATA]
    report = learn_merge(["run0/final", "run1/final"], rows, out="out", compare=(), **SHORT)
    assert list(report.losses)[:2] == ["component 0", "component 1"]
    assert report.tasks == ("task 0", "task 1")


def test_a_merger_and_a_model_are_measured_alike():
    collator = MaskCollator(pad_token_id=0)
    merger = Merger([load(name) for name in MODELS])
    with merger.component(1):
        found = held_out_losses(merger, held_out_rows(), collator)
    assert found == pytest.approx(plain_losses(load("model1")), rel=1e-5)


def test_models_with_few_learned_positions_and_paths_are_learned_from(folder):
    """Rows longer than the table of positions are cut, as `tune` does; paths are folders, too."""
    paths = [Path(f"short{seed}") for seed in range(2)]
    for seed, path in enumerate(paths):
        save(tiny("gpt2", seed, n_positions=8), path)
        AutoTokenizer.from_pretrained("model0").save_pretrained(path)
    rows = [[{"text": " ".join(f"t{k % 9 + n}" for k in range(30))} for n in range(4)]] * 2
    report = learn_merge(paths, rows, out="out", **{**SHORT, "start": "regmean"})
    assert all(map(math.isfinite, report.losses["regmean"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"granlarity": "input"}, "unknown field granlarity; did you mean granularity"),
        ({"train": "weights"}, "train is 'weights', expected one of masks, lora, all"),
        ({"start": "tyes"}, "start: .*did you mean ties"),
        ({"start": "ties"}, "expected a base, as ties in start requires"),
        ({"start": "slerp"}, "expected a base, as slerp in start requires"),
        ({"start": ""}, "start is ''"),
        ({"compare": ("ties",)}, "expected a base, as ties in compare requires"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"held_out": 1.0}, r"held_out is 1\.0"),
        ({"components": MODELS[:1]}, "expected two or more components and one data set for each"),
        ({"components": "model0"}, "components is 'model0', expected a list"),
        ({"data": "rows.jsonl"}, "data is 'rows.jsonl', expected a list"),
        ({"data": DATA[:1]}, "expected two or more components and one data set for each"),
        ({"data": ["nowhere.jsonl", DATA[1]]}, "there is no file nowhere.jsonl"),
        (
            {"data": [[{"text": "t1 t2 t3"}], DATA[1]]},
            "task 0 has no examples to train on: all 1 are held out",
        ),
        ({"rank": 0}, "rank is 0"),
        ({"seed": 2**40}, "seed is"),
        ({"base": 5}, "expected base as a path, got int"),
        ({"data": [DATA[0], [{"messages": []}]]}, "task 1: TextExamples: rows"),
        ({"components": ["model0", "./model0"]}, "expected each component once, got model0 twice"),
        ({"components": [1, 2]}, "expected components as folders or hub ids, got int"),
        ({"base": "longer"}, "(?s)compare names task_arithmetic: .*shapes differ"),
        ({"start": "./nowhere"}, "start: there is no such method or folder: .*nowhere"),
        ({"start": "longer", "train": "lora"}, r"embed_tokens.* shapes \[96, 16\] .*\[97, 16\]"),
        ({"start": "reversed", "train": "lora"}, "their tokenizers differ"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(settings, message, folder):
    given = {"components": MODELS, "data": DATA, **SHORT, **settings}
    tokens = [f"t{i}" for i in range(97)]
    if "longer" in (settings.get("start"), settings.get("base")):
        save(tiny("llama", 2, vocab_size=97), folder / "longer")
        save_tokenizer(folder / "longer", tokens)
    elif settings.get("start") == "reversed":
        save(tiny("llama", 2), folder / "reversed")
        save_tokenizer(folder / "reversed", tokens[95::-1])
    with pytest.raises(ValueError, match=message):
        learn_merge(given.pop("components"), given.pop("data"), out="out", **given)
    assert not list(folder.glob("out*"))


@pytest.mark.parametrize("what", ["component", "base", "config"])
def test_a_run_does_not_go_on_with_other_models(what):
    """The student's checkpoints belong to the models that it began with."""
    options = {"train": "all", "start": "average", "compare": ()}
    if what == "base":
        save(tiny("llama", 7), "base")
        options |= {"base": "base", "start": "task_arithmetic"}
    learned(**options)
    shutil.rmtree("out")
    if what == "config":
        file = Path("model1/config.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token_id": 5}))
    else:
        folder = {"component": "model1", "base": "base"}[what]
        save(tiny("llama", 9), folder)
    with pytest.raises(ValueError, match="the models changed since the run in this folder began"):
        learned(**options)
    report = learned(**options, fresh=True)
    shutil.rmtree("out")
    assert learned("other", **options).losses == report.losses


def test_a_merge_with_nan_is_never_the_best(monkeypatch):
    measured = module._Run._measured

    def with_nan(self, name, model):
        return (math.nan,) * 2 if name == "average" else measured(self, name, model)

    monkeypatch.setattr(module._Run, "_measured", with_nan)
    # a rate so small that the student stays what it began with
    report = learned(start="average", train="masks", compare=(), max_steps=1, learning_rate=1e-9)
    assert report.delivered == report.student


def test_components_named_as_numbers_keep_their_own_rows(tmp_path):
    for k, name in enumerate(("x/component 1", "y/regmean")):
        shutil.copytree(MODELS[k], tmp_path / name)
    models = [str(tmp_path / "x/component 1"), str(tmp_path / "y/regmean")]
    report = learn_merge(models, DATA, out="out", **SHORT, train="masks", start="average")
    assert report.components == ("component 0", "component 1")
