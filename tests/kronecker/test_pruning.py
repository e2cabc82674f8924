"""Pruned models: which neurons go, what the others make up for, and that the result is a stock
model."""

import copy
import itertools
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import peft
import pytest
import torch
import transformers
from torch import nn

from kronecker import (
    LowRankConfig,
    PruneConfig,
    convert_,
    from_pretrained,
    num_parameters,
    prune_,
)
from kronecker.data.batches import batches
from kronecker.discovery.finding import blocks_of
from kronecker.discovery.mlps import Mlp, find_mlps
from kronecker.fitting.block import blocks_with
from kronecker.fitting.elimination import eliminate, refitted
from kronecker.fitting.fit import fit_part
from kronecker.fitting.mlp import MlpWeights, Seen
from kronecker.fitting.neurons import fit_neurons
from kronecker.layers.experts import is_experts
from kronecker.moments import Moments
from kronecker.surgery.blocks import Stack, config_with_blocks, keep_blocks_, new_places
from kronecker.surgery.neurons import PrunablePart, neurons_by_influence
from model_components._walk import Call
from tests.support.models import MAKERS, MIXTURES, auto_class, tiny


def ids(count=8, length=16, seed=0):
    return torch.randint(3, 96, (count, length), generator=torch.Generator().manual_seed(seed))


def output(model, batch=None):
    with torch.no_grad():
        return model(input_ids=ids() if batch is None else batch)[0]


def problem(inputs, outputs=5, seed=0):
    """A weight, and correlated second moments of its inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, inputs, generator=generator) @ torch.randn(
        inputs, inputs, generator=generator
    )
    weight = torch.randn(outputs, inputs, generator=generator)
    return weight.double(), (x.T @ x / 40).double()


def least_error(weight, moment, kept):
    """By the definition: the best weight on these inputs, and what it misses."""
    kept = torch.tensor(sorted(kept))
    apart = weight.clone()
    apart[:, kept] -= torch.linalg.solve(moment[kept][:, kept], (weight @ moment)[:, kept].T).T
    return float((apart @ moment * apart).sum())


def test_each_step_drops_what_costs_least():
    weight, moment = problem(8)
    alive = list(range(8))
    while len(alive) > 2:
        rest = [[j for j in alive if j != dropped] for dropped in alive]
        alive = min(rest, key=lambda kept: least_error(weight, moment, kept))
    assert eliminate(weight @ moment, moment, 2).tolist() == alive


def test_dropping_several_at_a_time_is_seldom_better():
    apart = []
    for seed in range(6):
        weight, moment = problem(12, seed=seed)
        fast, slow = (
            least_error(weight, moment, eliminate(weight @ moment, moment, 4, step=step).tolist())
            for step in (4, 1)
        )
        apart.append(fast / slow)
    assert sum(apart) / len(apart) > 1


def test_elimination_is_near_the_best_choice_there_is():
    ours, by_size = [], []
    for seed in range(8):
        weight, moment = problem(9, seed=seed)
        best = min(
            least_error(weight, moment, kept) for kept in itertools.combinations(range(9), 4)
        )
        ours.append(
            least_error(weight, moment, eliminate(weight @ moment, moment, 4).tolist()) / best
        )
        by_size.append(
            least_error(weight, moment, weight.square().sum(0).argsort()[-4:].tolist()) / best
        )
    assert min(ours) >= 1 - 1e-6
    assert sum(ours) / 8 < 1.2
    assert sum(by_size) / 8 > 1.5  # what large weights alone would keep


def test_a_family_whose_config_has_no_inner_size_is_refused():
    with pytest.raises(ValueError, match="no field of BloomConfig gives"):
        prune_(tiny("bloom"), calibration=[torch.tensor([[1, 2, 3]])], progress=False)


def test_an_unset_inner_size_is_set(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    kinds = {"attention_types": [[["global", "local"], 1]], "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**sizes, **kinds)).eval()
    rows = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(0))
    prune_(model, PruneConfig(keep=0.5), calibration=[rows], progress=False)
    model.save_pretrained(tmp_path)
    again = transformers.GPTNeoForCausalLM.from_pretrained(tmp_path)
    assert again.config.intermediate_size == 64
    torch.testing.assert_close(again(rows).logits, model(rows).logits, rtol=0, atol=0)


def test_blocks_that_a_config_lists_by_index_are_refused():
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    counts = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.Llama4TextConfig(
        **sizes, **counts, **ids, intermediate_size_mlp=32, num_local_experts=2, moe_layers=[1]
    )
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval()
    stack = Stack("model.layers", 3)
    # without the first block, the experts are in block 0, but the config says 1
    with pytest.raises(ValueError, match="no field of Llama4TextConfig gives"):
        config_with_blocks(model, stack, [1, 2])


def test_the_closed_form_is_the_least_squares_solution():
    generator = torch.Generator().manual_seed(0)
    h, t = (
        torch.randn(50, 6, generator=generator).double(),
        torch.randn(50, 3, generator=generator).double(),
    )
    kept = torch.tensor([0, 2, 5])
    expected = torch.linalg.lstsq(h[:, kept], t).solution.T
    torch.testing.assert_close(refitted(t.T @ h, h.T @ h, kept), expected)


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "bloom"])
def test_every_family_becomes_a_smaller_stock_model(kind, tmp_path):
    model = tiny(kind)
    before = num_parameters(model)
    report = prune_(model, PruneConfig(keep=0.5), calibration=[ids(4, seed=1)], progress=False)
    assert report.after == num_parameters(model) < before == report.before
    stacks = {r.name for r in report.layers if is_experts(model.get_submodule(r.name))}
    assert all(r.after == (16 if r.name in stacks else r.before // 2) for r in report.layers)
    assert len(report.layers) == len(find_mlps(model)) + len(stacks)
    assert bool(stacks) == (kind in MIXTURES)
    model.save_pretrained(tmp_path)
    stock, said = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said.values())
    torch.testing.assert_close(output(stock), output(model))
    fresh = type(model)(stock.config)
    assert {n: p.shape for n, p in fresh.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_pruned_model_generates_with_a_cache(kind):
    model = tiny(kind)
    prune_(model, PruneConfig(keep=0.5), calibration=[ids()], progress=False)
    ways = [
        model.generate(ids(1, 6), max_new_tokens=8, do_sample=False, use_cache=c, pad_token_id=0)
        for c in (True, False)
    ]
    assert torch.equal(*ways)


def redundant(kind):
    """A model whose hidden neurons come in pairs that say the same: half of them are enough."""
    model = tiny(kind)
    for mlp in find_mlps(model):
        for name in mlp.ups:
            layer = model.get_submodule(name)
            weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
            half = len(weight) // 2
            weight.data[half:] = weight.data[:half]
            if layer.bias is not None:
                layer.bias.data[half:] = layer.bias.data[:half]
    return model


@pytest.mark.parametrize("fields", [{"epochs": 0}, {"epochs": 1}, {"method": "fast"}])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "gemma2"])
def test_neurons_that_say_the_same_go_without_a_loss(kind, fields):
    model = redundant(kind)
    before = output(model)
    config = PruneConfig(keep=0.5, ridge=1e-3, **fields)
    report = prune_(model, config, calibration=[ids(16, seed=1)], progress=False)
    assert max(r.error for r in report.layers) < 0.02
    assert float((output(model) - before).norm() / before.norm()) < 0.02


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_descent_is_nearer_to_the_original(kind):
    errors = []
    for epochs in (0, 12):
        config = PruneConfig(keep=0.5, epochs=epochs)
        report = prune_(tiny(kind), config, calibration=[ids(64, seed=1)], progress=False)
        errors.append(report.layers[0].error)
    assert errors[0] > errors[1]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3"])
def test_one_pass_fits_each_mlp_on_what_the_original_feeds_it(kind):
    """Against the definition: least squares with a ridge on the original's hidden neurons."""
    batch = ids(64, seed=1)
    original = tiny(kind)
    model = copy.deepcopy(original)
    mlps = find_mlps(original)
    read = {}

    def see(name):
        return lambda module, given: read.update({name: given[0].flatten(0, 1).double()})

    for mlp in mlps:
        original.get_submodule(mlp.down).register_forward_pre_hook(see(mlp.down))
    output(original, batch)
    config = PruneConfig(keep=0.5, method="fast")
    report = prune_(model, config, calibration=[batch], progress=False)
    for mlp, row in zip(mlps, report.layers, strict=True):
        ups = [m.get_submodule(mlp.ups[0]).weight for m in (original, model)]
        kept = torch.cat([(ups[0] == own).all(1).nonzero()[:, 0] for own in ups[1]])
        hidden = read[mlp.down]
        weight = original.get_submodule(mlp.down).weight.double()
        moment = hidden.T @ hidden / len(hidden)
        ridge = config.ridge * moment.diagonal().mean()
        cross = weight @ moment + ridge * weight
        damped = moment + ridge * torch.eye(len(moment))
        expected = torch.linalg.solve(damped[kept][:, kept], cross[:, kept].T).T
        found = model.get_submodule(mlp.down).weight.double()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        apart = hidden[:, kept] @ found.T - hidden @ weight.T
        assert row.error == pytest.approx(
            float(apart.norm() / (hidden @ weight.T).norm()), rel=1e-3
        )


