"""Heads: fair to both answers bit by bit, what they start from, and the pooling against plain
torch."""

import itertools
import math

import pytest
import torch
from tests.support.equivalence import judge

from heads.pairwise import PairwiseHead, pairwise_loss
from heads.pairwise.functional import log_probabilities, swapped
from heads.pairwise.layers import Pool
from heads.pairwise.surface import NAMES, SURFACE, columns_of

FAIR = ("davidson", "antisymmetric")
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
        mixed = log_probabilities(
            head(torch.where(some[:, None], b, a), torch.where(some[:, None], a, b))
        )
        assert torch.equal(torch.where(some[:, None], swapped(mixed), mixed), straight)
        same = head(a, a)
        assert torch.equal(same[:, 0], same[:, 1])


def looks_of(count, seed=1):
    """Surface features of A and of B, some of which are the same number for most answers."""
    drawn = torch.randn(2, count, len(NAMES), generator=torch.Generator().manual_seed(seed))
    drawn[..., ::3] = drawn[..., ::3].clamp(min=1.0)
    return drawn


def looking(link, ties=True, kinds=tuple(SURFACE)):
    head = head_of(link, ties, 8, surface=kinds)
    head.fit_(*torch.randn(2, 200, 24), *looks_of(200))
    return head


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("link", FAIR)
def test_swapping_moves_no_bit_with_surface_features(link, ties):
    head = looking(link, ties)
    (a, b), (look_a, look_b) = torch.randn(2, 65, 24), looks_of(65, seed=2)
    straight = head(a, b, look_a, look_b)
    assert torch.equal(swapped(straight), head(b, a, look_b, look_a))
    assert (straight - head(a, b, look_a, look_a)).abs().amax() > 1e-2  # they say something
    same = head(a, a, look_a, look_a)
    assert torch.equal(same[:, 0], same[:, 1])
    with pytest.raises(ValueError, match=r"PairwiseHead:.*features"):
        head(a, b)


def test_a_head_looks_at_the_kinds_it_was_made_for():
    head, (a, b) = looking("antisymmetric", kinds=["length"]), torch.randn(2, 5, 24)
    look_a, look_b = looks_of(5)
    changed = look_a.clone()
    changed[:, columns_of(["style", "overlap"])] += 1
    assert torch.equal(head(a, b, look_a, look_b), head(a, b, changed, look_b))
    changed[:, columns_of(["length"])] += 1
    assert not torch.equal(head(a, b, look_a, look_b), head(a, b, changed, look_b))


def test_encodings_say_how_far_a_number_is_through_each_bin():
    head = looking("davidson", kinds=["length"])
    edges_of = head.encoding.edges
    assert edges_of.shape == (3, 17)
    x = torch.linspace(-3, 3, 50)[:, None].expand(50, len(NAMES))
    for column, edges in zip(head.encoding(x).view(50, 3, 16).unbind(1), edges_of, strict=True):
        wanted = torch.stack(
            [
                ((x[:, 0] - low) / max(high - low, 1e-6)).clamp(0, 1)
                for low, high in itertools.pairwise(edges)
            ],
            1,
        )
        torch.testing.assert_close(column, wanted)
        assert (column.sum(1).diff() >= 0).all()


def test_scales_are_those_of_the_data():
    head = PairwiseHead(3, hidden_features=0)
    a, b = torch.randn(2, 500, 3) * torch.tensor([1.0, 100.0, 0.0])
    head.fit_(a, b, torch.zeros(500, 0), torch.zeros(500, 0))
    torch.testing.assert_close(head.scale, torch.tensor([1.0, 100.0, 1.0]), rtol=0.1, atol=0)
    torch.nn.init.ones_(head.outer.weight)
    assert torch.equal(head.score(a), head.outer(a / head.scale)[:, 0])
    head.fit_(a * 1e-20, b * 1e-20, torch.zeros(500, 0), torch.zeros(500, 0))
    torch.testing.assert_close(head.scale, torch.tensor([1e-20, 1e-18, 1.0]), rtol=0.1, atol=0)


