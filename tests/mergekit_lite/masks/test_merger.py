"""Merger over real architectures: components' own bits, baked bits, masks on disk, and what is
refused."""

import json
from typing import get_args

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mergekit_lite import AccurateMaskedLinear, EfficientMaskedLinear, merge_models
from mergekit_lite.masks import (
    KLConfig,
    MaskConfig,
    MaskedEmbedding,
    MaskedLayer,
    Merger,
    config,
    constraints,
    masked_linear,
)
from mergekit_lite.masks.constraints import constrain, unconstrain
from mergekit_lite.masks.surgery import masked_class
from tests.support.models import auto_class, save, save_tokenizer, tiny

DECODERS = [
    "gpt2",
    "llama",
    "llama-tied",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3",
    "mixtral",
]
BFLOAT16 = {"rtol": 0.05, "atol": 0.05}
GRANULARITIES = ("scalar", "input", "output", "element")
IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))


def pair(kind, folder, dtype=torch.float32, count=2):
    return [save(tiny(kind, seed), folder / str(seed), dtype) for seed in range(count)]


def open_merger(paths, kind="gpt2", **config):
    return Merger.from_pretrained(
        paths, auto_class=auto_class(kind), **{"initial": "random", "constraint": "none"} | config
    ).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [*DECODERS, "classifier"])
def test_a_baked_checkpoint_has_the_bits_of_the_merger(kind, dtype, tmp_path):
    paths = pair(kind, tmp_path, dtype)
    granularities = GRANULARITIES if kind in ("gpt2", "llama-tied", "mixtral") else ("input",)
    for granularity in granularities:
        merger = open_merger(paths, kind, granularity=granularity)
        report = merger.bake(tmp_path / granularity, progress=False)
        baked = auto_class(kind).from_pretrained(tmp_path / granularity, dtype="auto").eval()
        assert baked.dtype == dtype
        assert torch.equal(logits(merger), logits(baked))
        assert report.bytes_written > 0
        folded = logits(merger.fold_())
        assert torch.equal(folded, logits(baked))


@pytest.mark.parametrize("kind", [*DECODERS, "classifier"])
def test_a_component_runs_with_its_own_bits(kind, tmp_path):
    paths = pair(kind, tmp_path, count=3)
    merger = open_merger(paths, kind, granularity="scalar")
    for k, path in enumerate(paths):
        with merger.component(k):
            own = logits(merger)
        assert torch.equal(own, logits(auto_class(kind).from_pretrained(path).eval()))
    assert not torch.equal(own, logits(merger))
    with pytest.raises(ValueError, match="expected 0 to 2"), merger.component(3):
        pass