def test_descent_is_never_worse_than_the_closed_form():
    """A model whose hidden neurons are tiny, so that its writing matrix is large: steps have to
    keep to sizes."""
    errors = []
    for epochs in (0, 1):
        model = tiny("bert")
        for mlp in find_mlps(model):
            up, down = (model.get_submodule(n) for n in (mlp.ups[0], mlp.down))
            up.weight.data /= 100
            up.bias.data.zero_()
            down.weight.data *= 100
        config = PruneConfig(epochs=epochs)
        report = prune_(model, config, calibration=[ids(8, seed=1)], progress=False)
        errors.append(report.layers[0].error)
    assert errors[1] <= errors[0]


def test_all_neurons_are_the_original():
    model = tiny("gpt2")
    before = output(model)
    prune_(model, PruneConfig(keep=1.0, epochs=0), calibration=[ids(32, seed=1)], progress=False)
    torch.testing.assert_close(output(model), before, rtol=1e-3, atol=1e-4)


def test_the_error_from_moments_is_the_error():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    weights = MlpWeights(
        [(draw(12, 6),)], [draw(12)], (draw(6, 12),), draw(6), lambda said: torch.relu(said[0])
    )
    x = draw(300, 6)
    seen = Seen(Moments.zeros(6, 12))
    seen.add(weights.hidden(x), weights(x), None)
    small, error = fit_neurons(Mlp(("up",), "down"), weights, seen, 5, PruneConfig(epochs=0))
    direct = float((small(x) - weights(x)).square().sum() / weights(x).square().sum())
    assert error == pytest.approx(direct, rel=1e-4)


@pytest.mark.parametrize("method", ["best", "fast"])
def test_a_size_is_kept_and_neurons_are_rounded(method):
    model = tiny("llama")
    size = 0.85
    config = PruneConfig(size=size, method=method)
    report = prune_(model, config, calibration=[ids()], progress=False)
    per_neuron = 3 * 16 * 4
    assert size * report.before - per_neuron < report.after <= size * report.before
    model = tiny("llama")
    prune_(model, PruneConfig(keep=0.6, multiple_of=8), calibration=[ids()], progress=False)
    assert model.config.intermediate_size == 16


@pytest.mark.parametrize("fields", [{"multiple_of": 16}, {"method": "blocks"}])
def test_the_whole_size_drops_nothing(fields):
    report = prune_(
        tiny("llama"), PruneConfig(size=1.0, **fields), calibration=[ids()], progress=False
    )
    assert report.after == report.before


@pytest.mark.parametrize("method", ["best", "fast"])
def test_a_model_whose_states_autocast_leaves_in_bfloat16(method, monkeypatch):
    monkeypatch.setattr("kronecker.surgery.prune._LARGE", 0)
    monkeypatch.setattr("kronecker.surgery.prune.is_faster_in_bfloat16", lambda device: True)
    sizes = {"vocab_size": 96, "num_hidden_layers": 2, "embedding_size": 8, "hidden_size": 16}
    config = transformers.ElectraConfig(num_attention_heads=2, intermediate_size=32, **sizes)
    model = transformers.ElectraModel(config).eval()
    report = prune_(model, PruneConfig(method=method), calibration=[ids(8)], progress=False)
    assert all(0 < row.error < 1 for row in report.layers)
    assert not any("closed form only" in note for note in report.notes)


def test_a_size_that_is_missed_is_said():
    report = prune_(tiny("mixtral"), PruneConfig(size=0.9999), calibration=[ids()], progress=False)
    assert "of the parameters are kept, instead of the requested 100.0%" in str(report)


def test_padding_does_not_count():
    batch, found = ids(6, 12), []
    for fill in (5, 77):
        padded, mask = torch.full((6, 20), fill), torch.zeros(6, 20, dtype=torch.long)
        padded[:, :12], mask[:, :12] = batch, 1
        model = tiny("bert")
        prune_(model, calibration=[{"input_ids": padded, "attention_mask": mask}], progress=False)
        found.append(output(model))
    torch.testing.assert_close(*found)


def test_a_fused_gate_and_up_lose_the_same_neurons(tmp_path):
    config = transformers.Phi3Config(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.Phi3ForCausalLM(config).eval()
    assert find_mlps(model)[0].layout == "halves"
    prune_(model, calibration=[ids()], progress=False)
    assert model.model.layers[0].mlp.gate_up_proj.weight.shape == (24, 16)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        output(transformers.Phi3ForCausalLM.from_pretrained(tmp_path)), output(model)
    )


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_fitted_on_the_tokens_they_get(kind):
    model = tiny(kind)
    for parameter in model.parameters():
        parameter.data *= 8  # far enough from zero that a gate's bounds and biases count
    name = next(n for n, m in model.named_modules() if is_experts(m))
    before, seen = copy.deepcopy(model.get_submodule(name)), {}
    hook = lambda m, given, named: seen.update(x=given[0], to=given[1])  # noqa: E731
    handle = model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    output(model, ids(8, seed=1))
    handle.remove()
    calibration = [ids(8, seed=1)]
    report = prune_(model, PruneConfig(keep=0.7), calibration=calibration, progress=False)
    (error,) = [layer.error for layer in report.layers if layer.name == name]
    after, apart, energy = model.get_submodule(name), 0.0, 0.0
    for expert in range(3):
        x = seen["x"][(seen["to"] == expert).any(-1)]
        alone = (x, torch.full((len(x), 1), expert), torch.ones(len(x), 1))
        with torch.no_grad():
            old, new = (stack(*alone) for stack in (before, after))
        apart, energy = (
            apart + float((old - new).square().sum()),
            energy + float(old.square().sum()),
        )
    assert error == pytest.approx((apart / energy) ** 0.5, rel=1e-3)
    assert error < 0.7


