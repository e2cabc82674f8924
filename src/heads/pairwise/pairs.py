"""`Pair`: a prompt, two answers (strings or turns of a conversation), and which is better."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from .choices import CLASSES

_WINNERS = {
    "a": 0,
    "model_a": 0,
    "response_a": 0,
    "answer_a": 0,
    "output_1": 0,
    "left": 0,
    "b": 1,
    "model_b": 1,
    "response_b": 1,
    "answer_b": 1,
    "output_2": 1,
    "right": 1,
    "tie": 2,
    "tied": 2,
    "draw": 2,
    "both": 2,
    "neither": 2,
    "equal": 2,
    "same": 2,
    # the Arena writes tie (bothbad); other data sets use a space or an underscore
    **{
        f"{before}both{between}{how}{after}": 2
        for how in ("bad", "good")
        for between in ("", "_", " ")
        for before, after in (("", ""), ("tie (", ")"))
    },
}


ROLES = ("system", "user", "assistant")


class Turn(NamedTuple):
    """A turn of a conversation.

    Attributes:
        role: ``"user"``, ``"assistant"`` or ``"system"``.
        text: The text of the turn.
    """

    role: str
    text: str


Words = str | tuple[Turn, ...]
"""A string, or the turns of a conversation."""

WordsLike = str | Sequence[Turn | tuple[str, str] | Mapping[str, str]]
"""The values that `check_words` converts to `Words`."""


class Pair(NamedTuple):
    """A prompt, two answers, which is better, and who wrote them.

    Attributes:
        prompt: The string, or the turns of the conversation, that both answers reply to.
        a: Answer A: a string, or the turns after the shared prompt. The last turn is the
            assistant's.
        b: Answer B: a string or turns, as for A.
        label: 0 if A is better, 1 if B is better, 2 for a tie, or a soft label: the fractions of
            annotators who chose A, B and tie. None means no label.
        writers: The names of the models that wrote A and B; None for an unknown name.
    """

    prompt: Words
    a: Words
    b: Words
    label: int | tuple[float, ...] | None = None
    writers: tuple[str | None, str | None] = (None, None)


def turns_of(role: str, words: Words) -> tuple[Turn, ...]:
    """Convert ``words`` to turns: a string becomes one turn, and an empty prompt becomes none.

    >>> turns_of("user", "Hello"), turns_of("user", "")
    ((Turn(role='user', text='Hello'),), ())
    """
    if not isinstance(words, str):
        return words
    if words or role == "assistant":
        return (Turn(role, words),)
    return ()


def said_by(role: str, words: Words) -> str:
    r"""Return the text of one role's turns, joined by blank lines; return a string as it is.

    >>> said_by(
    ...     "assistant",
    ...     (Turn("assistant", "One."), Turn("user", "And?"), Turn("assistant", "Two.")),
    ... )
    'One.\n\nTwo.'
    """
    if isinstance(words, str):
        return words
    return "\n\n".join(turn.text for turn in words if turn.role == role)


def plain(value: object) -> Any:
    """Convert arrays and tuples to lists, and nan to None; return other values as they are.

    This undoes the changes that NumPy, pandas and parquet make to lists and None.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, tuple):
        return list(value)
    return value


