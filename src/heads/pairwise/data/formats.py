"""Convert rows of the Chatbot Arena, of preference data and of other formats to `Pair`s."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import NoneType

from ..pairs import Pair, Turn, Words, check_label, plain, sound, turns_of

_ROLES = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
}
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_TRUE = ("1", "1.0", "true", "yes")
_FALSE = ("0", "0.0", "false", "no", "", "none", "nan")


def pair_of(row: object) -> Pair:
    """Convert a row of any known format to a pair.

    Raises:
        ValueError: The format is unknown, or a field is invalid.

    >>> pair_of({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"})
    Pair(prompt='2 + 2?', a='4', b='5', label=0, writers=(None, None))
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"row has type {type(row).__name__}, expected a mapping")
    for names, read in _ANSWERS.items():
        if all(name in row for name in names):
            prompt, a, b = read(row, *names)
            verdict = _verdict(row)
            if "chosen" in names and verdict not in (0, None):
                raise ValueError(
                    "expected a row with chosen and rejected to have no other verdict, or one that "
                    f"prefers chosen, got {verdict}"
                )
            return Pair(prompt, a, b, 0 if "chosen" in names else verdict, _writers(row))
    known = "; ".join(", ".join(names) for names in _ANSWERS)
    raise ValueError(
        f"expected columns of two answers ({known}), got {', '.join(map(str, row))}; for other "
        "names, use --columns prompt=question a=first b=second label=better"
    )


def _writers(row: Mapping[str, object]) -> tuple[str | None, str | None]:
    for names in _WRITERS:
        if any(name in row for name in names):
            one, other = names
            return _name(row.get(one)), _name(row.get(other))
    return None, None


def _name(value: object) -> str | None:
    value = plain(value)
    return None if value is None else str(value)


def _texts(row: Mapping[str, object], one: str, other: str) -> tuple[Words, Words, Words]:
    """Return prompt and answers from three columns, as turns if all are lists of one length."""
    asked = "prompt" if "prompt" in row else "instruction"
    if asked not in row:
        raise ValueError(
            f"expected a prompt or instruction column besides {one} and {other}, got none"
        )
    values = [plain(row[name]) for name in (asked, one, other)]
    prompts, a, b = map(_list, values)
    if prompts is not None and a is not None and b is not None:
        # lists of different lengths are not rounds of a conversation: join each into a text
        if not len(prompts) == len(a) == len(b) > 0:
            return _text(asked, prompts), _text(one, a), _text(other, b)
        return _parted(_rounds(one, prompts, a), _rounds(one, prompts, b))
    if _is_list_of(values[0], Mapping):
        shared: Words = _messages(asked, values[0])
    else:
        shared = _text(asked, values[0])
    return shared, _text(one, values[1]), _text(other, values[2])


def _rounds(name: str, prompts: list[str | None], answers: list[str | None]) -> list[Turn]:
    """Return the turns of a conversation, in which prompts and answers alternate."""
    turns = []
    for asked, answer in zip(prompts, answers, strict=True):
        # the Arena's data contain null, which is read as an empty turn
        turns.append(Turn("user", sound(name, asked or "")))
        turns.append(Turn("assistant", sound(name, answer or "")))
    return turns


def _conversations(row: Mapping[str, object], one: str, other: str) -> tuple[Words, Words, Words]:
    return _parted(_messages(one, plain(row[one])), _messages(other, plain(row[other])))


def _preferred(row: Mapping[str, object], one: str, other: str) -> tuple[Words, Words, Words]:
    """Return the prompt (its column, or the answers' shared beginning), and both answers."""
    chosen = plain(row[one])
    rejected = plain(row[other])
    before = plain(row.get("prompt"))
    if isinstance(chosen, list) and isinstance(rejected, list):
        a = _messages(one, chosen)
        b = _messages(other, rejected)
        asked = ()
        if before and isinstance(before, list):
            asked = _messages("prompt", before)
        elif before:
            asked = turns_of("user", _text("prompt", before))
        if (
            a[:1] and a[0].role != "assistant"
        ):  # a already has the prompt, but perhaps not its system turn
            asked = asked[:1] if asked[:1] and asked[0].role == "system" != a[0].role else ()
        return _parted(asked + a, asked + b)
    chosen = _text(one, chosen)
    rejected = _text(other, rejected)
    # HH's rows: each text is a whole conversation, with Human: and Assistant:
    a = _dialogue(chosen)
    b = _dialogue(rejected)
    # if there is a prompt column, such a text is an answer that quotes a conversation
    if before in (None, "") and a and b:
        return _parted(a, b)
    if isinstance(before, list):
        asked = _messages("prompt", before)
    else:
        asked = _text("prompt", before)
    return asked, chosen, rejected


def _dialogue(text: str) -> list[Turn]:
    """Return the turns of a text in which ``Human:`` and ``Assistant:`` begin paragraphs.

    Return no turns if the text begins in another way.
    """
    turns: list[Turn] = []
    for part in ("\n\n" + text.lstrip()).split("\n\n"):
        speaker, colon, words = part.partition(":")
        if colon and speaker in _SPEAKERS:
            turns.append(Turn(_SPEAKERS[speaker], words.strip()))
        elif turns:
            turns[-1] = Turn(turns[-1].role, f"{turns[-1].text}\n\n{part}")
        elif part.strip():
            # words before the first speaker: this text is not a dialogue
            return []
    return turns


def _parted(a: Sequence[Turn], b: Sequence[Turn]) -> tuple[Words, Words, Words]:
    """Split two conversations into their shared prompt and the rest of each.

    A single turn becomes a string.
    """
    for side in (a, b):
        if not side or side[-1].role != "assistant":
            raise ValueError(
                "expected each conversation to end with an answer of the assistant, got one that "
                "does not"
            )
    shared = 0
    # - 1: each side keeps its last turn, even if both last turns are equal
    while shared < min(len(a), len(b)) - 1 and a[shared] == b[shared]:
        shared += 1
    if a[shared] != b[shared] and a[shared].role == b[shared].role == "user":
        raise ValueError(
            "expected both conversations to have the same prompt, got "
            f"{a[shared].text!r:.40} and {b[shared].text!r:.40}"
        )
    # both rests must begin with an answer
    while shared and not a[shared].role == b[shared].role == "assistant":
        shared -= 1
    if shared == 1 and a[0].role == "user":
        prompt: Words = a[0].text
    else:
        prompt = tuple(a[:shared])
    return "" if prompt == () else prompt, _from_turn(shared, a), _from_turn(shared, b)


def _from_turn(first: int, turns: Sequence[Turn]) -> Words:
    """Return the turns from index ``first`` on, or the text of a single turn."""
    if len(turns) == first + 1:
        return turns[first].text
    return tuple(turns[first:])


def _is_list_of(value: object, *kinds: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kinds) for item in value)


