"""Masks over differences from a base: adapters stay factors, and everything equals the same with
whole weights."""

import copy
import json
import os

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from mergekit_lite import merge_models
from mergekit_lite.masks import KLConfig, Merger, masked_kl
from mergekit_lite.masks.constraints import CONSTRAINTS
from mergekit_lite.masks.layers import MaskedLinear
from mergekit_lite.masks.low_rank import LowRankLinear, LowRankMaskedLinear, has_factors
from tests.mergekit_lite.masks import reference
from tests.support.equivalence import judge, place
from tests.support.models import auto_class, save, tiny

IDS = torch.randint(3, 90, (4, 9), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "task": torch.tensor([0, 1, 0, 1])}


def adapters(folder, kind="llama", targets=("q_proj", "down_proj"), count=2):
    """A base and adapters of it, of which the last leaves the first target alone."""
    base = save(tiny(kind, 1), folder / "base")
    for number in range(count):
        torch.manual_seed(number)
        own = list(targets[1:] if number == count - 1 and len(targets) > 1 else targets)
        config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=own, init_lora_weights=False)
        wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        wrapped.save_pretrained(folder / str(number))
    return str(base), [f"{base}+{folder / str(k)}" for k in range(count)]


def whole(base, paths, folder, **config):
    """The same merger, of adapters that were folded into checkpoints first."""
    for k, path in enumerate(paths):
        merge_models([path], "linear", weight=1, out=folder / f"whole{k}", progress=False)
    return Merger.from_pretrained(
        [folder / f"whole{k}" for k in range(len(paths))], base=base, **config
    )


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def distinct(model):
    """Numbers of weights in memory."""
    weights = [p for name, p in model.named_parameters() if ".masks." not in name]
    return sum({p.data_ptr(): p.numel() for p in weights}.values())


@pytest.mark.parametrize("granularity", ["scalar", "input", "output"])
def test_a_low_rank_layer_is_the_dense_one(granularity):
    torch.manual_seed(0)
    base = nn.Linear(5, 4)
    plain = copy.deepcopy(base)  # which stays on the CPU
    parts = [(torch.randn(2, 5), torch.randn(4, 2)) for _ in range(2)]
    adapted = [LowRankLinear(base, a, b, 0.5) for a, b in parts]
    assert not any(
        factor.requires_grad for component in adapted for factor in (component.down, component.up)
    )
    layer = place(LowRankMaskedLinear(adapted, granularity=granularity, base=base))
    values = layer.masks["weight"]
    values.data.normal_()

    def fast(x, masks):
        layer.masks["weight"] = nn.Parameter(masks) if not masks.requires_grad else values
        return torch.func.functional_call(layer, {"masks.weight": masks}, (x,))

    def dense(x, masks):
        weight = plain.weight.detach().to(x.dtype)
        for (a, b), mask in zip(parts, masks, strict=True):
            weight = weight + mask * 0.5 * (b.to(x.dtype) @ a.to(x.dtype))
        return nn.functional.linear(x, weight, plain.bias.detach().to(x.dtype))

    inputs = {"x": torch.randn(3, 5), "masks": values.detach().cpu()}
    judge(f"low rank, {granularity}", "eager", fast, dense, inputs, dtype=torch.float32)


@pytest.mark.parametrize("granularity", ["scalar", "input", "output"])
def test_factors_train_as_whole_weights_do(granularity, tmp_path):
    base, paths = adapters(tmp_path)
    thin = Merger.from_pretrained(paths, base=base, granularity=granularity)
    dense = whole(base, paths, tmp_path, granularity=granularity)
    assert has_factors(thin)
    assert not has_factors(dense)
    assert distinct(thin) < 1.2 * sum(p.numel() for p in tiny("llama", 1).parameters())
    assert [n for n, m in thin.masks().items() if m.requires_grad] == [
        n for n, m in dense.masks().items() if m.requires_grad
    ]
    torch.manual_seed(0)
    for name, mask in thin.masks().items():
        if mask.requires_grad:
            mask.data += 0.3 * torch.randn_like(mask)
        dense.masks()[name].data.copy_(mask.data)
    losses = []
    for merger in (thin, dense):
        losses.append(merger(kl=KLConfig(), **BATCH).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-7)
    for name, mask in thin.masks().items():
        if mask.requires_grad:
            torch.testing.assert_close(mask.grad, dense.masks()[name].grad, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(logits(thin), logits(dense))
    thin.bake(tmp_path / "out", progress=False)
    baked = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(baked), logits(thin))
    torch.testing.assert_close(logits(thin.fold_()), logits(baked))


