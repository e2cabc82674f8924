"""Step losses against sums written out."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.thinker.test_model import batch, model_of
from thinker import AllSteps, FlowPlan, Reach
from thinker.losses import LastAndRandom, LearnedWeights

LABELS = torch.tensor([[1, 2, 3, -100], [4, -100, -100, -100], [5, 6, 7, 8]])


EVERY = FlowPlan.every_step(memory=False)


def dense(out, weights):
    """Σ_b Σ_s w_s Σ_o -log p, over the 8 answers."""
    total = 0.0
    for logits, w in zip(out.step_logits, weights, strict=True):
        for row in range(3):
            for place in range(4):
                if LABELS[row, place] >= 0:
                    weight = w if not torch.is_tensor(w) or w.dim() == 0 else w[row]
                    total = (
                        total - weight * F.log_softmax(logits[row, place], -1)[LABELS[row, place]]
                    )
    return total / 8


def run(loss, n_step=4, seed=0, **changes):
    model = model_of(**changes)
    steps = loss.supervised(n_step, EVERY, torch.Generator().manual_seed(seed))
    out = model(*batch(), n_step=n_step, out_len=4, output_steps=steps)
    return out, steps, loss(out, LABELS)


def test_last_and_one_random_earlier_step():
    loss, seen = LastAndRandom(), set()
    for seed in range(40):
        out, steps, found = run(loss, seed=seed)
        assert steps[-1] == 4
        assert len(steps) == 2
        seen.add(steps[0])
        if seed == 0:
            torch.testing.assert_close(found, dense(out, [0.3, 0.7]))
    assert seen == {1, 2, 3}
    out, steps, found = run(loss, n_step=1)
    assert steps == (1,)
    torch.testing.assert_close(found, dense(out, [1.0]))
    once = FlowPlan.read_once(memory=False)
    assert loss.supervised(4, once, torch.Generator()) == (4,)


def test_all_steps():
    out, steps, found = run(AllSteps())
    assert steps == (1, 2, 3, 4)
    torch.testing.assert_close(found, dense(out, [0.25] * 4))


def test_learned_weights_never_fall():
    loss = LearnedWeights(max_steps=8)
    out, _, found = run(loss)
    # equal scores: a straight line
    torch.testing.assert_close(found, dense(out, [0.1, 0.2, 0.3, 0.4]))
    found.backward()
    assert loss.scores.grad.abs().sum() > 0
    with torch.no_grad():
        loss.scores.normal_(std=3, generator=torch.Generator().manual_seed(0))
    weights = loss.weights(out, (1, 2, 3, 4))
    assert (weights.diff() >= 0).all()
    assert float(weights.detach().sum()) == pytest.approx(1)
    with pytest.raises(ValueError, match=r"LearnedWeights:.*9.*max_steps.*8"):
        loss.weights(out, (9,))


def test_reach_counts_what_can_be_known():
    """A row's answers in reach share the weight of all its answers; the two last steps count alike."""
    model = model_of(causal=True, window=2, num_latents=None, positions="rotary")
    loss = Reach(window=2, grad_steps=2)
    assert loss.supervised(3, EVERY, torch.Generator()) == (2, 3)
    assert loss.grad_steps == 2
    tokens, _ = batch(length=4, padded=False)
    distance = torch.tensor([[1, 2, 3, 0], [3, 0, 0, 0], [1, 2, 3, 4]])
    out = model(tokens, n_step=3, output_steps=(2, 3))
    total = 0.0
    for logits, step in zip(out.step_logits, (2, 3), strict=True):
        for row in range(3):
            answers = [p for p in range(4) if LABELS[row, p] >= 0]
            near = [p for p in answers if distance[row, p] <= step]
            for p in near:
                error = -F.log_softmax(logits[row, p], -1)[LABELS[row, p]]
                total = total + error * len(answers) / len(near) / 2 / 8
    torch.testing.assert_close(loss(out, LABELS, distance), total)
    wide = Reach(window=3).weights(out, (1, 2), distance)
    assert (wide[0, 2] > 0).tolist() == [True, True, False, False]
    with pytest.raises(ValueError, match=r"Reach:.*distances"):
        loss(out, LABELS)


def test_labels_of_each_step():
    out, _, _ = run(AllSteps())
    by_step = torch.stack([LABELS, LABELS.roll(1, 0), LABELS.roll(2, 0), LABELS], 1)  # (B, T, O)
    steps = [
        F.cross_entropy(x.flatten(0, 1), by_step[:, s].flatten())
        for s, x in enumerate(out.step_logits)
    ]
    torch.testing.assert_close(AllSteps()(out, by_step), sum(steps) / 4)
    short = AllSteps()(out, by_step[:, :3])  # the last that has answers has those of all later ones
    torch.testing.assert_close(
        short, AllSteps()(out, torch.cat([by_step[:, :3], by_step[:, 2:3]], 1))
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LastAndRandom(last=0), "last=0"),
        (lambda: LastAndRandom(random=math.nan), "random=nan"),
        (lambda: Reach(window=1), r"Reach:.*window of 2 or more, got .*window=1"),
        (lambda: Reach(grad_steps=0), "got grad_steps=0"),
        (
            lambda: Reach().check(model_of().config),
            r"Reach:.*window.*2",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