@pytest.mark.parametrize("kind", ["gpt2", "llama-tied", "qwen2", "mixtral", "classifier"])
def test_efficient_and_auto_differ_from_accurate_by_rounding_alone(kind, tmp_path):
    paths = pair(kind, tmp_path)
    accurate = logits(open_merger(paths, kind))
    for mode in ("efficient", "auto"):
        torch.testing.assert_close(
            logits(open_merger(paths, kind, mode=mode)), accurate, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("kind", ["gpt2", "llama-tied", "gemma3", "mixtral"])
def test_gradients_of_masks_are_those_of_the_dense_merge(kind, tmp_path):
    """Against autograd through functional_call on Σ m_k W_k of whole state dicts."""
    models = [tiny(kind, seed) for seed in range(2)]
    merger = Merger(models, MaskConfig(initial="random", granularity="input", constraint="none"))
    masks = merger.masks()
    (merger(input_ids=IDS).logits.float().square().sum()).backward()
    leaves = {n: m.detach().clone().requires_grad_() for n, m in masks.items()}
    states = [dict(m.named_parameters()) for m in models]
    merged = {
        n: sum(m * s[n] for m, s in zip(leaf, states, strict=True)) for n, leaf in leaves.items()
    }
    out = torch.func.functional_call(models[0], merged, kwargs={"input_ids": IDS}, tie_weights=True)
    out.logits.float().square().sum().backward()
    for name, mask in masks.items():
        torch.testing.assert_close(mask.grad, leaves[name].grad, rtol=2e-3, atol=2e-3, msg=name)


def test_what_is_masked_and_what_is_trainable():
    merger = Merger([tiny("llama-tied", seed) for seed in range(2)])
    kinds = {type(layer) for layer in merger.layers().values()}
    assert kinds == {AccurateMaskedLinear, MaskedEmbedding, MaskedLayer}
    assert {n for n, p in merger.named_parameters() if p.requires_grad} == {
        n for n, _ in merger.named_parameters() if ".masks." in n
    }
    masks = merger.masks()
    assert "lm_head.weight" not in masks  # tied: one mask
    assert merger.model.lm_head.masks["weight"] is masks["model.embed_tokens.weight"]
    stock = dict(tiny("llama-tied").named_parameters())
    assert list(masks) == list(stock)
    assert "output masks: weight [1, 16, 1]" in repr(merger.model.model.layers[0].self_attn.q_proj)
    experts = Merger(
        [tiny("mixtral", seed) for seed in range(2)], MaskConfig(granularity="output")
    ).masks()
    # the first is what is left of 1
    assert experts["model.layers.0.mlp.experts.down_proj"].shape == (1, 3, 16, 1)


def test_models_are_shared_and_not_changed():
    models = [tiny("gpt2", seed) for seed in range(2)]
    before = logits(models[0])
    merger = Merger(models)
    layer = merger.model.transformer.h[0].attn.c_attn
    for k, model in enumerate(models):
        assert (
            layer.components[k].weight.data_ptr()
            == model.transformer.h[0].attn.c_attn.weight.data_ptr()
        )
        assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(logits(models[0]), before)


def test_it_generates_and_passes_on_what_the_model_has(tmp_path):
    paths = pair("gpt2", tmp_path)
    merger = open_merger(paths, mode="accurate")
    merger.bake(tmp_path / "out", progress=False)
    baked = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = baked.generate(IDS, **options)
    blends = []
    layer = merger.layers()["transformer.h.0.attn.c_attn"]
    layer.register_forward_hook(lambda *_: blends.append(layer.is_folded))
    assert torch.equal(merger.generate(IDS, **options), expected)
    assert blends == [True] * 6  # once for all tokens
    assert not merger.is_folded
    with merger.component(1):
        own = (
            transformers.AutoModelForCausalLM.from_pretrained(paths[1])
            .eval()
            .generate(IDS, **options)
        )
        assert torch.equal(merger.generate(IDS, **options), own)
    assert torch.equal(merger.fold_().generate(IDS, **options), expected)
    assert merger.is_folded
    assert merger.config.n_embd == 16
    with pytest.raises(AttributeError, match="no_such_thing"):
        merger.no_such_thing  # noqa: B018


def test_folding_ends_with_training_and_with_new_masks(tmp_path):
    merger = Merger([tiny("gpt2", seed) for seed in range(2)]).eval().fold_()
    before = logits(merger)
    merger.save_masks(tmp_path / "m.safetensors")
    with torch.no_grad():
        merger.masks()["transformer.h.0.mlp.c_fc.weight"].mul_(2)
    assert not torch.equal(logits(merger), before)  # folded weights of other masks are dropped
    merger.fold_().train()
    assert all(layer.folded is None for layer in merger.eval().layers().values())
    merger.fold_().load_masks(tmp_path / "m.safetensors")
    assert torch.equal(logits(merger), before)


def test_masks_go_to_disk_and_come_back(tmp_path):
    paths = pair("gpt2", tmp_path)
    merger = open_merger(paths, granularity="output", constraint="sigmoid")
    path = merger.save_masks(tmp_path / "deep" / "m.safetensors")
    again = Merger.from_pretrained(paths, masks=path).eval()
    assert again.mask_config == merger.mask_config
    assert torch.equal(logits(again), logits(merger))
    assert [p.name for p in path.parent.iterdir()] == ["m.safetensors"]
    with pytest.raises(ValueError, match=r"Merger\.from_pretrained:.*granularity"):
        Merger.from_pretrained(paths, masks=path, granularity="input")


def test_masks_of_other_components_are_refused(tmp_path):
    paths = pair("gpt2", tmp_path, count=3)
    path = open_merger(paths[:2]).save_masks(tmp_path / "m.safetensors")
    other = open_merger(paths[1:])
    with pytest.raises(ValueError, match=r"load_masks:.*components.*0"):
        other.load_masks(path)
    with pytest.raises(ValueError, match=r"load_masks:.*2.*models.*3"):
        open_merger(paths).load_masks(path)
    with pytest.raises(ValueError, match=r"load_masks:.*got 'output'"):
        open_merger(paths[:2], granularity="scalar").load_masks(path)
    held = load_file(path)
    with pytest.raises(ValueError, match=r"load_masks:.*does not exist"):
        other.load_masks(tmp_path / "none")
    save_file(held, tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match=r"load_masks:.*no masks"):
        other.load_masks(tmp_path / "bare.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"load_masks:.*safetensors"):
        other.load_masks(tmp_path / "cut.safetensors")


def test_baking_reads_the_components_files_in_blocks_and_keeps_what_lies_beside(tmp_path):
    paths = pair("llama", tmp_path)
    save_tokenizer(tmp_path / "0", [f"t{i}" for i in range(96)])
    merger = open_merger(paths)
    report = merger.bake(tmp_path / "out", max_shard_size="20kB", progress=False)
    assert len(report.paths) > 2
    assert (tmp_path / "out" / "tokenizer.json").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama"
    # it went through the engine, tensor by tensor
    assert {t["method"] for t in report.tensors} == {"linear"}
    in_memory = Merger([tiny("llama", seed) for seed in range(2)], merger.mask_config)
    in_memory.bake(tmp_path / "memory", progress=False)
    with pytest.raises(ValueError, match=f"bake to {tmp_path / 'memory'}"):
        in_memory.bake(tmp_path / "memory")
    a, b = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / n) for n in ("out", "memory")
    )
    assert torch.equal(logits(a), logits(b))


