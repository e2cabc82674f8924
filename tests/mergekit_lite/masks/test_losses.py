"""masked_kl against the dense definition, and that it never holds a (positions, vocabulary) tensor."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mergekit_lite.masks import KLConfig, MaskCollator, Merger, distillation, masked_kl
from mergekit_lite.masks._eager.evidence import evidence
from mergekit_lite.masks.constraints import mask_shape
from mergekit_lite.masks.losses import mask_penalty
from tests.mergekit_lite.masks import reference
from tests.support.equivalence import judge, place
from tests.support.models import tiny

N, H, V, K = 37, 8, 50, 3
DIRECTIONS = ("forward", "reverse")
GRANULARITIES = ("scalar", "input", "output", "element")


def made(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shares(kind, positions=N, count=K):
    generator = torch.Generator().manual_seed(3)
    if kind == "task":
        return torch.nn.functional.one_hot(
            torch.randint(count, (positions,), generator=generator), count
        ).double()
    if kind == "mixed":
        return torch.rand(positions, count, generator=generator, dtype=torch.float64).softmax(-1)
    return "confidence"


CASES = [
    (d, c, "input", t, e)
    for d in DIRECTIONS
    for c in ("task", "mixed", "confidence")
    for t, e in [(1, 0), (2, 0.3)]
]
CASES += [("forward", "hard", "input", 1, 0)] + [
    ("forward", "task", g, 1, 0) for g in GRANULARITIES
]


DRAWS = [(torch.float32, 0), (torch.float32, 400), (torch.bfloat16, 0), (torch.float16, 0)]


# one draw may hide a rounding that another shows
@pytest.mark.parametrize(("dtype", "draw"), DRAWS)
@pytest.mark.parametrize(
    ("direction", "kind", "granularity", "temperature", "cross_entropy"), CASES
)
def test_masked_kl(direction, kind, granularity, temperature, cross_entropy, dtype, draw):
    if dtype == torch.float16 and direction != "forward":
        pytest.skip("the definition itself underflows to NaN in float16: it sets no budget")
    teachers = [made(N, H, seed=draw + k).to(dtype) for k in range(K)]
    heads = [made(V, H, seed=draw + 10 + k).to(dtype) for k in range(K)]
    options = {
        "coefficients": shares(kind),
        "confidence_temperature": 0.0 if kind == "hard" else 0.7,
        "temperature": float(temperature),
        "direction": direction,
        "labels": torch.randint(V, (N,), generator=torch.Generator().manual_seed(4)),
        "cross_entropy": cross_entropy,
    }

    def fast(student, masks):
        return masked_kl(student, place(teachers), place(heads), masks, **place(options)).to(dtype)

    def dense(student, masks):
        cast = [[t.to(student.dtype) for t in ts] for ts in (teachers, heads)]
        own = options["coefficients"]
        own = own.to(student.dtype) if isinstance(own, torch.Tensor) else own
        return reference.masked_kl(student, *cast, masks, **options | {"coefficients": own})

    masks = made(K, *mask_shape((V, H), granularity), seed=draw + 21).abs()
    inputs = {"student": made(N, H, seed=draw + 20), "masks": masks}
    case = f"{direction}, {kind}, T {temperature}, cross-entropy {cross_entropy}"
    judge(f"masked_kl, {granularity}", "eager", fast, dense, inputs, dtype=dtype, case=case)


def test_logits_without_heads_and_a_head_without_masks():
    students, teachers = made(N, V), [made(N, V, seed=k) for k in (1, 2)]
    options = {"coefficients": shares("mixed", count=2)}
    for heads in (None, [torch.eye(V, dtype=torch.float64)] * 2):
        leaf = students.clone().requires_grad_()
        found = masked_kl(leaf, teachers, heads, **options)
        expected = reference.masked_kl(leaf, teachers, **options)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(v, leaf)[0] for v in (found, expected)))


def test_a_bias_and_a_normalizer():
    student, teacher, head = made(N, H).requires_grad_(), made(N, H, seed=1), made(V, H, seed=2)
    bias, other = made(V, seed=3).requires_grad_(), made(V, seed=4)
    found = masked_kl(
        student,
        [teacher],
        [head],
        coefficients=torch.ones(1),
        bias=bias,
        teacher_biases=[other],
        normalizer=5.0,
    )
    expected = reference.masked_kl(
        student @ head.T + bias,
        [teacher @ head.T + other],
        coefficients=torch.ones(N, 1, dtype=torch.float64),
    )
    torch.testing.assert_close(found, expected * N / 5)
    for a, b in zip(
        torch.autograd.grad(found, (student, bias)),
        torch.autograd.grad(expected, (student, bias)),
        strict=True,
    ):
        torch.testing.assert_close(a, b * N / 5)


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_of_its_own_is_trained(bias):
    student, head = made(N, H).requires_grad_(), made(V, H, seed=5).requires_grad_()
    teachers, heads = [made(N, H, seed=k) for k in (1, 2)], [made(V, H, seed=k) for k in (3, 4)]
    own = made(V, seed=6).requires_grad_() if bias else None
    coefficients = shares("mixed", count=2)
    found = masked_kl(student, teachers, heads, head=head, bias=own, coefficients=coefficients)
    logits = student @ head.T + (own if bias else 0)
    targets = [t @ h.T for t, h in zip(teachers, heads, strict=True)]
    expected = reference.masked_kl(logits, targets, coefficients=coefficients)
    torch.testing.assert_close(found, expected)
    leaves = [student, head, own] if bias else [student, head]
    for a, b in zip(*(torch.autograd.grad(v, leaves) for v in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_parameters_may_depend_on_each_other_and_have_hooks():
    student, masks = made(N, H), made(2, V, 1, seed=1).requires_grad_()
    teachers, heads = [made(N, H, seed=k) for k in (2, 3)], [made(V, H, seed=k) for k in (4, 5)]
    options = {"coefficients": shares("mixed", count=2)}
    seen = []
    acting = masks.softmax(0)
    acting.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    found = masked_kl(
        student, teachers, heads, acting, bias=(acting[:, :, 0] ** 2).sum(0), **options
    )
    found.backward()
    assert len(seen) == 1
    copy = masks.detach().requires_grad_()
    again = copy.softmax(0)
    weight = (again * torch.stack(heads)).sum(0)
    logits = student @ weight.T + (again[:, :, 0] ** 2).sum(0)
    targets = [t @ h.T for t, h in zip(teachers, heads, strict=True)]
    reference.masked_kl(logits, targets, **options).backward()
    torch.testing.assert_close(masks.grad, 2 * copy.grad)


def test_heads_are_frozen_and_biases_may_have_another_dtype():
    weight = torch.nn.Parameter(made(V, H).bfloat16())
    student = made(N, H, seed=1).bfloat16().requires_grad_()
    bias = made(V, seed=2).float().requires_grad_()
    loss = masked_kl(
        student,
        [student],
        [weight],
        bias=bias,
        teacher_biases=[bias.detach()],
        coefficients=torch.ones(1),
        normalizer=torch.ones(1, dtype=torch.float64),
    )
    loss.backward()
    assert weight.grad is None
    assert loss.shape == ()
    assert loss.dtype == bias.grad.dtype == torch.float32
    assert loss.abs() < 1e-6


@pytest.mark.parametrize("granularity", ["scalar", "input", "output"])
def test_an_average_of_equal_heads_is_that_head(granularity):
    """A third has no short form in bfloat16, and rounded masks would scale all logits."""
    states, head = made(128, 64).bfloat16(), (made(2000, 64, seed=1) / 8).bfloat16()
    masks = torch.full((3, *mask_shape((2000, 64), granularity)), 1 / 3)
    loss = masked_kl(states, [states] * 3, [head] * 3, masks, coefficients=torch.ones(3) / 3)
    assert loss < 2e-5


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_targets_that_underflow_give_finite_losses(direction):
    student = torch.randn(4, V).requires_grad_()
    teachers = [torch.full((4, V), -300.0), torch.full((4, V), -300.0)]
    teachers[0][:, 0] = teachers[1][:, 1] = 300.0
    for coefficients in (torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]), "confidence"):
        loss = masked_kl(student, teachers, coefficients=coefficients, direction=direction)
        assert torch.isfinite(loss)
        assert torch.isfinite(torch.autograd.grad(loss, student)[0]).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", ["task", "mixed", "confidence", "hard"])
def test_a_teacher_that_is_nan_is_no_perfect_one(kind, direction):
    teachers = [made(N, V), made(N, V, seed=1), made(N, V, seed=2)]
    for teacher in teachers:
        teacher[3] = float("nan")
    options = {
        "coefficients": shares(kind),
        "confidence_temperature": 0.0 if kind == "hard" else 1.0,
    }
    assert masked_kl(made(N, V, seed=3), teachers, direction=direction, **options).isnan()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tokens_that_nobody_can_say_count_nothing(direction):
    """A vocabulary filled up to a round size, whose last logits are minus infinity."""
    student, teachers = made(N, V), [made(N, V, seed=1), made(N, V, seed=2)]
    options = {"coefficients": torch.tensor([0.3, 0.7]).double(), "direction": direction}
    wide = [torch.cat([x, torch.full((N, 3), -torch.inf)], 1) for x in (student, *teachers)]
    leaf = wide[0].requires_grad_()
    loss = masked_kl(leaf, wide[1:], **options)
    torch.testing.assert_close(loss, masked_kl(student, teachers, **options))
    assert torch.autograd.grad(loss, leaf)[0].isfinite().all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_small_confidence_temperature_takes_the_surest_teacher(direction):
    student, teachers = made(N, V).float(), [made(N, V, seed=k).float() for k in (1, 2, 3)]
    limit = masked_kl(student, teachers, confidence_temperature=0.0, direction=direction)
    for temperature in (1e-6, 1e-12, 1e-30):
        found = masked_kl(
            student, teachers, confidence_temperature=temperature, direction=direction
        )
        torch.testing.assert_close(found, limit, rtol=1e-5, atol=0)


def test_evidence_is_how_probable_a_teacher_finds_an_example():
    log_probs = -made(N, K).abs() * 3
    example = torch.tensor([0] * 5 + [2] * 1 + [3] * 20 + [7] * (N - 26))
    found = evidence(log_probs, example)
    torch.testing.assert_close(found, reference.evidence(log_probs, example))
    torch.testing.assert_close(found.sum(1), torch.ones(N).double())


def test_an_impossible_token_spoils_no_other_example():
    log_probs = -made(8, 2).abs()
    log_probs[1, 0] = -torch.inf
    log_probs[5] = -torch.inf
    found = evidence(log_probs, torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]))
    assert found.isfinite().all()
    assert found[2, 0] < 1e-6
    torch.testing.assert_close(found[3:5], evidence(log_probs[3:5], torch.zeros(2)))
    torch.testing.assert_close(found[5:].sum(1), torch.ones(3).double())


def test_evidence_is_not_in_the_dtype_of_autocast():
    heads = [made(V, H, seed=k).float() for k in (1, 2)]
    teachers = [made(N, H, seed=k).float() for k in (3, 4)]
    arguments = (teachers, {"heads": heads}, torch.arange(N) % V, torch.zeros(N, dtype=torch.long))
    expected = distillation._evidence(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(distillation._evidence(*arguments), expected)


class Largest(TorchDispatchMode):
    """The largest result of any operation that is not a view, in elements."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            given = {id(a) for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)}
            for value in tree_leaves(result):
                if isinstance(value, torch.Tensor) and id(value) not in given:
                    self.seen = max(self.seen, value.numel())
        return result


