"""What each MLP becomes within a budget: the sum of errors, what an error is, one structure for all, time."""

import copy

import pytest
import torch
import transformers

from kronecker import (
    KroneckerConfig,
    LowRankConfig,
    LowRankLinear,
    PruneConfig,
    convert_,
    num_parameters,
    plan,
    prune_,
)
from kronecker.planning import Choice, measuring
from kronecker.planning.solving import best_of_each
from kronecker.structures import from_json, structure_of, to_json
from kronecker.surgery.mlps import find_mlps
from tests.kronecker.test_convert import compressed, ids, output
from tests.support.models import tiny


def test_a_plan_keeps_the_budget_and_is_a_config(tmp_path):
    model = tiny("gpt2", n_layer=3)
    with torch.no_grad():  # a block that says little
        model.transformer.h[1].mlp.c_proj.weight.mul_(0.01)
    total = num_parameters(model)
    budget = total - 3000
    made_plan = plan(model, budget=budget, calibration=ids(16, seed=1).split(8), progress=False)
    assert made_plan.parameters <= budget
    assert not compressed(model)
    assert f"budget of {budget:,}" in str(made_plan)
    counts = {n: c.parameters for n, c in made_plan.chosen.items()}
    assert min(counts, key=counts.get) == "transformer.h.1.mlp.c_proj"
    configs = from_json(to_json(made_plan.configs))
    assert configs == made_plan.configs
    report = convert_(model, configs, calibration=ids(16, seed=1).split(8), progress=False)
    assert report.after == made_plan.parameters
    with pytest.raises(ValueError, match="budget is 100, needed "):
        plan(model := tiny("gpt2"), budget=100, calibration=[ids()], progress=False)
    assert not compressed(model)


def test_a_plans_error_is_what_the_choice_does_to_the_stream():
    model = tiny("gpt2", n_layer=1)
    data = ids(16, seed=1)
    made = plan(model, budget=num_parameters(model) - 100, calibration=data.split(8), progress=False)
    (name, choices), residual = next(iter(made.options.items())), []
    block = model.transformer.h[0]
    block.register_forward_hook(lambda module, args, out: residual.append(out[0] if isinstance(out, tuple) else out))
    output(model, data)
    for choice in choices[1:]:
        small = copy.deepcopy(model)
        configs = dict.fromkeys(find_mlps(model)[0].ups, choice.config) | {name: choice.config.opposite()}
        convert_(small, configs, calibration=data.split(8), progress=False)
        residual.clear()
        output(model, data)
        output(small, data)
        before, after = residual
        changed = float((after - before).square().sum() / before.square().sum())
        assert choice.error**2 == pytest.approx(changed, rel=0.05)


def test_a_plan_is_no_worse_than_one_shape_for_all():
    model = tiny("gpt2", n_layer=3)
    found = plan(model, budget=num_parameters(model) - 3000, calibration=[ids(16, seed=1)], progress=False)
    error = sum(c.error**2 for c in found.chosen.values())
    for config in {c.config for held in found.options.values() for c in held}:
        same = [next((c for c in held if c.config == config), None) for held in found.options.values()]
        if all(same) and sum(c.parameters for c in same) <= sum(c.parameters for c in found.chosen.values()):
            assert error <= sum(c.error**2 for c in same) + 1e-12