def test_an_expert_without_tokens_keeps_its_biases():
    model = tiny("gpt-oss")
    router = model.model.layers[0].mlp.router
    router.weight.data.zero_()
    router.bias.data.copy_(torch.tensor([1.0, 1.0, -1.0]))  # nothing goes to the third
    experts = model.model.layers[0].mlp.experts
    before = experts.down_proj_bias.detach().clone()
    prune_(model, PruneConfig(keep=0.7), calibration=[ids(4)], progress=False)
    assert torch.equal(experts.down_proj_bias[2], before[2])
    assert not torch.equal(experts.down_proj_bias[0], before[0])


def test_a_stack_that_is_normed_after_each_expert_is_left_alone():
    experts = tiny("mixtral").model.layers[0].mlp.experts
    assert is_experts(experts)
    experts.has_post_expert_norm = True
    assert not is_experts(experts)


def test_an_expert_without_tokens_keeps_its_largest_neurons():
    model = tiny("mixtral")
    block = model.model.layers[1].mlp
    block.gate.weight.data[2] = 0
    block.gate.weight.data[:2] *= 100
    block.experts.down_proj.data[2, :, 8:] *= 1e-3
    wanted = block.experts.down_proj.data[2, :, :8].clone()
    block.gate.register_forward_hook(lambda m, given, out: (out[0], out[1], out[2].clamp(max=1)))
    prune_(model, PruneConfig(keep=0.3), calibration=[ids(4, seed=1)], progress=False)
    torch.testing.assert_close(block.experts.down_proj.data[2], wanted, rtol=1e-4, atol=1e-5)


def test_hooks_modes_and_frozen_weights_survive():
    model, seen = tiny("gpt2"), []
    layer = model.transformer.h[1].mlp.c_proj
    layer.register_forward_hook(lambda module, given, out: seen.append(given[0].shape[-1]))
    layer.weight.requires_grad_(False)
    model.transformer.h[0].train()
    prune_(model, calibration=[ids()], progress=False)
    seen.clear()
    output(model)
    assert seen == [32]
    assert model.transformer.h[1].mlp.c_proj is layer
    assert not layer.weight.requires_grad
    assert model.transformer.h[1].mlp.c_fc.weight.requires_grad
    assert model.transformer.h[0].training
    assert not model.transformer.h[1].training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_keep_their_dtype(dtype):
    model = tiny("llama").to(dtype)
    report = prune_(model, calibration=[ids()], progress=False)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert torch.isfinite(output(model)).all()
    assert all(0 <= r.error < 1 for r in report.layers)


def mapped_files():
    """Return for each mapped range of this process's memory its start, end and file."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            start, end = (int(number, 16) for number in fields[0].split("-"))
            found.append((start, end, Path(fields[5])))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's list of mapped files")
def test_a_model_in_bfloat16_stays_mapped(tmp_path):
    """Weights that stay are the files' own memory, new ones the cache's: no copy takes room."""
    tiny("llama").bfloat16().save_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prune_(model, calibration=[ids()], cache=tmp_path / "cache", progress=False)
    files = mapped_files()
    for name, parameter in model.named_parameters():
        place = parameter.data_ptr()
        (file,) = [file for start, end, file in files if start <= place < end]
        expected = tmp_path / ("cache" if ".mlp." in name else "model")
        assert file.parent == expected, name
    model.save_pretrained(tmp_path / "smaller")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "smaller")
    assert torch.equal(output(again), output(model))


@pytest.mark.parametrize("method", ["fast", "best", "blocks"])
def test_half_precision_is_fitted_as_float32_is(method):
    """Only what a bfloat16 model's weights are rounded to tells its fit from a float32 one's."""
    half = tiny("llama").bfloat16()
    full = copy.deepcopy(half).float()
    config = PruneConfig(keep=0.5, method=method)
    found = [prune_(m, config, calibration=[ids(64)], progress=False).layers for m in (half, full)]
    errors = [[layer.error for layer in layers if layer.error is not None] for layers in found]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_blocks_are_as_they_were_after_an_error(error):
    """Checked while the error is on its way, which keeps every frame alive."""
    raised = []
    for place in range(1, 9):
        model = tiny("llama").bfloat16()
        weights = {name: (p, p.dtype, p.data_ptr()) for name, p in model.named_parameters()}
        seen = []

        def stop(module, given, seen=seen, place=place):
            seen.append(module)
            if len(seen) == place:
                raise error("stopped")

        model.model.layers[1].mlp.register_forward_pre_hook(stop)
        try:
            prune_(model, PruneConfig(method="best"), calibration=[ids()], progress=False)
        except (error, ValueError):  # finding the MLPs turns errors of the model into its own
            for name, parameter in model.named_parameters():
                assert (parameter, parameter.dtype, parameter.data_ptr()) == weights[name], name
            assert all("forward" not in vars(layer) for layer in model.model.layers)
            raised.append(place)
    # where the search for MLPs tries something, an error of the model is an answer
    assert len(raised) > 4


def test_blocks_share_the_arguments_that_were_recorded():
    """Positions and masks are one tensor for all blocks, whatever the dtype they are cast to."""
    model = tiny("llama").bfloat16()
    mlps = find_mlps(model)
    blocks, states = blocks_with(model, mlps, [], batches([ids(), ids(seed=2)], model, "test"))
    assert {hidden.dtype for hidden in states} == {torch.float32}
    for batch in range(2):
        cosines = {
            block.calls[batch].named["position_embeddings"][0].data_ptr() for block in blocks
        }
        assert len(cosines) == 1
    with blocks[0].computing_in_float32():
        assert blocks[0].calls[0].named["position_embeddings"][0].dtype == torch.float32
        assert next(blocks[0].module.parameters()).dtype == torch.float32


class Heads(nn.Module):
    """Blocks, and a list of heads: modules whose own forward is called outside the walk."""

    def __init__(self, width=16):
        super().__init__()
        self.table = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.heads = nn.ModuleList(nn.Linear(width, 4) for _ in range(3))

    def forward(self, input_ids):
        hidden = self.table(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return sum(head(hidden) for head in self.heads)


class Named(Heads):
    """A model whose blocks are given their states by a name of their own, as PatchTST's are."""

    def forward(self, input_ids):
        hidden = self.table(input_ids)
        for block in self.blocks:
            hidden = hidden + block(input=hidden)
        return hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Heads, Named])
