"""Surface features of an answer: its length, its style, and its overlap with the prompt.

These features do not show whether an answer is correct. `pairwise_report` shows how much a judge
depends on them.

Shapes: N and P pairs, F features, B bins.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from .pairs import Pair, said_by

SURFACE = {
    "length": ("characters", "words", "characters a word"),
    "style": (
        "lines",
        "paragraphs",
        "bullets",
        "numbered items",
        "code blocks",
        "headings",
        "bold",
        "links",
        "refusals",
        "distinct words",
        "digits",
        "punctuation",
        "question marks",
        "exclamation marks",
        "capitals",
        "other alphabets",
        "repeated triples",
        "ends a sentence",
        "begins with a capital",
    ),
    "overlap": ("words of the prompt", "prompt covered"),
}
"""Names of the features, by kind.

Counts are stored as log(1 + count); all other features are ratios or flags.
"""

NAMES = tuple(name for names in SURFACE.values() for name in names)

# in the order of the names above, from bullets to refusals
_COUNTED = tuple(
    re.compile(pattern, re.MULTILINE | re.IGNORECASE)
    for pattern in (
        # do not use \s*, which matches across lines, and takes hours for a million blank lines
        r"^[^\S\n]*[-*•]\s",
        r"^[^\S\n]*\d+[.)]\s",
        r"```",
        r"^#{1,6}\s",
        r"\*\*",
        r"https?://",
        r"\b(i cannot|i can't|i am not able|i'm not able|i'm sorry|as an ai|unable to)\b",
    )
)
_WORD = re.compile(r"\w+")
_PARAGRAPH = re.compile(r"\n\s*\n")


def surface_of(prompt: str, answer: str) -> np.ndarray:
    r"""Return an answer's surface features, in the order of `NAMES`, as float64.

    >>> found = dict(
    ...     zip(NAMES, surface_of("Name two fruits.", "1. Apple\n2. Pear").round(2).tolist())
    ... )
    >>> found["numbered items"], found["words"], found["ends a sentence"]
    (1.1, 1.61, 0.0)
    """
    words = _WORD.findall(answer.lower())
    asked = set(_WORD.findall(prompt.lower()))
    distinct = set(words)
    triples = list(zip(words, words[1:], words[2:], strict=False))
    size = max(1, len(answer))
    count = max(1, len(words))
    length = [math.log1p(len(answer)), math.log1p(len(words)), len(answer) / count]
    counts = [
        answer.count("\n"),
        len(_PARAGRAPH.split(answer)),
        *(len(p.findall(answer)) for p in _COUNTED),
    ]
    shares = [
        len(distinct) / count,
        sum(c.isdigit() for c in answer) / size,
        sum(c in ",;:()" for c in answer) / size,
        100 * answer.count("?") / size,
        100 * answer.count("!") / size,
        sum(c.isupper() for c in answer) / size,
        sum(c > "\x7f" for c in answer) / size,
        (len(triples) - len(set(triples))) / max(1, len(triples)),
        # a tuple, because an empty answer gives '', which is in every string but not in this tuple
        float(answer.rstrip()[-1:] in tuple(".!?\"')`")),
        float(answer[:1].isupper()),
    ]
    overlap = [
        sum(word in asked for word in words) / count,
        len(asked & distinct) / max(1, len(asked)),
    ]
    # the order of NAMES: length, style as counts and then shares, overlap
    return np.array([*length, *map(math.log1p, counts), *shares, *overlap])


def surfaces_of(pairs: Sequence[Pair]) -> tuple[np.ndarray, np.ndarray]:
    """Return the surface features (N, F) of the answers called A, and of the answers called B."""
    first, second = [], []
    for pair in pairs:
        # only the user's turns: repeating the system's instructions is not overlap
        asked = said_by("user", pair.prompt)
        first.append(surface_of(asked, said_by("assistant", pair.a)))
        second.append(surface_of(asked, said_by("assistant", pair.b)))
    return np.stack(first), np.stack(second)


def columns_of(kinds: Sequence[str]) -> list[int]:
    """Return the indices, in `NAMES`, of the features of these kinds."""
    return [NAMES.index(name) for kind in kinds for name in SURFACE[kind]]


class SurfaceEncoding(nn.Module):
    """An encoding of surface features for a network.

    Each feature becomes B numbers from 0 to 1: for each bin, the fraction of the bin that lies
    below the feature's value.

    The edges of the bins are quantiles of the data passed to `fit_` (Gorishniy, Rubachev and
    Babenko, "On Embeddings for Numerical Features in Tabular Deep Learning", 2022). For one answer,
    its features are encoded; for two answers, the differences and means of their features.

    Args:
        kinds: The kinds of features: any of ``"length"``, ``"style"`` and ``"overlap"``.
        compares: Whether to encode two answers instead of one.
        bins: The number of bins, B.

    Attributes:
        width: The number of values in an encoding.

    >>> encoding = SurfaceEncoding(["length"], compares=False, bins=2)
    >>> encoding.fit_(torch.arange(3.0)[:, None].expand(3, len(NAMES)), torch.ones(3, len(NAMES)))
    >>> encoding(torch.full((1, len(NAMES)), 1.5))
    tensor([[1.0000, 0.5000, 1.0000, 0.5000, 1.0000, 0.5000]])
    """

    def __init__(self, kinds: Sequence[str], *, compares: bool, bins: int = 16):
        super().__init__()
        self.columns = columns_of(kinds)
        self.compares = compares
        count = (1 + compares) * len(self.columns)
        self.width = count * bins
        self.edges: Tensor
        self.register_buffer("edges", torch.zeros(count, bins + 1))

    @torch.no_grad()
    def fit_(self, a: Tensor, b: Tensor) -> None:
        """Set the edges of the bins to quantiles of the features of A and B, each (N, F)."""
        # both orders, so that the bins of differences are symmetric in A and B
        seen = torch.cat([self._seen(a, b), self._seen(b, a)]).double()
        shares = torch.linspace(0, 1, self.edges.shape[1], dtype=torch.float64)
        self.edges.copy_(torch.stack([torch.quantile(column, shares) for column in seen.unbind(1)]))

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        """Return encodings (*B, width) of features (*B, F) of A and, with ``compares``, of B."""
        low = self.edges[:, :-1]
        high = self.edges[:, 1:]
        seen = self._seen(a, b)
        # if many answers have the same value, quantiles are equal, and the bin becomes a step
        return ((seen[..., None] - low) / (high - low).clamp(min=1e-6)).clamp(0, 1).flatten(-2)

    def _seen(self, a: Tensor, b: Tensor | None) -> Tensor:
        one = a[..., self.columns]
        if not self.compares or b is None:
            return one
        other = b[..., self.columns]
        return torch.cat([one - other, (one + other) / 2], -1)
