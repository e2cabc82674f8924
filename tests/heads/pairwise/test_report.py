"""Metrics against their plain definitions, temperatures, and the report with its plot."""

import math

import pytest
import torch
from tests.heads.pairwise.support import model_of, pairs_of

from heads.pairwise import Pair, calibrate_, pairwise_report, predict_pairs
from heads.pairwise.report.evaluation import CalibrationReport, _seen
from heads.pairwise.report.metrics import (
    calibration_bins,
    cautious_temperature,
    pairwise_metrics,
)


def test_metrics_are_what_they_say():
    draw = torch.Generator().manual_seed(0)
    found = torch.randn(500, 3, generator=draw).log_softmax(-1)
    labels = torch.randint(0, 3, (500,), generator=draw)
    lengths = torch.randn(500, generator=draw)
    made = pairwise_metrics(
        found, labels, swapped_log_probabilities=found[:, [1, 0, 2]], length_difference=lengths
    )
    best, p = found.argmax(-1), found.exp()
    assert made.accuracy == pytest.approx(float((best == labels).double().mean()))
    assert made.log_loss == pytest.approx(
        float(torch.nn.functional.nll_loss(found, labels)), rel=1e-5
    )
    shares = torch.bincount(labels, minlength=3) / 500
    shares[:2] = shares[:2].mean()
    assert made.log_loss_prior == pytest.approx(float(-(shares * shares.log()).sum()), rel=1e-5)
    assert made.flip_rate == pytest.approx(
        float((best != found[:, [1, 0, 2]].argmax(-1)).double().mean())
    )
    both = [torch.cat([one, -one]) for one in (p[:, 0] - p[:, 1], lengths)]  # in both orders
    expected = torch.corrcoef(torch.stack(both))[0, 1]
    assert made.length_correlation == pytest.approx(float(expected), rel=1e-4)
    sure, error = p.amax(-1), 0.0
    for k in range(15):
        inside = (sure > k / 15) & (sure <= (k + 1) / 15)
        if inside.any():
            gap = sure[inside].mean() - (best == labels)[inside].float().mean()
            error += float(inside.float().mean() * gap.abs())
    assert made.calibration_error == pytest.approx(error, rel=1e-4)
    for i in range(3):
        for j in range(3):
            assert made.confusion[i][j] == float(((labels == i) & (best == j)).sum())


def test_nothing_depends_on_which_side_the_better_answer_is_on():
    draw = torch.Generator().manual_seed(0)
    found = torch.randn(300, 2, generator=draw).log_softmax(-1)
    # chosen and rejected
    labels, lengths = (torch.zeros(300, dtype=torch.long), torch.randn(300, generator=draw) + 1)
    turn = torch.rand(300, generator=draw) < 0.5
    turned = torch.where(turn[:, None], found.flip(1), found), torch.where(turn, 1, labels)
    one = pairwise_metrics(found, labels, length_difference=lengths)
    other = pairwise_metrics(*turned, length_difference=torch.where(turn, -lengths, lengths))
    names = (
        "log_loss",
        "log_loss_prior",
        "length_correlation",
        "label_length_correlation",
        "calibration_error",
    )
    for name in names:
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-5)
    assert one.log_loss_prior == pytest.approx(math.log(2))
    assert 0.5 < one.label_length_correlation < 0.9


def test_soft_labels_and_two_classes():
    found = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]).log()
    made = pairwise_metrics(found, [(1.0, 0.0, 0.0), (0.25, 0.5, 0.25)])
    assert made.accuracy == pytest.approx(0.75)
    assert math.isnan(made.flip_rate)
    assert math.isnan(made.length_correlation)
    assert "nan" in str(made)
    with pytest.raises(ValueError, match="expected"):
        pairwise_metrics(found, [0])
    with pytest.raises(ValueError, match="expected"):
        pairwise_metrics(found[:0], torch.zeros(0, dtype=torch.long))


def test_certain_verdicts_lose_nothing_and_temperatures_have_a_limit():
    certain = torch.tensor([[1.0, 0.0, 0.0]]).log()
    assert pairwise_metrics(certain, [0]).log_loss == 0
    assert pairwise_metrics(certain, [1]).log_loss == math.inf
    right = torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    assert cautious_temperature(right, [0, 1], "ab").best_inverse == pytest.approx(1 / 0.02)
    assert cautious_temperature(right, [1, 0], "ab").value == pytest.approx(50)
    model, pair = model_of(), pairs_of(1)[0][:3]
    said = predict_pairs(model, model.dataset([pair], progress=False), progress=False).verdicts[0]
    wrong = (["A", "B", "tie"].index(said) + 1) % 3
    data = model.dataset([(*pair, wrong)], progress=False)
    report = calibrate_(model, data, progress=False)  # one pair is no evidence
    assert (report.temperature, report.error) == (pytest.approx(1.0), math.inf)


