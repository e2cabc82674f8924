"""Layers of peft models with our forward: the same results, files, hooks and switches; what is declined, and why."""

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora
from torch import nn

import heads.lora.linear
from heads.lora import LoraLinear, accelerate_lora_, restore_lora_
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
    options = {"target_modules": TARGETS[kind], "r": 4, "lora_alpha": 8, "fan_in_fan_out": kind == "gpt2"} | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = get_peft_model((model or tiny(kind)).to(dtype), LoraConfig(**options), adapter_name=adapters[0])
        for name in adapters[1:]:
            made.add_adapter(name, LoraConfig(**options))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.2).to(parameter.dtype)
    return made.eval()


def run(model, **inputs):
    """Output, and the gradients of all that is trainable."""
    model.zero_grad()
    output = model(input_ids=IDS, **inputs)[0]
    output.double().square().mean().backward()
    return {"output": output.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


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
                given |= {n: part.view(shapes[n]) for n, part in zip(names[key], parts, strict=True)}
            held.to(embeds)
            return torch.func.functional_call(held, given, kwargs={"inputs_embeds": embeds})[0]

        return function

    vectors = {key.lower(): torch.cat([model.get_parameter(n).detach().flatten() for n in names[key]]) for key in "AB"}
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


def test_queries_keys_and_values_are_computed_at_once():
    model = peft_model("llama")
    report = accelerate_lora_(model)
    assert "8 groups share their input" in str(report)  # 4 layers: q, k, v and gate, up
    attention = model.get_submodule("base_model.model.model.layers.0.self_attn")
    x = torch.randn(1, 3, 16, requires_grad=True)
    made = [getattr(attention, name)(x) for name in ("q_proj", "k_proj", "v_proj")]
    assert len({y.grad_fn.next_functions[0][0] for y in made}) == 1
    assert not attention.q_proj.shared._waiting  # nothing is kept alive
    alone = attention.k_proj(x)  # asked for out of turn: it is computed with the others
    torch.testing.assert_close(alone, made[1])


@pytest.mark.parametrize("inputs", [(0, 1, 2), (0, 1, 1), (0, 0, 1)])
def test_layers_that_do_not_share_after_all_stop_sharing(inputs):
    model = peft_model("llama", torch.float64)
    attention = model.get_submodule("base_model.model.model.layers.0.self_attn")
    different = [torch.randn(2, 3, 16, dtype=torch.float64) for _ in range(3)]
    xs = [different[i] for i in inputs]  # (0, 1, 1) is cross-attention
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    expected = [layer(x) for layer, x in zip(layers, xs, strict=True)]
    accelerate_lora_(model)
    for _ in range(2):
        for layer, x, y in zip(layers, xs, expected, strict=True):
            torch.testing.assert_close(layer(x), y)
    for layer in layers:  # they no longer compute each other's
        layer(xs[0])
        assert not attention.q_proj.shared._waiting


def test_a_call_that_was_interrupted_does_not_end_sharing():
    model = peft_model("llama")
    accelerate_lora_(model)
    attention = model.get_submodule("base_model.model.model.layers.0.self_attn")
    for _ in range(3):
        attention.q_proj(torch.randn(1, 2, 16))  # and k and v are never asked for
        x = torch.randn(1, 3, 16, requires_grad=True)
        made = [layer(x) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
        assert len({y.grad_fn.next_functions[0][0] for y in made}) == 1


def test_what_waits_is_not_taken_under_other_circumstances():
    model = peft_model("llama", torch.float64, adapters=("a", "b"))
    attention = model.get_submodule("base_model.model.model.layers.0.self_attn")
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    changes = {
        "gradients": lambda: None,
        "x": lambda: x.mul_(2.0),
        "adapter": lambda: model.set_adapter("b"),
        "factor": lambda: torch.nn.init.ones_(attention.k_proj.lora_B["a"].weight),
        "weight": lambda: torch.nn.init.ones_(attention.k_proj.base_layer.weight),
    }
    for name, change in changes.items():
        model.set_adapter("a")
        accelerate_lora_(model)
        with torch.set_grad_enabled(name != "gradients"):
            attention.q_proj(x)
        change()
        found = attention.k_proj(x)
        restore_lora_(model)
        torch.testing.assert_close(found, attention.k_proj(x), msg=name)
        assert found.requires_grad


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


def test_what_waits_for_one_thread_is_not_taken_by_another(monkeypatch):
    model = peft_model("llama")
    accelerate_lora_(model)
    attention = next(m for m in model.modules() if hasattr(m, "q_proj"))
    calls, real = [], heads.lora.linear.compute

    def counted(layers, *rest):
        calls.append(len(layers))
        return real(layers, *rest)

    monkeypatch.setattr(heads.lora.linear, "compute", counted)
    x, other = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        attention.q_proj(x)

        def elsewhere():
            with torch.no_grad():
                return attention.q_proj(other)

        pool.submit(elsewhere).result()
        attention.k_proj(x)
        attention.v_proj(x)
        assert calls == [3, 3]  # q, k and v at once, here and there
        assert attention.q_proj.shared.misses == 0


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


def test_second_derivatives_are_refused():
    model = peft_model("llama", torch.float64)
    accelerate_lora_(model)
    layer = next(m for m in model.modules() if isinstance(m, LoraLinear))
    x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivatives were asked for"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_compiled_for_any_length(dropout):
    """One graph for all lengths, or two where the order of products changes with them."""
    torch._dynamo.reset()
    model = peft_model("llama", lora_dropout=dropout).train(dropout > 0)
    accelerate_lora_(model, order="factored")
    graphs = []
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=lambda g, _: graphs.append(g) or g.forward)
    with torch.no_grad():
        for length in (5, 7, 9, 12, 13):
            compiled(input_ids=torch.zeros(2, length, dtype=torch.int64), use_cache=False)
    restore_lora_(model)
    stock = []
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=lambda g, _: stock.append(g) or g.forward)
    with torch.no_grad():
        for length in (5, 7, 9, 12, 13):
            compiled(input_ids=torch.zeros(2, length, dtype=torch.int64), use_cache=False)
    assert len(graphs) == len(stock)