def test_baking_rounds_like_the_merger_when_it_was_loaded_in_another_dtype(tmp_path):
    paths = pair("llama", tmp_path)
    merger = Merger.from_pretrained(paths, dtype=torch.bfloat16, initial="random").eval()
    merger.bake(tmp_path / "out", progress=False)
    baked = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert baked.dtype == torch.bfloat16
    assert torch.equal(logits(merger), logits(baked))


def test_models_that_were_changed_after_loading_are_baked_as_they_are(tmp_path):
    models = [transformers.AutoModelForCausalLM.from_pretrained(p) for p in pair("llama", tmp_path)]
    models[0].model.layers[0].mlp.up_proj.weight.data.mul_(2)
    merger = Merger(models, MaskConfig(initial="component:0"))
    merger.bake(tmp_path / "out", progress=False)
    baked = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(baked), logits(models[0].eval()))
    assert baked.config.architectures == ["LlamaForCausalLM"]


def test_what_files_hold_beyond_the_model_is_left_out(tmp_path):
    """A tied head that is stored all the same would be the first component's."""
    paths = pair("llama-tied", tmp_path)
    for path in paths:
        held = load_file(f"{path}/model.safetensors")
        held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
        save_file(held, f"{path}/model.safetensors", {"format": "pt"})
    merger = open_merger(paths)
    merger.bake(tmp_path / "out", progress=False)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    baked = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(baked), logits(merger))


def test_pickled_components_are_baked_from_memory(tmp_path):
    paths = pair("gpt2", tmp_path)
    for path in paths:
        torch.save(load_file(f"{path}/model.safetensors"), f"{path}/pytorch_model.bin")
        (tmp_path / path / "model.safetensors").unlink()
    merger = open_merger(paths)
    merger.bake(tmp_path / "out", progress=False)
    assert torch.equal(
        logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()),
        logits(merger),
    )


def test_saving_goes_through_bake(tmp_path):
    merger = Merger([tiny("gpt2", seed) for seed in range(2)])
    with pytest.raises(ValueError, match="bake"):
        merger.save_pretrained(tmp_path)


