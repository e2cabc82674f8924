"""A judge as a reward model: the same scores from padded ids, the same folders, and TRL's trainer."""

import pytest
import torch
from datasets import Dataset
from tests.heads.pairwise.support import encoder_of, model_of, pairs_of, tokenizer_of
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

from heads.pairwise import PairwiseForSequenceClassification, PairwiseModel, predict_pairs

KINDS = ("bert", "modernbert", "llama", "mistral", "mpnet")


def padded(data, side):
    """All sequences of a data set, and what a stock collator makes of them."""
    answers = [data.answer(k).tokens for k in range(2 * len(data))]
    columns = ([t.ids for t in answers], [t.types for t in answers], [torch.ones(len(t.ids)).numpy() for t in answers])
    ids, types, mask = (
        pad_sequence([torch.from_numpy(row).long() for row in column], batch_first=True, padding_side=side)
        for column in columns
    )
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


@pytest.mark.parametrize("link", ["davidson", "rao-kupper"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_scores_and_their_differences_the_odds(kind, link, tmp_path):
    model = model_of(kind, link=link, pooling=["first", "last"], hidden_features=4)
    model.head.temperature.fill_(1.5)
    model.save_pretrained(tmp_path)
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert isinstance(scorer, PairwiseForSequenceClassification)
    assert scorer.tokenizer is not None
    data = model.dataset(pairs_of(20), progress=False)
    found = predict_pairs(model, data, progress=False)
    for side in ("left", "right"):
        with torch.no_grad():
            logits = scorer(**padded(data, side)).logits
        assert logits.shape == (40, 1)
        torch.testing.assert_close(1.5 * logits.view(20, 2), found.scores)
        odds = found.log_probabilities[:, 0] - found.log_probabilities[:, 1]
        if link == "davidson":
            torch.testing.assert_close(logits[::2, 0] - logits[1::2, 0], odds)
        else:  # its threshold bends the odds, and leaves their sign
            assert bool(((logits[::2, 0] - logits[1::2, 0]) * odds >= 0).all())


def test_the_reward_trainer_of_trl_trains_a_judge(tmp_path):
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(0)
    tokenizer = tokenizer_of()
    tokenizer.eos_token = "<sep>"
    model = PairwiseForSequenceClassification.from_encoder(
        encoder_of("llama"), tokenizer, link="davidson", pooling="last", ties=False
    )
    rows = [
        {"prompt": f"{p} ", "chosen": (a, b)[label], "rejected": (b, a)[label]}
        for p, a, b, label in pairs_of(600, labels=2)
    ]
    arguments = RewardConfig(
        str(tmp_path / "runs"), max_steps=120, per_device_train_batch_size=16, learning_rate=1e-2, use_cpu=True,
        report_to="none", disable_tqdm=True, bf16=False, logging_steps=120, max_length=32,
    )  # fmt: skip
    trainer = RewardTrainer(
        model, args=arguments, train_dataset=Dataset.from_list(rows[:500]),
        eval_dataset=Dataset.from_list(rows[500:]), processing_class=tokenizer,
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_accuracy"] > max(0.7, before["eval_accuracy"] + 0.1)
    assert after["eval_loss"] < before["eval_loss"]
    trainer.save_model(str(tmp_path / "judge"))
    judge = PairwiseModel.from_pretrained(tmp_path / "judge")
    assert type(judge) is PairwiseModel
    assert all(torch.equal(value, judge.state_dict()[name]) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_tokenised_rows_are_what_the_judge_reads(kind):
    model = model_of(kind, link="davidson", pooling="last")
    scorer = PairwiseForSequenceClassification(model.config).eval()
    scorer.load_state_dict(model.state_dict())
    pairs = [*pairs_of(12), ("p", "w1 w2", "w3", (0.2, 0.7, 0.1)), ("p", "w1", "w2", (0.2, 0.2, 0.6))]
    data = model.dataset(pairs, progress=False)
    rows, scores = data.reward_rows(), predict_pairs(model, data, progress=False).scores
    won = [(n, p[3] if isinstance(p[3], int) else p[3].index(max(p[3]))) for n, p in enumerate(pairs)]
    won = [(n, k) for n, k in won if k < 2]
    assert len(rows) == len(won) < len(pairs)
    for row, (number, k) in zip(rows, won, strict=True):
        for name, side in (("chosen_ids", k), ("rejected_ids", 1 - k)):
            kinds = torch.from_numpy(data.answer(2 * number + side).tokens.types).long()[None]
            with torch.no_grad():
                found = scorer(torch.tensor([row[name]]), token_type_ids=kinds).logits[0, 0]
            torch.testing.assert_close(found, scores[number, side])
    with pytest.raises(ValueError, match="reward_rows: pair 0 has no label"):
        model.dataset([("p", "a", "b")], progress=False).reward_rows()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"link": "antisymmetric"}, "link is 'antisymmetric'; needed one that has scores: davidson or rao-kupper"),
        ({"pooling": ["mean", "last"]}, r"pooling is \['mean', 'last'\]; needed first, last or both"),
        ({"pooling": "last", "surface": ["length"]}, r"surface is \['length'\]; needed none"),
    ],
)
def test_what_ids_alone_do_not_tell_is_refused(options, said, tmp_path):
    model = model_of(**options)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"PairwiseForSequenceClassification: {said}"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_an_empty_sequence_is_refused():
    model = PairwiseForSequenceClassification.from_encoder(encoder_of("bert"), tokenizer_of(), pooling="last").eval()
    ids = torch.tensor([[1, 5, 2], [0, 0, 0]])
    with pytest.raises(ValueError, match="lengths are"):
        model(ids, torch.tensor([[1, 1, 1], [0, 0, 0]]))
