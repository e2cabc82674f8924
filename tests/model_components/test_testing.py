"""The judge, the battery and the counter must see what they are there to see."""

import sys

import pytest
import torch
from torch import nn

from model_components.testing import (
    BEHAVIORS,
    NotEquivalent,
    check_equivalent,
    check_module,
    count_operations,
)
from tests.support.equivalence import ROWS, judge, write_numerics


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
    assert check_equivalent(reference, reference, inputs, dtype=dtype).worst <= 0.5 + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_wrong_by_one_per_cent_fails(inputs, dtype):
    with pytest.raises(NotEquivalent, match="output"):
        check_equivalent(
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
        check_equivalent(fast, reference, inputs, dtype=dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory is not poisoned where there is a GPU")
def test_an_output_left_unwritten_fails(inputs):
    def fast(x, w):
        out = torch.empty(33, 9, dtype=x.dtype)
        out[:32] = reference(x[:32], w)
        return out

    with pytest.raises(NotEquivalent, match="has NaN or infinity"):
        check_equivalent(fast, reference, inputs, dtype=torch.float32, gradients=False)


def test_one_wrong_element_fails(inputs):
    def fast(x, w):
        out = reference(x, w).clone()
        out[0, 0] += 1e-3
        return out

    with pytest.raises(NotEquivalent, match="maximum"):
        check_equivalent(fast, reference, inputs, dtype=torch.float32, gradients=False)


def test_a_wrong_shape_or_dtype_fails(inputs):
    with pytest.raises(NotEquivalent, match="shape"):
        check_equivalent(
            lambda x, w: reference(x, w)[:1],
            reference,
            inputs,
            dtype=torch.float32,
            gradients=False,
        )
    with pytest.raises(NotEquivalent, match="dtype"):
        check_equivalent(
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


class Doubled(torch.autograd.Function):
    """A linear layer of a careless author: no second derivative, and the weight is not saved."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x.detach(), weight
        return (x @ weight.T).view(x.shape[0], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad @ ctx.weight, grad.T @ ctx.x


class Careless(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("shift", torch.zeros(3))

    def reset_parameters(self):
        if self.fault != "reset":
            nn.init.normal_(self.weight)

    def forward(self, x):
        if self.fault == "function":
            return Doubled.apply(x, self.weight)
        if self.fault == "first column":
            return (x @ self.weight.T)[:, :1]
        if self.fault == "kept":
            self.total = getattr(self, "total", 0) + x.detach().sum()
            return x @ self.weight.T + 1e-2 * self.total
        if self.fault == "stale" and not self.training:
            self.cached = getattr(self, "cached", self.weight.detach().clone())
            return x @ self.cached.T
        if self.fault == "detached":
            return x.detach() @ self.weight.T
        return x @ self.weight.T


FAULTS = {
    "none": set(),
    "function": {"gradient_penalty", "changed_before_backward"},
    "first column": {"leading_dimensions"},
    "kept": {"modes_switched", "checkpointed"},
    "detached": {"gradients", "parameters_frozen"},
    "reset": {"parameters_reset"},
    "stale": {"state_replaced_after_use"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_battery_finds_what_is_silently_wrong(fault):
    report = check_module(lambda: Careless(fault), torch.randn(6, 4))
    assert FAULTS[fault] <= set(report.wrong), report
    if fault == "none":
        assert report.passed == tuple(BEHAVIORS), report
    if fault == "function":  # which raises, too, where torch notices
        assert {"func_grad", "output_changed_in_place"} <= set(report.raised), report


class Attention(nn.Module):
    """Its gradient of the keys' bias is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def reset_parameters(self):
        self.q.reset_parameters()
        self.k.reset_parameters()

    def forward(self, x):
        assert x.dim() == 3
        return torch.softmax(self.q(x) @ self.k(x).mT, -1) @ x


def test_a_gradient_that_is_zero_and_a_layer_s_own_assert_are_not_wrong():
    report = check_module(Attention, torch.randn(6, 5, 4))
    assert not report.wrong, report
    assert set(report.raised) == {"leading_dimensions"}, report


def test_the_battery_leaves_no_trace():
    hook = sys.excepthook
    check_module(lambda: nn.Linear(4, 3), torch.randn(6, 4))
    assert sys.excepthook is hook
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    check_module(lambda: nn.Linear(4, 3), torch.ones(6, 4), only=["deepcopied", "fully_sharded"])
    assert torch.equal(torch.rand(3), expected)


def test_the_battery_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"check_module:.*function.*Linear"):
        check_module(nn.Linear(4, 3), torch.randn(6, 4))
    with pytest.raises(ValueError, match=r"check_module:.*even.*\[5, 4\]"):
        check_module(lambda: nn.Linear(4, 3), torch.randn(5, 4))
    with pytest.raises(ValueError, match=r"check_module:.*list.*'pickled'"):
        check_module(lambda: nn.Linear(4, 3), torch.randn(6, 4), only="pickled")
    with pytest.raises(ValueError, match=r"check_module:.*'deepcopy'"):
        check_module(lambda: nn.Linear(4, 3), torch.randn(6, 4), only=["deepcopy"])
    report = check_module(lambda: nn.LSTM(4, 3), torch.randn(6, 4), only=["float64"])
    assert "output=" in report.raised["float64"]


def test_every_behavior_says_what_it_tries():
    assert all(function.__doc__ for function in BEHAVIORS.values())


def test_operations_and_bytes_are_counted():
    x = torch.randn(8, 4, requires_grad=True)

    def step():
        (x @ x.T).sum().backward()

    found = count_operations(step)
    assert found.by_name["mm"] == 3
    assert found.largest == 8 * 8 * 4
    assert found.operations == sum(found.by_name.values())
    assert "view" not in found.by_name
