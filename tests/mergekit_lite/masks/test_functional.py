"""blend, masked_linear, masked_embedding: every impl × mode × granularity × dtype against the dense
definition."""

import importlib.util
import itertools

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from mergekit_lite.masks import blend, masked_embedding, masked_linear
from mergekit_lite.masks.constraints import mask_shape
from tests.benchmarks.measure import saved_bytes
from tests.mergekit_lite.masks import reference
from tests.support.equivalence import judge, place

CUDA = torch.cuda.is_available()
GRANULARITIES = ("scalar", "input", "output", "element")
IMPLS = ["eager"]
if CUDA or importlib.util.find_spec("triton"):
    IMPLS.append("fused")
# float64: by finite differences, below
DTYPES = {"eager": (torch.float32, torch.bfloat16, torch.float16)}
# triton's interpreter stores bfloat16 wrongly: that dtype is for a GPU
DTYPES["fused"] = (
    (torch.float32, torch.float16, torch.bfloat16) if CUDA else (torch.float32, torch.float16)
)
CASES = [(impl, dtype) for impl in IMPLS for dtype in DTYPES[impl]]


def made(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def parts(shape, granularity, count, dtype, transposed=False):
    weights = [made(*shape, seed=k, dtype=dtype) for k in range(count)]
    return weights, made(count, *mask_shape(shape, granularity, transposed), seed=9)


@pytest.mark.parametrize(("impl", "dtype"), CASES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("shape", "count"), [((33, 300), 2), ((1, 1), 3), ((7,), 2), ((5, 17), 4)])
def test_blend(shape, count, granularity, impl, dtype):
    weights, masks = parts(shape, granularity, count, dtype)

    def fast(masks):
        return blend(place(weights), masks, impl=impl)

    def dense(masks):
        return reference.blend([w.to(masks.dtype) for w in weights], masks)

    case = f"{count} of {list(shape)}"
    # it promises float32 sums and one rounding, so float32 sets the budget
    judge(
        f"blend, {granularity}",
        impl,
        fast,
        dense,
        {"masks": masks},
        dtype=dtype,
        working=torch.float32,
        case=case,
    )


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 3, 4, 4), ()])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_blend_of_experts_kernels_and_scalars(shape, granularity):
    weights, masks = parts(shape, granularity, 2, torch.float32)

    def dense(masks):
        return reference.blend([w.to(masks.dtype) for w in weights], masks)

    case = f"2 of {list(shape)}"
    judge(
        f"blend, {granularity}",
        "eager",
        lambda masks: blend(place(weights), masks),
        dense,
        {"masks": masks},
        dtype=torch.float32,
        case=case,
    )


# x's shape, out_features, components: odd, one, empty, wide enough for several column blocks
SHAPES = [((3, 4, 33), 20, 2), ((1, 1), 1, 2), ((0, 6), 4, 2), ((5, 700), 1600, 3)]


