"""The kernels of balanced factors: equal to the definition, registered soundly, compiled without
spills."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kronecker import KroneckerLinear, kron_linear, reference
from tests.support.equivalence import judge, place
from tests.support.kernels import uninterpreted

pytest.importorskip("triton")
from kronecker import _triton

OLD = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
needs_new_card = pytest.mark.skipif(OLD, reason="the card is older than the kernels")
# (O1, I1), (O2, I2), tokens: tiles filled up, all sides different, more tokens than programs
SHAPES = [
    ((16, 16), (16, 16), 1),
    ((33, 17), (20, 48), 9),
    ((64, 64), (64, 64), 20),
    ((128, 40), (16, 100), 3),
    ((24, 18), (31, 16), 0),
]
# Triton's interpreter stores bfloat16 wrongly
DTYPES = (torch.float16, torch.bfloat16) if torch.cuda.is_available() else (torch.float16,)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_new_card
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("a_shape", "b_shape", "tokens"), SHAPES)
@pytest.mark.parametrize("backward", ["fused", "eager, as before Hopper"])
def test_one_kernel_equals_the_definition(a_shape, b_shape, tokens, dtype, backward, monkeypatch):
    monkeypatch.setattr(_triton, "_PROGRAMS", 6)
    if backward != "fused":
        monkeypatch.setattr(_triton, "has_backward", lambda grad: False)
    inputs = {
        "x": draw(tokens, a_shape[1] * b_shape[1], seed=1),
        "a": draw(1, *a_shape, seed=2),
        "b": draw(1, *b_shape, seed=3),
        "bias": draw(a_shape[0] * b_shape[0], seed=4),
    }
    judge(
        "kron_linear",
        "fused",
        lambda **t: kron_linear(**t, impl="fused"),
        reference.kron_linear,
        inputs,
        dtype=dtype,
        case=f"1 of {a_shape} x {b_shape}, x [{tokens}]",
    )


@needs_new_card
def test_a_layer_takes_the_kernel_and_trains_its_scale():
    layer = place(KroneckerLinear(320, 1024, scales=True, impl="fused").half())
    x = place(draw(2, 5, 320).half())
    y = layer(x)
    y.add_(1)  # no view of a custom function
    y.float().square().mean().backward()
    twin = place(KroneckerLinear(320, 1024, scales=True, impl="eager").half())
    twin.load_state_dict(layer.state_dict())
    (twin(x) + 1).float().square().mean().backward()
    for ours, plain in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, rtol=0.02, atol=1e-4)


@needs_new_card
def test_a_gradient_penalty_goes_through_the_definition():
    # small, since half precision overflows
    a, b = (place(0.1 * draw(1, 16, 16, seed=k)).half().requires_grad_() for k in (1, 2))
    x = place(draw(4, 256).half()).requires_grad_()
    penalties = []
    for impl in ("fused", "eager"):
        y = kron_linear(x, a, b, impl=impl)
        (gradient,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(gradient.float().square().mean(), a)[0])
    fused, eager = penalties
    assert (fused - eager).float().norm() < 0.01 * eager.float().norm()


@needs_new_card
def test_operators_are_registered_soundly():
    x, a, b = (place(t.half()) for t in (draw(3, 320), draw(17, 16), draw(18, 20)))
    torch.library.opcheck(_triton.forward, (x, a, b))
    torch.library.opcheck(_triton.backward, (_triton.forward(x, a, b), x, a, b))
    turned = [t.T.contiguous().T for t in (x, a, b)]  # strides of the results are the same
    torch.library.opcheck(_triton.forward, turned)
    torch.library.opcheck(_triton.backward, (_triton.forward(x, a, b), *turned))


@pytest.mark.parametrize(
    ("rank", "sides", "dtype"),
    [
        (2, (16, 16, 16, 16), torch.float16),
        (1, (16, 8, 16, 16), torch.float16),
        (1, (16, 16, 129, 16), torch.float16),
        (1, (128, 65, 16, 16), torch.float16),
        (1, (16, 16, 16, 16), torch.float32),
    ],
)
def test_factors_that_do_not_fit_are_refused(rank, sides, dtype):
    o1, i1, o2, i2 = sides
    a, b = draw(rank, o1, i1).to(dtype), draw(rank, o2, i2).to(dtype)
    with pytest.raises(ValueError, match="kron_linear: impl 'fused' cannot run: "):
        kron_linear(draw(2, i1 * i2).to(dtype), place(a), place(b), impl="fused")


@needs_new_card
def test_tracers_see_an_operator_and_transforms_are_refused(monkeypatch):
    layer = place(KroneckerLinear(256, 256, impl="fused").half())
    x = place(draw(3, 256).half())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (3, 256)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    compiled(x).float().sum().backward()
    graph = make_fx(layer)(x)
    torch.testing.assert_close(graph(x), layer(x))
    with pytest.raises(ValueError, match=r"kron_linear: .*torch\.func"):
        torch.func.vmap(layer)(x)
    monkeypatch.setattr("model_components._fused.fused_pays", lambda *_: True)
    layer.impl = "auto"
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x), rtol=0.01, atol=0.01)
    with pytest.raises(ValueError, match="order='b_first'"):
        kron_linear(x, layer.a, layer.b, order="b_first", impl="fused")


COMPILE = """
import torch
from kronecker import _triton as kernels
from tests.support.kernels import compiled, integers

count = 0
shapes = [(64, 64, 64, 64), (60, 64, 64, 60), (64, 128, 128, 64), (128, 64, 64, 128)]
for dtype in ("bf16", "fp16"):
    for o1, i1, o2, i2 in shapes:
        sizes = kernels._sizes(torch.empty(o1, i1), torch.empty(o2, i2))
        warps = sizes.pop("num_warps")
        halves = {name: "*" + dtype for name in ("x", "a", "b")} | integers("tokens")
        forward = halves | {"out": "*" + dtype}
        backward = halves | {"grad": "*" + dtype, "dx": "*" + dtype, "da": "*fp32", "db": "*fp32"}
        for capability, shared in ((80, 163), (90, 227), (100, 227)):
            tokens = {"TOKENS": kernels._TOKENS}
            compiled(kernels.forward_kernel, forward, sizes | tokens, capability, shared=shared, num_warps=warps)
            count += 1
            if capability >= 90:
                compiled(kernels.backward_kernel, backward, sizes, capability, shared=shared, num_warps=warps)
                count += 1
print("compiled", count)
"""


def test_kernels_compile_for_gpus_that_are_not_here():
    assert "compiled 40" in uninterpreted(COMPILE)
