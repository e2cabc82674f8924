"""The judge must see what it is there to see."""

import pytest
import torch

from tests.support.equivalence import ROWS, NotEquivalent, judge, write_numerics


def reference(x, w):
    return torch.tanh(x @ w.mT)


class _Tampered(torch.autograd.Function):
    """The identity, with a planted error in the backward pass."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(33, 17, generator=generator),
        "w": torch.randn(9, 17, generator=generator),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_passes_its_own_judgement(inputs, dtype):
    row = judge("self", "reference", reference, reference, inputs, dtype=dtype)
    assert row.worst <= 0.5 + 1e-6
    ROWS.remove(row)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_wrong_by_one_per_cent_fails(inputs, dtype):
    with pytest.raises(NotEquivalent, match="output"):
        judge(
            "bad",
            "fast",
            lambda x, w: reference(x, w) * 1.01,
            reference,
            inputs,
            dtype=dtype,
            gradients=False,
        )


# In half precision the reference's own gradient error can hide 1 %: so paths are always judged in
# float32 as well.
@pytest.mark.parametrize(
    ("dtype", "factor"), [*((d, 0.0) for d in DTYPES), (torch.float32, 1.01), (torch.float64, 1.01)]
)
def test_a_gradient_that_is_zero_or_wrong_by_one_per_cent_fails(inputs, dtype, factor):
    def fast(x, w):
        return reference(x, _Tampered.apply(w, factor))

    with pytest.raises(NotEquivalent, match="gradient of w"):
        judge("bad", "fast", fast, reference, inputs, dtype=dtype)


def test_an_output_left_unwritten_fails(inputs):
    def fast(x, w):
        out = torch.empty(33, 9, dtype=x.dtype)
        out[:32] = reference(x[:32], w)
        return out

    with pytest.raises(NotEquivalent, match="not finite"):
        judge("bad", "fast", fast, reference, inputs, dtype=torch.float32, gradients=False)


def test_one_wrong_element_fails(inputs):
    def fast(x, w):
        out = reference(x, w).clone()
        out[0, 0] += 1e-3
        return out

    with pytest.raises(NotEquivalent, match="maximum"):
        judge("bad", "fast", fast, reference, inputs, dtype=torch.float32, gradients=False)


def test_a_wrong_shape_or_dtype_fails(inputs):
    with pytest.raises(NotEquivalent, match="shape"):
        judge(
            "bad",
            "fast",
            lambda x, w: reference(x, w)[:1],
            reference,
            inputs,
            dtype=torch.float32,
            gradients=False,
        )
    with pytest.raises(NotEquivalent, match="dtype"):
        judge(
            "bad",
            "fast",
            lambda x, w: reference(x, w).double(),
            reference,
            inputs,
            dtype=torch.float32,
            gradients=False,
        )


def test_the_page_lists_the_worst_case(tmp_path, inputs):
    row = judge("shown", "fast", reference, reference, inputs, dtype=torch.float32)
    write_numerics(tmp_path / "numerics.md")
    assert "| `shown` | fast | float32 | 1 |" in (tmp_path / "numerics.md").read_text()
    ROWS.remove(row)


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory is not poisoned where there is a GPU")
def test_memory_that_nobody_wrote_is_poisoned():
    for made in (torch.empty(3), torch.ones(2).new_empty(4), torch.empty_like(torch.ones(2, 2))):
        assert made.isnan().all()