def test_lists_of_other_modules_are_left_alone(kind, dtype):
    model = kind().to(dtype).eval()
    report = prune_(model, calibration=[torch.arange(32).view(4, 8)], progress=False)
    assert all(layer.after < layer.before for layer in report.layers)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_one_token_and_dead_neurons_are_no_trouble():
    model = tiny("gpt2")
    report = prune_(model, calibration=[torch.tensor([[5]])], progress=False)
    assert all(r.error < 0.1 for r in report.layers)
    assert torch.isfinite(output(model)).all()
    dead = tiny("distilbert", activation="relu")
    for layer in dead.transformer.layer:
        layer.ffn.lin1.bias.data.fill_(-1e4)
    prune_(dead, calibration=[ids()], progress=False)
    assert torch.isfinite(output(dead)).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep": 0}, r"PruneConfig: keep is 0"),
        ({"keep": 1.5}, r"PruneConfig:.*1\.5"),
        ({"size": 1.5}, r"PruneConfig:.*1\.5"),
        ({"method": "some"}, r"PruneConfig:.*'some'"),
        ({"epochs": -1}, r"PruneConfig:.*epochs.*-1"),
        ({"ridge": 0}, r"PruneConfig:.*ridge.*0"),
        ({"method": "blocks", "multiple_of": 64}, r"PruneConfig:.*multiple_of.*64.*1"),
        ({"method": "blocks", "allocate": "influence"}, r"PruneConfig:.*allocate.*uniform"),
    ],
)
def test_bad_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        PruneConfig(**fields)


def test_configs_round_trip():
    config = PruneConfig(keep=0.3, method="fast", multiple_of=64)
    assert PruneConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match=r"PruneConfig:.*unknown"):
        PruneConfig.from_dict({"kept": 1})


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([], "calibration is empty"),
        (["text"], r"prune_:.*calibration"),
        ([{}], r"prune_:.*\[\]"),
        ([{"text": "so it came"}], r"prune_:.*\[\]"),
        ([{"input_ids": ["so", "it"]}], r"prune_:.*\['input_ids'\]"),
        ([{"labels": torch.ones(2, 3)}], r"prune_:.*\['labels'\]"),
        ([torch.tensor([[3, 96]])], r"prune_:.*token.*3.*96.*0.*95"),
        ([torch.tensor([[-1, 5]])], r"prune_:.*-1.*5.*0.*95"),
        ([torch.ones(2, 3)], r"prune_:.*torch\.float32"),
        (
            [{"input_ids": torch.ones(0, 4).long(), "attention_mask": torch.ones(1, 4)}],
            r"prune_:.*\[0.*4\]",
        ),
        (
            [torch.ones(1, 65, dtype=torch.long)],
            r"prune_:.*65.*tokens.*64",
        ),
    ],
)
def test_bad_calibration_changes_nothing(calibration, message):
    model = tiny("llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        prune_(model, calibration=calibration, progress=False)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_rows_of_a_tokenized_data_set_are_calibration():
    rows = [
        {"text": "so it came", "input_ids": row.tolist(), "attention_mask": [1] * 16}
        for row in ids()
    ]
    models = tiny("llama"), tiny("llama")
    for model, calibration in zip(
        models, (datasets.Dataset.from_list(rows), ids().split(1)), strict=True
    ):
        prune_(model, calibration=calibration, progress=False)
    assert torch.equal(output(models[0]), output(models[1]))


def test_models_that_cannot_be_pruned_are_refused():
    def attempt(model, message, **fields):
        with pytest.raises(ValueError, match=message):
            prune_(model, PruneConfig(**fields), calibration=[ids()], progress=False)

    sizes = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2}
    attempt(
        transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)),
        r"prune_:.*MambaForCausalLM",
    )
    heads = {"n_layer": 2, "n_head": 4}
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes | heads))
    attempt(bloom, r"prune_:.*BloomConfig")  # four times the width, always
    attempt(tiny("gpt2").to("meta"), r"kronecker:.*device")
    attempt(tiny("gpt2"), r"prune_: size is 0\.01, expected 0\.\d+ to 1", size=0.01)
    shared = tiny("llama")
    shared.model.layers[1].mlp.up_proj.weight = shared.model.layers[0].mlp.up_proj.weight
    attempt(shared, r"prune_:.*layers")
    broken = tiny("llama")
    broken.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("inf")
    attempt(broken, r"kronecker:.*finite")


def test_an_interrupted_call_changes_nothing_and_goes_on(tmp_path, monkeypatch):
    model = tiny("gpt2")
    before, config = copy.deepcopy(model.state_dict()), copy.deepcopy(model.config.to_dict())
    expected = tiny("gpt2")
    prune_(expected, calibration=[ids()], progress=False)
    calls = []

    def fail(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fit_neurons(*given)

    monkeypatch.setattr("kronecker.fitting.fit.fit_neurons", fail)
    with pytest.raises(KeyboardInterrupt):
        prune_(model, calibration=[ids()], cache=tmp_path, progress=False)
    after = model.state_dict()
    assert all(torch.equal(before[n], t) for n, t in after.items())
    assert len(before) == len(after)
    assert model.config.to_dict() == config
    assert model.transformer.h[0].mlp.c_fc.nf == 64
    output(model)
    prune_(model, calibration=[ids()], cache=tmp_path, progress=False)
    assert len(calls) == 4  # the first block's fit was kept
    assert torch.equal(output(model), output(expected))
    for other in ({"config": PruneConfig(keep=0.4)}, {"calibration": [ids(seed=5)]}):
        prune_(tiny("gpt2"), **({"calibration": [ids()]} | other), cache=tmp_path, progress=False)
    assert len(calls) == 10  # for another share or other data nothing was


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_what_the_stream_has_lost_is_made_up_for(kind, monkeypatch):
    """Fitting towards what the MLP itself gave is further from the original."""

    def apart(**patched):
        distances = []
        for seed in range(4):
            model = tiny(kind, seed)
            before = output(model, ids(64, seed=2))
            with monkeypatch.context() as patch:
                for name, value in patched.items():
                    patch.setattr(f"kronecker.{name}", value)
                prune_(
                    model,
                    PruneConfig(keep=0.5, epochs=0),
                    calibration=[ids(256, seed=1)],
                    progress=False,
                )
            distances.append(float((output(model, ids(64, seed=2)) - before).norm()))
        return sum(distances)

    assert apart() < apart(
        **{"fitting.block.Block._stream": lambda self, writer, x, y, out, call: torch.zeros_like(y)}
    )


def test_what_a_user_has_set_stays():
    model = tiny("gpt2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.25
    model.gradient_checkpointing_enable()
    model.extra = nn.Identity()
    prune_(model, calibration=[ids()], progress=False)
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.25}
    assert model.transformer.gradient_checkpointing
    assert model.config.n_inner == model.transformer.config.n_inner == 32


def test_plain_attributes_have_the_new_size():
    model = tiny("llama")
    prune_(model, calibration=[ids()], progress=False)
    assert {layer.mlp.intermediate_size for layer in model.model.layers} == {12}


def test_rounded_neurons_keep_a_size_or_say_so():
    config = PruneConfig(size=0.85, multiple_of=64)
    with pytest.raises(ValueError, match=r"prune_: size is 0\.85, expected 1\.0 or more"):
        prune_(tiny("llama"), config, calibration=[ids()], progress=False)
    mixture = tiny("mixtral")
    report = prune_(mixture, PruneConfig(size=0.9), calibration=[ids()], progress=False)
    assert report.after <= 0.9 * report.before
    assert mixture.config.intermediate_size % 8 == 0


def fitted_parts(model, cache, monkeypatch):
    """Return how many parts are fitted, and not taken from the cache."""
    fits = []
    with monkeypatch.context() as patch:
        real = fit_part
        patch.setattr("kronecker.fitting.fit.fit_part", lambda *a: fits.append(0) or real(*a))
        prune_(model, calibration=[ids()], cache=cache, progress=False)
    return len(fits)


def test_the_cache_serves_a_copy_of_the_folder_and_no_other_weights(tmp_path, monkeypatch):
    tiny("llama").save_pretrained(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two, other = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        for name in ("one", "two", "two")
    )
    assert fitted_parts(one, tmp_path / "cache", monkeypatch) == 4
    assert fitted_parts(two, tmp_path / "cache", monkeypatch) == 0
    first = next(iter(other.state_dict().values()))
    first.view(-1)[0] += 0.5
    assert fitted_parts(other, tmp_path / "cache", monkeypatch) == 4


def test_the_cache_is_of_one_model_and_one_layout(tmp_path):
    for fields, batch in (({}, ids()), ({"hidden_act": "relu"}, ids()), ({}, ids().view(16, 8))):
        cached, plain = (tiny("llama", **fields) for _ in range(2))
        prune_(cached, calibration=[batch], cache=tmp_path, progress=False)
        prune_(plain, calibration=[batch], progress=False)
        assert torch.equal(output(cached), output(plain))
    file = next(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:50])
    prune_(tiny("llama"), calibration=[ids().view(16, 8)], cache=tmp_path, progress=False)


