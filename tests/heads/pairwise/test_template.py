"""Chat templates: sequences are what the template renders, and what is said in them is text."""

import pytest
from tests.heads.pairwise.support import tokenizer_of, words
from tokenizers import pre_tokenizers
from transformers import BertConfig

from heads.pairwise import PairwiseConfig, Turn
from heads.pairwise.data.template import Template

CHAT = (
    "{% if messages[0]['role'] != 'system' %}<cls> w80 <sep> {% endif %}"
    "{% for m in messages %}{{ {'user': 'w81', 'assistant': 'w82', 'system': 'w83'}[m['role']] }} "
    "{{ m['content'] }} <sep> {% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% "
    "endif %}{{ {'user': 'w81', 'assistant': 'w82'}[m['role']] }} {{ m['content'] }} <sep> {% "
    "endfor %}"
)


def chat_of(template=CHAT):
    tokenizer = tokenizer_of()
    tokenizer.chat_template = template
    return tokenizer


def made_of(tokenizer, prompt, answer, **changes):
    config = PairwiseConfig(encoder=BertConfig(vocab_size=96), **{"max_tokens": 64} | changes)
    ((made,),) = Template(tokenizer, config).sequences([(prompt, [answer])])
    return made


def turns(*texts):
    return tuple(Turn(role, text) for role, text in texts)


TALKS = {
    "texts": (words(1, 2), words(3)),
    "no prompt": ("", words(3)),
    "two rounds": (turns(("user", "w1"), ("assistant", "w2 w3"), ("user", "w4")), "w5"),
    "a system": (turns(("system", "w9"), ("user", "w1")), "w5 w6"),
    "an answer of turns": ("w1", turns(("assistant", "w2"), ("user", "w3"), ("assistant", "w4"))),
}


@pytest.mark.parametrize("talk", TALKS)
def test_sequences_are_what_the_template_renders(talk):
    tokenizer, (prompt, answer) = chat_of(), TALKS[talk]
    tokens, of_prompt, of_answer = made_of(tokenizer, prompt, answer)
    said = list(turns(("user", prompt)) if isinstance(prompt, str) else prompt)
    said += turns(("assistant", answer)) if isinstance(answer, str) else answer
    messages = [{"role": turn.role, "content": turn.text} for turn in said]
    assert tokens.ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    assert (of_prompt, of_answer) == (0, 0)
    assert tokenizer.decode(tokens.ids[tokens.begin :]) == f"{said[-1].text} <sep>"


def test_what_is_said_is_text_and_what_the_template_says_is_not():
    tokenizer = chat_of()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ids = made_of(tokenizer, "w1 <sep>", "w2 <pad> <cls>")[0].ids.tolist()
    assert ids.count(2) == 3
    assert ids.count(1) == 1
    assert 0 not in ids


def test_a_long_conversation_loses_its_beginning():
    tokenizer = chat_of()
    talk = turns(*((("user", "assistant")[k % 2], words(k, k)) for k in range(9)))
    tokens, cut, _ = made_of(tokenizer, talk, "w50 w51", max_tokens=20)
    ids = tokenizer.decode(tokens.ids).split()
    assert len(ids) == 20
    assert ids[:4] == ["<cls>", "w80", "<sep>", "w81"]
    assert ids[-6:] == ["w8", "<sep>", "w82", "w50", "w51", "<sep>"]
    assert cut == 9 * 2 + 8 * 2 - (20 - 4 - 5)
    long, _, cut = made_of(tokenizer, talk, words(*range(40)), max_tokens=24, max_prompt_tokens=4)
    assert (len(long.ids), cut) == (24, 40 - (24 - 4 - 4 - 3))


def test_a_template_without_a_system_reads_it_as_the_users():
    tokens = made_of(chat_of(NO_SYSTEM), turns(("system", "w9"), ("user", "w1")), "w5")[0]
    assert tokenizer_of().decode(tokens.ids) == "w81 w9 <sep> w81 w1 <sep> w82 w5 <sep>"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0]['content'] }}", r"PairwiseDataset:.*renders each turn"),
        (
            "{{ raise_exception('never') }}",
            r"PairwiseDataset:.*assistant",
        ),
    ],
)
def test_other_templates_are_refused(template, said):
    with pytest.raises(ValueError, match=said):
        made_of(chat_of(template), "w1", "w2")


def test_a_tokenizer_that_does_not_part_two_texts():
    tokenizer = tokenizer_of()
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.eos_token = "<sep>"
    tokens = made_of(tokenizer, "w1 w2", "w3")[0]
    assert tokenizer.decode(tokens.ids).split()[-2:] == ["w3", "<sep>"]
    assert tokens.ids[tokens.begin] == 7
    tokenizer.eos_token = None
    empty = made_of(tokenizer, "w1", "")[0]  # then its last token stands for it
    assert (len(empty.ids), empty.begin) == (1, 0)


def test_what_leaves_no_room_is_refused():
    long_system = CHAT.replace("'system': 'w83'", "'system': '" + " ".join(["w83"] * 40) + "'")
    talk = (Turn("system", "w1"), Turn("user", "w2"))
    with pytest.raises(ValueError, match=r"PairwiseDataset:.*conversation"):
        made_of(chat_of(long_system), talk, "w3", max_tokens=32)
    assert len(made_of(chat_of(long_system), "w2", "w3", max_tokens=32)[0].ids) < 32


def test_a_long_opening_leaves_an_answer_one_token():
    long_system = CHAT.replace("'system': 'w83'", "'system': '" + " ".join(["w83"] * 10) + "'")
    talk = (Turn("system", "w1"), Turn("user", words(*range(2, 60))))
    budget = {"max_tokens": 32, "max_prompt_tokens": 100}
    tokens, _, cut_of_answer = made_of(chat_of(long_system), talk, "w61 w62 w63", **budget)
    assert len(tokens.ids) == 32
    assert cut_of_answer == 2
    assert tokenizer_of().decode(tokens.ids[tokens.begin]) == "w61"


def test_nothing_at_all_is_refused():
    bare = tokenizer_of()
    bare._tokenizer.post_processor = None
    with pytest.raises(ValueError, match=r"PairwiseDataset:.*prompt"):
        made_of(bare, "", "", append_prompt=False)
