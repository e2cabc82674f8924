"""Judges: what they must tell apart, and the scores they are defined by."""

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from heads.lora import LikelihoodGain, WinRate, judge_answers
from heads.pairwise import PairwiseModel
from tests.support.models import save_tokenizer, tiny

WORDS = ["<unk>", "<end>", "<pad>", *"abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture
def speaker(tmp_path):
    save_tokenizer(tmp_path, WORDS)
    return tiny("llama"), AutoTokenizer.from_pretrained(tmp_path, eos_token="<end>")


def test_the_gain_is_what_the_prompt_adds(speaker):
    model, tokenizer = speaker
    logs, bare = (
        torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].detach().double(), -1)
        for ids in ([1, 3, 4, 5], [1, 4, 5])
    )
    expected = float(logs[1, 4] + logs[2, 5] - bare[0, 4] - bare[1, 5])
    judge = LikelihoodGain(model.train(), tokenizer)
    assert judge("a", "b c") == pytest.approx(expected, rel=1e-4)
    assert judge("<end> a", "b c") == pytest.approx(expected, rel=1e-4)  # it begins there already
    assert model.training
    assert judge("a", "") == 0
    assert judge("", "b c") == pytest.approx(0, abs=1e-6)
    with pytest.raises(
        ValueError, match=r"LikelihoodGain:.*64.*context length.*1 in the prompt and 70"
    ):
        judge("", "a " * 70)
    with_start = LikelihoodGain(
        model, AutoTokenizer.from_pretrained(tokenizer.name_or_path, bos_token="<pad>")
    )
    assert with_start("a", "b c") != judge("a", "b c")
    assert isinstance(LikelihoodGain(model.bfloat16(), tokenizer)("a", "b"), float)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"LikelihoodGain:.*bos_token"):
        LikelihoodGain(model, tokenizer)


def test_a_pairwise_model_judges_against_references(tmp_path):
    save_tokenizer(tmp_path, WORDS)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    encoder = BertModel(BertConfig(vocab_size=len(WORDS), pad_token_id=2, **sizes))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, pad_token="<pad>", eos_token="<end>")
    model = PairwiseModel.from_encoder(encoder, tokenizer=tokenizer).eval()
    torch.nn.init.normal_(model.head.outer.weight)
    judge = WinRate(model, {"a": "b c"})
    shares = model.predict(["a"], ["d e f"], ["b c"], progress=False).probabilities[0]
    assert judge("a", "d e f") == pytest.approx(100 * float(shares[0] + shares[2] / 2), rel=1e-5)
    assert judge("a", "b c") == pytest.approx(50, abs=1e-3)  # against itself, by fairness
    assert judge("a", "") != 50
    with pytest.raises(ValueError, match=r"WinRate:.*BertModel"):
        WinRate(encoder, {})
    two = PairwiseModel.from_encoder(encoder, tokenizer=tokenizer, ties=False)
    assert WinRate(two, {"a": "b c"})("a", "b c") == pytest.approx(50)
    with pytest.raises(ValueError, match=r"WinRate:.*'q'"):
        judge("q", "a")


def test_scores_are_averaged_and_must_be_finite():
    assert judge_answers(lambda prompt, answer: -1.5, ["a"], ["b"], progress=False) == -1.5
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"the judge gave {wrong}"):
            judge_answers(lambda p, a, wrong=wrong: wrong, ["a"], ["b"], progress=False)
    with pytest.raises(ValueError, match=r"judge_answers:.*1.*prompts.*0"):
        judge_answers(lambda p, a: 1, ["a"], [])