def test_one_structure_for_all_is_the_best_of_them_and_prune_takes_it(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(measuring, "_SAMPLE", 2)
    found = plan(model, keep=0.505, calibration=[ids(16, seed=1)], uniform=True, progress=False)
    assert found.parameters < num_parameters(model)
    assert f"measured on 2 of {found.mlps} MLPs" in str(found)
    assert len(found.configs) == 3 * found.mlps
    assert len({c.config for c in found.chosen.values()}) == 1
    tried = zip(*(choices[1:] for choices in found.options.values()), strict=True)
    sums = {t[0].config: sum(c.error**2 for c in t) for t in tried}
    assert {structure_of(c) for c in sums} == {"prune", "low_rank", "kronecker"}
    chosen = next(iter(found.chosen.values())).config
    assert sum(c.error**2 for c in found.chosen.values()) == min(sums.values())
    assert (found.prune is not None) == isinstance(chosen, PruneConfig)
    budget = num_parameters(model) - 2000
    only = plan(model, budget=budget, calibration=[ids(16, seed=1)], structures=["prune"], uniform=True, progress=False)
    report = prune_(model, only.prune, calibration=[ids(16, seed=1)], progress=False)
    assert report.after == only.parameters <= budget
    assert "everywhere: error" in str(found)


def test_half_of_the_neurons_is_half_of_them():
    model, batch = tiny("llama"), [ids(16, seed=1)]
    found = plan(model, keep=0.5, calibration=batch, structures=["prune"], uniform=True, progress=False)
    assert found.prune is not None
    assert found.prune.keep == 0.5


@pytest.mark.parametrize("structure", ["prune", "low_rank", "kronecker"])
def test_a_plan_of_one_structure_is_what_convert_makes(structure):
    model = tiny("gpt2")
    before = [p.clone() for p in model.parameters()]
    budget = num_parameters(model) - 2000
    found = plan(model, budget=budget, calibration=[ids(16, seed=1)], structures=[structure], progress=False)
    assert {structure_of(c) for c in found.configs.values()} == {structure}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert convert_(model, found.configs, calibration=[ids(16, seed=1)], progress=False).after == found.parameters


@pytest.mark.parametrize("limits", [("time",), ("parameters", "time")])
def test_a_budget_of_time_is_kept(limits, monkeypatch):
    real = measuring._run

    def run(block, states):
        """A clock that goes by what a block holds, low rank being slow."""
        slow = [m for m in block.module.modules() if isinstance(m, LowRankLinear)]
        return real(block, states)[0], num_parameters(block.module) * (3.0 if slow else 1.0)

    monkeypatch.setattr(measuring, "_run", run)
    model = tiny("gpt2")
    candidates = [PruneConfig(keep=0.25, refit="writing"), LowRankConfig(keep=0.3, epochs=0)]
    budget = num_parameters(model) - 3000 if "parameters" in limits else None
    found = plan(model, budget=budget, time_budget=0.8, calibration=[ids(16)], candidates=candidates, progress=False)
    assert found.seconds <= 0.8 * sum(choices[0].seconds for choices in found.options.values())
    assert budget is None or found.parameters <= budget
    assert any(isinstance(c.config, PruneConfig) for c in found.chosen.values())
    with pytest.raises(ValueError, match="within the budget of time"):
        plan(model, time_budget=0.01, calibration=[ids(16)], candidates=candidates, progress=False)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({}, "budget is None, needed a number of parameters, keep or time_budget"),
        ({"budget": 10_000, "structures": ["svd"]}, "structures have 'svd', needed some of kronecker"),
        ({"budget": 10_000, "structures": ["dense"]}, "structures have 'dense', needed some of kronecker"),
        ({"budget": 10_000, "structures": "prune"}, r"structures is 'prune', needed a list, as \['prune'\]"),
        ({"time_budget": 1.5}, "time_budget is 1.5, needed a share"),
        ({"keep": 0.0}, "keep is 0.0, needed a share"),
        ({"keep": 0.5, "budget": 9000}, "budget is 9,000 and keep 0.5, needed one of them"),
        ({"budget": 10**9}, "budget is 1,000,000,000, needed"),
        ({"budget": 0.5}, "budget is 0.5, needed a whole number of parameters; a share is keep=0.5"),
    ],
)
def test_bad_plans_are_refused(named, message):
    with pytest.raises(ValueError, match=message):
        plan(tiny("gpt2"), calibration=[ids()], progress=False, **named)


@pytest.mark.parametrize("keep", [0.3, 0.55, 0.8])
def test_a_free_plan_is_never_worse_than_one_for_all(keep):
    errors = {}
    for uniform in (False, True):
        found = plan(tiny("llama"), keep=keep, calibration=[ids(8)], uniform=uniform, progress=False)
        errors[uniform] = sum(c.error**2 for c in found.chosen.values())
    assert errors[False] <= errors[True] * (1 + 1e-6)


