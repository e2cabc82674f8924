"""A whole run from one file: by the command, killed and resumed, and what is refused."""

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from mergekit_lite.masks import MaskCollator, MaskTrainer
from mergekit_lite.masks.run import _Task, held_out_losses, run_masks
from mergekit_lite.masks.run_config import MaskRun
from model_components._cli import main
from model_components._runs import RunFolder
from tests.support.models import save, save_tokenizer, tiny


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k in range(2):
        save(tiny("llama", k), tmp_path / f"model{k}")
        save_tokenizer(tmp_path / f"model{k}", [f"t{i}" for i in range(96)])
        generator = torch.Generator().manual_seed(k)
        rows = [
            {
                "prompt": f"t{n} ",
                "completion": " ".join(
                    f"t{i}" for i in torch.randint(3, 90, (6,), generator=generator)
                ),
            }
            for n in range(12)
        ]
        (tmp_path / f"task{k}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {
        "components": ["model0", "model1"],
        "data": ["task0.jsonl", {"files": ["task1.jsonl"], "name": "second"}],
        "masks": {"granularity": "output"},
        "kl": {"coefficients": "evidence"},
        "training": {
            "max_steps": 4,
            "save_steps": 2,
            "per_device_train_batch_size": 4,
            "use_cpu": True,
        },
        "compare": ["linear", "regmean++"],
        "held_out": 3,
    }
    (tmp_path / "run.yml").write_text(yaml.safe_dump(values))
    return values


def test_the_command_trains_bakes_and_compares(config, tmp_path, capsys, monkeypatch):
    fillers = []

    def collate(**settings):
        fillers.append(settings["pad_token_id"])
        return MaskCollator(**settings)

    monkeypatch.setattr("mergekit_lite.masks.run.MaskCollator", collate)
    assert main(["learn", "run.yml", "merged", "--progress"]) == 0
    assert set(fillers) == {0}  # the tokenizer has no padding of its own
    printed = capsys.readouterr().err
    assert "what is supervised in brackets" in printed
    assert "⟦" in printed
    report = json.loads((tmp_path / "merged.training" / "report.json").read_text())
    assert list(report["losses"]) == ["model0", "model1", "linear", "regmean++", "masks"]
    assert report["tasks"] == ["task0", "second"]
    baked = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    again = MaskRun.from_yaml("run.yml")
    tokenizer = transformers.AutoTokenizer.from_pretrained("model0")
    test = [_Task(again, data, tokenizer).test for data in again.data]
    found = held_out_losses(baked, test, MaskCollator(pad_token_id=0))
    assert found == pytest.approx(report["losses"]["masks"], rel=1e-5)
    assert all(len(part) == 3 for part in test)
    own = held_out_losses(
        transformers.AutoModelForCausalLM.from_pretrained("model1"),
        test,
        MaskCollator(pad_token_id=0),
    )
    assert own == pytest.approx(report["losses"]["model1"], rel=1e-5)
    history = json.loads(
        (tmp_path / "merged.training" / "checkpoint-4" / "trainer_state.json").read_text()
    )
    assert not list(tmp_path.glob(".*compare*"))
    assert history["global_step"] == 4
    assert main(["learn", "run.yml", "merged"]) == 1
    assert "not empty" in capsys.readouterr().err


def test_a_run_over_a_base_compares_with_methods_that_need_one(config, tmp_path):
    base = tmp_path / "base"
    save(tiny("llama", 7), base)
    values = config | {
        "base": "base",
        "compare": ["task_arithmetic", "ties", "linear"],
        "masks": {},
    }
    (tmp_path / "run.yml").write_text(yaml.safe_dump(values))
    run = MaskRun.from_yaml("run.yml")
    assert run.masks.constraint == "auto"
    report = run_masks(run, "merged", progress=False)
    assert list(report.losses) == [
        "model0",
        "model1",
        "base",
        "task_arithmetic",
        "ties",
        "linear",
        "masks",
    ]
    collator = MaskCollator(pad_token_id=0)
    test = [
        _Task(run, data, transformers.AutoTokenizer.from_pretrained("model0")).test
        for data in run.data
    ]
    own = held_out_losses(transformers.AutoModelForCausalLM.from_pretrained(base), test, collator)
    assert own == pytest.approx(report.losses["base"], rel=1e-5)
    (tmp_path / "run.yml").write_text(yaml.safe_dump(values | {"base": ["base"]}))
    with pytest.raises(ValueError, match=r"MaskRun:.*model"):
        MaskRun.from_yaml("run.yml")