@pytest.mark.parametrize("other", [nn.Tanh(), nn.functional.silu])
def test_the_cache_sees_another_activation(other, tmp_path):
    cached, plain = tiny("llama", hidden_act="relu"), tiny("llama", hidden_act="relu")
    prune_(tiny("llama", hidden_act="relu"), calibration=[ids()], cache=tmp_path, progress=False)
    for layer in (*cached.model.layers, *plain.model.layers):
        del layer.mlp.act_fn
        layer.mlp.act_fn = other
    prune_(cached, calibration=[ids()], cache=tmp_path, progress=False)
    prune_(plain, calibration=[ids()], progress=False)
    assert torch.equal(output(cached), output(plain))


@pytest.mark.parametrize("place", range(1, 6))
def test_an_interrupt_leaves_no_hook_and_no_forward(place, monkeypatch):
    model = tiny("llama")
    before = output(model)
    runs, run = [], Call.run

    def stop(self, block, hidden):
        runs.append(block)
        if len(runs) == place:
            raise KeyboardInterrupt
        return run(self, block, hidden)

    monkeypatch.setattr(Call, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        prune_(model, calibration=[ids(), ids(seed=1)], progress=False)
    assert torch.equal(output(model), before)
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules()
    )


def test_adapters_wrappers_and_nothing_but_padding_are_refused():
    def attempt(model, message, batch=None):
        with pytest.raises(ValueError, match=message):
            prune_(model, calibration=[ids() if batch is None else batch], progress=False)

    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    attempt(peft.get_peft_model(tiny("llama"), adapter), "merge adapters first")
    wrapper = nn.Module()
    wrapper.encoder = tiny("bert")
    attempt(wrapper, r"prune_:.*encoder")
    attempt(
        tiny("bert"),
        r"prune_:.*calibration",
        {"input_ids": ids(), "attention_mask": torch.zeros(8, 16)},
    )
    with torch.inference_mode():
        attempt(tiny("bert"), "expected a call outside torch.inference_mode")


@pytest.mark.parametrize(
    "kind", ["gpt2", "llama", "llama-tied", "bert", "gemma2", "qwen3", "mixtral", "gpt-oss"]
)
def test_without_some_blocks_it_is_a_stock_model(kind, tmp_path):
    model = tiny(kind)
    count = model.config.num_hidden_layers
    report = prune_(
        model,
        PruneConfig(keep=0.5, method="blocks"),
        calibration=[ids(8, seed=1)],
        progress=False,
    )
    assert model.config.num_hidden_layers == max(1, round(count / 2))
    assert report.after == num_parameters(model) < report.before
    gone = [r for r in report.layers if not r.after]
    assert len(gone) == count - model.config.num_hidden_layers
    assert sum(r.before for r in gone) == report.before - report.after
    assert all(r.unit == ("neurons" if r.after else "parameters") for r in report.layers)
    after = output(model)
    model.save_pretrained(tmp_path)
    stock = auto_class(kind).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(output(stock), after)
    if model.can_generate():
        texts = [
            m.generate(ids()[:, :4], max_new_tokens=6, min_new_tokens=6, do_sample=False)
            for m in (model, stock)
        ]
        assert torch.equal(*texts)
        plain = model.generate(
            ids()[:, :4], max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=False
        )
        assert torch.equal(texts[0], plain)


def cosine_influences(model, blocks, batch):
    """By the definition: 1 - cos of the hidden states before and after each block."""
    seen = []
    hooks = [
        block.register_forward_hook(
            lambda module, given, out: seen.append(
                1 - torch.cosine_similarity(given[0], out[0] if isinstance(out, tuple) else out, -1)
            )
        )
        for block in blocks
    ]
    output(model, batch)
    for hook in hooks:
        hook.remove()
    return [float(one.mean()) for one in seen]


