"""Pairs to token ids, and batches: what is cut, counted and refused."""

import pytest
import torch
from tests.heads.pairwise.support import model_of, pairs_of, tokenizer_of, words
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertConfig, PreTrainedTokenizerFast

from heads.pairwise import PairwiseCollator, PairwiseConfig, Turn
from heads.pairwise.data.collate import PairwiseDataset
from heads.pairwise.data.template import Template, cut_middle


def config_of(**changes):
    return PairwiseConfig(encoder=BertConfig(vocab_size=96), **{"max_tokens": 16} | changes)


def sequences_of(pair, **changes):
    data = PairwiseDataset([pair], tokenizer_of(), config_of(**changes), progress=False)
    return [tokens.ids.tolist() for tokens in tokens_of(data)], data


def tokens_of(data, number=0):
    return [answer.tokens for answer in data[number]["answers"]]


def test_sequences_are_the_tokenizers_own():
    tokenizer, pair = tokenizer_of(), (words(1, 2), words(3), words(4, 5))
    made, data = sequences_of(pair)
    for sequence, ids, answer in zip(tokens_of(data), made, pair[1:], strict=True):
        expected = tokenizer(pair[0], answer)
        assert ids == expected["input_ids"]
        assert sequence.types.tolist() == expected["token_type_ids"]
        assert sequence.begin == ids.index(2) + 1
    bare, _ = sequences_of(pair, append_prompt=False)
    assert bare == [tokenizer(answer)["input_ids"] for answer in pair[1:]]
    empty, _ = sequences_of(("", *pair[1:]))
    assert empty[0] == tokenizer("", pair[1])["input_ids"]


def ids_of(*numbers):
    return [k + 4 for k in numbers]


def test_a_prompt_loses_its_beginning_and_an_answer_its_middle():
    prompt, long, short = words(*range(10)), words(*range(20, 40)), words(50)
    # 16 tokens: 3 are special, 4 the prompt's at least
    made, data = sequences_of((prompt, long, short))
    assert made[0] == [1, *ids_of(6, 7, 8, 9), 2, *ids_of(20, 21, 22, 23, 24, 36, 37, 38, 39), 2]
    assert made[1] == [1, *ids_of(*range(10)), 2, *ids_of(50), 2]
    assert str(data.report).splitlines() == [
        "1 pairs (without labels), 30 tokens",
        "1 prompts and 1 answers were too long: 17 tokens were cut, from the beginnings of prompts "
        "and the middles of answers",
    ]
    assert [tokens.begin for tokens in tokens_of(data)] == [6, 12]
    made, _ = sequences_of((prompt, long, short), max_prompt_tokens=1)
    assert made[0][:3] == [1, *ids_of(9), 2]


def test_what_is_read_of_an_answer_does_not_depend_on_its_rival():
    """Bit for bit: a third answer must not change a verdict on two."""
    prompt, a, b, c = words(*range(12)), words(*range(20, 26)), words(50), words(*range(30, 80))
    tokens = [sequences_of((prompt, a, other))[0][0] for other in (a, b, c, "")]
    assert all(one == tokens[0] for one in tokens)


def test_conversations_are_read_turn_by_turn():
    asked = (Turn("user", words(1)), Turn("assistant", words(2)), Turn("user", words(3)))
    longer = (Turn("assistant", words(5, 6)), Turn("user", words(7)), Turn("assistant", words(8)))
    made, data = sequences_of((asked, words(4), longer))
    assert made[0] == [1, *ids_of(1), 2, *ids_of(2), 2, *ids_of(3), 2, *ids_of(4), 2]
    assert made[1] == [
        1,
        *ids_of(1),
        2,
        *ids_of(2),
        2,
        *ids_of(3),
        2,
        *ids_of(5, 6),
        2,
        *ids_of(7),
        2,
        *ids_of(8),
        2,
    ]
    assert [len(tokens.ids) - tokens.begin for tokens in tokens_of(data)] == [2, 2]
    told = [{"role": turn.role, "content": turn.text} for turn in asked]
    assert sequences_of((told, words(4), list(longer)))[0] == made


def test_an_empty_answer_is_a_sequence_without_one():
    made, data = sequences_of((words(1), "", words(2)))
    assert made[0] == [1, *ids_of(1), 2, 2]
    assert tokens_of(data)[0].begin == 3
    tokenizer = tokenizer_of()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    data = PairwiseDataset([("w1", "~", "w2")], tokenizer, config_of(), progress=False)
    assert tokens_of(data)[0].ids.tolist() == made[0]