@pytest.mark.parametrize(("impl", "dtype"), CASES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("mode", ["accurate", "efficient"])
@pytest.mark.parametrize("transposed", [False, True])
def test_masked_linear(mode, granularity, transposed, impl, dtype):
    if mode == "efficient" and (granularity == "element" or impl == "fused"):
        pytest.skip("efficient has no element masks, and no kernel of its own")
    for x_shape, out_features, count in SHAPES:
        large = out_features > 1000
        if large and (
            dtype not in (torch.float32, torch.bfloat16) or (impl == "fused" and not CUDA)
        ):
            continue  # seconds each, and nothing new
        shape = (x_shape[-1], out_features) if transposed else (out_features, x_shape[-1])
        weights, masks = parts(shape, granularity, count, dtype, transposed)
        x = made(*x_shape, seed=5)
        bias = made(out_features, seed=6)

        def fast(x, masks, bias, weights=weights):
            return masked_linear(
                x, place(weights), masks, bias, mode=mode, transposed=transposed, impl=impl
            )

        def dense(x, masks, bias, weights=weights):
            cast = [w.to(x.dtype) for w in weights]
            return reference.masked_linear(x, cast, masks, bias, mode=mode, transposed=transposed)

        case = f"{'(I, O)' if transposed else '(O, I)'}, x {list(x_shape)}, {count}"
        inputs = {"x": x, "masks": masks, "bias": bias}
        judge(
            f"masked_linear {mode}, {granularity}",
            impl,
            fast,
            dense,
            inputs,
            dtype=dtype,
            case=case,
        )


@pytest.mark.parametrize(("impl", "dtype"), CASES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    "ids", [torch.tensor([[0, 3, 3], [8, 1, 0]]), torch.tensor(4), torch.zeros(0, 2).long()]
)
def test_masked_embedding(ids, granularity, impl, dtype):
    weights, masks = parts((9, 37), granularity, 2, dtype)

    def fast(masks):
        return masked_embedding(place(ids), place(weights), masks, impl=impl)

    def dense(masks):
        return reference.masked_embedding(ids, [w.to(masks.dtype) for w in weights], masks)

    judge(
        f"masked_embedding, {granularity}",
        impl,
        fast,
        dense,
        {"masks": masks},
        dtype=dtype,
        case=f"ids {list(ids.shape)}",
    )


@pytest.mark.parametrize("granularity", ["output", "element"])
def test_the_gradient_of_a_token_that_comes_often(granularity):
    # summed in bfloat16, the 257th of equal gradients and all after it would be lost
    weights, masks = parts((9, 5), granularity, 2, torch.bfloat16)
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        leaf = masks.detach().to(dtype).requires_grad_()
        rows = masked_embedding(torch.full((4000,), 3), [w.to(dtype) for w in weights], leaf)
        rows.sum().backward()
        gradients.append(leaf.grad.double())
    torch.testing.assert_close(*gradients, rtol=0.02, atol=0.5)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_finite_differences(granularity):
    weights, masks = parts((4, 6), granularity, 3, torch.float64)
    x, masks = made(2, 3, 6, dtype=torch.float64).requires_grad_(), masks.double().requires_grad_()
    modes = ["accurate"] if granularity == "element" else ["accurate", "efficient"]
    for mode in modes:
        assert torch.autograd.gradcheck(
            lambda x, m, mode=mode: masked_linear(x, weights, m, mode=mode), (x, masks)
        )
    assert torch.autograd.gradcheck(
        lambda m: masked_embedding(torch.tensor([1, 1, 3]), weights, m), (masks,)
    )


def test_inputs_that_are_not_contiguous():
    weights, masks = parts((5, 6), "input", 2, torch.float32)
    x = made(6, 4).T.requires_grad_()
    strided = [w.T.contiguous().T for w in weights]
    a, b = (
        masked_linear(x, weights, masks),
        masked_linear(x.contiguous(), strided, masks.expand(2, 1, 6)),
    )
    torch.testing.assert_close(a, b)
    a.sum().backward()  # the gradient of a sum is broadcast, with strides of 0
    torch.testing.assert_close(x.grad, blend(weights, masks).sum(0).expand(4, -1))


@pytest.mark.parametrize("mode", ["accurate", "efficient"])
def test_what_is_saved_for_backward_is_x(mode):
    weights, masks = parts((64, 32), "input", 2, torch.float32)
    x, masks = made(10, 32).requires_grad_(), masks.requires_grad_()
    saved = saved_bytes(lambda: masked_linear(x, weights, masks, mode=mode), resident=weights)
    assert saved == x.nbytes + masks.nbytes
    plain = saved_bytes(lambda: reference.masked_linear(x, weights, masks), resident=weights)
    assert plain >= x.nbytes + weights[0].nbytes
    three = saved_bytes(
        lambda: [masked_linear(x, weights, masks) for _ in range(3)], resident=weights
    )
    assert three == x.nbytes + masks.nbytes  # q, k and v share one x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_accurate_has_the_bits_of_the_stock_layer_with_the_blended_weight(dtype, granularity):
    weights, masks = parts((20, 12), granularity, 3, dtype)
    bias, x = made(20, dtype=dtype), made(2, 5, 12, dtype=dtype)
    stock = torch.nn.Linear(12, 20).to(dtype)
    stock.weight.data, stock.bias.data = blend(weights, masks), bias
    assert torch.equal(masked_linear(x, weights, masks, bias), stock(x))
    turned = Conv1D(20, 12).to(dtype)
    turned.weight.data, turned.bias.data = stock.weight.data.T.contiguous(), bias
    other = [w.T.contiguous() for w in weights]
    assert torch.equal(
        masked_linear(x, other, masks.transpose(1, 2), bias, transposed=True), turned(x)
    )


def test_auto_mode_is_efficient_for_few_tokens():
    weights, masks = parts((6, 4), "input", 2, torch.float32)
    few, many = made(16, 4), made(17, 4)
    assert torch.equal(
        masked_linear(few, weights, masks, mode="auto"),
        masked_linear(few, weights, masks, mode="efficient"),
    )
    assert torch.equal(
        masked_linear(many, weights, masks, mode="auto"), masked_linear(many, weights, masks)
    )


def test_autocast_computes_in_its_dtype_and_keeps_masks_float32():
    weights, masks = parts((6, 4), "input", 2, torch.float32)
    x, masks = made(3, 4).requires_grad_(), masks.requires_grad_()
    for mode in ("accurate", "efficient"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = masked_linear(x, weights, masks, mode=mode)
            assert y.dtype == torch.nn.functional.linear(x, weights[0]).dtype == torch.bfloat16
            kept = saved_bytes(
                lambda mode=mode: masked_linear(x, weights, masks, mode=mode), resident=weights
            )
        # no copies of weights in autocast's dtype; efficient keeps the masks in it
        of_masks = masks.nbytes if mode == "accurate" else masks.nbytes // 2
        assert kept == x.nbytes // 2 + of_masks
        y.float().sum().backward()
        assert masks.grad.dtype == x.grad.dtype == torch.float32


@pytest.mark.parametrize("impl", IMPLS)
def test_compiles_without_a_graph_break(impl):
    weights, masks = parts((6, 4), "input", 2, torch.float32)
    weights, x = place(weights), place(made(3, 4)).requires_grad_()
    masks = place(masks).requires_grad_()
    compiled = torch.compile(
        lambda x, m: masked_linear(x, weights, m, impl=impl), fullgraph=True, backend="aot_eager"
    )
    results = []
    for function in (compiled, lambda x, m: masked_linear(x, weights, m, impl=impl)):
        y = function(x, masks)
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), (x, masks))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


