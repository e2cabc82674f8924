"""Layers of peft models with our forward: the same results, files, hooks and switches; what is
declined, and why."""

import copy
import itertools
import warnings
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners import lora
from torch import nn
from transformers.pytorch_utils import Conv1D

import heads.lora._eager.autograd
import heads.lora.layers
from heads.lora import LoraLinear, accelerate_lora_, inject_lora_, restore_lora_
from tests.support.equivalence import judge
from tests.support.models import tiny
from tests.support.ranks import in_two_processes

TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "bert": ["query", "key", "value", "dense"],
    "qwen2": ["q_proj", "v_proj"],
}
IDS = torch.randint(0, 96, (3, 7), generator=torch.Generator().manual_seed(3))


def peft_model(kind="llama", dtype=torch.float32, adapters=("default",), model=None, **changes):
    """A peft model whose adapters say something."""
    options = {
        "target_modules": TARGETS[kind],
        "r": 4,
        "lora_alpha": 8,
        "fan_in_fan_out": kind == "gpt2",
    } | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = get_peft_model(
            (model or tiny(kind)).to(dtype), LoraConfig(**options), adapter_name=adapters[0]
        )
        for name in adapters[1:]:
            made.add_adapter(name, LoraConfig(**options))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.2).to(
                parameter.dtype
            )
    return made.eval()


def run(model, **inputs):
    """Output, and the gradients of all that is trainable."""
    model.zero_grad()
    output = model(input_ids=IDS, **inputs)[0]
    output.double().square().mean().backward()
    return {"output": output.detach()} | {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


def assert_same(a, b):
    assert set(a) == set(b)
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", TARGETS)
def test_a_models_output_and_gradients_are_pefts(kind, dtype):
    """Adapters' factors as one vector each of A and B, so that the budget is of many numbers."""
    model = peft_model(kind, torch.float64)
    names = {k: [n for n, _ in model.named_parameters() if f".lora_{k}." in n] for k in "AB"}
    shapes = {n: p.shape for n, p in model.named_parameters()}

    def call(held):
        def function(embeds, a, b):
            given = {}
            for packed, key in ((a, "A"), (b, "B")):
                parts = packed.split([shapes[n].numel() for n in names[key]])
                given |= {
                    n: part.view(shapes[n]) for n, part in zip(names[key], parts, strict=True)
                }
            held.to(embeds)
            return torch.func.functional_call(held, given, kwargs={"inputs_embeds": embeds})[0]

        return function

    vectors = {
        key.lower(): torch.cat([model.get_parameter(n).detach().flatten() for n in names[key]])
        for key in "AB"
    }
    given = {"embeds": torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))} | vectors
    ours = copy.deepcopy(model)
    report = accelerate_lora_(ours)
    assert len(report.accelerated) == len(names["A"])
    assert not report.skipped
    judge("accelerate_lora_", "eager", call(ours), call(model), given, dtype=dtype, case=kind)


@pytest.mark.parametrize("kind", TARGETS)
def test_every_gradient_in_float64_is_pefts(kind):
    model = peft_model(kind, torch.float64)
    expected = run(model)
    accelerate_lora_(model)
    assert_same(expected, run(model))
    assert restore_lora_(model) > 0
    assert all(type(m) is not LoraLinear for m in model.modules())
    found = run(model)
    assert all(torch.equal(expected[k], found[k]) for k in expected)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_many_tokens_in_float32_go_through_one_merged_weight(kind, monkeypatch):
    """Where nothing is rounded away, and no gradient is asked for."""
    model = peft_model(kind, adapters=("a", "b"))
    model.base_model.set_adapter(["a", "b"])
    ids = torch.randint(0, 96, (8, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(input_ids=ids)[0]
    accelerate_lora_(model)
    count, real = [], heads.lora.layers.merged
    monkeypatch.setattr(heads.lora.layers, "merged", lambda *given: count.append(1) or real(*given))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids)[0], expected, rtol=1e-4, atol=1e-5)
        assert count
        count.clear()
        model(input_ids=ids[:1, :2])
        model.bfloat16()(input_ids=ids)
    model.float()(input_ids=ids)
    assert not count