def sound(name: str, text: str) -> str:
    """Check that a text can be encoded as UTF-8, as tokenizers require, and return it.

    Raises:
        ValueError: The text has a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has a lone surrogate, expected valid Unicode text") from error
    return text


def check_words(name: str, value: object) -> Words:
    """Return a string as it is, or convert a list of messages to `Turn`s.

    Raises:
        ValueError: The value is neither a string nor a list of messages, or it is an answer whose
            last turn is not the assistant's.

    >>> check_words("a", [{"role": "assistant", "content": "Yes."}])
    (Turn(role='assistant', text='Yes.'),)
    """
    if isinstance(value, str):
        return sound(name, value)
    turns = []
    for part in value if isinstance(value, (tuple, list)) else [None]:
        if isinstance(part, Mapping):
            turn = (part.get("role"), part.get("content"))
        else:
            turn = part
        if (
            not isinstance(turn, (tuple, list))
            or len(turn) != 2
            or turn[0] not in ROLES
            or not isinstance(turn[1], str)
        ):
            raise ValueError(
                f"{name} is {value!r:.60}, expected a string or a list of messages with roles "
                f"{', '.join(ROLES)}"
            )
        turns.append(Turn(turn[0], sound(name, turn[1])))
    if name != "prompt" and (not turns or turns[-1].role != "assistant"):
        raise ValueError(f"{name} is {value!r:.60}, expected the last role to be assistant")
    return tuple(turns)


def as_pairs(operation: str, pairs: Iterable[object], classes: int = 3) -> list[Pair]:
    """Convert pairs, tuples, or mappings with the keys prompt, a, b and label to `Pair`s.

    Raises:
        ValueError: An item is none of these or is invalid; the message gives its index.

    >>> as_pairs("an example", [{"prompt": "2 + 2?", "a": "4", "b": "5", "label": "A"}])
    [Pair(prompt='2 + 2?', a='4', b='5', label=0, writers=(None, None))]
    """
    converted = []
    for number, given in enumerate(pairs):
        pair = given
        if isinstance(pair, Mapping) and {"prompt", "a", "b"} <= set(pair):
            pair = (pair["prompt"], pair["a"], pair["b"], pair.get("label"))
        if not isinstance(pair, (tuple, list)) or not 3 <= len(pair) <= len(Pair._fields):
            hint = ""
            # the caller passed everything that `read_pairs` returned: pairs and report
            if isinstance(pair, list) and pair and isinstance(pair[0], Pair):
                hint = "; read_pairs returns two values: pairs, report = read_pairs(...)"
            raise ValueError(
                f"{operation}: pair {number} is {pair!r:.60}; expected (prompt, a, b) or (prompt, "
                f"a, b, label){hint}"
            )
        try:
            words = [
                check_words(name, part)
                for name, part in zip(("prompt", "a", "b"), pair, strict=False)
            ]
            label = check_label(pair[3], classes) if len(pair) > 3 else None
        except ValueError as error:
            raise ValueError(f"{operation}: pair {number}: {error}") from error
        converted.append(Pair(words[0], words[1], words[2], label, *pair[4:]))
    return converted


def split_pairs(
    pairs: Sequence[Pair], shares: Sequence[float] = (0.8, 0.1, 0.1), *, seed: int = 0
) -> list[list[Pair]]:
    """Split pairs into parts, such as training, validation and test, that share no prompt.

    If there are fewer than ten prompts per part, pairs are split instead of prompts, and parts may
    share prompts.

    Args:
        pairs: Pairs in any order; each part keeps this order.
        shares: The fraction of the prompts in each part; the fractions sum to 1.
        seed: The random seed of the split.

    Returns:
        One list of pairs for each share.

    Raises:
        ValueError: The shares are not positive or do not sum to 1, or a part has no pair.

    >>> pairs = [Pair(f"prompt {k % 50}", "a", "b", 0) for k in range(100)]
    >>> [len(part) for part in split_pairs(pairs)]
    [80, 10, 10]
    """
    if not shares or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            f"split_pairs: shares is {shares!r}, expected positive numbers that sum to 1"
        )
    # each pair without a prompt counts as a separate prompt
    prompts = [(str(pair.prompt), 0 if pair.prompt else n) for n, pair in enumerate(pairs)]
    if len(set(prompts)) < 10 * len(shares):
        prompts = [("", number) for number in range(len(pairs))]
    # sorted, because the order of a set of texts changes from process to process
    drawn = sorted(set(prompts))
    random.Random(seed).shuffle(drawn)
    # round the cumulative ends: sizes rounded one by one may not add up to all prompts
    ends = [round(end * len(drawn)) for end in accumulate(shares)]
    part_of = {}
    for number, prompt in enumerate(drawn):
        # the last end is left out: shares that sum to just below 1 must not make another part
        part_of[prompt] = sum(number >= end for end in ends[:-1])
    parts: list[list[Pair]] = [[] for _ in shares]
    for prompt, pair in zip(prompts, pairs, strict=True):
        parts[part_of[prompt]].append(pair)
    if not all(parts):
        raise ValueError(
            f"split_pairs: expected enough pairs for every part, got {len(pairs)} pairs, which "
            f"make parts of sizes {[len(part) for part in parts]}"
        )
    return parts


def count_labels(pairs: Iterable[Pair]) -> tuple[int, ...]:
    """Count the pairs of each class; a soft label counts as its most frequent class."""
    counts = [0, 0, 0]
    for pair in pairs:
        label = pair.label
        if isinstance(label, tuple):
            label = label.index(max(label))
        if label is not None:
            counts[label] += 1
    return tuple(counts)


def listed_counts(counts: Sequence[int]) -> str:
    """Format the counts of the classes.

    >>> listed_counts((3, 1, 0))
    'A 3, B 1, tie 0'
    """
    parts = []
    for name, count in zip(CLASSES, counts, strict=True):
        parts.append(f"{name} {count}")
    return ", ".join(parts)


def check_label(label: object, classes: int = 3) -> int | tuple[float, ...] | None:
    """Convert a label to a class index, to fractions that sum to 1, or, if it is empty, to None.

    With two classes, the fraction of ties may be 0 or omitted.

    Raises:
        ValueError: The label cannot be converted.

    >>> check_label("model_b"), check_label("Tie (both bad)"), check_label([0.5, 0.5, 0.0])
    (1, 2, (0.5, 0.5, 0.0))
    >>> check_label((0.75, 0.25, 0.0), classes=2)
    (0.75, 0.25)
    """
    if classes == len(CLASSES):
        without = ""
    else:
        without = " for a model without ties"
    label = plain(label)
    if isinstance(label, str) and label.strip():
        text = label.strip().lower()
        # pandas reads whole numbers in a column with empty cells as floats, such as 0.0
        known = _WINNERS | {form: k for k in range(len(CLASSES)) for form in (str(k), f"{k}.0")}
        label = known.get(text, label)
    if label is None or (isinstance(label, str) and not label.strip()):
        return None
    if isinstance(label, list):
        shares = _parse_soft_label(label, classes)
        if shares is None:
            raise ValueError(
                f"label is {label!r}, expected {classes} fractions that sum to 1{without}"
            )
        return shares
    # bool is an int, and True would be B
    if (
        isinstance(label, bool)
        or not isinstance(label, (int, float))
        or label not in range(classes)
    ):
        known = ", ".join(f"{k} ({name})" for k, name in enumerate(CLASSES[:classes]))
        raise ValueError(f"label is {label!r}, expected one of {known}{without}")
    return int(label)


def _parse_soft_label(label: list[Any], classes: int) -> tuple[float, ...] | None:
    """Parse a soft label; return None if it is not a distribution over the classes."""
    try:
        shares = tuple(float(share) for share in label)
    except (TypeError, ValueError):
        return None
    # a model without ties accepts three fractions if the fraction of ties is 0
    if not any(shares[classes:]):
        shares = shares[:classes]
    # `not`, because comparisons with nan are False; the tolerance is for rounded fractions
    if len(shares) != classes or not min(shares) >= 0 or not abs(sum(shares) - 1) < 1e-3:
        return None
    return shares