def test_temperature_is_the_best_one():
    draw = torch.Generator().manual_seed(1)
    true = torch.randn(4000, 3, generator=draw, dtype=torch.float64)
    labels = torch.multinomial(true.softmax(-1), 1, generator=draw)[:, 0]
    for scale in (0.2, 1.0, 5.0):
        found = 1 / cautious_temperature(true * scale, labels, range(4000)).best_inverse
        assert found == pytest.approx(scale, rel=0.1)
        best = torch.nn.functional.cross_entropy(true * scale / found, labels)
        for other in (0.98, 1.02):
            assert best < torch.nn.functional.cross_entropy(true * scale / (found * other), labels)


def test_a_temperature_is_held_back_where_pairs_or_prompts_are_few():
    draw = torch.Generator().manual_seed(0)
    true = torch.randn(4000, 3, generator=draw, dtype=torch.float64) * 2
    labels = torch.multinomial(true.softmax(-1), 1, generator=draw)[:, 0]
    own = list(range(4000))
    # with many pairs it is the best one
    for scale in (0.4, 3.0):
        found = cautious_temperature(true * scale, labels, own)
        assert found.value == pytest.approx(1 / found.best_inverse, rel=0.02)
        assert abs(found.best_inverse - 1 / scale) < 3 * found.error
    # right calibration: of many small sets none is made surer, and few are made less sure
    values = []
    for start in range(0, 4000, 40):
        part = slice(start, start + 40)
        values.append(cautious_temperature(true[part], labels[part], own[part]).value)
    assert sum(value < 1 for value in values) <= 6  # two standard errors: one in forty by chance
    raw = [
        cautious_temperature(true[start : start + 40], labels[start : start + 40], own[:40])
        for start in range(0, 4000, 40)
    ]
    assert sum(one.best_inverse > 1 for one in raw) > 30
    # pairs of one prompt are hardly more than one pair
    alone = cautious_temperature(true[:40] * 3, labels[:40], own[:40])
    repeated = cautious_temperature(
        (true[:40] * 3).repeat(10, 1), labels[:40].repeat(10), own[:40] * 10
    )
    assert repeated.error == pytest.approx(alone.error, rel=1e-6)


def test_the_error_of_a_temperature_is_that_of_many_draws():
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(200):
        true = torch.randn(200, 2, generator=draw, dtype=torch.float64) * 2
        labels = torch.multinomial(true.softmax(-1), 1, generator=draw)[:, 0]
        found.append(cautious_temperature(true, labels, range(200)))
    spread = torch.tensor([one.best_inverse for one in found]).std()
    error = torch.tensor([one.error for one in found]).mean()
    assert error == pytest.approx(float(spread), rel=0.15)


@pytest.mark.parametrize("link", ["davidson", "antisymmetric", "concat"])
def test_calibration_keeps_verdicts_and_lowers_the_log_loss(link):
    model = model_of(link=link)
    pairs = [pair[:3] for pair in pairs_of(300)]
    true = predict_pairs(model, model.dataset(pairs, progress=False), progress=False).probabilities
    drawn = torch.multinomial(true, 1, generator=torch.Generator().manual_seed(2))[:, 0].tolist()
    with torch.no_grad():
        lasts = [p for last in model.head._lasts for p in last.parameters()]
        # too sure of itself
        for parameter in (*lasts, *([] if model.head.tie is None else [model.head.tie])):
            parameter.mul_(3)
    data = model.dataset(
        [(*pair, label) for pair, label in zip(pairs, drawn, strict=True)], progress=False
    )
    before = pairwise_report(model, data, progress=False)
    report = calibrate_(model, data, progress=False)
    after = pairwise_report(model, data, progress=False)
    assert report.before == pytest.approx(before.metrics.log_loss)
    assert report.after == pytest.approx(after.metrics.log_loss, rel=1e-5)
    assert after.metrics.log_loss < before.metrics.log_loss
    assert 1.5 < report.temperature < 6
    assert after.predictions.verdicts == before.predictions.verdicts
    assert float(model.head.temperature) == pytest.approx(report.temperature)
    assert calibrate_(model, data, progress=False).temperature == pytest.approx(
        report.temperature, rel=1e-4
    )
    assert "log-loss" in str(report)
    with torch.no_grad():
        model.head.temperature.fill_(0.02)
    assert "class frequencies, which needs no judge; fit the temperature to 100" in str(
        pairwise_report(model, data, progress=False)
    )
    assert "which needs no judge" not in str(after)
    few = model.dataset(data.pairs[:40], progress=False)
    assert "100 pairs or more give a better" in str(calibrate_(model, few, progress=False))