def test_initial_masks_are_formulas(tmp_path):
    base, paths = adapters(tmp_path)
    for initial, weight in (("average", 0.5), (1.0, 1.0), (0.7, 0.7)):
        merger = Merger.from_pretrained(paths, base=base, initial=initial)
        merge_models(
            paths,
            "task_arithmetic",
            base_model=base,
            weight=[weight] * 2,
            out=tmp_path / str(weight),
            progress=False,
        )
        static = AutoModelForCausalLM.from_pretrained(tmp_path / str(weight)).eval()
        torch.testing.assert_close(logits(merger), logits(static))


def test_components_and_the_base_run_by_number(tmp_path):
    base, paths = adapters(tmp_path)
    merger = Merger.from_pretrained(paths, base=base)
    assert merger.count == 2
    assert merger.labels == [*paths, base]
    for k, path in enumerate([*paths, base]):
        merge_models([path], "linear", weight=1, out=tmp_path / f"own{k}", progress=False)
        with merger.component(k):
            own = logits(merger)
        torch.testing.assert_close(
            own, logits(AutoModelForCausalLM.from_pretrained(tmp_path / f"own{k}").eval())
        )
    with pytest.raises(ValueError, match="expected 0 to 2"), merger.component(3):
        pass


def test_a_report_over_a_base_is_of_the_components(tmp_path):
    base, paths = adapters(tmp_path)
    merger = Merger.from_pretrained(paths, base=base)
    report = merger.report()
    assert report.labels == tuple(paths)
    changed = {name for name, mask in merger.masks().items() if mask.requires_grad}
    assert {row.name for row in report.rows} == changed
    assert all(row.mean == (0.5, 0.5) and max(row.wins) == 0.5 for row in report.rows)


def test_task_vectors_are_what_components_change(tmp_path):
    base, paths = adapters(tmp_path)
    merger = Merger.from_pretrained(paths, base=base)
    for k, vector in enumerate(merger.task_vectors()):
        own, stem = merger.state(k), merger.state(2)
        assert {name for name, value in vector.items() if value.any()} == {
            name for name in own if not torch.equal(own[name], stem[name])
        }
        for name, value in vector.items():
            torch.testing.assert_close(value, own[name] - stem[name], rtol=1e-3, atol=1e-7)
    with pytest.raises(ValueError, match=r"Merger\.task_vectors:.*base"):
        Merger.from_pretrained(paths).task_vectors()


@pytest.mark.parametrize("coefficients", ["task", "evidence", "confidence"])
def test_the_base_is_no_teacher(coefficients, tmp_path):
    base, paths = adapters(tmp_path)
    over_base, alone = (
        Merger.from_pretrained(paths, base=b, initial="component:0") for b in (base, None)
    )
    found = [m.distill(KLConfig(coefficients=coefficients), **BATCH) for m in (over_base, alone)]
    torch.testing.assert_close(found[0], found[1], rtol=5e-3, atol=1e-7)  # of a small loss


def test_one_adapter_over_its_base_is_scaled_place_by_place(tmp_path):
    base, paths = adapters(tmp_path, count=1)
    merger = Merger.from_pretrained(paths, base=base, initial=1.0)
    with merger.component(0):
        own = logits(merger)
    torch.testing.assert_close(own, logits(merger))
    with pytest.raises(ValueError, match=r"Merger:.*models"):
        Merger.from_pretrained(paths)


def test_what_is_no_linear_layer_s_adapter_is_folded_in(tmp_path):
    base, paths = adapters(tmp_path, "gpt2", ("c_attn", "c_fc"))
    merger = Merger.from_pretrained(paths, base=base)
    assert not has_factors(merger)
    base, others = adapters(tmp_path / "llama")
    assert not has_factors(Merger.from_pretrained(others, base=base, granularity="element"))
    merger.distill(KLConfig(), **BATCH).backward()
    assert all(mask.grad is not None for mask in merger.masks().values() if mask.requires_grad)