@pytest.mark.parametrize("method", ["fast", "best"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_blocks_of_less_influence_lose_more_neurons(kind, method, tmp_path):
    model = tiny(kind)
    blocks = blocks_of(model, [m.down for m in find_mlps(model)])
    batch = ids(8, seed=1)
    influences = torch.tensor(cosine_influences(model, [b for _, b, _ in blocks], batch))
    config = PruneConfig(keep=0.5, method=method, allocate="influence")
    report = prune_(model, config, calibration=[batch], progress=False)
    gone = (-influences / 0.1).softmax(0) * 0.5 * len(influences)
    count = report.layers[0].before
    assert gone.max() < 0.8
    assert all(
        abs(row.after - (1 - g) * count) < 1
        for row, g in zip(report.layers, gone.tolist(), strict=True)
    )
    told = torch.tensor([row.influence for row in report.layers])
    torch.testing.assert_close(told, influences, rtol=1e-4, atol=1e-5)
    # as many in all as uniform shares would leave
    assert sum(row.after for row in report.layers) == len(gone) * (count // 2)
    # BERT's blocks differ by less than a neuron
    assert kind == "bert" or len({row.after for row in report.layers}) > 1
    assert any("that only kronecker.from_pretrained loads" in note for note in report.notes)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(output(from_pretrained(tmp_path)), output(model))
    with pytest.raises(RuntimeError):
        auto_class(kind).from_pretrained(tmp_path)


def part(name, count):
    return PrunablePart(
        name, (name,), count, lambda n: {name: torch.Size([4, n])}, Mlp(("up",), name)
    )


def test_no_mlp_loses_more_than_four_fifths_and_the_size_holds():
    parts = [part(f"p{i}", 800) for i in range(4)]
    influences = {"p0": 0.0, "p1": 0.5, "p2": 0.5, "p3": 9.0}
    half = 4 * 4 * 400  # parameters, four for each neuron
    keep = neurons_by_influence(parts, half, influences, PruneConfig())
    # p0 loses all that it may, and the two beside it the rest
    assert [keep[p.name] for p in parts] == [160, 320, 320, 800]
    keep = neurons_by_influence(parts, 4 * 4 * 700, influences, PruneConfig())
    assert set(keep.values()) == {100}
    keep = neurons_by_influence(parts, half, influences, PruneConfig(multiple_of=64))
    assert [keep[p.name] for p in parts] == [128, 320, 320, 800]
    keep = neurons_by_influence(parts, 0, influences, PruneConfig())
    assert set(keep.values()) == {800}


def of_one_loud_block(kind="llama"):
    """A model whose first block alone changes the hidden states much."""
    model = tiny(kind)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
                module.weight.mul_(30 if number == 0 else 0.01)
    return model


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"size": 0.72, "multiple_of": 8}, 0.72),
        ({"size": 1.0, "multiple_of": 16}, 1.0),
        ({"keep": 1.0, "multiple_of": 16}, 1.0),
    ],
)
def test_a_size_holds_whatever_the_rounding(fields, kept):
    model = of_one_loud_block()
    config = PruneConfig(allocate="influence", epochs=0, **fields)
    report = prune_(model, config, calibration=[ids()], progress=False)
    assert kept - 0.15 < report.after / report.before <= kept
    if kept == 1:
        assert not any("save_pretrained" in note for note in report.notes)


def test_influence_does_not_lose_what_equal_shares_lose_to_rounding():
    """Equal shares round down every MLP, so they drop up to one multiple in each."""
    kept = {}
    for allocate in ("uniform", "influence"):
        config = PruneConfig(size=0.8, multiple_of=8, allocate=allocate, epochs=0)
        model = tiny("llama")
        step = 8 * 3 * model.config.hidden_size  # parameters of one multiple of an MLP
        prune_(model, config, calibration=[ids()], progress=False)
        kept[allocate] = num_parameters(model)
    budget = round(0.8 * num_parameters(tiny("llama")))
    assert kept["uniform"] <= budget - step
    assert budget - step < kept["influence"] <= budget


def test_a_share_that_rounding_misses_is_said():
    config = PruneConfig(keep=0.02, multiple_of=8, allocate="influence", epochs=0)
    report = prune_(tiny("llama"), config, calibration=[ids()], progress=False)
    kept = "32 of 96 neurons are kept, 33.3% instead of the requested 2.0%"
    assert any(kept in note for note in report.notes)


def test_a_users_own_save_pretrained_stays():
    model = tiny("llama")
    model.save_pretrained = own = lambda *given, **named: None
    prune_(model, PruneConfig(epochs=0), calibration=[ids()], progress=False)
    assert vars(model)["save_pretrained"] is own


def test_parts_that_take_more_than_a_config_are_no_trouble():
    """PatchTST's encoder takes a number of patches, too."""
    config = transformers.PatchTSTConfig(
        num_input_channels=2,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        d_model=16,
        ffn_dim=24,
        num_attention_heads=2,
        num_hidden_layers=3,
        prediction_length=4,
    )
    model = transformers.PatchTSTForPrediction(config).eval()
    calibration = [{"past_values": torch.randn(8, 32, 2)}]
    report = prune_(model, PruneConfig(), calibration=calibration, progress=False)
    assert report.after < report.before


def test_an_interrupt_at_the_end_leaves_the_model_as_it_was(monkeypatch, tmp_path):
    model = tiny("llama")
    before = output(model)

    def interrupt(model):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kronecker.storage.checkpoints.has_smaller_layers", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prune_(model, PruneConfig(allocate="influence"), calibration=[ids()], progress=False)
    assert torch.equal(output(model), before)
    model.save_pretrained(tmp_path)
    stock = auto_class("llama").from_pretrained(tmp_path).eval()
    torch.testing.assert_close(output(stock), before)


class Mine(transformers.LlamaForCausalLM):
    """A class of a user's own."""


def test_what_has_no_influence_or_no_folder_is_refused():
    config = PruneConfig(keep=0.5, allocate="influence")
    padding = {"input_ids": ids(2), "attention_mask": torch.zeros(2, 16, dtype=torch.long)}
    with pytest.raises(ValueError, match="expected calibration data with tokens, got only padding"):
        prune_(tiny("llama"), config, calibration=[padding], progress=False)
    with pytest.raises(
        ValueError, match=r"prune_: expected the name of a transformers model class, got 'Mine'"
    ):
        prune_(Mine(tiny("llama").config).eval(), config, calibration=[ids()], progress=False)
    model = tiny("qwen3")
    prune_(model, config, calibration=[ids()], progress=False)
    for again, expected in (
        (PruneConfig(keep=0.5), "allocate='influence' for such a model"),
        (PruneConfig(method="blocks"), "the original model; drop blocks before neurons"),
    ):
        with pytest.raises(
            ValueError, match=rf"is already pruned to a size that .*expected {expected}"
        ):
            prune_(model, again, calibration=[ids()], progress=False)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_blocks_that_stay_make_up_for_those_that_went(kind, monkeypatch):
    batch = ids(16, seed=5)
    before = output(tiny(kind), batch)
    errors = {}
    for fitted in (False, True):
        model = tiny(kind)
        config = PruneConfig(keep=0.5, method="blocks")
        with monkeypatch.context() as patch:
            if not fitted:
                patch.setattr("kronecker.surgery.prune._Walk.fitting", lambda self, parts, keep: [])
            prune_(model, config, calibration=ids(64, seed=1).split(8), progress=False)
        errors[fitted] = float((output(model, batch) - before).norm())
    assert errors[True] < errors[False]


def test_a_block_that_does_nothing_goes_first(monkeypatch):
    monkeypatch.setattr("kronecker.surgery.prune._Walk.fitting", lambda self, parts, keep: [])
    model = tiny("llama")
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.model.layers[1].get_submodule(name).weight.mul_(1e-4)
    before = output(model)
    count = model.config.num_hidden_layers
    config = PruneConfig(keep=(count - 1) / count, method="blocks")
    report = prune_(model, config, calibration=[ids(8)], progress=False)
    assert [r.name for r in report.layers] == ["model.layers.1"]
    assert [m.self_attn.layer_idx for m in model.model.layers] == list(range(count - 1))
    torch.testing.assert_close(output(model), before, rtol=1e-2, atol=1e-2)


