"""kron_linear: every impl × order × dtype × shape against the dense definition."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kronecker import kron_linear, reference
from kronecker._eager import ORDERS, build, order_of
from tests.benchmarks.measure import saved_bytes
from tests.support.equivalence import judge, place

CUDA = torch.cuda.is_available()
# (O1, I1), (O2, I2), r, leading shape of x: sizes of 1, odd, not powers of two, none
SHAPES = [
    ((6, 5), (1, 2), 1, (2, 7)),
    ((5, 6), (2, 1), 3, (9,)),
    ((70, 33), (4, 1), 2, (3, 1, 5)),
    ((33, 70), (2, 2), 1, (300,)),
    ((7, 3), (3, 3), 4, (17,)),
    ((4, 3), (5, 7), 2, (11,)),
    ((1, 5), (1, 3), 1, (1,)),
    ((3, 4), (2, 3), 2, (0,)),
    ((12, 7), (2, 3), 2, ()),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def made(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def parts(a_shape, b_shape, r, leading, dtype=torch.float32):
    out_features, in_features = (m * n for m, n in zip(a_shape, b_shape, strict=True))
    return {
        "x": made(*leading, in_features, seed=1, dtype=dtype),
        "a": made(r, *a_shape, seed=2, dtype=dtype),
        "b": made(r, *b_shape, seed=3, dtype=dtype),
        "bias": made(out_features, seed=4, dtype=dtype),
        "scales": made(r, seed=5, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("a_shape", "b_shape", "r", "leading"), SHAPES)
def test_kron_linear(a_shape, b_shape, r, leading, order, dtype):
    def fast(**tensors):
        return kron_linear(**tensors, order=order)

    inputs = parts(a_shape, b_shape, r, leading)
    case = f"{r} of {a_shape} x {b_shape}, x {[*leading]}"
    judge(
        f"kron_linear, {order}",
        "eager",
        fast,
        reference.kron_linear,
        inputs,
        dtype=dtype,
        case=case,
    )


@pytest.mark.parametrize("order", ORDERS)
def test_few_tokens_take_another_way_to_the_same_result(order):
    inputs = parts((40, 24), (2, 3), 3, (2,))
    judge(
        f"kron_linear, {order}",
        "eager",
        lambda **t: kron_linear(**t, order=order),
        reference.kron_linear,
        inputs,
        dtype=torch.float32,
        case="2 tokens",
    )


@pytest.mark.parametrize("order", ORDERS)
def test_finite_differences(order):
    held = [t.requires_grad_() for t in parts((3, 4), (2, 3), 2, (2, 3), torch.float64).values()]
    assert torch.autograd.gradcheck(
        lambda x, a, b, bias, s: kron_linear(x, a, b, bias, s, order=order), held
    )


@pytest.mark.parametrize("order", ORDERS)
def test_inputs_that_are_not_contiguous(order):
    t = parts((4, 6), (3, 2), 2, (5,))
    x = made(12, 5).T.requires_grad_()
    a, b = (
        t["a"].transpose(1, 2).contiguous().transpose(1, 2),
        t["b"].transpose(1, 2).contiguous().transpose(1, 2),
    )
    y = kron_linear(x, a, b, order=order)
    torch.testing.assert_close(y, reference.kron_linear(x, t["a"], t["b"]))
    y.sum().backward()  # the gradient of a sum is broadcast, with strides of 0
    torch.testing.assert_close(x.grad, reference.kron_weight(t["a"], t["b"]).sum(0).expand(5, -1))


def test_the_order_is_the_cheapest():
    assert order_of((3072, 384), (1, 2), 1, 1024) == "b_first"
    assert order_of((384, 3072), (2, 1), 1, 1024) == "a_first"
    assert order_of((768, 768), (4, 1), 2, 1024) == "a_first"
    assert order_of((1024, 256), (3, 3), 2, 1024) == "b_first"
    assert order_of((1024, 256), (3, 3), 4, 1024) == "rebuild"
    # building a weight for one token is dearer
    assert order_of((1024, 256), (3, 3), 4, 1) == "b_first"


def test_what_is_saved_for_backward():
    t = parts((64, 32), (1, 2), 1, (10,))
    x, a, b = (t[k].requires_grad_() for k in ("x", "a", "b"))
    kept = x.nbytes + a.nbytes + b.nbytes
    for order in ("b_first", "rebuild"):
        assert saved_bytes(lambda order=order: kron_linear(x, a, b, order=order)) == kept
    assert saved_bytes(lambda: kron_linear(x, a, b, order="a_first")) == kept + 10 * 2 * 64 * 4
    assert saved_bytes(lambda: reference.kron_linear(x, a, b)) >= kept + 64 * 64 * 4


def test_only_the_gradients_that_are_asked_for_are_made():
    for order in ORDERS:
        t = parts((4, 3), (2, 2), 2, (5,))
        t["a"].requires_grad_()
        kron_linear(t["x"], t["a"], t["b"], order=order).sum().backward()
        assert t["a"].grad is not None
        assert t["x"].grad is None
        assert t["b"].grad is None


def test_autocast_computes_in_its_dtype():
    t = parts((4, 3), (2, 2), 2, (5,))
    a = t["a"].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = kron_linear(t["x"], a, t["b"], t["bias"], t["scales"])
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert a.grad.dtype == torch.float32


def test_checkpointing_gives_the_same_gradients():
    t = parts((4, 3), (2, 2), 2, (5,))
    x, a = t["x"].requires_grad_(), t["a"].requires_grad_()
    kron_linear(x, a, t["b"]).square().sum().backward()
    first = a.grad.clone()
    a.grad = None
    checkpoint(
        lambda x: kron_linear(x, a, t["b"]), x, use_reentrant=False
    ).square().sum().backward()
    assert torch.equal(a.grad, first)


def test_torch_compile_takes_it_whole():
    t = place(parts((8, 6), (2, 1), 2, (7,)))
    for v in t.values():
        v.requires_grad_()

    def f(x, a, b, bias, scales):
        return kron_linear(x, a, b, bias, scales, order="a_first")

    y = torch.compile(f, fullgraph=True, backend="aot_eager")(**t)
    torch.testing.assert_close(y, f(**t))
    y.square().sum().backward()
    grads = {k: v.grad.clone() for k, v in t.items()}
    for v in t.values():
        v.grad = None
    f(**t).square().sum().backward()
    for name, v in t.items():
        torch.testing.assert_close(grads[name], v.grad)


def test_build_is_the_dense_weight():
    t = parts((5, 4), (3, 2), 3, (1,), torch.float64)
    torch.testing.assert_close(build(t["a"], t["b"]), reference.kron_weight(t["a"], t["b"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": torch.ones(2, 7)},
            r"kron_linear:.*7.*\(4.*2\).*\(5.*3\).*2.*\*.*3.*6",
        ),
        (
            {"x": torch.ones(2, 6, dtype=torch.float64)},
            r"kron_linear:.*torch.float64.*torch.float32",
        ),
        ({"a": torch.ones(4, 2)}, r"kron_linear:.*\(r.*O1.*I1\).*\(r.*O2.*I2\)"),
        ({"a": torch.ones(2, 4, 2)}, r"kron_linear:.*\(r.*O1.*I1\)"),
        ({"a": torch.ones(1, 4, 2, dtype=torch.float64)}, r"kron_linear:.*float"),
        ({"bias": torch.ones(3)}, r"kron_linear:.*\[3\].*\(20,\)"),
        ({"scales": torch.ones(3)}, r"kron_linear:.*\[3\].*\(1,\)"),
        ({"impl": "fast"}, "impl is 'fast'"),
        ({"order": "c_first"}, r"kron_linear:.*b_first"),
    ],
)
def test_bad_input_is_refused(change, message):
    good = {"x": torch.ones(2, 6), "a": torch.ones(1, 4, 2), "b": torch.ones(1, 5, 3)}
    with pytest.raises(ValueError, match=message):
        kron_linear(**good | change)


def _layer_arguments(order):
    """Factors for which an order is the cheapest, with many tokens."""
    shapes = {"b_first": ((6, 4), (1, 2)), "a_first": ((4, 6), (2, 1)), "rebuild": ((4, 3), (3, 4))}
    a_shape, b_shape = shapes[order]
    rank = 3 if order == "rebuild" else 1
    a, b, bias = made(rank, *a_shape), made(rank, *b_shape), made(a_shape[0] * b_shape[0])
    return a, b, bias, a_shape[1] * b_shape[1]


@pytest.mark.parametrize("order", ["b_first", "a_first", "rebuild"])
def test_no_graph_for_every_number_of_tokens(order):
    a, b, bias, width = _layer_arguments(order)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    layer = torch.compile(
        lambda x: kron_linear(x, a, b, bias), backend=backend, dynamic=True, fullgraph=True
    )
    for count in range(2, 27):
        x = made(count, width)
        torch.testing.assert_close(layer(x), kron_linear(x, a, b, bias))
    assert len(graphs) <= 2  # the first number may be one that a factor has too


@pytest.mark.parametrize("order", ["b_first", "a_first", "rebuild"])
def test_a_layer_is_exported_with_a_dynamic_batch(order):
    a, b, bias, width = _layer_arguments(order)

    class Layer(torch.nn.Module):
        def forward(self, x):
            return kron_linear(x, a, b, bias)

    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(Layer(), (made(5, width),), dynamic_shapes=({0: batch},))
    x = made(11, width)
    torch.testing.assert_close(exported.module()(x), kron_linear(x, a, b, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("a_shape", "b_shape"), [((32, 32), (16, 16)), ((16, 20), (24, 16))])
def test_one_term_of_balanced_factors_takes_plain_products(a_shape, b_shape, dtype):
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "x": torch.randn(3, 30, a_shape[1] * b_shape[1], generator=generator),
        "a": torch.randn(1, *a_shape, generator=generator),
        "b": torch.randn(1, *b_shape, generator=generator),
        "bias": torch.randn(a_shape[0] * b_shape[0], generator=generator),
    }
    case = f"{a_shape} x {b_shape}"
    judge(
        "kron_linear, balanced",
        "eager",
        kron_linear,
        reference.kron_linear,
        inputs,
        dtype=dtype,
        case=case,
    )


@pytest.mark.parametrize("order", ["b_first", "a_first", "rebuild"])
def test_transforms_and_second_derivatives(order):
    a, b, bias, width = _layer_arguments(order)
    x = made(3, width)
    expected = reference.kron_linear(x, a, b, bias)
    torch.testing.assert_close(
        torch.vmap(lambda row: kron_linear(row, a, b, bias, order=order))(x), expected
    )
    square = lambda b: kron_linear(x, a, b, bias, order=order).square().sum()  # noqa: E731
    dense = lambda b: reference.kron_linear(x, a, b, bias).square().sum()  # noqa: E731
    torch.testing.assert_close(
        torch.func.hessian(square)(b), torch.func.hessian(dense)(b), rtol=1e-4, atol=1e-4
    )
    second = []
    for loss in (square, dense):
        leaf = b.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        gradient.sum().backward()
        second.append(leaf.grad)
    torch.testing.assert_close(*second)


def test_the_result_may_be_written_into():
    a, b, _, width = _layer_arguments("b_first")
    x = made(3, 2, width).requires_grad_()
    for order in ("b_first", "a_first", "rebuild"):
        x.grad = None
        kron_linear(x, a, b, order=order).relu_().sum().backward()
        ours = x.grad.clone()
        x.grad = None
        reference.kron_linear(x, a, b).relu().sum().backward()
        torch.testing.assert_close(ours, x.grad)


def test_meta_tensors_have_shapes_even_under_autocast():
    a, b, bias, width = (
        t.to("meta") if isinstance(t, torch.Tensor) else t for t in _layer_arguments("a_first")
    )
    assert kron_linear(torch.empty(2, 3, width, device="meta"), a, b, bias).shape == (2, 3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kron_linear(torch.empty(2, 3, width, device="meta"), a, b, bias).shape == (2, 3, 8)


def test_one_term_of_n_1_is_fewer_neurons_with_another_activation():
    """What the guide says of B of (n, 1): kept neurons, each through Σ_j d_j act(b_j g) c_j u
    instead of act(g) u."""
    generator = torch.Generator().manual_seed(0)
    x, gate, up, down = (
        torch.randn(*s, generator=generator).double() for s in ((5, 6), (4, 6), (4, 6), (3, 4))
    )
    b, c, d = (torch.randn(3, generator=generator).double() for _ in range(3))
    wide = [kron_linear(x, a[None], small.view(1, 3, 1)) for a, small in ((gate, b), (up, c))]
    said = kron_linear(nn.functional.silu(wide[0]) * wide[1], down[None], d.view(1, 1, 3))
    g, u = x @ gate.T, x @ up.T
    hidden = sum(d[j] * nn.functional.silu(b[j] * g) * c[j] * u for j in range(3))
    torch.testing.assert_close(said, hidden @ down.T)


@pytest.mark.parametrize("tokens", [255, 256, 257, 258, 300, 513])
def test_a_last_block_of_few_tokens(tokens):
    shapes = ((tokens, 96), (1, 8, 32), (1, 3, 3))
    # float64, as what differs is which rows a block has and not how they are rounded
    x, a, b = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    expected = kron_linear(x, a, b, impl="reference")
    torch.testing.assert_close(kron_linear(x, a, b, order="a_first"), expected)
