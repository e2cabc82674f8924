"""Packed attention, the links and the losses, each against its definition."""

import pytest
import torch
import torch.nn.functional as F
from tests.support.equivalence import judge

from heads.pairwise import reference
from heads.pairwise.functional import (
    davidson,
    log_probabilities,
    packed_attention,
    pairwise_loss,
    swapped,
)

CASES = {  # lengths, then how far apart, whether causal, and how many heads share a key
    "one": ((5,), None, False, 1),
    "several": ((3, 1, 7, 2), None, False, 1),
    "with empty ones": ((0, 4, 0, 1), None, False, 1),
    "none": ((), None, False, 1),
    "no tokens": ((0, 0), None, False, 1),
    "window": ((9, 1, 3, 6), 2, False, 1),
    "window of one": ((4, 5), 0, False, 1),
    "odd": ((33, 17), 5, False, 1),
    "causal": ((3, 1, 7, 2), None, True, 1),
    "grouped": ((6, 4), None, False, 3),
    "causal, grouped": ((3, 1, 7, 2), None, True, 3),
    "causal, grouped, window": ((9, 1, 6), 2, True, 3),
}


def tensors(lengths, heads=3, width=5, seed=0, groups=None):
    draw = torch.Generator().manual_seed(seed)
    counts = {"query": heads, "key": groups or heads, "value": groups or heads}
    return {
        n: torch.randn(sum(lengths), k, width, generator=draw, dtype=torch.float64)
        for n, k in counts.items()
    }