def test_one_dtype_for_checkpoints_of_two(tmp_path):
    paths = [
        save(tiny("llama", 0), tmp_path / "a"),
        save(tiny("llama", 1), tmp_path / "b", torch.bfloat16),
    ]
    with pytest.raises(ValueError, match=r"(?s)Merger:.*load both"):
        Merger.from_pretrained(paths)
    assert Merger.from_pretrained(paths, dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_a_layer_shows_the_parameters_of_what_runs():
    merger = Merger([tiny("llama", seed) for seed in range(2)]).eval()
    layer = merger.model.model.layers[0].mlp.up_proj
    assert layer.in_features == 16
    with merger.component(1):
        assert layer.weight is layer.components[1].weight
    merged = layer.weight
    assert not torch.equal(merged, layer.components[0].weight)
    merger.fold_()
    assert torch.equal(layer.weight, layer.folded["weight"])
    assert layer.bias is None


def test_masks_know_the_dtype_of_their_components(tmp_path):
    paths = pair("llama", tmp_path)
    path = Merger.from_pretrained(paths, dtype=torch.bfloat16).save_masks(
        tmp_path / "m.safetensors"
    )
    with pytest.raises(ValueError, match=r"load_masks:.*torch\.bfloat16"):
        Merger.from_pretrained(paths, masks=path)
    merger = Merger.from_pretrained(paths)
    before = merger.hashes()
    assert merger.to(torch.float16).hashes() != before


def test_a_mask_that_is_not_finite_is_not_baked(tmp_path):
    merger = Merger([tiny("gpt2", seed) for seed in range(2)])
    with torch.no_grad():
        merger.masks()["transformer.h.0.mlp.c_fc.weight"][0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"bake:.*h\.0\.mlp\.c_fc\.weight"):
        merger.bake(tmp_path / "out")
    assert not (tmp_path / "out").exists()


INITIAL = {"average": 0.5, 0.25: 0.25, "component:1": None, "random": None}


@pytest.mark.parametrize("initial", INITIAL)
def test_initial_masks(initial, tmp_path):
    models = [tiny("gpt2", seed) for seed in range(2)]
    merger = Merger(models, MaskConfig(initial=initial, constraint="none")).eval()
    mask = merger.masks()["transformer.h.1.mlp.c_proj.weight"]
    if INITIAL[initial] is not None:
        assert (mask == INITIAL[initial]).all()
    elif initial == "random":
        torch.testing.assert_close(mask.sum(0), torch.ones_like(mask[0]))
        assert mask.std() > 0.1
        again = Merger(models, MaskConfig(initial=initial, constraint="none")).masks()[
            "transformer.h.1.mlp.c_proj.weight"
        ]
        assert torch.equal(mask, again)
    else:
        assert torch.equal(logits(merger), logits(models[1]))


def test_masks_sum_to_one_unless_told_otherwise():
    models = [tiny("gpt2", seed) for seed in range(2)]
    merger = Merger(models, MaskConfig(initial="random"))
    assert merger.mask_config.constraint == "sum_to_one"
    for masks in merger.effective_masks().values():
        torch.testing.assert_close(masks.sum(0), torch.ones_like(masks[0]))
    assert Merger(models[:1], base=models[1]).mask_config.constraint == "none"
    with pytest.raises(ValueError, match=r"MaskConfig:.*0.5.*0.5.*'sum_to_one'.*1"):
        Merger(models, MaskConfig(initial=0.25))


CONSTRAINTS = {
    "unit_interval": lambda m: ((m >= 0) & (m <= 1)).all(),
    "sum_to_one": lambda m: torch.allclose(m.sum(0), torch.ones_like(m[0])),
    "sigmoid": lambda m: ((m > 0) & (m < 1)).all(),
}


def test_every_constraint_is_here():
    assert {"none", *CONSTRAINTS} == set(constraints.CONSTRAINTS)
    assert {"auto", *constraints.CONSTRAINTS} == set(get_args(config.Constraint))


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_constraints_hold_and_let_gradients_through(constraint):
    raw = (3 * torch.randn(3, 5, generator=torch.Generator().manual_seed(0))).requires_grad_()
    masks = constrain(raw, constraint)
    assert CONSTRAINTS[constraint](masks)
    for far in (torch.full((3, 5), -1e3), torch.full((3, 5), 1e3)):
        assert constrain(far, constraint).isfinite().all()
    torch.testing.assert_close(constrain(unconstrain(masks, constraint), constraint), masks)
    inner = (
        torch.rand(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        .mul(0.8)
        .add(0.1)
    )
    assert torch.autograd.gradcheck(lambda r: constrain(r, constraint), (inner.requires_grad_(),))


def test_what_has_no_row_no_mask_or_no_name_is_refused():
    merger = Merger([tiny("llama", 1), tiny("llama", 2)])
    with pytest.raises(IndexError):
        merger(input_ids=torch.tensor([[-1, 2]]))
    with pytest.raises(ValueError, match=r"constrain: .*'softmax'"):
        constrain(torch.ones(2), "softmax")
    with pytest.raises(ValueError, match=r"Merger:.*3.*labels.*2"):
        Merger([tiny("llama", 1), tiny("llama", 2)], labels=["a", "b", "c"])


@pytest.mark.parametrize(
    ("constraint", "initial"), [("sigmoid", "component:0"), ("sum_to_one", 0.3)]
)
def test_masks_that_a_constraint_cannot_begin_as_are_refused(constraint, initial):
    with pytest.raises(ValueError, match=f"MaskConfig: .*'{constraint}'"):
        Merger(
            [tiny("gpt2", seed) for seed in range(2)],
            MaskConfig(constraint=constraint, initial=initial),
        )


def test_masks_begin_where_a_gradient_leads_back_inside():
    merger = Merger(
        [tiny("gpt2", seed) for seed in range(2)],
        MaskConfig(constraint="unit_interval", initial=3.0),
    )
    assert all((raw == 1).all() for raw in merger.masks().values())


def test_masks_stay_float32_when_the_model_is_cast():
    merger = Merger([tiny("gpt2", seed) for seed in range(2)], MaskConfig(initial="random"))
    before = {name: mask.detach().clone() for name, mask in merger.masks().items()}
    merger.to(torch.bfloat16)
    assert merger.dtype == torch.bfloat16
    assert all(
        mask.dtype == torch.float32 and torch.equal(mask, before[n])
        for n, mask in merger.masks().items()
    )
    assert logits(merger).dtype == torch.bfloat16


def test_masks_over_a_few_modules_and_the_others_stay():
    models = [tiny("llama", seed) for seed in range(2)]
    merger = Merger(models, MaskConfig(modules=("*.mlp.*", "lm_head")))
    trained = {name for name, mask in merger.masks().items() if mask.requires_grad}
    assert trained == {n for n in merger.masks() if ".mlp." in n or n.startswith("lm_head")}
    merger(input_ids=IDS).logits.square().sum().backward()
    assert {name for name, mask in merger.masks().items() if mask.grad is not None} == trained
    assert MaskConfig.from_json(merger.mask_config.to_json()) == merger.mask_config
    with pytest.raises(ValueError, match=r"Merger:.*patterns"):
        Merger(models, MaskConfig(modules=("mlp",)))
    with pytest.raises(ValueError, match=r"MaskConfig:.*'mlp'"):
        MaskConfig(modules="mlp")


def test_a_head_whose_masks_stay_gives_the_same_loss_and_gradients():
    found = []
    for modules in (None, ("model.layers.*",)):
        config = MaskConfig(modules=modules, initial=0.3, constraint="none")
        merger = Merger([tiny("llama", seed) for seed in range(2)], config)
        loss = merger.distill(KLConfig(coefficients="confidence"), input_ids=IDS)
        loss.backward()
        inside = {n: mask.grad for n, mask in merger.masks().items() if ".layers." in n}
        found.append({"loss": loss.detach(), **inside})
    torch.testing.assert_close(found[1], found[0])


def test_constrained_element_masks_are_not_kept_until_backward():
    """What a constraint makes of the trained masks is as large as K weights: it is made again
    instead."""
    weights = [torch.randn(64, 48) for _ in range(2)]
    raw, x = torch.randn(1, 64, 48, requires_grad=True), torch.randn(5, 48, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.data_ptr()) or t, lambda t: t
    ):
        out = masked_linear(x, weights, raw, rule=lambda r: constrain(r, "sum_to_one"))
    assert set(saved) == {t.data_ptr() for t in (x, raw, *weights)}
    plain = masked_linear(x, weights, constrain(raw, "sum_to_one"))
    assert torch.equal(out, plain)
    for a, b in zip(
        *(torch.autograd.grad(o.square().sum(), (x, raw)) for o in (out, plain)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_a_mask_far_outside_its_bounds_comes_back():
    constraint = "unit_interval"
    raw = (3 * torch.randn(3, 5, generator=torch.Generator().manual_seed(0))).requires_grad_()
    optimizer = torch.optim.SGD([raw], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        (constrain(raw, constraint) - 0.2).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(
        constrain(raw, constraint).detach(), torch.full((3, 5), 0.2), rtol=0, atol=1e-3
    )


def test_report_and_heat_map(tmp_path):
    pytest.importorskip("matplotlib")
    config = MaskConfig(constraint="none")
    merger = Merger(
        [tiny("llama", seed) for seed in range(2)], config, labels=["models/a", "models/b"]
    )
    with torch.no_grad():
        merger.masks()["model.layers.1.mlp.up_proj.weight"][0] = 0.9
    report = merger.report()
    row = next(r for r in report.rows if r.name == "model.layers.1.mlp.up_proj.weight")
    assert row.mean == (0.9, 0.5)
    assert row.winner == 0
    assert row.wins == (1.0, 0.0)
    assert "0 at 100%" in str(report)
    assert "component 1: models/b" in str(report)
    report.plot().savefig(tmp_path / "heat.png")
    assert (tmp_path / "heat.png").stat().st_size > 5000


class Odd(torch.nn.Module):
    """A module that owns a parameter and has children that do: both are masked."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(4))
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x * self.scale)


def test_nested_owners_of_parameters():
    from mergekit_lite.masks.layers import Selection
    from mergekit_lite.masks.surgery import Surgeon

    roots = [torch.nn.Sequential(Odd()) for _ in range(2)]
    stock = [root(torch.ones(1, 4)).detach() for root in roots]
    selection = Selection()
    surgeon = Surgeon(MaskConfig(initial="component:1"), selection)
    surgeon.replace(roots[0], [roots[1]])
    assert set(surgeon.raw) == {"0.scale", "0.inner.weight", "0.inner.bias"}
    assert torch.equal(roots[0](torch.ones(1, 4)), stock[1])
    for k in range(2):
        selection.component = k
        assert torch.equal(roots[0](torch.ones(1, 4)), stock[k])


def test_a_module_with_two_names_is_masked_under_both():
    from mergekit_lite.masks.layers import Selection
    from mergekit_lite.masks.surgery import Surgeon

    roots = [torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2)]
    for root in roots:
        root.append(root[0])
    selection = Selection()
    Surgeon(MaskConfig(), selection).replace(roots[0], [roots[1]])
    assert roots[0][0] is roots[0][1]
    assert type(roots[0][1]) is not torch.nn.Linear


def spoiled(change):
    model = tiny("llama", 1)
    change(model)
    return model


def nan(model):
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan


DIFFERENT = {
    "different architectures: LlamaForCausalLM": lambda: tiny("mistral"),
    "different architectures: model.layers": lambda: tiny("llama", num_hidden_layers=3),
    "has shapes [24, 16]": lambda: tiny("llama", intermediate_size=20),
    "align the vocabularies first": lambda: tiny("llama", vocab_size=100),
    "has dtypes torch.float32 (a) and torch.bfloat16 (b)": lambda: tiny("llama").to(torch.bfloat16),
    "is tied to another tensor in one of": lambda: tiny("llama-tied"),
    "variance_epsilon is 1e-06 (a) and 0.001": lambda: tiny("llama", rms_norm_eps=1e-3),
    "config.hidden_act is 'silu' (a) and 'gelu' (b)": lambda: tiny("llama", hidden_act="gelu"),
    "mlp.act_fn is SiLUActivation (a) and GELUActivation (b)": lambda: tiny(
        "llama", hidden_act="gelu"
    ),
    "k_proj.bias is in only one of a and b": lambda: tiny("llama", attention_bias=True),
    "the buffer model.rotary_emb.inv_freq differs": lambda: tiny(
        "llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    ),
    "up_proj.weight of b holds NaN": lambda: spoiled(nan),
}


@pytest.mark.parametrize("message", DIFFERENT)
def test_components_that_do_not_fit_are_refused(message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is looked at
        Merger([tiny("llama"), DIFFERENT[message]()], labels=["a", "b"])
    assert message in str(caught.value)


def test_fine_tunes_for_longer_inputs_fit(tmp_path):
    """Rotary positions turn alike however far they are said to go; those that stretch with the
    length do not."""
    longer = tiny("llama", 1, max_position_embeddings=128)
    Merger([tiny("llama"), longer])
    paths = [save(tiny("llama"), tmp_path / "a"), save(longer, tmp_path / "b")]
    merger = Merger.from_pretrained(paths)
    merger.bake(tmp_path / "out", progress=False)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 64
    )
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    stretched = [
        tiny("llama", k, max_position_embeddings=n, rope_parameters=dynamic)
        for k, n in enumerate((64, 128))
    ]
    with pytest.raises(ValueError, match=r"(?s)Merger:.*max_position_embeddings.*64"):
        Merger(stretched, labels=["a", "b"])


def test_settings_may_be_overridden_or_let_pass(tmp_path):
    paths = [
        save(tiny("llama"), tmp_path / "a"),
        save(tiny("llama", 1, rms_norm_eps=1e-3), tmp_path / "b"),
    ]
    with pytest.raises(ValueError, match=r"(?s)Merger:.*rms_norm_eps.*1e-06"):
        Merger.from_pretrained(paths)
    merger = Merger.from_pretrained(
        paths, model_options={"rms_norm_eps": 1e-3, "attn_implementation": "eager"}
    )
    assert merger.config.rms_norm_eps == 1e-3
    assert merger.config._attn_implementation == "eager"
    with pytest.warns(
        UserWarning,
        match="(?s)Merger:.*config.rms_norm_eps",
    ):
        merger = Merger.from_pretrained(paths, strict=False)
    assert merger.config.rms_norm_eps == 1e-6
    with pytest.raises(ValueError, match="has shapes"):
        Merger([tiny("llama"), tiny("llama", intermediate_size=20)], strict=False)


def test_experts_for_each_token_are_compared():
    """A field that has token in its name."""
    with pytest.raises(ValueError, match=r"(?s)Merger:.*num_experts_per_tok.*2"):
        Merger(
            [tiny("mixtral", num_experts_per_tok=2), tiny("mixtral", num_experts_per_tok=1)],
            labels=["a", "b"],
        )


def test_other_tokenizers_of_the_same_size_are_refused(tmp_path):
    paths = pair("llama", tmp_path)
    words = [f"t{i}" for i in range(96)]
    save_tokenizer(tmp_path / "0", words)
    save_tokenizer(tmp_path / "1", words)
    Merger.from_pretrained(paths)
    save_tokenizer(tmp_path / "1", [words[1], words[0], *words[2:]])
    with pytest.raises(ValueError, match=r"(?s)Merger:.*'t[01]'"):
        Merger.from_pretrained(paths)
    with pytest.warns(UserWarning, match="tokenizers differ"):
        Merger.from_pretrained(paths, strict=False)
    save_tokenizer(tmp_path / "1", [f"u{i}" for i in range(96)])
    with pytest.raises(ValueError, match=r"(?s)Merger:.*tokens"):
        Merger.from_pretrained(paths)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_components_may_be_adapters(kind, dtype, tmp_path):
    base = save(tiny(kind, 1), tmp_path / "base", dtype)
    targets = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_fc"]}[kind]
    for number in range(2):
        torch.manual_seed(number)
        config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False)
        wrapped = peft.get_peft_model(
            transformers.AutoModelForCausalLM.from_pretrained(base), config
        )
        wrapped.save_pretrained(tmp_path / str(number))
    merger = Merger.from_pretrained([f"{base}+{tmp_path / '0'}", str(tmp_path / "1")])
    assert merger.labels[1] == f"{base}+{tmp_path / '1'}"
    merger.bake(tmp_path / "out", progress=False)
    models = [f"{base}+{tmp_path / str(k)}" for k in range(2)]
    merge_models(models, "linear", weight=0.5, out=tmp_path / "static", progress=False)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "static"))
    for name, value in other.items():  # the mean of weights that were rounded, and the rounded mean
        torch.testing.assert_close(
            one[name], value, **({} if dtype == torch.float32 else {"rtol": 0.02, "atol": 1e-3})
        )
    with merger.component(1):
        own = logits(merger)
    torch.testing.assert_close(
        own, logits(wrapped.to(dtype).eval()), **({} if dtype == torch.float32 else BFLOAT16)
    )


def test_an_adapter_in_memory_is_folded_into_a_copy():
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny("llama", 1), config).eval()
    before = {name: value.clone() for name, value in wrapped.state_dict().items()}
    merger = Merger([tiny("llama"), wrapped])
    with merger.component(1):
        torch.testing.assert_close(logits(merger), logits(wrapped))
    assert all(torch.equal(value, before[name]) for name, value in wrapped.state_dict().items())


def test_files_that_changed_after_loading_are_not_baked(tmp_path):
    paths = pair("llama", tmp_path)
    merger = open_merger(paths)
    save(tiny("llama", 1), tmp_path / "1")  # the same values, written anew
    merger.bake(tmp_path / "same", progress=False)
    save(tiny("llama", 5), tmp_path / "1")
    with pytest.raises(ValueError, match=r"bake:.*1.*\(model"):
        merger.bake(tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_files_that_do_not_fit_are_refused_before_a_weight_is_read(tmp_path, monkeypatch):
    paths = [
        save(tiny("llama"), tmp_path / "a"),
        save(tiny("llama", intermediate_size=20), tmp_path / "b"),
    ]
    monkeypatch.setattr(
        transformers.LlamaForCausalLM,
        "from_pretrained",
        lambda *a, **k: pytest.fail("weights were read"),
    )
    with pytest.raises(ValueError, match="has shapes"):
        Merger.from_pretrained(paths)
    with pytest.raises(ValueError, match=r"Merger:.*models"):
        Merger.from_pretrained(paths[:1])
    with pytest.raises(ValueError, match=r"Merger:.*models"):
        Merger.from_pretrained(paths[0])
    with pytest.raises(ValueError, match=r"Merger:.*folder"):
        Merger.from_pretrained([paths[0], str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match=r"Merger\.from_pretrained:.*MaskConfig.*'granlarity'"):
        Merger.from_pretrained(paths, granlarity="input")


def test_a_layer_alone_refuses_too():
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"AccurateMaskedLinear:.*1.*components"):
        AccurateMaskedLinear([linear])
    with pytest.raises(ValueError, match=r"MaskedLayer:.*components"):
        MaskedLayer([linear, torch.nn.Linear(2, 3)])
    layers = [torch.nn.Linear(2, 2, bias=False), linear]
    for order in (layers, layers[::-1]):
        with pytest.raises(ValueError, match=r"AccurateMaskedLinear:.*bias.*None"):
            AccurateMaskedLinear(order)
    with pytest.raises(ValueError, match=r"EfficientMaskedLinear:.*'element'"):
        EfficientMaskedLinear([linear, linear], granularity="element")
    with pytest.raises(ValueError, match=r"initial.*got 'half'"):
        AccurateMaskedLinear([linear, linear], initial="half")


def test_a_computed_weight_cannot_be_changed_in_place():
    layer = AccurateMaskedLinear([torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)])
    for change in (
        lambda: layer.weight.zero_(),
        lambda: torch.nn.init.normal_(layer.weight),
        lambda: layer.weight.data.normal_(),
        lambda: layer.weight.__setitem__(0, 1.0),
        lambda: layer.bias.add_(1),
    ):
        with pytest.raises(RuntimeError, match="computed"):
            change()
    total = layer.weight.sum() + layer.weight.mean(0).sum()
    assert type(total) is torch.Tensor
    total.backward()
    assert layer.masks["weight"].grad is not None


def test_a_folded_layer_follows_its_components_and_its_dtype():
    layers = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
    layer, x = AccurateMaskedLinear(layers).eval(), torch.randn(2, 4)
    layer.fold_()
    with torch.no_grad():
        layers[0].weight.add_(1)
    torch.testing.assert_close(layer(x), layer.to_linear()(x))
    layer.fold_()
    assert layer.double()(x.double()).dtype == torch.float64
    assert layer.is_folded


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "fast"}, r"MaskConfig:.*accurate"),
        ({"granularity": "row"}, r"MaskConfig:.*scalar"),
        ({"constraint": "01"}, r"MaskConfig:.*auto"),
        ({"mode": "efficient", "granularity": "element"}, r"MaskConfig:.*'element'"),
        ({"initial": "half"}, r"MaskConfig:.*average"),
        ({"initial": "component:"}, r"MaskConfig:.*average"),
        ({"initial": float("nan")}, "initial is nan"),
    ],
)
def test_config_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        MaskConfig(**values)


def test_a_component_that_there_is_not_cannot_be_the_start():
    with pytest.raises(ValueError, match=r"MaskConfig:.*2.*components"):
        Merger([tiny("gpt2", seed) for seed in range(2)], MaskConfig(initial="component:5"))


def test_settings_that_only_the_config_holds_are_compared():
    with pytest.raises(ValueError, match=r"(?s)Merger:.*sliding_window.*\(a\).*4"):
        Merger(
            [tiny("mistral", sliding_window=None), tiny("mistral", sliding_window=4)],
            labels=["a", "b"],
        )


def test_recurrent_layers_are_refused():
    with pytest.raises(ValueError, match=r"Merger:.*weights"):
        masked_class(torch.nn.LSTM(2, 2))


def test_efficient_layers_keep_component_bits():
    layers = [torch.nn.Linear(4, 3) for _ in range(2)]
    masked = EfficientMaskedLinear(layers)
    masked.selection.component = 1
    x = torch.randn(2, 4)
    assert torch.equal(masked(x), layers[1](x))


@pytest.mark.parametrize(
    "components",
    [
        [torch.nn.LayerNorm(4), torch.nn.RMSNorm(4)],
        [torch.nn.LayerNorm(4), torch.nn.LayerNorm(4, eps=1e-3)],
        [torch.nn.Conv2d(2, 2, 3), torch.nn.Conv2d(2, 2, 3, padding=1)],
        [torch.nn.Sequential(torch.nn.Linear(2, 2))] * 2,
    ],
)
def test_a_layer_alone_refuses_components_that_compute_otherwise(components):
    with pytest.raises(ValueError, match=r"MaskedLayer: expected"):
        MaskedLayer(components)


def test_buffers_that_differ_are_refused():
    norms = [torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)]
    norms[1].running_mean.fill_(1)
    with pytest.raises(ValueError, match=r"MaskedLayer:.*running_mean"):
        MaskedLayer(norms)


def test_a_fold_is_not_used_for_other_masks_or_under_transforms():
    layer = AccurateMaskedLinear([torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]).eval()
    x, name = torch.randn(2, 4), "masks.weight"
    layer.fold_()
    other = {name: torch.rand_like(layer.masks["weight"])}
    moved = torch.func.functional_call(layer, other, (x,))
    assert not torch.equal(moved, layer(x))
    layer.fold_()
    gradient = torch.func.grad(lambda m: torch.func.functional_call(layer, {name: m}, (x,)).sum())
    assert gradient(other[name]).abs().sum() > 0
    layer.fold_()
    state = {key: value + 1 for key, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    torch.testing.assert_close(layer(x), layer.to_linear()(x))


def test_a_computed_weight_may_be_read_into_another_tensor():
    layer = AccurateMaskedLinear([torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]).eval()
    plain = torch.nn.Linear(4, 3)
    with torch.no_grad():
        plain.weight.copy_(layer.weight)
        plain.bias.mul_(0).add_(layer.bias)
    torch.testing.assert_close(plain(torch.ones(2, 4)), layer(torch.ones(2, 4)))
    layer.fold_()
    for change in (
        lambda: layer.weight[0].zero_(),
        lambda: layer.weight.T.fill_(1),
        lambda: torch.zeros(3, 4, out=layer.weight),
        lambda: torch.nn.functional.relu(layer.weight, inplace=True),
        lambda: torch.nn.init.eye_(layer.weight),
    ):
        with pytest.raises(RuntimeError, match="computed"):
            change()
    assert layer.is_folded
