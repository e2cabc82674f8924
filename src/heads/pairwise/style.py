"""What an answer looks like, in numbers: its length, layout and wording, none of which says whether it is right."""

from __future__ import annotations

import math
import re

import numpy as np

from .pairs import Pair, said_by

STYLE = (
    "characters", "words", "lines", "paragraphs", "bullets", "numbered items", "code blocks", "headings", "bold",
    "links", "refusals", "distinct words", "characters a word", "words of the prompt", "prompt covered", "digits",
    "punctuation", "question marks", "exclamation marks", "capitals", "other alphabets", "repeated triples",
    "ends a sentence", "begins with a capital",
)  # fmt: skip
"""Names of the features; the first eleven are logarithms of counts, the others shares."""

_COUNTED = tuple(
    re.compile(pattern, re.MULTILINE | re.IGNORECASE)
    for pattern in (
        r"^\s*[-*•]\s", r"^\s*\d+[.)]\s", r"```", r"^#{1,6}\s", r"\*\*", r"https?://",
        r"\b(i cannot|i can't|i am not able|i'm not able|i'm sorry|as an ai|unable to)\b",
    )
)  # fmt: skip
_WORD, _PARAGRAPH = re.compile(r"\w+"), re.compile(r"\n\s*\n")


def style_of(prompt: str, answer: str) -> np.ndarray:
    r"""An answer's features, in the order of `STYLE`, as float64.

    >>> found = dict(zip(STYLE, style_of("Name two fruits.", "1. Apple\n2. Pear").round(2).tolist()))
    >>> found["numbered items"], found["words"], found["ends a sentence"]
    (1.1, 1.61, 0.0)
    """
    words = _WORD.findall(answer.lower())
    asked, distinct = set(_WORD.findall(prompt.lower())), set(words)
    triples = list(zip(words, words[1:], words[2:], strict=False))
    size, count = max(1, len(answer)), max(1, len(words))
    counts = [len(answer), len(words), answer.count("\n"), len(_PARAGRAPH.split(answer))]
    counts += [len(pattern.findall(answer)) for pattern in _COUNTED]
    shares = [
        len(distinct) / count,
        len(answer) / count,
        sum(word in asked for word in words) / count,
        len(asked & distinct) / max(1, len(asked)),
        sum(c.isdigit() for c in answer) / size,
        sum(c in ",;:()" for c in answer) / size,
        100 * answer.count("?") / size,
        100 * answer.count("!") / size,
        sum(c.isupper() for c in answer) / size,
        sum(c > "\x7f" for c in answer) / size,
        1 - len(set(triples)) / max(1, len(triples)),
        float(answer.rstrip()[-1:] in tuple(".!?\"')`")),
        float(answer[:1].isupper()),
    ]
    return np.array([*map(math.log1p, counts), *shares])


def styles_of(pairs: list[Pair]) -> tuple[np.ndarray, np.ndarray]:
    """(N, F) features of the answers called A, and of those called B."""
    sides = [
        np.stack([style_of(said_by("user", p.prompt), said_by("assistant", answer)) for p, answer in side])
        for side in ([(p, p.a) for p in pairs], [(p, p.b) for p in pairs])
    ]
    return sides[0], sides[1]
