"""Every start against its dense definition, and what each one promises."""

import pytest
import torch

from kronecker import KroneckerLinear, LowRankLinear, reference
from kronecker.init import Factors, als, correct_bias, prune, random, van_loan
from kronecker.layers.weights import start
from kronecker.moments import Moments
from tests.kronecker.test_functional import made
from tests.support.equivalence import judge

SHAPES = [
    ((6, 8), (1, 2), 1),
    ((9, 12), (3, 3), 2),
    ((8, 6), (2, 1), 2),
    ((5, 7), (5, 1), 1),
    ((12, 4), (4, 2), 3),
]


@pytest.mark.parametrize(("shape", "b_shape", "rank"), SHAPES)
def test_van_loan_is_the_truncated_svd(shape, b_shape, rank):
    def fast(weight):
        return van_loan(weight, b_shape, rank).weight()

    def dense(weight):
        return reference.van_loan(weight, b_shape, rank)

    judge(
        "van_loan",
        "eager",
        fast,
        dense,
        {"weight": made(*shape)},
        dtype=torch.float32,
        gradients=False,
        case=f"{rank} of {b_shape}",
    )


@pytest.mark.parametrize(("shape", "b_shape", "rank"), SHAPES)
def test_as_many_terms_as_the_smaller_factor_has_elements_are_exact(shape, b_shape, rank):
    a_size = shape[0] * shape[1] // (b_shape[0] * b_shape[1])
    found = van_loan(
        made(*shape, dtype=torch.float64), b_shape, min(a_size, b_shape[0] * b_shape[1])
    )
    assert found.error < 1e-7
    torch.testing.assert_close(found.weight(), made(*shape, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("keep", "place"), [("even", (0, 0)), ("odd", (1, 1)), ((1, 0), (1, 0))])
def test_prune(keep, place, dtype):
    judge(
        "prune",
        "eager",
        lambda weight: prune(weight, (2, 2), keep=keep).weight(),
        lambda weight: reference.prune(weight, (2, 2), place),
        {"weight": made(6, 8)},
        dtype=dtype,
        gradients=False,
        case=str(keep),
    )


def test_prune_keeps_outputs_exactly_and_takes_the_position_with_the_most_energy():
    weight = made(6, 4)
    weight[1::2] *= 3
    found = prune(weight, (2, 1), keep="energy").weight()
    assert torch.equal(found[1::2], weight[1::2])
    assert not found[0::2].any()


@pytest.mark.parametrize(("shape", "b_shape", "rank"), SHAPES)
def test_als_is_the_dense_alternation(shape, b_shape, rank):
    x = made(200, shape[1], seed=7)

    def fast(weight, x):
        begin = van_loan(weight, b_shape, rank)
        return als(Moments.of(x, weight), begin, rounds=3).weight()

    def dense(weight, x):
        begin = van_loan(weight.float(), b_shape, rank)
        begin = Factors(begin.a.to(weight.dtype), begin.b.to(weight.dtype), 0.0)
        moments = Moments.of(x, weight)
        moment, inputs = moments.damped().to(weight.dtype), moments.inputs.to(weight.dtype)
        cross = moments.cross.to(weight.dtype) + begin.weight() @ (moment - inputs)
        return reference.als(cross, moment, begin.a, begin.b, 3)

    judge(
        "als",
        "eager",
        fast,
        dense,
        {"weight": made(*shape), "x": x},
        dtype=torch.float32,
        gradients=False,
        case=f"{rank} of {b_shape}",
    )


def test_als_makes_outputs_better_though_not_the_weight():
    weight, x = made(12, 16), made(500, 16, seed=3) * torch.tensor([3.0, 0.1]).repeat(8)
    moments, begin = Moments.of(x, weight), van_loan(weight, (1, 2))
    found = als(moments, begin)
    assert found.error < 0.5 * moments.error(begin.weight())
    assert (found.weight() - weight).norm() >= (begin.weight() - weight).norm()
    errors = [als(moments, begin, rounds=n).error for n in (1, 2, 8)]
    assert errors == sorted(errors, reverse=True)


def test_moments_add_up_and_a_corrected_bias_gives_the_mean():
    weight, bias, x = made(6, 4), made(6, seed=2), made(50, 4, seed=1) + 1
    y = torch.nn.functional.linear(x, weight, bias)
    whole, parts = Moments.of(x, weight, bias), Moments.zeros(6, 4)
    for i in range(0, 50, 20):
        parts.add(x[i : i + 20], y[i : i + 20])
    torch.testing.assert_close(parts.cross, whole.cross, rtol=1e-5, atol=1e-4)
    found = als(whole.centered(), prune(weight, (2, 1)))
    fixed = correct_bias(whole, found.weight()).float()
    torch.testing.assert_close(
        (x @ found.weight().T + fixed).mean(0), y.mean(0), rtol=1e-4, atol=1e-4
    )
    one = correct_bias(Moments.of(x[:1], weight, bias), found.weight()).float()
    torch.testing.assert_close(x[0] @ found.weight().T + one, y[0], rtol=1e-4, atol=1e-4)


def test_random_keeps_the_size_of_activations():
    for shape, b_shape, rank in (
        ((512, 512), (2, 2), 1),
        ((512, 512), (4, 1), 3),
        ((512, 512), (16, 16), 4),
    ):
        torch.manual_seed(0)
        found = random(shape, b_shape, rank)
        y = torch.randn(200, 512, generator=torch.Generator().manual_seed(1)) @ found.weight().T
        assert 0.3 < float(y.std()) < 1.5, (b_shape, rank)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: van_loan(torch.zeros(4, 4), (2, 1)), r"van_loan:.*finite"),
        (lambda: van_loan(torch.full((4, 4), float("nan")), (2, 1)), r"van_loan:.*finite"),
        (lambda: van_loan(torch.ones(4, 4), (3, 1)), r"kronecker\.init:.*b_shape.*\(3.*1\)"),
        (lambda: van_loan(torch.ones(4, 4), (2, 1), 3), r"van_loan:.*rank.*3.*1.*2"),
        (lambda: prune(torch.ones(4, 4), (2, 1), keep=(2, 0)), r"prune:.*position"),
        (
            lambda: als(Moments.zeros(4, 4), prune(torch.ones(4, 4), (2, 1))),
            "no calibration tokens",
        ),
        (
            lambda: als(
                Moments.of(torch.ones(2, 4), torch.ones(6, 4)), prune(torch.ones(4, 4), (2, 1))
            ),
            "expected",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_start_of_several_terms_begins_with_the_pruned_one():
    from kronecker import KroneckerConfig

    weight = made(9, 12)
    found = start(weight, (3, 3), KroneckerConfig(b_shape=(3, 3), rank=2, init="prune"), None)
    assert torch.equal(found.a[0], weight[0::3, 0::3])
    assert found.error < prune(weight, (3, 3)).error


@pytest.mark.parametrize("kind", [KroneckerLinear, LowRankLinear])
@pytest.mark.parametrize("shape", [(0, 8), (8,), (3, 5)])
def test_inputs_without_rows_or_of_another_width_are_refused(kind, shape):
    with pytest.raises(ValueError, match=r"expected inputs \(\*B, 8\) with at least one row"):
        kind.from_linear(torch.nn.Linear(8, 8), rank=1, init="fitted", inputs=torch.zeros(shape))