@pytest.mark.parametrize("kind", ["task", "mixed", "confidence", "hard"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_tensor_is_as_large_as_the_logits(direction, kind):
    positions, vocabulary = 600, 3000
    student = torch.randn(positions, H, requires_grad=True)
    heads, teachers = (
        [torch.randn(vocabulary, H) for _ in range(K)],
        [torch.randn(positions, H) for _ in range(K)],
    )
    masks = torch.rand(K, 1, H, requires_grad=True)
    own = shares(kind, positions)
    options = {
        "coefficients": own,
        "confidence_temperature": 0.0 if kind == "hard" else 1.0,
        "direction": direction,
    }
    with Largest() as seen:
        masked_kl(student, teachers, heads, masks, **options).backward()
    assert seen.seen <= positions * vocabulary / 12
    with Largest() as plain:
        reference.masked_kl(
            student, teachers, heads, masks, **options | {"coefficients": own}
        ).backward()
    assert plain.seen >= positions * vocabulary  # the measure sees what it should


def test_gradients_do_not_vanish_in_float16():
    """They are divided by the number of positions after everything else."""
    positions = 4096
    student = (0.1 * made(positions, H)).half().requires_grad_()
    heads = [made(2000, H, seed=k).half() for k in range(2)]
    teacher = (0.1 * made(positions, H, seed=3)).half()
    masks = torch.full((2, 1, H), 0.5, requires_grad=True)
    loss = masked_kl(student, [teacher, None], heads, masks, coefficients=torch.tensor([1.0, 0.0]))
    (loss * 65536).backward()  # as a loss scaler would
    wide = student.detach().float().requires_grad_()
    other = masks.detach().clone().requires_grad_()
    exact = masked_kl(
        wide,
        [teacher.float(), None],
        [h.float() for h in heads],
        other,
        coefficients=torch.tensor([1.0, 0.0]),
    )
    (exact * 65536).backward()
    torch.testing.assert_close(
        student.grad.float(), wide.grad, rtol=0.05, atol=0.05 * wide.grad.abs().mean().item()
    )
    torch.testing.assert_close(
        masks.grad, other.grad, rtol=0.05, atol=0.05 * other.grad.abs().mean().item()
    )


def test_no_positions_give_zero_with_a_graph():
    student, masks = torch.zeros(0, H, requires_grad=True), torch.ones(2, 1, H, requires_grad=True)
    bias = torch.ones(V, requires_grad=True)
    loss = masked_kl(
        student,
        [None, None],
        [torch.ones(V, H)] * 2,
        masks,
        coefficients=torch.zeros(0, 2),
        bias=bias,
    )
    loss.backward()
    assert loss == 0
    assert bias.grad.abs().sum() == 0  # DDP waits for every gradient
    assert masks.grad.abs().sum() == 0
    nothing = torch.zeros(0, V, dtype=torch.float64)
    assert masked_kl(nothing, [nothing], coefficients=torch.ones(1)).dtype == torch.float64


def test_nothing_is_kept_when_no_gradient_is_asked_for():
    with torch.no_grad():
        loss = masked_kl(made(N, V), [made(N, V, seed=1)], coefficients=torch.ones(1))
    assert loss.grad_fn is None


BAD = {
    "expected one or more teachers, got none": {"teachers": []},
    "labels have shape [2], expected [3]": {"cross_entropy": 1.0, "labels": torch.tensor([0, 1])},
    "direction is 'up'": {"direction": "up"},
    "of one shape (N, H)": {"teachers": [torch.zeros(3, 5), None]},
    "expected 2 or more heads of one shape (V, 4)": {"heads": [torch.zeros(6, 4)]},
    "have shape [3, 1, 4] with 2 heads": {"masks": torch.ones(3, 1, 4)},
    "have shape [2, 1, 4] with 0 heads": {"heads": None},
    "coefficients have shape [4]": {"coefficients": torch.ones(4)},
    "expected a tensor for teacher 1, which has coefficients": {
        "coefficients": torch.tensor([0.5, 0.5])
    },
    "expected labels of shape (N,) for cross_entropy": {"cross_entropy": 1.0},
    "labels are from 0 to 6, expected 0 to 5": {
        "cross_entropy": 1.0,
        "labels": torch.tensor([0, 6, 1]),
    },
    "lowest of the coefficients is -0.5": {"coefficients": torch.tensor([1.5, -0.5])},
    "sums over teachers are 0.5 to 0.5": {"coefficients": torch.tensor([0.5, 0.0])},
    "sums over teachers are nan": {"coefficients": torch.tensor([float("nan"), 0.0])},
    "expected coefficients to be a tensor or 'confidence', got 'task'": {"coefficients": "task"},
    "for every teacher, as coefficients='confidence' requires, got None for teacher 1": {
        "coefficients": "confidence"
    },
    "head has shape [5, 4], expected the shape of heads, [6, 4]": {
        "masks": None,
        "head": torch.ones(5, 4),
    },
    "expected either head or masks, got both": {"head": torch.ones(6, 4)},
    "expected heads, since head is given, got None": {
        "heads": None,
        "masks": None,
        "head": torch.ones(6, 4),
    },
    "1 teacher_biases for 2 teachers": {"teacher_biases": [None]},
    "expected heads, since bias is given, got None": {
        "heads": None,
        "masks": None,
        "bias": torch.ones(4),
    },
    "temperature is 0, expected": {"temperature": 0},
    "temperature is -1, expected": {"temperature": -1},
    "confidence_temperature is -1": {"confidence_temperature": -1},
    "expected 2 or more heads of one shape (V": {"heads": [torch.zeros(6, 4), torch.zeros(7, 4)]},
}


@pytest.mark.parametrize("message", BAD)
def test_refuses(message):
    arguments = {
        "student": torch.zeros(3, 4),
        "teachers": [torch.zeros(3, 4), None],
        "heads": [torch.zeros(6, 4)] * 2,
        "masks": torch.ones(2, 1, 4),
        "coefficients": torch.tensor([1.0, 0.0]),
    }
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is looked at
        masked_kl(**arguments | BAD[message])
    assert message in str(caught.value)


def test_what_no_teacher_is_needed_for():
    student, none = torch.zeros(2, 3), [None, None]
    assert masked_kl(student[:0], none, coefficients="confidence") == 0
    # two teachers, and a base
    states, heads = (torch.randn(3, 4), [torch.randn(6, 4) for _ in range(3)])
    biases = [torch.randn(6) for _ in range(3)]
    numbers = {"coefficients": torch.tensor([0.5, 0.5]), "bias": biases[2]}
    masks = torch.ones(3, 1, 1)
    three, two = (
        masked_kl(states, [states, states], heads, masks, teacher_biases=b, **numbers)
        for b in (biases, biases[:2])
    )
    assert torch.equal(three, two)


def test_penalties():
    masks = [torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[0.5], [-0.5]])]
    a, b = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([3.0, 0.0, -0.5])
    expected = {
        "l1": torch.cat([a, b]).abs().mean(),
        "l2": torch.cat([a, b]).square().mean(),
        "similarity": torch.cosine_similarity(a, b, dim=0),
    }
    for name, value in expected.items():
        torch.testing.assert_close(mask_penalty(masks, KLConfig(**{name: 2.0})), 2 * value)
    assert mask_penalty(masks, KLConfig()) == 0


