"""Heads: fair to both answers bit by bit, what they start from, and the pooling against plain torch."""

import itertools

import pytest
import torch
from tests.support.equivalence import judge

from heads.pairwise import PairwiseHead, Pool, log_probabilities, swapped

FAIR = ("davidson", "rao-kupper", "antisymmetric")
SHAPES = list(itertools.product(FAIR, (True, False), (0, 5)))


def head_of(link, ties, hidden, width=24, **options):
    torch.manual_seed(0)
    head = PairwiseHead(width, link=link, ties=ties, hidden_features=hidden, **options)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("link", "ties", "hidden"), SHAPES)
def test_swapping_moves_no_bit(link, ties, hidden, dtype):
    head = head_of(link, ties, hidden).to(dtype)
    for count in (1, 2, 7, 64, 333):
        a, b = torch.randn(2, count, 24, dtype=dtype)
        straight = log_probabilities(head(a, b))
        assert straight.shape == (count, 2 + ties)
        assert torch.equal(swapped(straight), log_probabilities(head(b, a)))
        some = torch.rand(count) < 0.5  # in a batch where only some pairs are exchanged
        mixed = log_probabilities(head(torch.where(some[:, None], b, a), torch.where(some[:, None], a, b)))
        assert torch.equal(torch.where(some[:, None], swapped(mixed), mixed), straight)
        same = head(a, a)
        assert torch.equal(same[:, 0], same[:, 1])


def test_the_early_head_is_not_fair():
    head = head_of("concat", True, 0)
    a, b = torch.randn(2, 50, 24)
    assert not torch.equal(swapped(head(a, b)), head(b, a))


@pytest.mark.parametrize("link", [*FAIR, "concat"])
def test_every_verdict_is_open_at_first(link):
    a, b = torch.randn(2, 5, 8)
    for hidden in (0, 4):
        head = PairwiseHead(8, link=link, hidden_features=hidden).eval()
        torch.testing.assert_close(log_probabilities(head(a, b)).exp(), torch.full((5, 3), 1 / 3))
        for rate in (0.05, 0.6):
            head.set_tie_rate_(rate)
            torch.testing.assert_close(log_probabilities(head(a, b)).exp()[:, 2], torch.full((5,), rate))
        two = PairwiseHead(8, link=link, hidden_features=hidden, ties=False).eval()
        torch.testing.assert_close(log_probabilities(two(a, b)).exp(), torch.full((5, 2), 0.5))
        with pytest.raises(ValueError, match="no class for ties"):
            two.set_tie_rate_(0.2)
        with pytest.raises(ValueError, match="rate is 1, needed a share"):
            head.set_tie_rate_(1)


@pytest.mark.parametrize("link", [*FAIR, "concat"])
def test_every_parameter_learns(link):
    for ties, hidden in itertools.product((True, False), (0, 5)):
        head = head_of(link, ties, hidden)
        a, b = torch.randn(2, 9, 24)
        log_probabilities(head(a, b))[:, 0].sum().backward()
        dead = [n for n, p in head.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-5]
        assert not dead


def test_scores_belong_to_single_answers():
    head = head_of("davidson", True, 0)
    a, b = torch.randn(2, 4, 24)
    logits = head(a, b)
    torch.testing.assert_close(logits[:, 0] - logits[:, 1], head.score(a) - head.score(b))
    with pytest.raises(ValueError, match="link 'concat' compares answers"):
        head_of("concat", True, 0).score(a)


def plainly(kind, states, lengths, query=None):
    found = []
    for part in states.split(lengths):
        if kind == "attention":
            found.append((part @ query[0]).softmax(0) @ part)
        else:
            found.append({"mean": part.mean(0), "first": part[0], "max": part.amax(0)}[kind])
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["mean", "first", "max", "attention"])
def test_pooling(kind):
    lengths = [3, 1, 8, 2]
    pool = Pool(6, kind)
    states = torch.randn(14, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    inputs = {"states": states}
    if kind == "attention":
        torch.manual_seed(1)
        inputs["query"] = torch.randn(1, 6, dtype=torch.float64)

    def fast(states, query=None):
        changed = {} if query is None else {"query.weight": query}
        return torch.func.functional_call(pool, changed, (states, torch.tensor(lengths)))

    judge(f"Pool, {kind}", "eager", fast, lambda states, query=None: plainly(kind, states, lengths, query), inputs,
          dtype=torch.float32, device="cpu")  # fmt: skip
    made = pool(states.bfloat16(), torch.tensor(lengths))
    assert made.dtype == torch.float32


def test_attention_starts_as_a_mean():
    states, lengths = torch.randn(7, 4), torch.tensor([3, 4])
    torch.testing.assert_close(Pool(4, "attention")(states, lengths), Pool(4, "mean")(states, lengths))