BAD = {
    "expected one of eager": {"impl": "quick"},
    "expected x with a last dimension of 4": {"x": torch.zeros(2, 5)},
    "expected one dtype": {"x": torch.zeros(2, 4).double()},
    "mode is 'quick'": {"mode": "quick"},
    "does not support element masks": {"mode": "efficient", "masks": torch.zeros(2, 6, 4)},
    "masks have shape": {"masks": torch.zeros(2, 6)},
    "masks have shape [3": {"masks": torch.zeros(3, 1, 4)},
    "expected one shape and one dtype": {"weights": [torch.zeros(6, 4), torch.zeros(6, 5)]},
    "requires grad": {"weights": [torch.zeros(6, 4, requires_grad=True), torch.zeros(6, 4)]},
}


@pytest.mark.parametrize("message", BAD)
def test_refuses(message):
    arguments = {
        "x": torch.zeros(2, 4),
        "weights": [torch.zeros(6, 4)] * 2,
        "masks": torch.zeros(2, 1, 4),
    }
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is looked at
        masked_linear(**arguments | BAD[message])
    assert message in str(caught.value)


def test_fused_is_refused_where_it_cannot_run():
    weights, masks = parts((6, 4), "input", 2, torch.float32)
    with pytest.raises(ValueError, match=r"masked_linear:.*'efficient'"):
        masked_linear(made(2, 4), weights, masks, mode="efficient", impl="fused")
    weights, masks = parts((6, 4), "input", 2, torch.float64)
    with pytest.raises(ValueError, match=r"blend:.*'fused'.*float"):
        blend(place(weights), place(masks), impl="fused")


def test_every_granularity_has_its_shape():
    for shape, granularity in itertools.product([(8, 4), (8,), (3, 8, 4)], GRANULARITIES):
        found = mask_shape(shape, granularity)
        assert torch.broadcast_shapes(found, shape) == torch.Size(shape)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 600])
def test_a_blend_is_contiguous_and_takes_float8(dtype, size):
    """Below and above a stretch."""
    weights = [torch.randn(size, size).to(dtype).T for _ in range(2)]
    masks = torch.rand(2, 1, size)
    merged = blend(weights, masks, impl="eager")
    assert merged.is_contiguous()
    expected = sum(w.float() * m for w, m in zip(weights, masks, strict=True)).to(dtype)
    assert torch.equal(merged.float(), expected.float())