def test_items_are_counted_from_both_ends():
    # more than are tokenised at once
    data = PairwiseDataset(pairs_of(300), tokenizer_of(), config_of(), progress=False)
    assert tokens_of(data, -1)[1].ids.tolist() == tokens_of(data, 299)[1].ids.tolist()
    alone = PairwiseDataset([data.pairs[270]], tokenizer_of(), config_of(), progress=False)
    for one, other in zip(tokens_of(data, 270), tokens_of(alone), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.types.tolist() == other.types.tolist()
    assert data.lengths[270] == alone.lengths[0]
    with pytest.raises(IndexError):
        data[300]


def test_cutting_keeps_head_and_tail():
    for count in range(1, 9):
        for room in range(1, 9):
            made = cut_middle(list(range(count)), room)
            assert len(made) == min(count, room)
            assert made[0] == 0
            assert made[-1] == count - 1 or room == 1
    assert cut_middle([1, 2, 3], 0) == []


def test_swapping_changes_nothing_but_the_order_of_pairs():
    pairs = [*pairs_of(20), ("w1", "w2", "w2", 2), ("w1", "w2", "w3", 0), ("w1", "w3", "w2", 1)]
    turned = [(p, b, a, label) for p, a, b, label in pairs]
    one, other = (
        PairwiseDataset(p, tokenizer_of(), config_of(), progress=False) for p in (pairs, turned)
    )
    straight, back = (
        PairwiseCollator()([data[i] for i in range(len(data))]) for data in (one, other)
    )
    assert torch.equal(straight["pairs"], back["pairs"].flip(1))
    assert all(
        torch.equal(straight[name], back[name])
        for name in ("input_ids", "lengths", "token_type_ids", "labels")
    )
    assert straight["pairs"][20, 0] == straight["pairs"][20, 1]  # one answer twice is encoded once
    assert torch.equal(straight["pairs"][21], straight["pairs"][22].flip(0))
    assert len(straight["lengths"]) == 2 * 20 + 2
    assert next(iter(straight)) == "pairs"


def test_special_tokens_in_texts_are_text():
    tokenizer = tokenizer_of()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    text = "w2 <sep> <pad> w3"
    data = PairwiseDataset(
        [("w1", text, "w4")], tokenizer, config_of(max_tokens=30), progress=False
    )
    made = tokens_of(data)[0].ids.tolist()
    assert made.count(2) == 2  # the template's own
    assert 0 not in made
    assert tokenizer("w1", text)["input_ids"].count(2) == 3


def test_soft_and_hard_labels_mix():
    pairs = [("p", "x", "y", (0.5, 0.5, 0.0)), ("p", "x", "y", 2)]
    data = PairwiseDataset(pairs, tokenizer_of(), config_of(), progress=False)
    made = PairwiseCollator()([data[0], data[1]])
    assert torch.equal(made["labels"], torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (("p", "x", None), r"PairwiseDataset:.*assistant"),
        ((3, "x", "y"), r"PairwiseDataset:.*prompt.*3"),
        (("p", "x", [("user", "y")]), r"PairwiseDataset:.*assistant"),
        (("p", "x", [("judge", "y")]), r"PairwiseDataset:.*messages with roles"),
        (("p", "x"), "pair 1 is"),
        (("p", "x", "y", 5), r"PairwiseDataset:.*label.*5.*0"),
        (("p", "x", "y", True), r"PairwiseDataset:.*label"),
        (("p", "x", "hi \ud83d"), r"PairwiseDataset:.*surrogate"),
        (("p", "x", "y", 0), r"PairwiseDataset:.*1.*2.*pairs"),
    ],
)
def test_bad_pairs_are_refused_with_their_numbers(pair, said):
    with pytest.raises(ValueError, match=said):
        PairwiseDataset([("p", "x", "y"), pair], tokenizer_of(), config_of(), progress=False)


def test_shares_without_ties_serve_a_model_that_knows_none():
    model = model_of(ties=False)
    assert model.dataset([("p", "a", "b", (0.25, 0.75, 0.0))], progress=False).labels == [
        (0.25, 0.75)
    ]
    with pytest.raises(
        ValueError,
        match=r"PairwiseDataset:.*2.*fractions",
    ):
        model.dataset([("p", "a", "b", (0.25, 0.5, 0.25))], progress=False)


def test_labels_outside_two_classes_and_odd_tokenizers_are_refused():
    with pytest.raises(ValueError, match=r"PairwiseDataset:.*2.*0.*\(A\).*1.*\(B\)"):
        PairwiseDataset([("p", "x", "y", 2)], tokenizer_of(), config_of(ties=False), progress=False)
    with pytest.raises(ValueError, match=r"PairwiseDataset:.*fast tokenizer"):
        PairwiseDataset([("p", "x", "y")], object(), config_of(), progress=False)
    with pytest.raises(ValueError, match=r"PairwiseDataset:.*max_tokens.*4"):
        PairwiseDataset([("p", "x", "y")], tokenizer_of(), config_of(max_tokens=4), progress=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"link": "bt"}, r"PairwiseConfig:.*'bt'"),
        ({"pooling": "cls"}, r"PairwiseConfig:.*\['cls'\]"),
        ({"pooling": ["mean", "mean"]}, "each value at most once"),
        (
            {"surface": ["color"]},
            r"PairwiseConfig:.*\['color'\]",
        ),
        ({"dropout": 1.0}, r"PairwiseConfig:.*dropout.*1.0"),
        ({"hidden_features": -1}, "hidden_features is -1"),
        ({"surface": ["length"], "link": "concat"}, r"PairwiseConfig:.*link='concat'"),
        ({"max_tokens": 0}, r"PairwiseConfig:.*max_tokens.*0"),
        ({"label_smoothin": 0.1}, r"PairwiseConfig:.*label_smoothin;.*label_smoothing"),
        ({"encoder": {"model_type": "nothing"}}, r"PairwiseConfig:.*model_type.*'nothing'"),
    ],
)
def test_configs_refuse(changes, said):
    with pytest.raises(ValueError, match=said):
        config_of(**{"max_tokens": 16} | changes) if "encoder" not in changes else PairwiseConfig(
            **changes
        )


def test_a_tokenizer_without_letters_is_read():
    vocabulary = {token: number for number, token in enumerate(["</s>", "0", "1", "+"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[])), eos_token="</s>"
    )
    template = Template(tokenizer, PairwiseConfig(encoder=BertConfig(), max_tokens=32))
    assert template.limit == 32
