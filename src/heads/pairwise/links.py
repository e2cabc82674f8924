"""`PairwiseHead`: two answers' features to logits of A, B and tie, and the pooling that makes features of tokens.

Shapes: T tokens of all sequences, S sequences, W width of the features, P pairs, C classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Link, Pooling
from .functional import davidson, rao_kupper


class PairwiseHead(nn.Module):
    """Logits of A, B and tie from the features of two answers.

    A calibrated model's logits are divided in evaluation by the buffer ``temperature``, which weights are saved with.
    But for ``"concat"``, swapping the answers swaps the first two logits and moves no bit: both answers go through the
    same products, one after the other, and what follows treats them alike.

    Args:
        in_features: W.
        link: See `PairwiseConfig`.
        ties: Whether there is a class for ties.
        hidden_features: Inner width; 0 for a linear head.
        dropout: On the features and inside.

    >>> head = PairwiseHead(8, link="antisymmetric", hidden_features=4).eval()
    >>> a, b = torch.randn(2, 5, 8)
    >>> torch.equal(head(a, b)[:, [1, 0, 2]], head(b, a))
    True
    """

    def __init__(
        self, in_features: int, *, link: Link = "davidson", ties: bool = True, hidden_features: int = 0,
        dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.in_features, self.link, self.ties = in_features, link, ties
        self.hidden_features, self.dropout = hidden_features, dropout
        seen = {"antisymmetric": 3, "concat": 2}.get(link, 1) * in_features
        outs = {"antisymmetric": 1 + ties, "concat": 2 + ties}.get(link, 1)
        if hidden_features:
            self.inner: nn.Module = nn.Linear(seen, hidden_features)
            seen = hidden_features
        else:
            self.inner = nn.Identity()
        self.outer = nn.Linear(seen, outs, bias=link == "concat")  # elsewhere only differences count
        self.tie = nn.Parameter(torch.zeros(())) if ties and link != "concat" else None
        self.temperature: Tensor
        self.register_buffer("temperature", torch.ones(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A last layer of zeros: every verdict is open at first, with a third of each where there are ties."""
        if isinstance(self.inner, nn.Linear):
            self.inner.reset_parameters()
        nn.init.zeros_(self.outer.weight)
        if self.outer.bias is not None:
            nn.init.zeros_(self.outer.bias)
        nn.init.ones_(self.temperature)
        self.set_tie_rate_(1 / 3)

    @torch.no_grad()
    def set_tie_rate_(self, rate: float) -> None:
        """Let answers that seem equal tie with this probability; a head starts nearer to data with few or many ties.

        Raises:
            ValueError: A rate outside (0, 1), or a head without ties.
        """
        if not self.ties:
            if rate == 1 / 3:  # what every head starts from
                return
            raise ValueError("PairwiseHead: there is no class for ties; needed ties=True")
        if not 0 < rate < 1:
            raise ValueError(f"PairwiseHead: rate is {rate}, needed a share between 0 and 1")
        log_nu = math.log(2 * rate / (1 - rate))
        if self.tie is None:
            self.outer.bias[-1] = log_nu
        elif self.link == "rao-kupper":
            self.tie.fill_(_inverse_softplus(math.log((1 + rate) / (1 - rate))))
        else:
            self.tie.fill_(log_nu)

    @property
    def untrained(self) -> bool:
        """Whether the last layer is still all zeros."""
        return not bool(self.outer.weight.any())

    def score(self, features: Tensor) -> Tensor:
        """(S,) scores of single answers from their (S, W) features, for the links that have them.

        Raises:
            ValueError: A link that only compares.
        """
        if self.link not in ("davidson", "rao-kupper"):
            raise ValueError(f"PairwiseHead: link {self.link!r} compares answers and gives single ones no score")
        return self._layers(features)[:, 0]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """(P, W) features of A and of B to (P, C) logits."""
        if self.link == "concat":
            return self._layers(torch.cat([a, b], -1))
        if self.link == "antisymmetric":
            common = [(a - b).abs(), a * b]
            one, other = (self._layers(torch.cat([d, *common], -1)) for d in (a - b, b - a))
            wins = 0.5 * (one[:, 0] - other[:, 0])
            logits = [wins, -wins]
            if self.tie is not None:
                logits.append(0.5 * (one[:, 1] + other[:, 1]) + self.tie)
            return torch.stack(logits, -1)
        score_a, score_b = self.score(a), self.score(b)
        if self.tie is None:
            return torch.stack([score_a, score_b], -1)
        if self.link == "davidson":
            return davidson(score_a, score_b, self.tie)
        return rao_kupper(score_a, score_b, F.softplus(self.tie))

    def extra_repr(self) -> str:
        """What it was made with."""
        return f"{self.in_features}, link={self.link!r}, ties={self.ties}"

    def _layers(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        if self.hidden_features:
            x = F.dropout(F.gelu(self.inner(x)), self.dropout, self.training)
        return self.outer(x)


def _inverse_softplus(value: float) -> float:
    return value + math.log(-math.expm1(-value))


class Pool(nn.Module):
    """(T, W) states of all sequences to (S, W) float32 features.

    Args:
        width: W.
        pooling: ``"mean"``, ``"first"``, ``"max"`` or ``"attention"``, a learned query.

    >>> pool = Pool(2, "mean")
    >>> pool(torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 1.0]]), torch.tensor([2, 1]))
    tensor([[2., 0.],
            [5., 1.]])
    """

    def __init__(self, width: int, pooling: Pooling):
        super().__init__()
        self.pooling = pooling
        self.query = nn.Linear(width, 1, bias=False) if pooling == "attention" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A query of zeros: a mean, at first."""
        if self.query is not None:
            nn.init.zeros_(self.query.weight)

    def forward(self, states: Tensor, lengths: Tensor) -> Tensor:
        """``lengths`` are (S,), at least 1 each."""
        states = states.float()
        if self.pooling == "first":
            return states[lengths.cumsum(0) - lengths]
        if self.query is None:  # sums in a fixed order on every device, unlike index_add
            return torch.segment_reduce(states, self.pooling, lengths=lengths, axis=0)
        scores = F.linear(states, self.query.weight.to(states.dtype))[:, 0]
        top = torch.segment_reduce(scores.detach(), "max", lengths=lengths)
        weights = (scores - top.repeat_interleave(lengths, output_size=len(states))).exp()
        total = torch.segment_reduce(weights, "sum", lengths=lengths)
        return torch.segment_reduce(states * weights[:, None], "sum", lengths=lengths, axis=0) / total[:, None]

    def extra_repr(self) -> str:
        """The kind."""
        return self.pooling