def test_masks_over_a_base_and_over_weights_are_told_apart(tmp_path):
    base, paths = adapters(tmp_path)
    merger = Merger.from_pretrained(paths, base=base)
    path = merger.save_masks(tmp_path / "m.safetensors")
    again = Merger.from_pretrained(paths, base=base, masks=path)
    assert all(torch.equal(mask, again.masks()[name]) for name, mask in merger.masks().items())
    with pytest.raises(ValueError, match=r"load_masks:.*3.*\(base=...\).*2"):
        Merger.from_pretrained(paths, masks=path)
    with pytest.raises(ValueError, match=r"load_masks:.*3.*\(base=...\).*3"):
        Merger.from_pretrained([*paths, base], masks=path)


@pytest.mark.parametrize("constraint", [name for name in CONSTRAINTS if name != "none"])
def test_a_constraint_is_on_the_components_masks(constraint, tmp_path):
    base, paths = adapters(tmp_path)
    merger = Merger.from_pretrained(paths, base=base, constraint=constraint)
    for name, masks in merger.effective_masks().items():
        torch.testing.assert_close(masks.sum(0), torch.ones_like(masks[0]), rtol=0, atol=1e-6)
        trained = merger.masks()[name].requires_grad
        torch.testing.assert_close(masks[:2], torch.full_like(masks[:2], 0.5 if trained else 0.0))


def test_models_in_memory_share_what_they_have_as_the_base_has_it():
    base, model = tiny("llama", 1), tiny("llama", 1)
    model.model.layers[0].mlp.down_proj.weight.data += 0.1
    merger = Merger([model], base=base)
    trained = [name for name, mask in merger.masks().items() if mask.requires_grad]
    assert trained == ["model.layers.0.mlp.down_proj.weight"]
    assert distinct(merger) == distinct(base) + model.model.layers[0].mlp.down_proj.weight.numel()
    assert isinstance(merger.layers()["model.layers.0.mlp.down_proj"], MaskedLinear)


def test_a_head_more_than_teachers_is_the_student_s():
    torch.manual_seed(0)
    student, heads = (
        torch.randn(5, 4, dtype=torch.float64),
        [torch.randn(7, 4, dtype=torch.float64) for _ in range(3)],
    )
    masks, shares = torch.randn(3, 1, 4, dtype=torch.float64), torch.tensor([0.25, 0.75])
    arguments = {
        "teachers": [student + 1, student - 1],
        "heads": heads,
        "masks": masks,
        "coefficients": shares,
    }
    torch.testing.assert_close(
        masked_kl(student, **arguments), reference.masked_kl(student, **arguments)
    )


def test_a_full_fine_tune_beside_an_adapter_counts_whole(tmp_path):
    base, paths = adapters(tmp_path, count=1)
    tuned = tiny("llama", 1)
    for parameter in tuned.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    save(tuned, tmp_path / "tuned")
    merger = Merger.from_pretrained([*paths, tmp_path / "tuned"], base=base, initial=1.0)
    models = [*paths, str(tmp_path / "tuned")]
    merge_models(
        models,
        "task_arithmetic",
        base_model=base,
        weight=[1.0] * 2,
        out=tmp_path / "out",
        progress=False,
    )
    static = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(merger), logits(static), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(merger.fold_()), logits(static), rtol=1e-4, atol=1e-5)


def test_an_adapter_of_a_tied_head_is_refused(tmp_path):
    base = save(tiny("llama-tied", 1), tmp_path / "base")
    config = peft.LoraConfig(r=3, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    wrapped.save_pretrained(tmp_path / "0", save_embedding_layers=False)
    with pytest.raises(ValueError, match="is not a tensor of"):
        Merger.from_pretrained([f"{base}+{tmp_path / '0'}"], base=base)


def test_small_changes_survive_a_bake_in_bfloat16(tmp_path):
    base = save(tiny("llama", 1), tmp_path / "base", torch.bfloat16)
    paths = []
    for number in range(8):
        torch.manual_seed(number)
        config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["up_proj"])
        wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=2e-4)
        wrapped.save_pretrained(tmp_path / str(number))
        paths.append(f"{base}+{tmp_path / str(number)}")
    merger = Merger.from_pretrained(paths, base=base, initial=1.0)
    assert merger.dtype == torch.bfloat16
    merger.bake(tmp_path / "out", progress=False)
    merge_models(
        paths,
        "task_arithmetic",
        base_model=base,
        weight=[1.0] * 8,
        out=tmp_path / "sum",
        progress=False,
    )
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "sum")]
    for name, value in files[1].items():
        assert torch.equal(files[0][name], value), name
    merger.fold_()
    folded = merger.layers()["model.layers.0.mlp.up_proj"].folded["weight"]
    expected = files[1]["model.layers.0.mlp.up_proj.weight"]
    assert (folded != expected).float().mean() < 0.02  # the factors are rounded, too
    name = "model.layers.0.mlp.up_proj.weight"
    exact = merger.layers()[name.removesuffix(".weight")].components[0].weight_delta()
    torch.testing.assert_close(merger.task_vectors()[0][name].float(), exact, rtol=0.01, atol=0)