def _list(value: object) -> list[str | None] | None:
    """Return a list of strings, which may be given as JSON; return None for other values."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value) or None  # an empty list is read as text
        except (ValueError, RecursionError):
            # json rejects thousands of brackets or digits: treat them as plain text
            return None
    # pyrefly: ignore[bad-return]: it does not understand _is_list_of
    return value if _is_list_of(value, str, NoneType) else None


def _text(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and _is_list_of(value, str, NoneType):
        value = "\n\n".join(filter(None, value))
    if not isinstance(value, str):
        raise ValueError(
            f"{name} has type {type(value).__name__}, expected a string or a list of messages"
        )
    return sound(name, value)


def _messages(name: str, value: object) -> tuple[Turn, ...]:
    """Return messages with ``role`` and ``content``, or ``from`` and ``value``, as turns."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(
                f"{name} is plain text, expected a list of messages, or such a list as JSON"
            ) from None
    turns = []
    for message in value if isinstance(value, list) else [value]:
        if not isinstance(message, Mapping):
            raise ValueError(
                f"{name} has a message of type {type(message).__name__}, expected a mapping with "
                "role and content"
            )
        role = message.get("role", message.get("from"))
        if str(role).lower() not in _ROLES:
            raise ValueError(
                f"{name} has a message with role {role!r:.20}, expected one of {', '.join(_ROLES)}"
            )
        text = _content(name, message.get("content", message.get("value")))
        turns.append(Turn(_ROLES[str(role).lower()], sound(name, text)))
    return tuple(turns)


def _content(name: str, content: object) -> str:
    """Return a message's text, or the texts of its parts, separated by blank lines."""
    texts = []
    for part in content if isinstance(content, list) else [content or ""]:
        if isinstance(part, Mapping) and part.get("type") == "text":
            part = part.get("text")
        if not isinstance(part, str):
            raise ValueError(
                f"{name} has a message with content of type {type(part).__name__}, expected text"
            )
        texts.append(part)
    return "\n\n".join(texts)


def _verdict(row: Mapping[str, object]) -> int | tuple[float, ...] | None:
    if _ONE_HOT[0] in row and _ONE_HOT[1] in row:
        won = []
        for name in _ONE_HOT:
            # data without ties may lack the third column
            text = str(row.get(name, 0)).strip().lower()
            if text not in _TRUE + _FALSE:
                raise ValueError(f"{name} is {row[name]!r}, expected 0 or 1")
            won.append(text in _TRUE)
        if sum(won) != 1:
            raise ValueError(
                "expected one winner, got several" if sum(won) else "expected one winner, got none"
            )
        return won.index(True)
    if "winner" in row:
        return check_label(row["winner"])
    if "preference" in row:
        return _preference(plain(row["preference"]))
    return check_label(row.get("label"))


def _preference(value: object) -> int | tuple[float, ...] | None:
    """Return a preference as a label: 1 is A, 2 is B, 0 or 1.5 a tie; others become soft labels."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return check_label(value)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (value == 0 or 1 <= value <= 2)
    ):
        raise ValueError(
            f"preference is {value!r}, expected 0 (tie), or a number from 1 (first answer) to 2 "
            "(second answer)"
        )
    # AlpacaEval counts answers from 1, but the classes here count from 0
    fixed = {0: 2, 1: 0, 1.5: 2, 2: 1}
    if value in fixed:
        return fixed[value]
    return (2.0 - value, value - 1.0, 0.0)


_ANSWERS: dict[
    tuple[str, str], Callable[[Mapping[str, object], str, str], tuple[Words, Words, Words]]
] = {
    ("conversation_a", "conversation_b"): _conversations,
    ("response_a", "response_b"): _texts,
    ("chosen", "rejected"): _preferred,
    ("output_1", "output_2"): _texts,
    ("a", "b"): _texts,
}
_WRITERS = (("model_a", "model_b"), ("generator_1", "generator_2"), ("gen_a", "gen_b"))
_ONE_HOT = ("winner_model_a", "winner_model_b", "winner_tie")
VERDICTS = {"winner", "preference", "label", *_ONE_HOT}
COLUMNS = {"prompt", "instruction", *VERDICTS, *chain.from_iterable((*_ANSWERS, *_WRITERS))}
