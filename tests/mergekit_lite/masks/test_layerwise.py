"""Masks that learn block by block: against whole models in memory, against formulas, and killed and resumed."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mergekit_lite.layerwise.blocks import Call
from mergekit_lite.masks import MaskConfig, Merger
from mergekit_lite.masks import layerwise_run as module
from mergekit_lite.masks.layerwise import LayerwiseTraining, train_layerwise
from mergekit_lite.masks.layerwise_run import relative_error
from tests.mergekit_lite.masks.test_low_rank import adapters
from tests.support.models import auto_class, save, tiny

IDS = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(0))
SHORT = LayerwiseTraining(steps=4, batch_size=4)


def examples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(5, 20, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, 90, (n,), generator=generator).tolist()} for n in sizes]


DATA = [examples(11, 1), examples(9, 2)]


def pair(kind, folder, count=2):
    return [save(tiny(kind, seed), folder / str(seed)) for seed in range(count)]


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def learn(paths, out, **options):
    return train_layerwise(paths, DATA, out, progress=False, **{"training": SHORT} | options)


@pytest.mark.parametrize("kind", ["gpt2", "llama-tied", "qwen3", "gemma2", "mistral"])
@pytest.mark.parametrize("granularity", ["input", "element"])
def test_what_is_baked_is_what_a_merger_loads(kind, granularity, tmp_path):
    paths = pair(kind, tmp_path)
    config = MaskConfig(granularity=granularity, constraint="sum_to_one")
    report = learn(paths, tmp_path / "out", masks=config, auto_class=auto_class(kind))
    baked = auto_class(kind).from_pretrained(tmp_path / "out").eval()
    merger = Merger.from_pretrained(paths, masks=report.masks, auto_class=auto_class(kind))
    assert torch.equal(logits(merger), logits(baked))
    assert merger.mask_config == config
    moved = [name for name, mask in merger.masks().items() if not torch.equal(mask, torch.full_like(mask, 0.5))]
    assert moved
    assert all(re.search(r"\.\d+\.", name) for name in moved)  # blocks' alone


def test_the_errors_are_those_of_whole_models(tmp_path):
    paths = pair("llama", tmp_path)
    report = learn(paths, tmp_path / "out", training=LayerwiseTraining(steps=30, batch_size=4, learning_rate=1e-2))
    baked = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    for k, path in enumerate(paths):
        own = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        rows = sorted(DATA[k], key=lambda row: len(row["input_ids"]))
        batches = [rows[i : i + 4] for i in range(0, len(rows), 4)]
        for block in range(len(report.after) - 1):  # the last state is normed
            means = []
            for batch in batches:
                errors = []
                for row in batch:
                    ids = torch.tensor([row["input_ids"]])
                    with torch.no_grad():
                        found = baked(ids, output_hidden_states=True).hidden_states[block + 1][0]
                        wanted = own(ids, output_hidden_states=True).hidden_states[block + 1][0]
                    errors += ((found - wanted).square().sum(-1) / wanted.square().sum(-1)).tolist()
                means.append(sum(errors) / len(errors))
            assert report.after[block][k] == pytest.approx(sum(means) / len(means), rel=1e-3)
    for before, after in zip(report.before, report.after, strict=True):
        assert sum(after) < sum(before)


def test_adapters_over_a_base_go_on_in_a_merger(tmp_path):
    base, paths = adapters(tmp_path)
    report = learn(paths, tmp_path / "out", base=base)
    merger = Merger.from_pretrained(paths, base=base, masks=report.masks)
    baked = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(merger), logits(baked))
    assert any(mask.requires_grad and mask.std() > 0 for mask in merger.masks().values())


def test_modules_choose_what_learns(tmp_path):
    paths = pair("llama", tmp_path)
    report = learn(paths, tmp_path / "out", masks=MaskConfig(modules=("*.mlp.*",)))
    for name, mask in Merger.from_pretrained(paths, masks=report.masks).masks().items():
        assert bool((mask != 0.5).any()) == (".mlp." in name)


def test_an_interrupted_run_goes_on_at_its_block(tmp_path, monkeypatch):
    paths = pair("llama", tmp_path)
    whole = learn(paths, tmp_path / "whole")
    real, trained = module.LayerwiseRun.train_block, []

    def train(self, number):
        if number == 2 and len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(number)
        real(self, number)

    monkeypatch.setattr(module.LayerwiseRun, "train_block", train)
    with pytest.raises(KeyboardInterrupt):
        learn(paths, tmp_path / "out")
    assert not (tmp_path / "out.masks").exists()
    trained.append("killed")
    report = learn(paths, tmp_path / "out")
    assert trained == [0, 1, "killed", 2, 3]
    assert (report.before, report.after) == (whole.before, whole.after)
    one, other = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / n).eval() for n in ("out", "whole"))
    assert torch.equal(logits(one), logits(other))
    trained.clear()
    with pytest.raises(ValueError, match="not empty"):
        learn(paths, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        learn(paths, tmp_path / "third")
    learn(paths, tmp_path / "third", training=LayerwiseTraining(steps=5, batch_size=4))  # other settings begin anew
    assert trained == [0, 1, 0, 1, 2, 3]


def test_masks_of_other_components_are_refused(tmp_path):
    paths = pair("llama", tmp_path, count=3)
    report = learn(paths[:2], tmp_path / "out")
    with pytest.raises(ValueError, match="made for other components: number 1"):
        Merger.from_pretrained([paths[0], paths[2]], masks=report.masks)
    with pytest.raises(ValueError, match="holds no masks"):
        Merger.from_pretrained(paths[:2], masks=tmp_path)


def test_the_report_reads_well(tmp_path):
    report = learn(pair("llama", tmp_path), tmp_path / "out")
    assert len(report.after) == 4
    assert "out.masks" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["after"]
    assert sorted(p.name for p in report.masks.iterdir()) == [f"part-{i:05d}.safetensors" for i in range(5)]


def test_the_error_of_a_token_is_relative_and_padding_has_none():
    expected = torch.tensor([[[1.0, 0.0], [0.0, 100.0], [5.0, 5.0]]])
    found = expected * 1.1
    found[0, 2] = 99
    call = Call((), {}, torch.tensor([True, True, False]))
    assert relative_error(call, found, expected).item() == pytest.approx(0.01, rel=1e-4)


BAD = {
    "2 components, data for 1": {"data": DATA[:1]},
    "1 component; needed": {"paths": 1, "data": DATA[:1]},
    "data is a tuple_iterator": {"data": iter(())},
    "steps is 0": {"training": {"steps": 0}},
    "learning_rate is -1": {"training": {"learning_rate": -1}},
    "batch_size is 2.5": {"training": {"batch_size": 2.5}},
    "are Merger's alone": {"masks": MaskConfig(constraint="spherical")},
}


@pytest.mark.parametrize("message", BAD)
def test_refuses(message, tmp_path):
    given = {"paths": 2, "data": DATA, "masks": None, "training": {}} | BAD[message]
    paths = pair("llama", tmp_path, count=given["paths"])
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is looked at
        train_layerwise(
            paths,
            given["data"],
            tmp_path / "out",
            masks=given["masks"],
            training=LayerwiseTraining(**given["training"]),
        )
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_models_of_other_shapes_are_refused(tmp_path):
    paths = [save(tiny("llama", 1), tmp_path / "0"), save(tiny("qwen2", 1), tmp_path / "1")]
    with pytest.raises(ValueError, match="models of one architecture"):
        learn(paths, tmp_path / "out")


def test_a_kill_between_masks_and_bake_loses_nothing(tmp_path, monkeypatch):
    paths, real, trained = pair("llama", tmp_path), module.LayerwiseRun.bake, []
    monkeypatch.setattr(module.LayerwiseRun, "bake", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        learn(paths, tmp_path / "out")
    assert (tmp_path / "out.masks").is_dir()
    monkeypatch.setattr(module.LayerwiseRun, "bake", real)
    monkeypatch.setattr(module.LayerwiseRun, "train_block", lambda self, number: trained.append(number))
    report = learn(paths, tmp_path / "out")
    assert not trained
    merger = Merger.from_pretrained(paths, masks=report.masks)
    assert torch.equal(
        logits(merger), logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval())
    )


def test_settings_that_differ_are_refused(tmp_path):
    one, other = tiny("llama", 1), tiny("llama", 2)
    other.config.rms_norm_eps = 1e-2
    paths = [save(m, tmp_path / str(k)) for k, m in enumerate((one, other))]
    with pytest.raises(ValueError, match="rms_norm_eps"):
        learn(paths, tmp_path / "out")


def test_a_component_that_is_not_finite_is_refused_at_its_block(tmp_path):
    paths = pair("llama", tmp_path)
    broken = tiny("llama", 1)
    broken.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    save(broken, tmp_path / "1")
    with pytest.raises(ValueError, match=r"mlp.up_proj.weight of model.layers.0. of .* holds NaN"):
        learn(paths, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masks": MaskConfig(modules=("*.nothing",))}, "no module has a name like"),
        ({"thread": 2}, "unknown option 'thread'"),
    ],
)
def test_options_that_do_nothing_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        learn(pair("llama", tmp_path), tmp_path / "out", **options)


def test_data_of_no_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is 3; needed a file, rows"):
        train_layerwise(pair("llama", tmp_path), [DATA[0], 3], tmp_path / "out")


def test_an_adapter_that_changes_nothing_is_the_base_everywhere(tmp_path):
    base, paths = adapters(tmp_path)
    held = load_file(tmp_path / "0" / "adapter_model.safetensors")
    zeroed = {n: 0 * v if "layers.1" in n and "lora_B" in n else v for n, v in held.items()}
    save_file(zeroed, tmp_path / "0" / "adapter_model.safetensors")
    config = MaskConfig(constraint="sigmoid")
    report = learn(paths, tmp_path / "out", base=base, masks=config)
    merger = Merger.from_pretrained(paths, base=base, masks=report.masks)
    baked = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(merger), logits(baked))
