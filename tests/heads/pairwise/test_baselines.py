"""Baselines: each finds what it can see, none what it cannot, all are fair; gains and their errors."""

import math
import random

import pytest
import torch
from tests.heads.pairwise.support import model_of, pairs_of

from heads.pairwise import Pair, Turn, baseline_verdicts, pairwise_report
from heads.pairwise.report.baselines import BASELINES, clustered, near_in_length, rivals_of
from heads.pairwise.report.metrics import pairwise_metrics
from heads.pairwise.surface import NAMES, surface_of, surfaces_of


def judged(count, rule, seed=0, ties=False):
    """Pairs of random words under a rule of the two answers."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        a, b = (
            " ".join(
                draw.choice(["red", "blue", "green", "old", "new", "far", "near", "big"])
                for _ in range(draw.randint(3, 12))
            )
            + draw.choice([".", "!", ""])
            for _ in range(2)
        )
        score = rule(a) - rule(b)
        label = (
            (2 if ties and abs(score) < 1 else int(score < 0))
            if score
            else (2 if ties else draw.randint(0, 1))
        )
        found.append(Pair(f"Say {draw.randint(0, 30)}.", a, b, label))
    return found


RULES = {
    "length": len,
    "a word": lambda text: text.count("blue"),
    "style": lambda text: text.endswith("!") - 0.5,
}


@pytest.mark.parametrize(
    ("rule", "knows"),
    [
        ("length", [False, True, True, True]),
        ("a word", [False, False, True, False]),
        ("style", [False, False, True, True]),
    ],
)
def test_each_finds_what_it_can_see(rule, knows):
    train, test = (judged(count, RULES[rule], seed) for count, seed in ((600, 0), (300, 1)))
    found = baseline_verdicts(train, test, classes=2)
    losses = [
        pairwise_metrics(found[name], [pair.label for pair in test]).log_loss for name in BASELINES
    ]
    for name, loss, known in zip(BASELINES, losses, knows, strict=True):
        assert (loss < 0.55) == known, (name, losses)


def test_two_classes_of_shares_of_three_and_no_ties():
    shares = [
        pair._replace(label=(0.75, 0.25, 0.0) if pair.label == 0 else (0.25, 0.75, 0.0))
        for pair in judged(60, len)
    ]
    two, three = (baseline_verdicts(shares, shares[:9], classes=classes) for classes in (2, 3))
    torch.testing.assert_close(
        two[BASELINES[1]].exp(), three[BASELINES[1]][:, :2].exp(), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ValueError, match="pair 0: "):
        baseline_verdicts([Pair("p", "a", "b", 2)], shares, classes=2)


def test_they_are_fair_and_probabilities():
    train, test = judged(200, len, ties=True), judged(40, len, 1, ties=True)
    turned = [Pair(p.prompt, p.b, p.a, p.label) for p in test]
    straight, back = (baseline_verdicts(train, part) for part in (test, turned))
    for name in BASELINES:
        torch.testing.assert_close(straight[name].exp().sum(1), torch.ones(40, dtype=torch.float64))
        torch.testing.assert_close(straight[name][:, [1, 0, 2]], back[name])
    shares = torch.bincount(torch.tensor([pair.label for pair in train]), minlength=3) / 200
    won = float(shares[:2].mean())
    expected = torch.tensor([won, won, float(shares[2])], dtype=torch.float64)
    torch.testing.assert_close(straight[BASELINES[0]][0].exp(), expected, rtol=1e-6, atol=1e-6)


def test_shares_of_judges_weigh_and_classes_may_be_absent():
    shares = {True: (0.75, 0.25, 0.0), False: (0.25, 0.75, 0.0)}
    train = [pair._replace(label=shares[len(pair.a) > len(pair.b)]) for pair in judged(200, len)]
    found = baseline_verdicts(train, [Pair("p", "a b c d e f g", "a"), Pair("p", "a", "")])
    length = found["a curve of length"].exp()
    assert length[0, 0] == pytest.approx(0.75, abs=0.08)
    assert (length[:, 2] < 1e-6).all()
    ties = [Pair("p", "a b", "a", 2)] * 3
    assert (baseline_verdicts(ties, ties)["style, boosted trees"].argmax(1) == 2).all()
    single = [Pair("p", "a b", "a", 0)]
    assert all(torch.isfinite(found).all() for found in baseline_verdicts(single, single).values())
    wordless = [Pair("p", "?", "!", k % 2) for k in range(30)]
    assert torch.isfinite(baseline_verdicts(wordless, wordless)["words and style, linear"]).all()


def test_what_cannot_be_fitted_is_refused(monkeypatch):
    many, bare = judged(30, len), [Pair("p", "a", "b")] * 30
    for train, test in (([], many), (bare, many), (many, [])):
        with pytest.raises(ValueError, match=r"baseline_verdicts:.*labels"):
            baseline_verdicts(train, test)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pairwise_report:.*'model-components\[judge\]'"):
        pairwise_report(
            model_of(), model_of().dataset(pairs_of(3), progress=False), train=judged(30, len)
        )


def test_an_error_counts_prompts_and_not_pairs():
    draw = torch.Generator().manual_seed(0)
    means, spread = [], []
    for _ in range(400):
        of_prompt = torch.randn(20, generator=draw).repeat_interleave(10)
        mean, error = clustered(
            of_prompt + 0.1 * torch.randn(200, generator=draw), [k // 10 for k in range(200)]
        )
        means.append(mean)
        spread.append(error)
    assert sum(spread) / 400 == pytest.approx(float(torch.tensor(means).std()), rel=0.1)


def test_style_is_what_it_says():
    text = "# Apples\n\n- **Red** ones\n- 12 green ones\n\nSee https://a.b, I'm sorry! Né"
    found = dict(zip(NAMES, surface_of("Which apples?", text).tolist(), strict=True))
    for name, count in (
        ("bullets", 2),
        ("headings", 1),
        ("bold", 2),
        ("links", 1),
        ("refusals", 1),
        ("paragraphs", 3),
        ("characters", len(text)),
        ("numbered items", 0),
        ("code blocks", 0),
    ):
        assert found[name] == pytest.approx(math.log1p(count)), name
    assert found["prompt covered"] == 0.5
    assert found["digits"] == pytest.approx(2 / len(text))
    assert found["other alphabets"] == pytest.approx(1 / len(text))
    assert (found["ends a sentence"], found["begins with a capital"]) == (0, 0)
    assert all(math.isfinite(value) for value in surface_of("", ""))
    assert surfaces_of([Pair("p", "x", "y z")])[1].shape == (1, len(NAMES))
    sizes = ((12, 10), (13, 10), (0, 1))
    assert near_in_length([Pair("p", "x" * a, "y" * b) for a, b in sizes]).tolist() == [
        True,
        False,
        False,
    ]


def test_the_report_puts_them_beside_the_model():
    model, pairs = model_of(), pairs_of(120)
    test, train = (model.dataset(part, progress=False) for part in (pairs[:40], pairs[40:]))
    report = pairwise_report(model, test, train=train.pairs, progress=False)
    assert [one.name for one in report.rivals] == list(BASELINES)
    for one in report.rivals:
        assert one.gain == pytest.approx(one.log_loss - report.metrics.log_loss, abs=1e-6)
    lines = str(report).splitlines()
    assert any(line.startswith("this model") for line in lines)
    assert any(line.startswith("a curve of length") and "±" in line for line in lines)
    assert report.to_dict()["rivals"][1]["name"] == "a curve of length"


def test_long_runs_of_empty_lines_take_no_time():
    # a pattern that looks at every line from every line would take hours
    found = dict(zip(NAMES, surface_of("", "\n" * 1_000_000 + "- x\n\n  2. y"), strict=True))
    assert found["bullets"] == found["numbered items"] == pytest.approx(math.log(2))


def test_pairs_of_one_prompt_say_nothing_about_others():
    differences = torch.randn(50, generator=torch.Generator().manual_seed(0))
    mean, error = clustered(differences, range(50))
    assert mean == pytest.approx(float(differences.mean()))
    assert error == pytest.approx(float(differences.std() / 50**0.5), rel=1e-5)
    assert math.isnan(clustered(differences, ["p"] * 50)[1])


def test_no_prompt_is_not_one_prompt():
    train, test = judged(200, len), [pair._replace(prompt="") for pair in judged(60, len, 1)]
    found = torch.full((60, 2), 0.5).log()
    rivals = rivals_of(found, [pair.label for pair in test], train, test)
    assert all(rival.error > 1e-3 for rival in rivals[1:])


def test_nothing_is_fitted_on_the_pairs_to_judge():
    """Words that only they have, with their labels, change nothing."""
    train, test = judged(200, len), judged(40, len, 1)
    new = [pair._replace(a=f"{pair.a} zebra", b=f"{pair.b} yak") for pair in test]
    more = [*test, *new, *new]
    for name, verdicts in baseline_verdicts(train, more).items():
        torch.testing.assert_close(verdicts[:40], baseline_verdicts(train, test)[name])


def test_overlap_is_with_what_the_user_said():
    talk = (Turn("system", "w1 w2"), Turn("user", "w3"))
    model = model_of(surface=["overlap"])
    data = model.dataset([(talk, "w3", "w1 w2")], progress=False)
    covered = NAMES.index("prompt covered")
    assert [float(data.answer(k).surface[covered]) for k in (0, 1)] == [1.0, 0.0]
