"""`lora_linear` against the dense definition."""

import gc
import itertools

import pytest
import torch

from heads.lora import lora_linear, reference
from heads.lora._eager import products
from tests.benchmarks.measure import saved_bytes
from tests.support.equivalence import judge, place

SEED = torch.tensor(-1234567890123456789)
SIZES = ((7, 12, 9, 3), (1, 1, 1, 1), (0, 6, 4, 2), (33, 40, 70, 24))  # tokens, in, out, rank
# bias, transposed, dropout
CASES = list(itertools.product((False, True), (False, True), (0.0, 0.3)))


def inputs_of(size, bias, transposed, seed=0):
    tokens, ins, outs, rank = size
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "x": (tokens, ins),
        "weight": (ins, outs) if transposed else (outs, ins),
        "lora_a": (rank, ins),
    }
    shapes |= {"lora_b": (outs, rank)} | ({"bias": (outs,)} if bias else {})
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def op(impl, **options):
    if impl != "reference":
        options = place(options)
    return lambda **given: lora_linear(**given, scaling=0.7, impl=impl, **options)


def name_of(transposed, bias, dropout):
    parts = [
        *(["Conv1D"] if transposed else []),
        *(["bias"] if bias else []),
        *(["dropout"] if dropout else []),
    ]
    return ", ".join(["lora_linear", *parts])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("bias", "transposed", "dropout"), CASES)
def test_it_is_the_definition(dtype, bias, transposed, dropout):
    options = {"transposed": transposed, "dropout_p": dropout, "seed": SEED}
    for size in SIZES:
        if size[0] == 1 and dtype != torch.float32:
            continue  # the budget of a single number in half precision is luck
        judge(
            name_of(transposed, bias, dropout),
            "eager",
            op("eager", **options),
            op("reference", **options),
            inputs_of(size, bias, transposed),
            dtype=dtype,
            case=str(size),
        )


def test_adapters_of_another_dtype_than_the_model():
    """peft's default under bfloat16: adapters in float32; x is not copied to theirs."""
    given = inputs_of((33, 40, 70, 24), True, False)

    def call(impl, dtype):
        def function(lora_a, lora_b, **rest):
            return lora_linear(
                lora_a=lora_a.to(dtype), lora_b=lora_b.to(dtype), scaling=0.7, impl=impl, **rest
            )

        return function

    judge(
        "lora_linear, float32 factors",
        "eager",
        call("eager", torch.float32),
        op("reference"),
        given,
        dtype=torch.bfloat16,
    )
    x = given["x"].bfloat16()
    a = given["lora_a"].requires_grad_()
    lora_linear(x, given["weight"].bfloat16(), a, given["lora_b"], scaling=1.0).sum().backward()
    assert a.grad.dtype == torch.float32


def test_finite_differences():
    given = {
        k: v.double().requires_grad_() for k, v in inputs_of((4, 5, 3, 2), True, False).items()
    }
    names = list(given)
    for options in ({}, {"dropout_p": 0.4, "seed": SEED}):
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(
                lambda *t, options=options: lora_linear(
                    **dict(zip(names, t, strict=True)), scaling=0.7, **options
                ),
                tuple(given.values()),
            )


def test_a_layer_that_is_used_twice_has_the_right_gradients_in_a_graph_of_them():
    """What is saved has a history: paths through it count once."""
    given = {
        k: v.double().requires_grad_()
        for k, v in inputs_of((4, 5, 5, 2), True, False).items()
        if k != "x"
    }
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)

    def gradients(create_graph):
        y = lora_linear(torch.tanh(lora_linear(x, **given, scaling=0.7)), **given, scaling=0.7)
        return torch.autograd.grad(
            y.square().sum(), [x, *given.values()], create_graph=create_graph
        )

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, expected)


def test_the_mask_is_the_same_everywhere_and_drops_the_share_that_it_should():
    for seed in (SEED, torch.tensor(0), torch.tensor(2**62)):
        for p in (0.05, 0.5, 0.9):
            mask = reference.keep_mask(seed, 700, 300, p)
            assert torch.equal(mask, products.dropout(seed, 700, 300, p).keep(slice(0, 700)).bool())
            deviation = (p * (1 - p) / mask.numel()) ** 0.5
            assert abs(mask.double().mean() - (1 - p)) < 5 * deviation
            for dim in (0, 1):  # no row or column is special
                n = mask.shape[dim]
                assert (mask.double().mean(dim) - (1 - p)).abs().max() < 5.5 * (
                    p * (1 - p) / n
                ) ** 0.5
    a, b = (reference.keep_mask(torch.tensor(s), 500, 500, 0.5).double() - 0.5 for s in (1, 2))
    assert abs((a * b).mean() * 4) < 5 / 500  # masks of neighboring seeds,
    assert abs((a[1:] * a[:-1]).mean() * 4) < 5 / 500  # rows
    assert abs((a[:, 1:] * a[:, :-1]).mean() * 4) < 5 / 500  # and columns do not know of each other
    # what a mere xor of row and column would give away
    corners = a[:-1, :-1] * a[1:, :-1] * a[:-1, 1:] * a[1:, 1:]
    assert abs(corners.mean() * 16) < 5 / 500