def test_candidates_that_do_not_divide_are_passed_over():
    model = tiny("gpt2")
    candidates = [KroneckerConfig(b_shape=(7, 1)), KroneckerConfig(b_shape=(2, 1), epochs=0)]
    budget = num_parameters(model) - 1000
    found = plan(model, budget=budget, calibration=[ids()], candidates=candidates, progress=False)
    assert {c.config for choices in found.options.values() for c in choices} == {None, candidates[1]}


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_one_structure_for_all_is_within_the_budget(kind, share):
    model = tiny(kind)
    inside = sum(num_parameters(model.get_submodule(n)) for m in find_mlps(model) for n in (*m.ups, m.down))
    budget = num_parameters(model) - inside + int(share * inside)
    for named in ({}, {"candidates": [PruneConfig(keep=0.95), PruneConfig(keep=0.2)]}):
        found = plan(model, budget=budget, calibration=[ids()], uniform=True, progress=False, **named)
        assert found.parameters <= budget
        small = copy.deepcopy(model)
        assert convert_(small, found.configs, calibration=[ids()], progress=False).after == found.parameters


def test_a_users_candidates_are_what_comes_back():
    model = tiny("gpt2")
    candidates = [PruneConfig(keep=0.5, refit="none"), LowRankConfig(keep=0.3, epochs=1)]
    budget = num_parameters(model) - 2000
    found = plan(model, budget=budget, calibration=[ids()], candidates=candidates, progress=False)
    assert set(found.configs.values()) <= set(candidates)
    with pytest.raises(ValueError, match="is not fitted to calibration data"):
        plan(model, budget=budget, calibration=[ids()], candidates=[LowRankConfig(init="svd")], progress=False)


@pytest.mark.parametrize("uniform", [False, True])
def test_a_plan_for_a_mixture_is_what_convert_makes(uniform):
    model = tiny("mixtral")
    found = plan(model, keep=0.6, calibration=[ids(8)], uniform=uniform, progress=False)
    assert set(found.chosen) == {f"model.layers.{i}.mlp.experts" for i in range(2)}
    structures = {structure_of(c.config) for choices in found.options.values() for c in choices if c.config}
    assert structures == {"prune", "kronecker"}
    before = output(model, ids(8))
    small = copy.deepcopy(model)
    assert convert_(small, found.configs, calibration=[ids(8)], progress=False).after == found.parameters
    assert torch.equal(output(model, ids(8)), before)
    if found.prune is not None:
        assert prune_(model, found.prune, calibration=[ids(8)], progress=False).after == found.parameters


@pytest.mark.parametrize("uniform", [False, True])
def test_a_plan_for_a_model_that_is_one_block(uniform):
    config = transformers.T5Config(
        vocab_size=96, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, pad_token_id=0, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    batch = {"input_ids": ids(), "decoder_input_ids": ids(seed=1)}
    found = plan(model, keep=0.5, calibration=[batch], uniform=uniform, progress=False)
    assert all(c.error > 0 for choices in found.options.values() for c in choices[1:])
    assert convert_(model, found.configs, calibration=[batch], progress=False).after == found.parameters


def test_a_price_can_miss_what_is_the_same_for_all():
    """No price chooses b, above the line from a to c; the same for all does, or what is left is spent on it."""
    a, b, c = (PruneConfig(keep=k) for k in (0.2, 0.5, 0.9))
    choices = [Choice(config, size, error, 0.0) for config, size, error in ((a, 10, 10.0), (b, 50, 6.0), (c, 90, 1.0))]
    options = {name: (Choice(None, 100, 0.0, 0.0), *choices) for name in ("first", "second")}
    limits = [(lambda choice: choice.parameters, 100)]
    best = best_of_each(options, limits)
    assert {n: x.config for n, x in best.items()} == {"first": b, "second": b}
    tight = [(lambda choice: choice.parameters, 70)]
    assert sorted(x.parameters for x in best_of_each(options, tight).values()) == [10, 50]


def test_candidates_that_are_not_about_one_mlp_are_refused():
    for candidate in (PruneConfig(keep=0.4, granularity="head"), PruneConfig(budget=10_000)):
        with pytest.raises(ValueError, match="is not about one MLP"):
            plan(tiny("llama"), keep=0.5, calibration=[ids()], candidates=[candidate], progress=False)


def test_padding_does_not_count_in_a_plan():
    texts = ids(6, seed=1)
    mask = torch.ones_like(texts)
    mask[:, 8:] = 0
    errors = []
    for filler in (3, 50):
        batch = {"input_ids": torch.where(mask.bool(), texts, filler), "attention_mask": mask}
        found = plan(tiny("llama"), keep=0.6, calibration=[batch], structures=["prune"], progress=False)
        errors.append([c.error for choices in found.options.values() for c in choices])
    assert errors[0] == pytest.approx(errors[1], rel=1e-3, abs=1e-9)