def test_masks_that_are_all_zero_get_no_nan_from_a_penalty():
    masks = [torch.tensor([[1.0, 1.0], [0.0, 0.0]], requires_grad=True)]
    mask_penalty(masks, KLConfig(similarity=1.0)).backward()
    assert masks[0].grad.isfinite().all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"coefficients": "loud"}, r"KLConfig:.*task"),
        ({"direction": "up"}, r"KLConfig:.*forward"),
        ({"temperature": 0}, "temperature is 0"),
        ({"l1": -1}, "l1 is -1"),
        ({"coefficients": "fixed"}, "shares belong"),
        ({"shares": (1.0, 2.0)}, "shares belong"),
        ({"coefficients": "fixed", "shares": (0.0, 0.0)}, "sum above 0"),
    ],
)
def test_config_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        KLConfig(**values)


def test_configs_round_trip():
    config = KLConfig(coefficients="fixed", shares=(1.0, 3.0), direction="reverse", l2=0.1)
    assert KLConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match=r"KLConfig:.*mode"):
        KLConfig.from_json('{"mode": 1}')


def test_packed_rows_of_a_decoder_that_mixes_them_are_refused():
    """Bloom's positions come from its mask, so its packed examples see each other."""
    rows = [{"input_ids": [5, 6, 7, 8], "task": 0}, {"input_ids": [20, 21, 22], "task": 0}]
    packed = MaskCollator(pad_token_id=0, pack=True)(rows)
    merger = Merger([tiny("bloom", k) for k in (0, 1)])
    with pytest.raises(ValueError, match="got packed rows, but in BloomForCausalLM the logits"):
        merger.distill(KLConfig(), **packed)
    Merger([tiny("llama", k) for k in (0, 1)]).distill(KLConfig(), **packed)