def ends_of(lengths):
    return [sum(lengths[:k]) for k in range(len(lengths) + 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_packed_attention(case, dtype):
    lengths, window, causal, shared = CASES[case]
    options = {"cu_seq_lens": torch.tensor(ends_of(lengths)), "window": window, "causal": causal}

    def defined(**given):
        return reference.packed_attention(**given, **options)

    for impl in ("eager", "auto"):

        def fast(impl=impl, **given):
            return packed_attention(**given, **options, impl=impl)

        judge(
            "packed_attention",
            "eager",
            fast,
            defined,
            tensors(lengths, groups=3 // shared),
            dtype=dtype,
            working=torch.float32,
            case=case,
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a GPU")
@pytest.mark.parametrize(
    "case", ["one", "several", "window", "odd", "causal", "causal, grouped, window"]
)
def test_packed_attention_on_a_gpu(case):
    lengths, window, causal, shared = CASES[case]
    inputs = tensors(lengths, width=32, groups=3 // shared)
    for dtype in (torch.bfloat16, torch.float16):
        options = {
            "cu_seq_lens": torch.tensor(ends_of(lengths)),
            "window": window,
            "causal": causal,
        }
        judge(
            "packed_attention",
            "fused",
            lambda options=options, **t: packed_attention(**t, **options, impl="fused"),
            lambda options=options, **t: reference.packed_attention(**t, **options),
            inputs,
            dtype=dtype,
            case=case,
        )


def test_strided_and_scaled_inputs():
    given = {k: v.float() for k, v in tensors((4, 6), heads=2, width=8).items()}
    apart = {k: v.transpose(0, 1).contiguous().transpose(0, 1) for k, v in given.items()}
    expected = reference.packed_attention(**given, cu_seq_lens=torch.tensor([0, 4, 10]), scale=0.3)
    torch.testing.assert_close(
        packed_attention(**apart, cu_seq_lens=[0, 4, 10], scale=0.3), expected
    )
    made = packed_attention(**given, cu_seq_lens=[0, 4, 10], scale=0.3, impl="reference")
    assert torch.equal(made, expected)


def test_finite_differences():
    given = [v.requires_grad_() for v in tensors((3, 2), 1, 2).values()]
    assert torch.autograd.gradcheck(
        lambda q, k, v: packed_attention(q, k, v, [0, 3, 5], window=1), given
    )
    scores = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    tie = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *given: log_probabilities(davidson(*given)), (*scores, tie)
    )


def test_attention_dropout_drops():
    q = torch.randn(400, 2, 4)
    ones = torch.ones_like(q)
    made = packed_attention(q, q, ones, [0, 200, 400], dropout_p=0.5)
    assert made.std() > 0.01
    assert abs(made.mean() - 1) < 0.1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cu_seq_lens": [0, 3]}, r"packed_attention:.*cu_seq_lens.*\[0.*3\].*0.*5"),
        ({"cu_seq_lens": [0, 4, 3, 5]}, "cu_seq_lens is"),
        ({"cu_seq_lens": []}, "cu_seq_lens is"),
        ({"query": torch.zeros(4, 1, 2)}, r"packed_attention:.*\[4.*1.*2\]"),
        ({"impl": "flash"}, r"packed_attention:.*'flash'"),
        (
            {"impl": "reference", "dropout_p": 0.1},
            "expected dropout_p=0 with impl='reference', got 0.1",
        ),
    ],
)
def test_bad_input_is_refused(changes, said):
    given = {
        "query": torch.zeros(5, 1, 2),
        "key": torch.zeros(5, 1, 2),
        "value": torch.zeros(5, 1, 2),
    }
    with pytest.raises(ValueError, match=said):
        packed_attention(**given | {"cu_seq_lens": [0, 5]} | changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fused_without_a_gpu_raises_and_does_not_fall_back():
    one = torch.zeros(5, 1, 2)
    with pytest.raises(ValueError, match=r"packed_attention:.*impl='fused'"):
        packed_attention(one, one, one, [0, 5], impl="fused")


@pytest.mark.parametrize("count", [0, 1, 37])
def test_davidson(count):
    draw = torch.Generator().manual_seed(count)
    inputs = {
        n: torch.randn(count, generator=draw, dtype=torch.float64) for n in ("score_a", "score_b")
    }
    inputs |= {"log_nu": torch.tensor(0.7, dtype=torch.float64)}

    def fast(score_a, score_b, log_nu):
        return log_probabilities(davidson(score_a, score_b, log_nu)).exp()

    for dtype in (torch.float32, torch.bfloat16):
        judge(
            "davidson",
            "eager",
            fast,
            reference.davidson,
            inputs,
            dtype=dtype,
            case=f"{count} pairs",
        )


def test_scores_far_apart_stay_finite():
    a = torch.tensor([300.0, -300.0, 0.0], requires_grad=True)
    b, tie = (
        torch.tensor([-300.0, 300.0, 0.0], requires_grad=True),
        torch.tensor(1e-4, requires_grad=True),
    )
    made = log_probabilities(davidson(a, b, tie))
    made.sum().backward()
    assert all(torch.isfinite(t).all() for t in (made, a.grad, b.grad, tie.grad))
    torch.testing.assert_close(made.exp().sum(-1), torch.ones(3))


def test_log_probabilities_are_a_softmax_and_swapping_moves_no_bit():
    for classes in (2, 3):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            logits = torch.randn(1000, classes).mul(7).to(dtype)
            made = log_probabilities(logits)
            assert torch.equal(swapped(made), log_probabilities(swapped(logits)))
            if dtype is not torch.bfloat16:
                torch.testing.assert_close(made, logits.log_softmax(-1))


def test_loss_is_cross_entropy():
    logits, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, 1, 0])
    for smoothing in (0.0, 0.2):
        expected = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        torch.testing.assert_close(
            pairwise_loss(logits, labels, label_smoothing=smoothing), expected
        )
    shares = torch.rand(6, 3).softmax(-1)
    torch.testing.assert_close(pairwise_loss(logits, shares), F.cross_entropy(logits, shares))
    hard = F.one_hot(labels, 3).float()
    torch.testing.assert_close(pairwise_loss(logits, hard), pairwise_loss(logits, labels))
    with pytest.raises(ValueError, match=r"pairwise_loss:.*\[6.*3\].*\[5\]"):
        pairwise_loss(logits, labels[:5])