def test_the_report_says_everything_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    for link, ties in (("davidson", True), ("concat", False)):
        model = model_of("mpnet", link=link, ties=ties)
        data = model.dataset(pairs_of(50, labels=3 if ties else 2), progress=False)
        report = pairwise_report(model, data, progress=False)
        text = str(report)
        for word in (
            "50 pairs",
            "accuracy",
            "class frequencies",
            "calibration",
            "flip rate",
            "length",
            "padded",
            "tokens",
        ):
            assert word in text
        report.plot().savefig(tmp_path / f"{link}.png")
        assert (tmp_path / f"{link}.png").stat().st_size > 5_000
        assert sum(map(sum, report.metrics.confusion)) == 50
        assert (report.metrics.flip_rate == 0) == (link == "davidson")
    with pytest.raises(ValueError, match=r"pairwise_report:.*50.*labeled"):
        pairwise_report(model, model.dataset([p[:3] for p in pairs_of(50)], progress=False))
    with pytest.raises(ValueError, match=r"calibrate_:.*PairwiseDataset"):
        calibrate_(model, [])
    with pytest.raises(ValueError, match=r"calibrate_:.*0.*labeled"):
        calibrate_(model, model.dataset([], progress=False))


def test_each_bin_of_confidence_stands_alone():
    confidence = torch.tensor([0.99, 0.97, 0.90, 0.88], dtype=torch.float64)
    right = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    # 15 bins: the last from 14/15, the one before from 13/15
    bins = calibration_bins(confidence, right)
    assert [b[0] for b in bins] == [0.5, 0.5]
    assert [b[2] for b in bins] == [1.0, 0.5]
    assert bins[0][1] == pytest.approx(0.89)
    assert bins[1][1] == pytest.approx(0.98)


def test_equal_odds_of_two_classes_are_a_tie_and_half_right():
    found = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.9, 0.1]]).log()
    made = pairwise_metrics(found, [0, 1, 0], swapped_log_probabilities=found)
    assert made.accuracy == pytest.approx(2 / 3)
    assert made.confusion == ((1.5, 0.5), (0.5, 0.5))
    assert made.calibration_error == pytest.approx(0.1 / 3, abs=1e-6)
    model = model_of(ties=False)
    assert model.predict(["w1"], ["w5"], ["w5"], progress=False).verdicts == ["tie"]


def test_what_log_loss_owes_is_a_rise():
    """A head that knows the labels by the encoder alone loses by its absence."""
    model = model_of(link="antisymmetric", surface=["length"])
    data = model.dataset(pairs_of(80), progress=False)
    found = predict_pairs(model, data, progress=False).log_probabilities
    said = model.dataset(
        [(*p[:3], int(row.argmax())) for p, row in zip(pairs_of(80), found, strict=True)]
    )
    report = pairwise_report(model, said, progress=False)
    assert report.owed["encoder"] > 0.05


def test_whose_prompts_were_trained_on_is_said():
    model = model_of()
    train = [Pair(f"w{k}", "w1", "w2", 0, ("x", "y")) for k in range(30)]
    test = [Pair(f"w{k}", "w3", "w4", k % 2, ("x", "z")) for k in range(25, 35)]
    report = pairwise_report(
        model, model.dataset(test, progress=False), train=train, progress=False
    )
    assert report.seen == (
        "5 of 10 prompts occur in training pairs; 1 of 2 answering models occur in training pairs",
    )


def test_a_calibrated_judge_is_not_made_surer_of_itself_by_chance():
    generator = torch.Generator().manual_seed(0)
    sharpened = 0
    for _ in range(200):
        logits = torch.randn(10, 3, generator=generator, dtype=torch.float64)
        labels = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        sharpened += cautious_temperature(logits, labels, range(10)).value < 1
    assert sharpened <= 2  # it was one in eight