def test_a_component_without_data_is_found_before_training(config, tmp_path):
    values = {k: v for k, v in config.items() if k != "compare"} | {"data": ["task0.jsonl"]}
    (tmp_path / "run.yml").write_text(yaml.safe_dump(values))
    assert MaskRun.from_yaml("run.yml").methods == ("linear",)
    with pytest.raises(ValueError, match=r"masks:.*components"):
        run_masks(
            MaskRun(**{**vars(MaskRun.from_yaml("run.yml")), "compare": ("regmean",)}),
            "merged",
            progress=False,
        )


def test_one_component_over_a_base_has_a_run_of_its_own(config, tmp_path):
    save(tiny("llama", 7), tmp_path / "base")
    values = {k: v for k, v in config.items() if k != "compare"}
    values |= {"components": ["model0"], "data": ["task0.jsonl"], "base": "bse"}
    (tmp_path / "run.yml").write_text(yaml.safe_dump(values))
    assert main(["learn", "run.yml", "merged", "--no-progress"]) == 1
    # what failed has claimed nothing
    (tmp_path / "run.yml").write_text(yaml.safe_dump(values | {"base": "base"}))
    assert main(["learn", "run.yml", "merged", "--no-progress"]) == 0
    report = json.loads((tmp_path / "merged.training" / "report.json").read_text())
    assert list(report["losses"]) == ["model0", "base", "task_arithmetic", "masks"]


def test_mean_masks_are_logged(config):
    values = MaskRun.from_yaml("run.yml")
    seen = []
    real = MaskTrainer.log
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            MaskTrainer,
            "log",
            lambda self, logs, *rest: real(self, logs, *rest) or seen.append(dict(logs)),
        )
        run_masks(
            MaskRun(
                **{
                    **vars(values),
                    "training": {**values.training, "logging_steps": 1},
                    "compare": (),
                }
            ),
            "logged",
            progress=False,
        )
    means = [(row["mask_0"], row["mask_1"]) for row in seen if "loss" in row]
    assert len(means) == 4
    assert means[0] != means[-1]
    assert all(0.3 < m < 0.7 for pair in means for m in pair)


def test_it_goes_on_where_it_was_killed(config, monkeypatch):
    run = MaskRun.from_yaml("run.yml")
    whole = run_masks(run, "whole", progress=False)
    real = MaskTrainer.compute_loss

    def killed(self, *arguments, **options):
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return real(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MaskTrainer, "compute_loss", killed)
        with pytest.raises(KeyboardInterrupt):
            run_masks(run, "out", progress=False)
    assert run_masks(run, "out", progress=False).losses == whole.losses


def test_checkpoints_of_another_run_are_not_taken_up(config, tmp_path):
    run = MaskRun.from_yaml("run.yml")
    run_masks(run, "out", progress=False)
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "other.yml").write_text(yaml.safe_dump({**config, "kl": {"direction": "reverse"}}))
    message = r"learn to .*out\.training: kl.coefficients must be 'evidence', got 'task'"
    with pytest.raises(ValueError, match=message):
        run_masks(MaskRun.from_yaml("other.yml"), "out", progress=False)
    data = Path(run.data[0].files[0])
    rows = data.read_text().splitlines()
    data.write_text("\n".join([*rows[:-1], rows[0]]))
    with pytest.raises(ValueError, match=f"the data of {run.data[0].name} have changed"):
        run_masks(run, "out", progress=False)
    run_masks(run, "out", fresh=True, progress=False)
    assert len(list(Path("out.training").glob("checkpoint-*"))) == 1


def test_the_second_of_two_runs_is_refused(config, tmp_path, capsys):
    with RunFolder(tmp_path / "out.training", {}, "learn"):
        assert main(["learn", "run.yml", "out"]) == 1
    assert f"another run is writing it now (process {os.getpid()}" in capsys.readouterr().err


