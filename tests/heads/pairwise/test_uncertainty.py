"""`fit_uncertainty_` against its definition, and what it keeps."""

import pytest
import torch
from tests.heads.pairwise.test_model import PAIRS, model_of

from heads.pairwise import PairwiseModel, calibrate_, fit_uncertainty_, predict_pairs
from heads.pairwise.inference import sides_of
from heads.pairwise.report.metrics import pairwise_metrics
from heads.pairwise.uncertainty import _least_sure


def trained(ties=True, **options):
    """A model with a head of random last layers, and labeled pairs."""
    model = model_of(link="antisymmetric", ties=ties, **options).eval()
    pairs = [(*pair, i % (2 + ties)) for i, pair in enumerate(PAIRS)]
    return model, model.dataset(pairs, progress=False)


@pytest.mark.parametrize("ties", [True, False])
def test_a_verdict_is_the_mean_over_the_last_weights(ties):
    """Beside a Laplace approximation written out: its Hessian by autograd, its mean by drawing."""
    model, data = trained(ties)
    head = model.head
    a, b, *looks = sides_of(model, data, range(len(data)))
    surface = looks if head.encoding is not None else (None, None)
    last = head.beside[-1]
    weights = torch.cat([head.outer.weight[0], last.weight[0]]).detach().double()
    read = head.read_by_last(a, b, *surface).detach().double()
    plain = head(a, b, *surface).detach().double()
    torch.testing.assert_close((read @ weights).float(), plain[:, 0].float())

    def expected_loss(w):
        """The log-loss of labels drawn from the head's own verdicts, and the prior."""
        wins = read @ w
        logits = torch.stack([wins, -wins, *plain[:, 2:].unbind(1)], 1)
        loss = -(plain.softmax(1) * logits.log_softmax(1)).sum()
        return loss + report.precision * w.square().sum() / 2

    report = fit_uncertainty_(model, data, data, batch_size=2)
    precision = torch.autograd.functional.hessian(expected_loss, weights)
    torch.testing.assert_close(
        head.covariance.double(), torch.linalg.inv(precision), rtol=1e-3, atol=1e-5
    )
    assert model.config.uncertainty
    drawn = torch.distributions.MultivariateNormal(weights, precision_matrix=precision)
    torch.manual_seed(0)
    wins = drawn.sample((20_000,)) @ read.T
    mean = torch.sigmoid(2 * wins).mean(0)
    found = head(a, b, *surface).detach()
    share = torch.sigmoid((found[:, 0] - found[:, 1]).double())
    # the approximation of the mean is good to about a hundredth
    torch.testing.assert_close(share, mean, rtol=0, atol=0.02)
    torch.testing.assert_close(found[:, 2:].double(), plain[:, 2:])


def test_verdicts_stay_fair_and_keep_their_winner(tmp_path):
    model, data = trained()
    before = predict_pairs(model, data, progress=False)
    report = fit_uncertainty_(model, data, data)
    assert "prior precision" in str(report)
    after = predict_pairs(model, data, progress=False)
    labels = [data[i]["label"] for i in range(len(data))]
    for found, loss in ((before, report.before), (after, report.after)):
        assert pairwise_metrics(found.log_probabilities, labels).log_loss == pytest.approx(loss)
    assert torch.equal(after.log_probabilities, after.swapped_log_probabilities)
    for one, other in zip(before.log_probabilities, after.log_probabilities, strict=True):
        assert (one[0] - one[1]).sign() == (other[0] - other[1]).sign()
        assert (one[0] - one[1]).abs() >= (other[0] - other[1]).abs()
    again = PairwiseModel.from_pretrained(
        model.save_pretrained(tmp_path / "judge") or tmp_path / "judge"
    )
    loaded = predict_pairs(again, again.dataset(data.pairs, progress=False), progress=False)
    assert torch.equal(loaded.log_probabilities, after.log_probabilities)
    # a second fit is around the plain verdicts, not around the softened ones
    covariance = model.head.covariance.clone()
    fit_uncertainty_(model, data, data)
    assert torch.equal(model.head.covariance, covariance)
    calibrate_(model, data, progress=False)
    # training does not see it
    model.train()
    a, b, *looks = sides_of(model, data, range(2))
    surface = looks if model.head.encoding is not None else (None, None)
    torch.manual_seed(0)
    soft = model.head(a, b, *surface)
    model.head.covariance.fill_(1e6)
    torch.manual_seed(0)
    assert torch.equal(model.head(a, b, *surface), soft)


def test_the_least_sure_of_equally_good_choices_is_taken():
    torch.manual_seed(0)
    noise = torch.randn(400)
    noise -= noise.mean()
    equal = 0.5 + 0.01 * noise
    # worse by far more than its error; worse by less than its error; the best
    losses = torch.stack(
        [equal + 0.1 + 0.1 * noise.flip(0), equal + 0.002 + 0.1 * noise.roll(1), equal]
    )
    assert _least_sure(losses) == 1
    assert _least_sure(losses[[0, 2]]) == 1


def test_other_heads_are_refused():
    model = model_of(link="davidson")
    data = model.dataset([(*pair, 0) for pair in PAIRS], progress=False)
    with pytest.raises(ValueError, match=r"fit_uncertainty_: the link is 'davidson'"):
        fit_uncertainty_(model, data, data)
    with pytest.raises(ValueError, match="uncertainty is True, expected False unless link"):
        model_of(link="davidson", uncertainty=True)


def test_a_judge_with_an_adapter_keeps_its_uncertainty(tmp_path):
    """Its head is inside a wrapper of peft's."""
    from peft import LoraConfig, get_peft_model

    model, _ = trained()
    settings = LoraConfig(r=2, target_modules=["query"], modules_to_save=["head", "pool"])
    wrapped = get_peft_model(model, settings)
    judge = wrapped.get_base_model().eval()
    pairs = [(*pair, i % 3) for i, pair in enumerate(PAIRS)]
    data = judge.dataset(pairs, progress=False)
    fit_uncertainty_(judge, data, data)
    expected = predict_pairs(judge, data).probabilities
    wrapped.merge_and_unload().save_pretrained(tmp_path)
    loaded = PairwiseModel.from_pretrained(tmp_path)
    found = predict_pairs(loaded, loaded.dataset(pairs, progress=False)).probabilities
    torch.testing.assert_close(found, expected)
    assert loaded.head.covariance.any()