@pytest.mark.parametrize(
    ("spreads", "scales"),
    [
        ([1.0, 1.0, 1e-32], [1.0, 1.0, 1.0]),
        ([0.0, 0.0, 0.0, 1.0, 1e-32], [1.0, 1.0, 1.0, 1.0, 1.0]),
        ([1e-32, 1e-32, 1e-32, 1.0, 100.0], [1.0, 1.0, 1.0, 1.0, 100.0]),
        ([1e4, 1.0, 1.0, 0.1], [1e4, 1.0, 1.0, 0.1]),
        ([math.nan, 100.0, 1.0, 0.1], [1.0, 100.0, 1.0, 0.1]),
        ([0.0, 0.0], [1.0, 1.0]),
    ],
)
def test_features_that_hardly_vary_count_as_constant(spreads, scales):
    head = PairwiseHead(len(spreads))
    a, b = torch.randn(2, 500, len(spreads)) * torch.tensor(spreads)
    head.fit_(a, b, torch.zeros(500, 0), torch.zeros(500, 0))
    torch.testing.assert_close(head.scale, torch.tensor(scales), rtol=0.2, atol=0)


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
            torch.testing.assert_close(
                log_probabilities(head(a, b)).exp()[:, 2], torch.full((5,), rate)
            )
        two = PairwiseHead(8, link=link, hidden_features=hidden, ties=False).eval()
        torch.testing.assert_close(log_probabilities(two(a, b)).exp(), torch.full((5, 2), 0.5))
        with pytest.raises(ValueError, match=r"PairwiseHead:.*ties"):
            two.set_tie_rate_(0.2)
        with pytest.raises(ValueError, match=r"PairwiseHead:.*1.*number"):
            head.set_tie_rate_(1)


@pytest.mark.parametrize("link", [*FAIR, "concat"])
def test_every_parameter_learns(link):
    for ties, hidden in itertools.product((True, False), (0, 5)):
        surface = () if link == "concat" else tuple(SURFACE)
        head = head_of(link, ties, hidden, surface=surface)
        head.fit_(*torch.randn(2, 200, 24), *looks_of(200))
        a, b = torch.randn(2, 9, 24)
        log_probabilities(head(a, b, *looks_of(9, seed=3)))[:, 0].sum().backward()
        dead = [
            n for n, p in head.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-5
        ]
        assert not dead


def test_scores_belong_to_single_answers():
    head = head_of("davidson", True, 0)
    a, b = torch.randn(2, 4, 24)
    logits = head(a, b)
    torch.testing.assert_close(logits[:, 0] - logits[:, 1], head.score(a) - head.score(b))
    with pytest.raises(ValueError, match=r"PairwiseHead:.*'concat'"):
        head_of("concat", True, 0).score(a)


def plainly(kinds, states, lengths, begins):
    found = []
    for part, begin in zip(states.split(lengths), begins, strict=True):
        answer = part[begin:]
        kept = {"mean": answer.mean(0), "first": part[0], "last": part[-1]}
        found.append(torch.cat([kept[kind] for kind in kinds]))
    return torch.stack(found)


@pytest.mark.parametrize("kinds", [["mean"], ["first"], ["last"], ["last", "mean"]])
def test_pooling(kinds):
    lengths, begins = [3, 1, 8, 2], [1, 0, 5, 0]
    pool = Pool(kinds)
    states = torch.randn(14, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def fast(states):
        return pool(states, torch.tensor(lengths), torch.tensor(begins))

    def defined(states):
        return plainly(kinds, states, lengths, begins)

    judge(
        f"Pool, {', '.join(kinds)}",
        "eager",
        fast,
        defined,
        {"states": states},
        dtype=torch.float32,
        device="cpu",
    )
    assert (
        pool(states.bfloat16(), torch.tensor(lengths), torch.tensor(begins)).dtype == torch.float32
    )


def test_a_comparison_drops_features_in_training():
    head = PairwiseHead(8, link="antisymmetric", dropout=0.5)
    torch.nn.init.ones_(head.outer.weight)
    a, b = torch.randn(2, 400, 8)
    for part in (head.beside[-1], head.project):
        torch.nn.init.zeros_(part.weight)  # what is left is the weighted difference
    assert (head.train()(a, b)[:, 0] - head.eval()(a, b)[:, 0]).abs().mean() > 0.3


def test_scales_are_of_both_sides():
    head = PairwiseHead(2)
    a, b = torch.randn(500, 2), 10 * torch.randn(500, 2)
    head.fit_(a, b, torch.zeros(500, 0), torch.zeros(500, 0))
    torch.testing.assert_close(head.scale, torch.cat([a, b]).std(0))


def test_losses_take_any_leading_dimensions():
    head = PairwiseHead(4).eval()
    a, b = torch.randn(2, 5, 3, 4)
    labels = torch.randint(0, 3, (5, 3))
    flat = pairwise_loss(head(a, b).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(pairwise_loss(head(a, b), labels), flat)
    with pytest.raises(ValueError, match="pairwise_loss"):
        pairwise_loss(head(a, b), labels[:, 0])
    with pytest.raises(ValueError, match="0 to 2, got 0 to 3"):
        pairwise_loss(torch.zeros(2, 3), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"2 or 3 classes"):
        pairwise_loss(torch.zeros(2, 4), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"PairwiseHead:.*\(\*B, 4\)"):
        head(a, b[:, :1])