def test_a_model_copied_half_way_through_is_sound():
    model = peft_model("llama")
    expected = run(model)
    accelerate_lora_(model)
    attention = model.get_submodule("base_model.model.model.layers.0.self_attn")
    attention.q_proj(torch.randn(1, 2, 16, requires_grad=True))  # k's and v's outputs are waiting
    copied = copy.deepcopy(model)
    twin = copied.get_submodule("base_model.model.model.layers.0.self_attn")
    assert twin.q_proj.shared.layers[0] is twin.q_proj
    assert_same(expected, run(copied))


def test_several_active_adapters_and_switching_and_disabling():
    model = peft_model("llama", torch.float64, adapters=("a", "b"))
    twin = copy.deepcopy(model)
    accelerate_lora_(twin)
    for switch in (lambda m: None, lambda m: m.set_adapter("b"), lambda m: m.base_model.set_adapter(["a", "b"])):
        switch(model), switch(twin)
        assert_same(run(model), run(twin))
    with model.disable_adapter(), twin.disable_adapter(), torch.no_grad():
        assert torch.equal(model(input_ids=IDS)[0], twin(input_ids=IDS)[0])
    twin.delete_adapter("a"), model.delete_adapter("a")
    model.set_adapter("b"), twin.set_adapter("b")
    assert_same(run(model), run(twin))


@pytest.mark.parametrize("names", [["a", "b", "a"], ["a", "a", "__base__"], ["b", "b", "b"], ["__base__"] * 3], ids=str)
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


@pytest.mark.parametrize(("mark", "why"), [("ds_id", "sharded"), ("_hf_hook", "accelerate moves its weights")])
@pytest.mark.parametrize("place", ["base_layer", "lora_A", "lora_B"])
def test_weights_that_others_hold_are_left_to_pefts_forward(mark, why, place):
    model = peft_model("llama")
    layer = next(m for m in model.modules() if isinstance(m, lora.Linear))
    part = layer.base_layer if place == "base_layer" else getattr(layer, place)["default"]
    setattr(part.weight if mark == "ds_id" else part, mark, 0)  # as DeepSpeed's ZeRO-3 and accelerate mark them
    reasons = list(accelerate_lora_(model).skipped.values())
    assert len(reasons) == 1
    assert why in reasons[0]


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


def test_a_weight_of_another_kind_is_declined():
    class Quantised(nn.Linear):
        pass

    base = nn.Sequential(Quantised(4, 4), nn.Linear(4, 4))
    model = get_peft_model(base, LoraConfig(target_modules=["0", "1"], r=2))
    report = accelerate_lora_(model)
    assert len(report.accelerated) == 1
    assert list(report.skipped.values()) == ["its base layer is a Quantised"]


@pytest.mark.parametrize("options", [{"impl": "reference"}, {"impl": "fast"}, {"order": "merged"}])
def test_options_that_are_none_are_refused(options):
    with pytest.raises(ValueError, match="accelerate_lora_: "):
        accelerate_lora_(peft_model("llama"), **options)


def test_a_model_without_adapters_is_refused():
    with pytest.raises(ValueError, match="has no LoRA layers"):
        accelerate_lora_(nn.Linear(2, 2))


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
    found = {"output": output.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
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
                    torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-7, msg=units)