def test_a_base_that_lacks_weights_is_refused(tmp_path):
    save(tiny("classifier", 1).base_model, tmp_path / "base")
    save(tiny("classifier", 2), tmp_path / "tuned")
    with pytest.raises(ValueError, match=r"Merger:.*checkpoint"):
        Merger.from_pretrained(
            [tmp_path / "tuned"], base=tmp_path / "base", auto_class=auto_class("classifier")
        )


def test_penalties_are_of_trained_masks(tmp_path):
    base, paths = adapters(tmp_path)
    merger = Merger.from_pretrained(paths, base=base)
    plain, more = (merger.distill(KLConfig(l1=weight), **BATCH) for weight in (0.0, 0.1))
    assert (more - plain).item() == pytest.approx(0.05, rel=1e-4)
    one = Merger.from_pretrained(paths[:1], base=base)
    task = {**BATCH, "task": torch.zeros(4, dtype=torch.long)}
    assert torch.isfinite(one.distill(KLConfig(similarity=1.0), **task))


def test_a_path_may_be_spelled_otherwise(tmp_path, monkeypatch):
    base, paths = adapters(tmp_path)
    path = Merger.from_pretrained(paths, base=base).save_masks(tmp_path / "m.safetensors")
    monkeypatch.chdir(tmp_path)
    merger = Merger.from_pretrained(["./base+0", "base+1"], base="base/", masks=path)
    assert has_factors(merger)


def test_an_adapter_whose_files_were_touched_is_baked(tmp_path):
    base, paths = adapters(tmp_path)
    merger = Merger.from_pretrained(paths, base=base)
    file = tmp_path / "0" / "adapter_model.safetensors"
    os.utime(file, (1, 1))
    merger.bake(tmp_path / "same", progress=False)
    held = load_file(file)
    save_file({name: value + 0.5 for name, value in held.items()}, file)
    with pytest.raises(ValueError, match=r"bake:.*changed"):
        merger.bake(tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match=r"bake:.*'thread'"):
        merger.bake(tmp_path / "out", thread=2)


@pytest.mark.parametrize("factor", [0.5, 2])
def test_an_adapter_whose_alpha_changed_after_loading_is_not_baked(factor, tmp_path):
    base, paths = adapters(tmp_path)
    merger = Merger.from_pretrained(paths, base=base)
    file = tmp_path / "0" / "adapter_config.json"
    settings = json.loads(file.read_text())
    settings["lora_alpha"] *= factor
    file.write_text(json.dumps(settings))
    os.utime(tmp_path / "0" / "adapter_model.safetensors", (1, 1))
    with pytest.raises(ValueError, match=r"bake:.*changed"):
        merger.bake(tmp_path / "out", progress=False)


def test_settings_that_differ_are_the_base_s_without_strict(tmp_path):
    base, tuned = tiny("llama", 1), tiny("llama", 2)
    tuned.config.rope_parameters = {**tuned.config.rope_parameters, "rope_theta": 50.0}
    save(base, tmp_path / "base")
    save(tuned, tmp_path / "tuned")
    with pytest.warns(UserWarning, match=r"Merger:.*base's version is used"):
        merger = Merger.from_pretrained(
            [tmp_path / "tuned"], base=tmp_path / "base", strict=False, initial=0.5
        )
    merger.bake(tmp_path / "out", progress=False)
    baked = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(baked), logits(merger))