def test_threads_do_not_disturb_each_other():
    model = peft_model("llama")
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randint(0, 96, (2, 5), generator=generator) for _ in range(4)]
    with torch.no_grad():
        expected = [model(input_ids=ids)[0] for ids in inputs]
        accelerate_lora_(model)

        def work(k):
            with torch.no_grad():
                return [model(input_ids=inputs[k])[0] for _ in range(10)]

        with ThreadPoolExecutor(4) as pool:
            for k, made in enumerate(pool.map(work, range(4))):
                for output in made:
                    torch.testing.assert_close(output, expected[k])


def test_inference_mode_and_another_dtype():
    model = peft_model("llama")
    with torch.no_grad():
        expected = model(input_ids=IDS)[0]
    accelerate_lora_(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=IDS)[0], expected)
    layer = next(m for m in model.modules() if isinstance(m, LoraLinear))
    with pytest.raises(RuntimeError, match="dtype"):  # the stock layer's own
        layer(torch.ones(1, 16, dtype=torch.float64))


@pytest.mark.parametrize("few", [0, 10**9])
def test_second_derivatives_are_pefts(few, monkeypatch):
    """By plain products, and by the function of our own, whose dropout is the same in both."""
    monkeypatch.setattr(heads.lora.layers, "_FEW", few)
    model = peft_model("llama", torch.float64)
    layer = next(m for m in model.modules() if isinstance(m, lora.Linear))
    a = layer.lora_A["default"].weight
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)

    def second():
        first = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), (x, a))

    expected = second()
    accelerate_lora_(model)
    for found, wanted in zip(second(), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_transforms_of_functions_see_through():
    model = peft_model("llama", torch.float64, lora_dropout=0.5)
    layer = next(m for m in model.modules() if isinstance(m, lora.Linear))
    x, tangent = (torch.randn(3, 4, 16, dtype=torch.float64) for _ in range(2))
    functions = {
        "vmap": lambda: torch.func.vmap(layer)(x),
        "grad": lambda: torch.func.grad(lambda given: layer(given).square().sum())(x),
        "jvp": lambda: torch.func.jvp(layer, (x,), (tangent,))[1],
        "jacrev": lambda: torch.func.jacrev(layer)(x[0, 0]),
        "hessian": lambda: torch.func.hessian(lambda given: layer(given).square().sum())(x[0, 0]),
    }
    expected = {name: function() for name, function in functions.items()}
    accelerate_lora_(model)
    for name, function in functions.items():
        torch.testing.assert_close(function(), expected[name], msg=name)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    torch.testing.assert_close(found, expected["jvp"])


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_compiled_for_any_length(dropout):
    torch._dynamo.reset()
    model = peft_model("llama", lora_dropout=dropout).train(dropout > 0)
    accelerate_lora_(model)
    graphs = []
    compiled = torch.compile(
        model, fullgraph=True, backend=lambda g, _: graphs.append(g) or g.forward
    )
    with torch.no_grad():
        for length in (5, 7, 12):
            ids = torch.zeros(2, length, dtype=torch.int64)
            torch._dynamo.mark_dynamic(ids, 1)
            compiled(input_ids=ids, use_cache=False)
    assert len(graphs) == 1


def test_a_copied_model_is_sound():
    model = peft_model("llama")
    expected = run(model)
    accelerate_lora_(model)
    assert_same(expected, run(copy.deepcopy(model)))


def test_several_active_adapters_and_switching_and_disabling():
    model = peft_model("llama", torch.float64, adapters=("a", "b"))
    twin = copy.deepcopy(model)
    accelerate_lora_(twin)
    for switch in (
        lambda m: None,
        lambda m: m.set_adapter("b"),
        lambda m: m.base_model.set_adapter(["a", "b"]),
    ):
        switch(model), switch(twin)
        assert_same(run(model), run(twin))
    with model.disable_adapter(), twin.disable_adapter(), torch.no_grad():
        assert torch.equal(model(input_ids=IDS)[0], twin(input_ids=IDS)[0])
    twin.delete_adapter("a"), model.delete_adapter("a")
    model.set_adapter("b"), twin.set_adapter("b")
    assert_same(run(model), run(twin))


@pytest.mark.parametrize(
    "names",
    [
        ["a", "b", "a"],
        ["b", "__base__", "b"],
        ["a", "a", "__base__"],
        ["b", "b", "b"],
        ["__base__"] * 3,
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_adapter_for_each_sample(kind, names):
    model = peft_model(kind, torch.float64, adapters=("a", "b"))
    model.base_model.set_adapter(["a", "b"])  # so that gradients of both are asked for
    expected = run(model, adapter_names=names) if set(names) != {"__base__"} else None
    twin = copy.deepcopy(model)
    accelerate_lora_(twin)
    if expected is not None:
        assert_same(expected, run(twin, adapter_names=names))
    with torch.no_grad():
        outputs = [m(input_ids=IDS, adapter_names=names)[0] for m in (model, twin)]
    torch.testing.assert_close(*outputs)
    with pytest.raises(ValueError, match="Length of `adapter_names`"):
        twin(input_ids=IDS, adapter_names=["a"])


def test_merging_and_unmerging():
    model = peft_model("gpt2", torch.float64)
    with torch.no_grad():
        expected = model(input_ids=IDS)[0]
        accelerate_lora_(model)
        model.merge_adapter()
        torch.testing.assert_close(model(input_ids=IDS)[0], expected)
        model.unmerge_adapter()
        torch.testing.assert_close(model(input_ids=IDS)[0], expected)
        torch.testing.assert_close(model.merge_and_unload()(input_ids=IDS)[0], expected)


def test_a_base_weight_that_is_trained_too():
    model = peft_model("gpt2", torch.float64, bias="all")
    for name, parameter in model.named_parameters():
        if "c_fc.base_layer" in name:
            parameter.requires_grad_()
    expected = run(model)
    assert sum("base_layer.weight" in k for k in expected) == 3
    assert sum("base_layer.bias" in k for k in expected) == 12
    accelerate_lora_(model)
    assert_same(expected, run(model))


@pytest.mark.parametrize("few", [0, 10**9])
def test_dropout_of_all_leaves_the_stock_layer(few, monkeypatch):
    monkeypatch.setattr(heads.lora.layers, "_FEW", few)
    model = peft_model("llama", lora_dropout=1.0).train()
    accelerate_lora_(model)
    output = model(input_ids=IDS)[0]
    with model.disable_adapter():
        torch.testing.assert_close(output, model(input_ids=IDS)[0], rtol=0, atol=0)
    output.sum().backward()
    assert all(
        p.grad is None or not p.grad.any() for n, p in model.named_parameters() if "lora_" in n
    )


@pytest.mark.parametrize(
    ("tokens", "training", "lean"), [(256, True, False), (257, True, True), (257, False, False)]
)
def test_many_tokens_under_dropout_keep_no_mask(tokens, training, lean, monkeypatch):
    model, ran = peft_model("llama", lora_dropout=0.5).train(training), []
    stock = heads.lora.layers.run
    monkeypatch.setattr(
        heads.lora.layers, "run", lambda *args, **named: ran.append(1) or stock(*args, **named)
    )
    accelerate_lora_(model)
    model(input_ids=torch.full((tokens // 16 + 1, 16), 3).flatten()[:tokens].view(tokens, 1))
    assert bool(ran) == lean


def test_dropout_drops_in_training_alone():
    model = peft_model("llama", lora_dropout=0.5)
    accelerate_lora_(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS)[0], model(input_ids=IDS)[0])
        model.train()
        outputs = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            outputs.append(model(input_ids=IDS)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")
def test_gradient_checkpointing_draws_the_same_dropout():
    model = peft_model("llama", lora_dropout=0.5).train()
    accelerate_lora_(model)
    found = []
    for on in (False, True):
        if on:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(0)
        found.append(run(model))
    assert_same(*found)


def test_hooks_on_a_factor_fire():
    model = peft_model("llama")
    accelerate_lora_(model)
    layer = next(m for m in model.modules() if isinstance(m, LoraLinear))
    seen = []
    handle = layer.lora_A["default"].register_forward_hook(lambda *_: seen.append(1))
    run(model)
    assert seen == [1]
    handle.remove()
    run(model)
    assert seen == [1]


@pytest.mark.parametrize(
    ("mark", "why"), [("ds_id", "sharded"), ("forward", "a forward that was replaced")]
)
@pytest.mark.parametrize("place", ["lora_A", "lora_B"])
def test_factors_that_others_hold_are_left_to_pefts_forward(mark, why, place):
    """As DeepSpeed's ZeRO-3 and accelerate's offloading mark them."""
    model = peft_model("llama")
    layer = next(m for m in model.modules() if isinstance(m, lora.Linear))
    part = getattr(layer, place)["default"]
    setattr(part.weight if mark == "ds_id" else part, mark, part.forward)
    reasons = list(accelerate_lora_(model).skipped.values())
    assert len(reasons) == 1
    assert why in reasons[0]


@pytest.mark.parametrize("hold", ["hook", "forward", "class"])
def test_a_base_layer_that_does_more_than_its_product_does_it(hold):
    """A hook, a forward of its own as accelerate's offloading has, a weight that is made when it is
    asked for."""
    model = peft_model("llama", torch.float64)
    base = next(m for m in model.modules() if isinstance(m, lora.Linear)).base_layer
    if hold == "hook":
        base.register_forward_hook(lambda module, given, out: out * 3)
    elif hold == "forward":
        base.forward = lambda x: nn.functional.linear(x, base.weight) * 3
    else:
        base.__class__ = type(
            "Tripled",
            (nn.Linear,),
            {"forward": lambda self, x: nn.functional.linear(x, self.weight) * 3},
        )
    expected = run(model)
    report = accelerate_lora_(model)
    assert not report.skipped
    assert_same(expected, run(model))


@pytest.mark.parametrize("beneath", ["IA3Config", "OFTConfig", "LoHaConfig", "LoraConfig"])
def test_over_another_tuners_layers_it_is_pefts(beneath):
    """The base layer's own output, and not that of the weight at the bottom."""
    model = tiny("llama").double()
    options = {"target_modules": TARGETS["llama"]}
    options |= {
        "IA3Config": {"feedforward_modules": ["down_proj"]},
        "OFTConfig": {"oft_block_size": 4},
    }.get(beneath, {})
    inner = get_peft_model(model, getattr(peft, beneath)(**options))
    generator = torch.Generator().manual_seed(4)
    for parameter in inner.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outer = peft_model("llama", torch.float64, model=inner.base_model.model)
    layer = next(m for m in outer.modules() if isinstance(m, lora.Linear))
    if beneath != "LoraConfig":  # peft gives a layer of its own kind a second adapter
        assert not isinstance(layer.base_layer, nn.Linear)
    expected = run(outer)
    assert not accelerate_lora_(outer).skipped
    assert_same(expected, run(outer))


def test_an_inactive_adapter_of_another_kind_stops_nothing():
    model = peft_model("llama", torch.float64)
    model.add_adapter("dora", LoraConfig(target_modules=TARGETS["llama"], r=2, use_dora=True))
    model.set_adapter("default")
    expected = run(model)
    report = accelerate_lora_(model)
    assert not report.skipped
    assert_same(expected, run(model))


REASONS = {
    "use_dora": ({"use_dora": True}, "DoraLinearVariant"),
    "lora_bias": ({"lora_bias": True}, "has a bias of its own"),
    "lora.Embedding": ({"target_modules": ["embed_tokens"]}, "lora.Embedding"),
}


@pytest.mark.parametrize("case", REASONS)
def test_what_is_not_supported_stays_pefts_and_the_report_says_why(case):
    changes, why = REASONS[case]
    model = peft_model("llama", torch.float64, **changes)
    expected = run(model)
    report = accelerate_lora_(model)
    assert not report.accelerated
    assert all(why in reason for reason in report.skipped.values())
    assert why in str(report)
    found = run(model)
    assert all(torch.equal(expected[k], found[k]) for k in expected)


def test_an_adapter_added_later_that_is_not_supported_goes_through_pefts_forward():
    model = peft_model("llama", torch.float64)
    accelerate_lora_(model)
    model.add_adapter("dora", LoraConfig(target_modules=TARGETS["llama"], r=2, use_dora=True))
    model.set_adapter("dora")
    found = run(model)
    restore_lora_(model)
    assert_same(run(model), found)


def test_float32_adapters_under_bfloat16_lose_little(monkeypatch):
    """What casting the factors costs, by the mean relative error of all gradients, against both of
    peft's ways."""

    def gradients(model, ids):
        model.zero_grad()
        model(input_ids=ids)[0].double().square().mean().backward()
        return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}

    monkeypatch.setattr(heads.lora._eager.autograd, "_SMALL", 0)  # so few tokens would not be cast
    errors = dict.fromkeys(("ours", "peft", "peft, bfloat16 adapters"), 0.0)
    for seed, way in itertools.product(range(4), errors):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 96, (4, 33), generator=generator)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS["llama"])
        model = get_peft_model(
            tiny("llama").bfloat16(), config, autocast_adapter_dtype="bfloat16" not in way
        ).eval()
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                size = 0.05 if "lora_B" in name else 0.2
                parameter.data = (torch.randn(parameter.shape, generator=generator) * size).to(
                    parameter.dtype
                )
        exact = gradients(copy.deepcopy(model).double(), ids)
        if way == "ours":
            accelerate_lora_(model)
        found = gradients(model, ids)
        errors[way] += (
            sum(float((found[n] - g).norm() / g.norm()) for n, g in exact.items()) / len(exact) / 4
        )
    assert errors["ours"] < 1.3 * errors["peft, bfloat16 adapters"] < 0.02, errors
    assert errors["ours"] < 1.5 * errors["peft"], errors


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
def test_adapters_of_a_lower_dtype_do_not_round_the_layers_own_output(lower):
    model = get_peft_model(nn.Sequential(nn.Linear(16, 16)), LoraConfig(target_modules=["0"], r=2))
    x = torch.randn(4, 16)
    with torch.no_grad():
        expected = model(x)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(lower)
        accelerate_lora_(model)
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("float32_base", [False, True])
def test_under_autocast_it_is_pefts(float32_base):
    """Also where the base layer gives float32, which autocast would round in a product with it."""
    model = peft_model("llama")
    if float32_base:
        for layer in (m for m in model.modules() if isinstance(m, lora.Linear)):
            layer.base_layer.register_forward_hook(lambda module, given, out: out.float())
    outputs = []
    for ours in (False, True):
        if ours:
            accelerate_lora_(model)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            outputs.append(model(input_ids=IDS)[0].float())
    assert (outputs[0] - outputs[1]).norm() < 0.02 * outputs[0].norm()
    if float32_base:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.zeros_(parameter)
        layer, x = next(m for m in model.modules() if isinstance(m, LoraLinear)), torch.randn(3, 16)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert torch.equal(layer(x), layer.base_layer(x))


@pytest.mark.parametrize("tokens", [3, 5000])
def test_float32_adapters_under_bfloat16_are_scaled_as_in_peft(tokens):
    model = get_peft_model(
        nn.Sequential(nn.Linear(16, 16)).bfloat16(), LoraConfig(target_modules=["0"], lora_alpha=24)
    )
    nn.init.normal_(model.base_model.model[0].lora_B["default"].weight)
    x = torch.randn(tokens, 16).bfloat16()
    with torch.no_grad():
        expected = model(x).float()
        accelerate_lora_(model)
        assert (model(x).float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("place", ["base_layer", "lora_A", "lora_dropout", "all modules"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_fire_wherever_they_are(place, kind):
    model = peft_model("llama", lora_dropout=0.1)
    accelerate_lora_(model)
    layer = next(m for m in model.modules() if isinstance(m, LoraLinear))
    part = (
        layer.base_layer
        if place == "base_layer"
        else None
        if place == "all modules"
        else getattr(layer, place)["default"]
    )
    seen = []
    if part is None:
        handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(
            lambda m, *_: seen.append(m is layer.base_layer) or None
        )
    else:
        handle = getattr(part, f"register_{kind}_hook")(lambda *_: seen.append(True) or None)
    layer(torch.randn(2, 16, requires_grad=True)).sum().backward()
    handle.remove()
    assert sum(seen) == 1


def test_adapters_that_are_active_together_have_masks_of_their_own():
    """With more tokens than masks are kept for."""
    base = nn.Sequential(nn.Linear(16, 16))
    model = peft_model(
        "llama", model=base, adapters=("a", "b"), target_modules=["0"], lora_dropout=0.5
    )
    model.base_model.set_adapter(["a", "b"])
    accelerate_lora_(model)
    layer = model.base_model.model[0]
    for name in "ab":
        for part in (layer.lora_A, layer.lora_B):
            part[name].weight.data = torch.eye(4, 16) if part is layer.lora_A else torch.eye(16, 4)
    x = torch.ones(2, 200, 16)
    both = (layer.train()(x) - layer.base_layer(x))[..., :4].detach() / (2 * layer.scaling["a"])
    assert set(both.round(decimals=4).unique().tolist()) == {0.0, 1.0, 2.0}


def test_what_a_base_layer_takes_besides_x_reaches_it():
    class Scaled(nn.Linear):
        def forward(self, x, by=1.0, *, plus=0.0):
            return super().forward(x) * by + plus

    base = nn.Sequential(Scaled(4, 4))
    model = peft_model("llama", model=base, target_modules=["0"])
    layer, x = model.base_model.model[0], torch.randn(3, 4)
    expected = [layer(x, 3.0), layer(x, plus=2.0), layer(x)]
    accelerate_lora_(model)
    for found, wanted in zip([layer(x, 3.0), layer(x, plus=2.0), layer(x)], expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_layers_that_others_changed_are_told_and_not_half_restored():
    model = peft_model("llama")
    layers = [m for m in model.modules() if isinstance(m, lora.Linear)]
    layers[0].forward = lambda *args, **kwargs: None
    report = accelerate_lora_(model)
    assert "its forward was replaced, for example by an accelerate hook" in report.skipped.values()
    assert len(report.accelerated) == len(layers) - 1
    with pytest.raises(ValueError, match=r"restore_lora_:.*forward"):
        restore_lora_(model)
    assert isinstance(layers[1], LoraLinear)
    del layers[0].forward
    layers[1].__class__ = type("FSDPLoraLinear", (LoraLinear,), {})
    with pytest.raises(ValueError, match=r"restore_lora_:.*FSDPLoraLinear"):
        restore_lora_(model)
    layers[1].__class__ = LoraLinear
    assert restore_lora_(model) == len(layers)
    assert all(type(layer) is lora.Linear for layer in layers)
    # what accelerate's hooks leave behind is the class's own forward
    for when in ("before", "after"):
        if when == "after":
            accelerate_lora_(model)
        add_hook_to_module(layers[2], ModelHook())
        remove_hook_from_module(layers[2])
        if when == "before":
            assert not accelerate_lora_(model).skipped
        assert restore_lora_(model) == len(layers)
        assert "forward" not in vars(layers[2])


def test_a_users_own_layer_keeps_its_forward_and_a_printed_model_shows_ours():
    class Linear(lora.Linear):
        def forward(self, x, *args, **kwargs):
            return super().forward(x, *args, **kwargs) * 2

    config = LoraConfig(target_modules=["0"])
    config._register_custom_module({nn.Linear: Linear})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), config)
    assert list(accelerate_lora_(model).skipped.values()) == ["lora.Linear"]
    model = peft_model("llama")
    accelerate_lora_(model)
    assert "lora.Linear accelerated(" in str(model)


def test_a_model_without_adapters_is_refused():
    with pytest.raises(ValueError, match=r"accelerate_lora_:.*LoRA"):
        accelerate_lora_(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"accelerate_lora_: str.*LoRA"):
        accelerate_lora_("models/base")


def test_an_accelerated_model_is_a_peft_model(tmp_path):
    model = peft_model("gpt2")
    names = list(model.state_dict())
    accelerate_lora_(model)
    assert list(model.state_dict()) == names
    assert all(isinstance(m, lora.Linear) for m in model.modules() if isinstance(m, LoraLinear))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny("gpt2"), tmp_path)
    accelerate_lora_(loaded)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=IDS)[0], model(input_ids=IDS)[0])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_whole_model_compiles_without_a_break(kind):
    torch._dynamo.reset()
    model = peft_model(kind, torch.float64)
    accelerate_lora_(model)
    expected = run(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    output = compiled(input_ids=IDS)[0]
    output.double().square().mean().backward()
    found = {"output": output.detach()} | {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }
    assert_same(expected, found)


RANK = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tests.heads.lora.test_accelerate import IDS, peft_model
from heads.lora import LoraLinear, accelerate_lora_
dist.init_process_group("gloo")
mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
for units in cases:
    model = peft_model("llama")
    accelerate_lora_(model)
    for layer in model.base_model.model.model.layers:
        if units == "factors":  # each module with parameters of its own, as peft's FSDP policy wraps them
            for module in layer.modules():
                if isinstance(module, LoraLinear):
                    for part in (module.lora_A["default"], module.lora_B["default"], module.base_layer):
                        fully_shard(part, mesh=mesh)
        if units == "layers":
            for module in list(layer.modules()):
                if isinstance(module, LoraLinear):
                    fully_shard(module, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    output = model(input_ids=IDS[rank:rank + 1])[0]
    output.square().mean().backward()
    state = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    torch.save(state | {"output": output.detach()}, f"{out}/{units}{rank}.pt")
"""


def test_fully_sharded_over_two_processes(tmp_path):
    """Blocks, whole layers, and factors as units of their own."""
    cases = ("blocks", "layers", "factors")
    in_two_processes(RANK, tmp_path, *cases)
    model = peft_model("llama")
    outputs = [model(input_ids=IDS[rank : rank + 1])[0] for rank in (0, 1)]
    (sum(y.square().mean() for y in outputs) / 2).backward()
    for units in cases:
        for rank in (0, 1):
            found = torch.load(tmp_path / f"{units}{rank}.pt", weights_only=True)
            torch.testing.assert_close(found["output"], outputs[rank].detach(), msg=units)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    torch.testing.assert_close(
                        found[name], parameter.grad, rtol=1e-4, atol=1e-7, msg=units
                    )


def test_layers_of_an_own_model_are_injected():
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ModuleDict({"0": torch.nn.Linear(8, 8)}), Conv1D(3, 8)
    )
    model[1].forward = lambda x: model[1]["0"](x)
    x = torch.randn(5, 4)
    before = model(x)
    report = inject_lora_(model, r=2, alpha=3.0, filter_fn=lambda m, name: name != "1.0")
    assert report.layers == ("0", "2")  # and not 1.0, whose name ends as the first one's
    assert torch.equal(model(x), before)
    trains = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trains) == 4
    assert report.trained == 2 * (4 + 8) + 2 * (8 + 3)
    assert model[0].scaling["default"] == 1.5
    assert len(get_peft_model_state_dict(model)) == 4
    torch.nn.init.normal_(model[2].lora_B["default"].weight)
    lean = model(x)
    folded = model[2].to_linear()
    assert type(folded) is Conv1D
    torch.testing.assert_close(folded(model[0](x)), model[2](model[0](x)))
    model[2].impl = "reference"
    torch.testing.assert_close(model(x), lean)
    changed = {n: t.clone() for n, t in get_peft_model_state_dict(model).items()}
    torch.nn.init.zeros_(model[2].lora_B["default"].weight)
    assert torch.equal(model(x), before)
    set_peft_model_state_dict(model, changed)
    torch.testing.assert_close(model(x), lean)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 5}, "at most 3"),
        ({"r": 0}, "r is 0"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"dropout": 1.0}, "dropout is 1"),
        ({"impl": "fused"}, "'fused'"),
    ],
)
def test_a_layer_alone_refuses(options, message):
    with pytest.raises(ValueError, match=rf"LoraLinear\.from_linear:.*{message}"):
        LoraLinear.from_linear(torch.nn.Linear(4, 3), **{"r": 2, **options})
    with pytest.raises(ValueError, match=r"inject_lora_:.*from_linear"):
        inject_lora_(torch.nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"inject_lora_:.*filter_fn.*Sequential"):
        inject_lora_(torch.nn.Sequential(torch.nn.ReLU()), filter_fn=lambda m, name: True)


def test_injection_reaches_every_name_and_keeps_the_mode():
    shared = torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(shared, torch.nn.ReLU(), shared).eval()
    inject_lora_(model, r=2, dropout=0.5)
    assert model[0] is model[2]
    x = torch.randn(3, 4)
    torch.nn.init.normal_(model[0].lora_B["default"].weight)
    assert torch.equal(model(x), model(x))  # no dropout in evaluation
    with pytest.raises(ValueError, match=r"inject_lora_:.*already"):
        inject_lora_(model)
    half = LoraLinear.from_linear(torch.nn.Linear(4, 4).bfloat16(), r=2)
    assert half.lora_A["default"].weight.dtype == torch.float32
    assert half(x.bfloat16()).dtype == torch.bfloat16


def test_updates_are_seen_by_torch_s_fast_path():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    inject_lora_(layer, r=2)
    x = torch.randn(2, 5, 8)
    torch.nn.init.normal_(layer.linear1.lora_B["default"].weight)
    expected = layer.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), expected)