def test_numbers_that_yaml_reads_as_text(config, tmp_path):
    (tmp_path / "e.yml").write_text((tmp_path / "run.yml").read_text() + "\n" + "seed: 1\n")
    told = "max_steps: 1e2\n  learning_rate: 1e-2\n  run_name: '2024'"
    (tmp_path / "e.yml").write_text((tmp_path / "e.yml").read_text().replace("max_steps: 4", told))
    training = MaskRun.from_yaml("e.yml").training
    assert (training["learning_rate"], training["max_steps"], training["run_name"]) == (
        0.01,
        100,
        "2024",
    )
    assert type(training["max_steps"]) is int


def test_epochs_are_not_cut_by_the_usual_number_of_steps(config, tmp_path):
    training = {k: v for k, v in config["training"].items() if k != "max_steps"} | {
        "num_train_epochs": 2
    }
    (tmp_path / "e.yml").write_text(yaml.safe_dump({**config, "training": training, "compare": []}))
    run_masks(MaskRun.from_yaml("e.yml"), "out", progress=False)
    states = sorted((tmp_path / "out.training").glob("checkpoint-*/trainer_state.json"))
    assert json.loads(states[-1].read_text())["epoch"] == 2


def test_components_of_one_name_have_rows_of_their_own(config, tmp_path):
    for k in range(2):
        (tmp_path / f"run{k}").mkdir()
        (tmp_path / f"model{k}").rename(tmp_path / f"run{k}" / "final")
    run = MaskRun.from_yaml("run.yml")
    both = MaskRun(**{**vars(run), "components": ("run0/final", "run1/final"), "compare": ()})
    assert list(run_masks(both, "out", progress=False).losses) == [
        "component 0",
        "component 1",
        "masks",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"component": []}, "unknown field component; did you mean components"),
        ({"components": ["model0"]}, "1 components and 2 tasks"),
        ({"components": "model0"}, "components is 'model0', expected a list"),
        ({"data": []}, "2 components and 0 tasks"),
        (
            {"data": ["task0.jsonl", "other/task0.jsonl"]},
            "two tasks are called 'task0'; expected names that differ",
        ),
        ({"data": ["task0.jsonl", 3]}, "entry 1 is 3, expected a file"),
        ({"data": [{"name": "a"}]}, "has no files"),
        ({"data": [{"files": "task0.jsonl", "component": 2}]}, "task0 follows component 2"),
        ({"data": [{"files": "task0.jsonl", "component": "a"}]}, "component of entry 0 is 'a'"),
        (
            {"masks": {"granlarity": "input"}},
            "masks: unknown field granlarity; did you mean granularity",
        ),
        ({"kl": {"coefficients": "x"}}, "expected one of task"),
        ({"kl": 3}, "kl is 3, expected fields of KLConfig"),
        (
            {"training": {"learning_rat": 1}},
            "training: unknown field learning_rat; did you mean learning_rate",
        ),
        ({"held_out": 0}, "held_out is 0"),
        ({"held_out": 12}, "task0 has 12 examples, 12 are held out"),
        ({"compare": ["tyes"]}, "did you mean ties"),
        ({"compare": ["ties"]}, "compare has ties, which needs a base"),
        ({"training": None}, "training is None, expected fields"),
        ({"held_out": "10%"}, "held_out is '10%'"),
        ({"data": ["nowhere.jsonl", "task1.jsonl"]}, "there is no file nowhere.jsonl"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"max_length": 1.5}, "max_length is 1.5"),
        ({"dtype": "bf16"}, "dtype is 'bf16'"),
        ({"data": [{"files": 5}, "task1.jsonl"]}, "files of entry 0 are 5"),
        ({"compare": [{"method": "ties"}]}, "compare has {'method': 'ties'}; expected names"),
        ({"compare": ["slerp"]}, "compare has slerp, which needs"),
        (
            {"components": ["model0"], "data": ["task0.jsonl"], "base": "model1"},
            "regmean++, which needs two components",
        ),
        ({"train_on_inputs": "yes"}, "train_on_inputs is 'yes'"),
    ],
)
def test_bad_files_are_refused_before_training(change, message, config, tmp_path, capsys):
    (tmp_path / "bad.yml").write_text(yaml.safe_dump({**config, **change}))
    assert main(["learn", "bad.yml", "out", "--no-progress"]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "bad.yml").write_text("[a")
    assert main(["learn", "bad.yml", "out"]) == 1
    assert "expected a YAML mapping of components" in capsys.readouterr().err