def test_dropout_without_a_seed_follows_torch():
    given = inputs_of((9, 12, 9, 3), False, False)
    made = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        made.append(lora_linear(**given, scaling=1.0, dropout_p=0.5))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_x_alone_is_kept_for_backward(dtype, dropout):
    given = {k: v.to(dtype) for k, v in inputs_of((64, 32, 48, 8), True, False).items()}
    given = {k: v.float() if "lora" in k else v for k, v in given.items()}
    own = [v.requires_grad_(k.startswith(("lora", "x"))) for k, v in given.items()]
    kept = saved_bytes(lambda: lora_linear(**given, scaling=1.0, dropout_p=dropout), resident=own)
    assert kept == (8 if dropout else 0)
    x = given["x"]
    kept = saved_bytes(
        lambda: lora_linear(**given, scaling=1.0, dropout_p=dropout), resident=own[1:]
    )
    assert kept == x.nbytes + (8 if dropout else 0)


def test_nothing_of_the_outputs_size_is_made_beside_it():
    tokens, ins, outs = 64, 16, 512
    given = {
        k: v.requires_grad_(k in ("lora_a", "lora_b", "x"))
        for k, v in inputs_of((tokens, ins, outs, 4), False, False).items()
    }
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(result):
                if torch.is_tensor(t) and t.numel() == tokens * outs:
                    made.append((function, t.untyped_storage().data_ptr()))
            return result

    gc.collect()
    with Watch():
        y = lora_linear(**given, scaling=1.0)
    assert {place for _, place in made} == {y.untyped_storage().data_ptr()}
    made.clear()
    dy = torch.randn_like(y)
    with Watch():
        y.backward(dy)
    assert {place for _, place in made} <= {dy.untyped_storage().data_ptr()}


def test_gradients_that_nobody_asked_for_are_not_made():
    given = inputs_of((5, 6, 4, 2), True, False)
    given["lora_b"].requires_grad_()
    y = lora_linear(**given, scaling=1.0)
    y.sum().backward()
    assert [k for k, v in given.items() if v.grad is not None] == ["lora_b"]


def test_autocast_is_the_plain_layers():
    given = {k: v.requires_grad_() for k, v in inputs_of((33, 40, 70, 24), True, False).items()}
    found = []
    for impl in ("reference", "eager"):
        with torch.autocast("cpu", torch.bfloat16):
            y = lora_linear(**given, scaling=0.7, impl=impl)
        assert y.dtype == torch.bfloat16
        found.append([y, *torch.autograd.grad(y.float().square().mean(), list(given.values()))])
    assert all(g.dtype == torch.float32 for g in found[1][1:])
    for a, b in zip(*found, strict=True):
        assert (a - b).float().norm() < 0.02 * a.float().norm()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_it_compiles_without_a_break(dropout):
    torch._dynamo.reset()
    given = {k: v.requires_grad_() for k, v in inputs_of((9, 12, 8, 3), True, False).items()}

    def call(**tensors):
        return lora_linear(**tensors, scaling=0.7, dropout_p=dropout, seed=SEED)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = []
    for function in (call, compiled):
        y = function(**given)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(given.values()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


BAD = {
    "x": ({"x": torch.ones(2, 7)}, "x has shape [2, 7], expected a last dimension of 6"),
    "a": ({"lora_a": torch.ones(2, 5)}, "expected (r, 6) and (4, r)"),
    "rank": ({"lora_a": torch.ones(3, 6)}, "lora_a and lora_b have shapes [3, 6] and [4, 2]"),
    "no rank": ({"lora_a": torch.ones(0, 6), "lora_b": torch.ones(4, 0)}, "r >= 1"),
    "bias": ({"bias": torch.ones(5)}, "bias has shape [5], expected [4]"),
    "dtype": (
        {"x": torch.ones(2, 6).double()},
        "x has dtype torch.float64 and weight has dtype torch.float32",
    ),
    "dims": ({"lora_a": torch.ones(6)}, "of shapes (*B, I), (O, I), (r, I) and (O, r), got"),
    "impl": ({"impl": "fast"}, "impl is 'fast'"),
    "dropout": ({"dropout_p": 1.0}, "dropout_p is 1.0, expected at least 0 and below 1"),
    "seed": ({"seed": torch.tensor(1.0)}, "seed has 1 elements and dtype torch.float32"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    changes, message = BAD[case]
    given = inputs_of((3, 6, 4, 2), True, False) | {"scaling": 1.0} | changes
    with pytest.raises(ValueError, match="lora_linear: ") as caught:
        lora_linear(**given)
    assert message in str(caught.value)


def test_the_gradient_of_a_is_not_summed_in_half_precision(monkeypatch):
    monkeypatch.setattr(products, "_BLOCK", {"cpu": 8})
    tokens = 4096  # a running sum in bfloat16 would stand still after 256 of 1024 like parts
    x, grad = (
        torch.ones(tokens, 2, dtype=torch.bfloat16),
        torch.ones(tokens, 3, dtype=torch.bfloat16),
    )
    a, b = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(3, 1, dtype=torch.bfloat16)
    drop = products.dropout(torch.tensor(0), tokens, 2, 1e-6)
    da, _ = products.gradients(grad, x, a, b, 1.0, drop, None, True, False)
    torch.testing.assert_close(da.float(), torch.full((1, 2), 3.0 * tokens), rtol=0.01, atol=0)