def test_blocks_by_size_and_what_is_refused(tmp_path, monkeypatch):
    model = tiny("gpt2")
    block = num_parameters(model.transformer.h[0])
    total = num_parameters(model)
    config = PruneConfig(size=(total - block) / total, method="blocks")
    report = prune_(model, config, calibration=[ids()], progress=False)
    assert report.after == total - block
    config = PruneConfig(size=0.01, method="blocks")
    with pytest.raises(ValueError, match=r"prune_: size is 0\.01, expected 0\.\d+ or more"):
        prune_(tiny("gpt2"), config, calibration=[ids()], progress=False)
    with pytest.raises(ValueError, match=r"prune_:.*LowRankConfig.*PruneConfig"):
        prune_(tiny("gpt2"), LowRankConfig(), calibration=[ids()], progress=False)
    model = tiny("gpt2")
    before = output(model)

    def fail(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("kronecker.fitting.fit.fit_neurons", fail)
    with pytest.raises(KeyboardInterrupt):
        prune_(model, PruneConfig(method="blocks"), calibration=[ids()], progress=False)
    assert torch.equal(output(model), before)
    assert model.config.n_layer == len(model.transformer.h)


def neo():
    config = transformers.GPTNeoConfig(
        vocab_size=96,
        hidden_size=16,
        num_layers=4,
        num_heads=2,
        intermediate_size=24,
        window_size=4,
        attention_types=[[["global", "local"], 2]],
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return transformers.GPTNeoForCausalLM(config).eval()


def without(model, gone):
    """The model without these blocks, as `prune_` drops them."""
    stack = Stack.of(model, [m.down for m in find_mlps(model)])
    stay = [i for i in range(stack.count) if i not in gone]
    config = config_with_blocks(model, stack, stay)
    keep_blocks_(model, stack, stay, config, new_places(model, stack, stay, config))
    return model


def test_a_block_in_a_new_place_has_its_own_settings(tmp_path):
    kinds = ["full_attention", "sliding_attention"] * 2
    model = tiny("gemma3", num_hidden_layers=4, layer_types=kinds, sliding_window=4)
    without(model, {1})
    assert model.config.layer_types == ["full_attention", "full_attention", "sliding_attention"]
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        output(auto_class("gemma3").from_pretrained(tmp_path).eval()), output(model)
    )


def test_blocks_are_renumbered_whatever_they_call_their_number(tmp_path):
    model = without(neo(), {1})
    model.generate(ids(1, 6), max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        output(transformers.GPTNeoForCausalLM.from_pretrained(tmp_path).eval()), output(model)
    )


def test_blocks_that_depend_on_their_place_are_refused():
    model = tiny("gpt2", n_layer=3, scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(
        ValueError,
        match=r"prune_:.*transformer\.h\.\d.*",
    ):
        without(model, {0})


def test_a_bias_before_the_middle_counts_from_the_start():
    """Without descent, large biases of the matrices that read the width are in what the fit works
    towards."""
    model = tiny("gpt2")
    for block in model.transformer.h:
        torch.nn.init.normal_(block.mlp.c_fc.bias, std=3.0)
    before = output(model, ids(8, seed=2))
    config = LowRankConfig(keep=0.999, epochs=0)
    convert_(model, config, calibration=[ids(16, seed=1)], progress=False)
    assert float((output(model, ids(8, seed=2)) - before).norm() / before.norm()) < 0.05


WITH_SINK = {
    "neurons": ("llama", PruneConfig(), "model.layers.0.mlp"),
    "neurons, fast": ("llama", PruneConfig(method="fast"), "model.layers.0.mlp"),
    "experts": ("mixtral", PruneConfig(), "model.layers.0.mlp.experts"),
    "low rank": ("llama", LowRankConfig(epochs=0), "model.layers.0.mlp"),
    "one layer": ("llama", {"*.0.mlp.up_proj": LowRankConfig()}, "model.layers.0.mlp.up_proj"),
}


@pytest.mark.parametrize("case", WITH_SINK)
def test_a_few_tokens_that_are_most_of_the_error_are_told(case):
    """An attention sink: one position whose hidden neurons are hundreds of times as large."""
    kind, config, name = WITH_SINK[case]
    change = prune_ if isinstance(config, PruneConfig) else convert_
    report = change(tiny(kind), config, calibration=[ids()], progress=False)
    assert not [note for note in report.notes if "attention sinks" in note]
    model = tiny(kind)
    with torch.no_grad():
        mlp = model.model.layers[0].mlp
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[2] = 0
        model.model.embed_tokens.weight[2, 0] = 1  # what no other token has
        model.model.layers[0].self_attn.o_proj.weight[0] = 0
        if kind == "mixtral":
            matrices = list(mlp.experts.gate_up_proj.chunk(2, dim=1))
        else:
            matrices = [mlp.gate_proj.weight, mlp.up_proj.weight]
        for matrix in matrices:
            matrix[..., 3, :] = 0
            matrix[..., 3, 0] = 30
    rows = ids()
    rows[:] = rows.clamp(min=3)
    rows[0, 0] = 2
    report = change(model, config, calibration=[rows], progress=False)
    (note,) = [note for note in report.notes if "attention sinks" in note]
    assert note.startswith(name)


@pytest.mark.parametrize(("kind", "said"), [("llama", 0), ("gemma2", 1), ("mixtral", 1)])
def test_blocks_that_nothing_replaces_are_said(kind, said):
    """A norm after the MLP, or experts, leave nothing to fit to the output of dropped blocks."""
    model = tiny(kind)
    layers = model.model.layers
    with torch.no_grad():
        for parameter in layers[0].parameters():
            parameter.mul_(3)  # so that it stays
    config = PruneConfig(keep=1 / len(layers), method="blocks", epochs=0)
    report = prune_(model, config, calibration=[ids()], progress=False)
    notes = [note for note in report.notes if "not fitted to compensate for the blocks" in note]
    assert len(notes) == said
    if said:
        assert notes[0].startswith("model.layers.0.mlp")


def gemma4(**changes):
    """A small Gemma 4 without what it has for phones, whose last layer has full attention."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 4,
    }
    config = transformers.Gemma4TextConfig(**sizes | changes)
    torch.manual_seed(0)
    return transformers.Gemma4ForCausalLM(config).eval()


def test_blocks_whose_config_loads_as_another_are_refused():
    """Gemma 4 gives the last layer full attention, whatever its config lists."""
    model = gemma4(layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2)
    before = output(model)
    with torch.no_grad():
        for layer in model.model.layers[4:]:  # the least influential
            for parameter in layer.parameters():
                parameter.mul_(1e-3)
    config = PruneConfig(keep=4 / 6, method="blocks", epochs=0)
    changed = output(model)
    assert not torch.equal(before, changed)
    with pytest.raises(ValueError, match=r"prune_: .*layer_type"):
        prune_(model, config, calibration=[ids()], progress=False)
    assert torch.equal(output(model), changed)


def test_neurons_of_a_family_with_numbers_for_each_layer_are_loaded(tmp_path):
    model = gemma4()
    assert model.config.vocab_size_per_layer_input > 10_000
    config = PruneConfig(method="fast", allocate="influence")
    prune_(model, config, calibration=[ids()], progress=False)
    model.save_pretrained(tmp_path)
    assert torch.equal(output(from_pretrained(tmp_path)), output(model))


def test_blocks_of_a_language_model_inside_another_are_dropped_from_its_config(tmp_path):
    text = {
        "vocab_size": 96,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    vision |= {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=95
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.model.language_model.layers[2:].parameters():
            parameter.mul_(1e-3)
    report = prune_(
        model,
        PruneConfig(keep=0.5, method="blocks", epochs=0),
        calibration=[ids().clamp(max=90)],
        progress=False,
    )
    assert [row.name.rpartition(".")[2] for row in report.layers[:2]] == ["2", "3"]
    assert model.config.text_config.layer_types == ["sliding_attention", "full_attention"]
    model.save_pretrained(tmp_path)
    again = transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path).eval()
    batch = ids().clamp(max=90)
    assert torch.equal(output(again, batch), output(model, batch))


@pytest.mark.parametrize(
    ("kinds", "is_said"),
    [
        (["linear_attention", "full_attention"], True),
        (["sliding_attention", "full_attention"], False),
        (["full_attention", "linear_attention"], False),
    ],
)
def test_attention_that_is_gone_is_said(kinds, is_said):
    model = tiny("llama")
    model.config.layer_types = kinds * (len(model.model.layers) // 2)
    # Llama itself ignores the list, but not its cache
    model.config.use_cache = False
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            for parameter in layer.parameters():
                parameter.mul_(1e-3)
    config = PruneConfig(keep=1 / len(model.model.layers), method="blocks", epochs=0)
    report = prune_(model, config, calibration=[ids()], progress=False)
    assert any("no attention layer is left" in note for note in report.notes) == is_said


def test_experts_rounded_in_eights_leave_neurons_to_the_other_mlps():
    parts = [part("dense", 96), replace(part("experts", 24), mlp=None)]
    keep = neurons_by_influence(parts, 4 * 40, {"dense": 0.5, "experts": 0.5}, PruneConfig())
    assert sum(4 * (p.count - keep[p.name]) for p in parts) == 4 * 40


def test_experts_whose_biases_are_zero_are_pruned():
    model = tiny("gpt-oss")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    report = prune_(model, PruneConfig(epochs=0), calibration=[ids()], progress=False)
    assert report.after < report.before


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        (
            torch.randint(3, 60, (2, 8)),
            "calibration is a single Tensor, expected a list of batches",
        ),
        (
            [torch.randint(3, 60, (2, 4, 8))],
            r"cannot run on a calibration batch with .*\[2, 4, 8\]",
        ),
        ([{"ids": torch.randint(3, 60, (2, 8))}], r"calibration batch with .*'ids': \[2, 8\]"),
        ([{"inputs_embeds": torch.full((2, 8, 16), torch.nan)}], "inputs_embeds has NaN or inf"),
        ({"input_ids": torch.randint(3, 60, (2, 8))}, "calibration is a single dict, expected a l"),
        ("texts.json", "calibration is a str, expected batches of token ids; text_of reads a file"),
        ([[3, 4, 5]], "calibration batch is a list, .*use torch.tensor to convert a list"),
        (["some text"], "calibration batch is a str, .*use a tokenizer"),
    ],
)
def test_calibration_that_is_none_is_refused_by_its_name(calibration, message):
    with pytest.raises(ValueError, match=message):
        prune_(tiny("llama"), PruneConfig(), calibration=calibration, progress=False)


def test_stacked_batches_and_labels_without_a_number_are_calibration():
    batches = torch.stack([ids(4, seed=1), ids(4, seed=2)])
    assert prune_(tiny("llama"), PruneConfig(epochs=0), calibration=batches, progress=False)
    labeled = [{"input_ids": ids(4), "labels": torch.full((4, 1), torch.nan)}]
    assert prune_(tiny("classifier"), PruneConfig(epochs=0), calibration=labeled, progress=False)


def test_a_mask_of_attention_that_hides_nothing_is_no_padding():
    rows, length = ids().shape
    batch = {"input_ids": ids(), "attention_mask": torch.zeros(rows, 1, length, length)}
    assert prune_(tiny("llama"), PruneConfig(epochs=0), calibration=[batch], progress=False)


def test_a_compiled_model_is_refused():
    model = tiny("llama")
    for compiled in (torch.compile(model), model):
        model.compile()
        with pytest.raises(ValueError, match="expected a model that is not compiled"):
            prune_(compiled, PruneConfig(), calibration=[ids()], progress=False)


def test_blocks_that_went_have_an_influence_and_no_error(monkeypatch):
    grad_modes = []

    def watched(*given):
        grad_modes.append(torch.is_grad_enabled())
        return blocks_with(*given)

    monkeypatch.setattr("kronecker.surgery.prune.blocks_with", watched)
    config = PruneConfig(keep=0.5, method="blocks")
    report = prune_(tiny("llama"), config, calibration=[ids()], progress=False)
    assert grad_modes == [False]  # a graph of all blocks would fill the memory
    gone = [one for one in report.layers if one.after == 0]
    assert gone
    assert all(one.error is None and one.influence > 0 for one in gone)
    assert all(one.influence is None for one in report.layers if one.after)
    assert "influence" in str(report)


def test_a_device_without_float64_is_refused(monkeypatch):
    empty = torch.empty

    def without(*sizes, dtype=None, **rest):
        if dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return empty(*sizes, dtype=dtype, **rest)

    model = tiny("llama")
    monkeypatch.setattr(torch, "empty", without)
    with pytest.raises(
        ValueError, match="prune_: weights are fitted in float64, which the device cpu does not"
    ):
        prune_(model, PruneConfig(), calibration=[ids()], progress=False)
    config = LowRankConfig(rank=2, init="svd")
    with pytest.raises(
        ValueError, match="convert_: weights are fitted in float64, which the device cpu does not"
    ):
        convert_(model, config, progress=False)


def test_a_model_whose_ids_have_no_vocabulary_takes_the_users_batch():
    config = transformers.CanineConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        num_hash_buckets=16,
        local_transformer_stride=8,
        downsampling_rate=4,
    )
    model = transformers.CanineModel(config).eval()
    rows = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(0))
    report = prune_(model, PruneConfig(), calibration=[rows], progress=False)
    assert report.after < report.before


def test_calibration_of_padding_or_with_another_mask_is_refused():
    ids = torch.randint(0, 90, (2, 8))
    for mask, message in (
        (torch.zeros(2, 8, dtype=torch.long), "expected calibration data with tokens, got only"),
        (torch.ones(2, 5, dtype=torch.long), r"has shape \[2, 5\], expected \[2, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            prune_(
                tiny("mixtral"),
                PruneConfig(method="fast"),
                calibration=[{"input_ids": ids, "attention_mask": mask}],
                progress=False,
            )


def test_dropped_blocks_leave_lists_of_token_ids_alone():
    model = tiny("llama", num_hidden_layers=2, eos_token_id=[2, 7])
    batches = [torch.randint(0, 90, (2, 8))]
    prune_(model, PruneConfig(keep=0.5, method="blocks"), calibration=batches, progress=False)
    assert model.config.eos_token_id == [2, 7]