@pytest.mark.parametrize("inverse", [0.0, -0.3])
def test_a_judge_that_knows_nothing_of_a_source_becomes_unsure_of_it(inverse):
    draw = torch.Generator().manual_seed(0)
    before, after = [], []
    for _ in range(20):
        gap = torch.randn(4000, generator=draw, dtype=torch.float64)
        logits = torch.stack([gap, -gap], 1)
        labels = torch.multinomial((logits * inverse).softmax(-1), 1, generator=draw)[:, 0]
        found = cautious_temperature(logits[:100], labels[:100], range(100))
        before.append(torch.nn.functional.cross_entropy(logits[100:], labels[100:]))
        after.append(torch.nn.functional.cross_entropy(logits[100:] / found.value, labels[100:]))
    assert sum(before) / 20 > 1
    # it was above 0.9 when the logarithm of the temperature had the prior: at the best temperature,
    # 50, the standard error of the logarithm is very large, so the fit stayed near 1
    assert sum(after) / 20 < math.log(2) + 0.01


@pytest.mark.parametrize("gap", [2.0, 8.0, 40.0, 800.0])
@pytest.mark.parametrize("shift", [0.0, 1e8])
def test_every_verdict_wrong_makes_a_judge_unsure(gap, shift):
    for right in (0, 1):
        logits = torch.full((100, 2), shift, dtype=torch.float64)
        logits[:, right] += gap
        found = cautious_temperature(logits, [1 - right] * 100, range(100))
        assert found.best_inverse < 0
        assert found.value == pytest.approx(50)


def test_few_pairs_or_prompts_hardly_change_a_temperature():
    split = torch.tensor([[0.5, 0.5]] * 2)
    two = cautious_temperature(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), split, ["p", "q"])
    assert two.value < 2  # it was 50: the slopes of both pairs are 0, and so was the error
    answers = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    assert cautious_temperature(answers, [0, 1, 0, 1], ["p", "p", "q", "q"]).value < 3
    # of a calibrated judge
    draw = torch.Generator().manual_seed(0)
    costs = []
    for _ in range(300):
        gap = torch.randn(10, generator=draw, dtype=torch.float64) * 2
        logits = torch.stack([gap, -gap], 1) / 2
        labels = torch.multinomial(logits.softmax(-1), 1, generator=draw)[:, 0]
        found = cautious_temperature(logits, labels, [number // 2 for number in range(10)])
        shares = logits.softmax(-1)
        tempered = (logits / found.value).log_softmax(-1)
        costs.append(float((shares * (shares.log() - tempered)).sum(1).mean()))
    assert sum(costs) / 300 < 0.007


def test_a_judge_that_is_not_better_than_chance_is_told_apart():
    told = str(CalibrationReport(100, 20.0, 0.1, 0.2, 0.9, 0.69))
    assert "1 / temperature = 0.1 ± 0.2" in told
    assert "not better than chance" in told
    assert "not better than chance" in str(CalibrationReport(100, 50.0, 0.0, 0.0, 0.9, 0.69))
    assert "not better than chance" not in str(CalibrationReport(100, 1.1, 0.9, 0.2, 0.5, 0.5))
    assert "not better than chance" not in str(CalibrationReport(9, 1.0, 50.0, math.inf, 0.5, 0.5))
    # equal logits say nothing
    assert cautious_temperature(torch.zeros(10, 2), [0, 1] * 5, range(10)).value == 1


def test_answers_of_one_length_are_no_longer_ones():
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra plot)")
    model = model_of("mpnet")
    pairs = [("w5", "w6 w7", "w8 w9", 1)] * 30 + [("w5", "w6 w7 w8", "w9", 0)] * 30
    axes = pairwise_report(model, model.dataset(pairs, progress=False), progress=False)
    labels = axes.plot_lengths().axes[0].get_lines()[0]
    assert set(labels.get_ydata()) == {1.0}


def test_pairs_without_a_prompt_are_no_prompt_that_was_seen():
    pairs = [Pair("", "w6", "w7", 0)] * 4
    assert _seen(pairs, pairs) == ()


def test_pairs_without_a_prompt_are_calibrated():
    model = model_of()
    pairs = [("", a, b) for _, a, b, *_ in pairs_of(200)]
    true = predict_pairs(model, model.dataset(pairs, progress=False), progress=False).probabilities
    drawn = torch.multinomial(true, 1, generator=torch.Generator().manual_seed(2))[:, 0].tolist()
    with torch.no_grad():
        model.head.outer.weight.mul_(3)
        model.head.tie.mul_(3)
    labeled = [(*pair, label) for pair, label in zip(pairs, drawn, strict=True)]
    report = calibrate_(model, model.dataset(labeled, progress=False), progress=False)
    assert report.temperature > 1.5
