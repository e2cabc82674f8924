"""`PairwiseHead` maps two answers' features to logits; `Pool` maps hidden states to features.

Shapes: T tokens of all sequences, S sequences, W width of the features, F surface features, P
pairs, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .choices import Link, Pooling
from .functional import davidson
from .surface import SurfaceEncoding

# default hidden width of a network, and the number of linear combinations of features it reads
_INNER = 64
_COMBINATIONS = 16
# a feature counts as constant if its standard deviation is at most this fraction of the median
# standard deviation; in MiniLM and SmolLM2, varying features have a third of the median or more
_SHARE_OF_MEDIAN = 1e-3
# or at most this fraction of the largest one, for encoders in which most features hardly vary
_SHARE_OF_LARGEST = 1e-6


class PairwiseHead(nn.Module):
    """A head that computes logits of A, B and tie from the features of two answers.

    - ``"davidson"`` gives each answer a score: a function of its features, plus the output of a
      network on its surface features, if the head reads any.
    - ``"antisymmetric"`` compares the answers by a weighted difference of their features and by a
      network. The network reads differences and means of a few linear combinations of the features,
      and the surface features of both answers. It runs on both orders of the answers: half the
      difference of the two outputs is added to A's logit, and half their sum to the tie's logit.
    - ``"concat"`` is a classifier over the concatenated features of both answers.

    Except with ``"concat"``, swapping the answers swaps the first two logits bit for bit: both
    answers go through the same matrix products, one after the other, and all other operations are
    symmetric in the two answers. Features are divided by the buffer ``scale``, which `fit_` sets.
    In evaluation, `Judge` divides the logits by the buffer ``temperature``, which `calibrate_`
    sets. With ``uncertainty``, the buffer ``covariance``, which `fit_uncertainty_` sets, makes
    verdicts in evaluation less confident for pairs that are unlike the training pairs.

    Args:
        in_features: The width of the features, W.
        link: See `PairwiseConfig`.
        ties: Whether there is a class for ties.
        hidden_features: The hidden width. 0 means a linear function of the features, and a width of
            64 for the networks of ``"antisymmetric"`` and of surface features.
        dropout: The dropout probability, for the features and inside networks. On the inputs of the
            networks of ``"antisymmetric"`` and of surface features, it is half as large.
        surface: Kinds of surface features that the head also reads; must be empty with
            ``"concat"``.
        uncertainty: Whether to keep a covariance of the last layers' weights; only for
            ``"antisymmetric"``.

    >>> head = PairwiseHead(8, link="antisymmetric", hidden_features=4).eval()
    >>> a, b = torch.randn(2, 5, 8)
    >>> torch.equal(head(a, b)[:, [1, 0, 2]], head(b, a))
    True
    """

    def __init__(
        self,
        in_features: int,
        *,
        link: Link = "davidson",
        ties: bool = True,
        hidden_features: int = 0,
        dropout: float = 0.0,
        surface: Sequence[str] = (),
        uncertainty: bool = False,
    ):
        super().__init__()
        self.in_features = in_features
        self.link = link
        self.ties = ties
        self.dropout = dropout
        compares = link == "antisymmetric"
        if surface:
            self.encoding = SurfaceEncoding(surface, compares=compares)
        else:
            self.encoding = None
        looks = 0 if self.encoding is None else self.encoding.width
        self.project: nn.Linear | None = None
        self.beside: nn.Sequential | None = None
        self.inner: nn.Module = nn.Identity()
        width = in_features * (1 + (link == "concat"))
        if compares:
            # no bias: it would cancel in differences, and the next layer has one for means
            self.project = nn.Linear(in_features, _COMBINATIONS, bias=False)
            # twice, for differences and means of the combinations; a second output is for ties
            self.beside = _network(
                looks + 2 * _COMBINATIONS, hidden_features or _INNER, 1 + ties, dropout
            )
        else:
            if hidden_features:
                self.inner = nn.Sequential(
                    nn.Linear(width, hidden_features), nn.GELU(), nn.Dropout(dropout)
                )
                width = hidden_features
            if looks:
                self.beside = _network(looks, hidden_features or _INNER, 1, dropout)
            else:
                self.beside = None
        concat = link == "concat"  # with the other links, a bias would cancel or favor a side
        self.outer = nn.Linear(width, 2 + ties if concat else 1, bias=concat)
        if ties and link != "concat":
            self.tie = nn.Parameter(torch.zeros(1))  # FSDP2 cannot shard scalars
        else:
            self.tie = None
        self.temperature: Tensor
        self.scale: Tensor
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("scale", torch.ones(in_features))
        self.covariance: Tensor | None
        width = in_features + (hidden_features or _INNER)  # of the last layers' inputs
        self.register_buffer("covariance", torch.zeros(width, width) if uncertainty else None)
        self.reset_parameters()

    @property
    def _lasts(self) -> list[nn.Linear]:
        """The last layers, whose weights start at zero."""
        beside: Any = self.beside
        if beside is None:
            return [self.outer]
        return [self.outer, beside[-1]]

    def reset_parameters(self) -> None:
        """Initialize all parameters, with zeros in the last layers.

        A new head gives all classes the same probability.
        """
        for module in self.modules():
            # the layers below the last stay random: with zeros, no gradient would reach them
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        for last in self._lasts:
            nn.init.zeros_(last.weight)
            if last.bias is not None:
                nn.init.zeros_(last.bias)
        nn.init.ones_(self.temperature)
        nn.init.ones_(self.scale)
        if self.covariance is not None:
            nn.init.zeros_(self.covariance)
        if self.encoding is not None:
            nn.init.zeros_(self.encoding.edges)
        # ν = 1: for equal scores, A, B and a tie are equally likely
        self.set_tie_rate_(1 / 3)

    @torch.no_grad()
    def fit_(self, a: Tensor, b: Tensor, surface_a: Tensor, surface_b: Tensor) -> None:
        """Set scales from features (P, W), and bins from surface features (P, F), of A and B.

        Args:
            a: The features of A.
            b: The features of B.
            surface_a: The surface features of A; ignored by a head that does not read them.
            surface_b: The surface features of B.
        """
        # one scale for both sides, or the head would treat A and B differently
        spread = torch.cat([a, b]).float().std(0)
        # the last norm of MiniLM multiplies three dimensions by 1e-32 to 1e-8. Dividing these by
        # their standard deviation would give the encoder infinite gradients
        varying = spread[(spread > 0) & spread.isfinite()]
        least = 0.0
        if varying.numel():
            by_median = _SHARE_OF_MEDIAN * float(varying.median())
            least = max(by_median, _SHARE_OF_LARGEST * float(varying.max()))
        self.scale.copy_(torch.where(spread > least, spread, 1.0))
        if self.encoding is not None:
            self.encoding.fit_(surface_a, surface_b)

    @torch.no_grad()
    def set_tie_rate_(self, rate: float) -> None:
        """Set the probability of a tie between answers with equal scores.

        Pass the tie rate of the training pairs, so that a new head predicts this rate at first.

        Raises:
            ValueError: ``rate`` is not strictly between 0 and 1, or the head has no class for ties.
        """
        if not self.ties:
            if rate == 1 / 3:  # the rate of every new head
                return
            raise ValueError(
                "PairwiseHead: ties is False, expected True: only such a head has a tie rate"
            )
        if not 0 < rate < 1:
            raise ValueError(f"PairwiseHead: rate is {rate}, expected a number between 0 and 1")
        # for equal answers rate = ν / (2 + ν), solved for ν
        log_nu = math.log(2 * rate / (1 - rate))
        if self.tie is None:
            # concat has no tie parameter; its last bias does the same
            self.outer.bias[-1] = log_nu
        else:
            self.tie.fill_(log_nu)

    @property
    def untrained(self) -> bool:
        """Return whether the weights of the last layers are still all zeros."""
        return not any(bool(last.weight.any()) for last in self._lasts)

    def score(self, features: Tensor, surface: Tensor | None = None) -> Tensor:
        """Return scores (*B,) from features (*B, W) and surface features (*B, F) of answers.

        Raises:
            ValueError: The link does not score single answers, or surface features are missing.
        """
        if self.link != "davidson":
            raise ValueError(
                f"PairwiseHead: link is {self.link!r}, but only 'davidson' scores single answers"
            )
        scores = self._read(features)[..., 0]
        if self.encoding is None or self.beside is None:
            return scores
        return scores + self.beside(self.encoding(_given(surface)))[..., 0]

    def forward(
        self, a: Tensor, b: Tensor, surface_a: Tensor | None = None, surface_b: Tensor | None = None
    ) -> Tensor:
        """Return logits (*B, C) from features (*B, W), and surface features (*B, F), of A and B."""
        for features in (a, b):
            if features.shape != a.shape or features.shape[-1:] != (self.in_features,):
                raise ValueError(
                    f"PairwiseHead: expected features of shape (*B, {self.in_features}) for both "
                    f"answers, got shapes {list(a.shape)} and {list(b.shape)}"
                )
        if self.link == "davidson":
            return self.linked(self.score(a, surface_a), self.score(b, surface_b))
        if self.project is None or self.beside is None:
            return self._read(a, b)
        a = self._dropped(a / self.scale)
        b = self._dropped(b / self.scale)
        last: Any = self.beside[-1]
        hidden = self._hidden(a, b, surface_a, surface_b)
        made = [last(inner) for inner in hidden]
        # outer has no bias: swapping the answers only flips the sign of its output
        wins = (self.outer(a - b)[..., 0] + (made[0][..., 0] - made[1][..., 0])) / 2
        if self.covariance is not None and not self.training:
            read = torch.cat([a - b, hidden[0] - hidden[1]], -1) / 2
            variance = (read @ self.covariance * read).sum(-1)
            # MacKay 1992: for a normal x of mean m and variance v, the mean of sigmoid(x) is about
            # sigmoid(m / sqrt(1 + pi v / 8)); here m is 2 * wins, with 4 times the variance of wins
            wins = wins / (1 + math.pi / 2 * variance).sqrt()
        logits = [wins, -wins]
        if self.tie is not None:
            logits.append((made[0][..., 1] + made[1][..., 1]) / 2 + self.tie.squeeze(0))
        return torch.stack(logits, -1)

    def _hidden(
        self, a: Tensor, b: Tensor, surface_a: Tensor | None, surface_b: Tensor | None
    ) -> list[Tensor]:
        """Return the inputs of the network's last layer, for the orders (A, B) and (B, A)."""
        project: Any = self.project
        network: Any = self.beside
        few = [project(a), project(b)]
        looks = [surface_a, surface_b]
        hidden = []
        for first, second in ((0, 1), (1, 0)):
            x = [few[first] - few[second], (few[first] + few[second]) / 2]
            if self.encoding is not None:
                x.append(self.encoding(_given(looks[first]), _given(looks[second])))
            inner = torch.cat(x, -1)
            for layer in network[:-1]:
                inner = layer(inner)
            hidden.append(inner)
        return hidden

    def read_by_last(
        self, a: Tensor, b: Tensor, surface_a: Tensor | None, surface_b: Tensor | None
    ) -> Tensor:
        """Return the last layers' inputs, (*B, W + hidden width); A's logit is linear in them."""
        a = a / self.scale
        b = b / self.scale
        one, other = self._hidden(a, b, surface_a, surface_b)
        return torch.cat([a - b, one - other], -1) / 2

    def linked(self, score_a: Tensor, score_b: Tensor) -> Tensor:
        """Return logits (*B, C) from scores (*B,) of A and B, for link ``"davidson"``."""
        if self.tie is None:
            return torch.stack([score_a, score_b], -1)
        return davidson(score_a, score_b, self.tie.squeeze(0))

    def extra_repr(self) -> str:
        """Return the settings to show in ``repr``."""
        return f"{self.in_features}, link={self.link!r}, ties={self.ties}"

    def _read(self, *features: Tensor) -> Tensor:
        seen = self._dropped(torch.cat([one / self.scale for one in features], -1))
        return self.outer(self.inner(seen))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def _network(width: int, inner: int, outs: int, dropout: float) -> nn.Sequential:
    """Build a network for surface encodings and combinations of features."""
    return nn.Sequential(
        nn.Dropout(dropout / 2),
        nn.Linear(width, inner),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(inner, inner),
        nn.GELU(),
        nn.Dropout(dropout),
        # no bias: it would cancel between the answers, and ties have their own parameter
        nn.Linear(inner, outs, bias=False),
    )


def _given(surface: Tensor | None) -> Tensor:
    if surface is None:
        raise ValueError(
            "PairwiseHead: expected surface features of shape (*B, F), which this head reads, got "
            "None"
        )
    return surface


class Pool(nn.Module):
    """A layer that pools hidden states (T, W) into float32 features (S, K W), for K poolings.

    The mean is over the answer and the tokens after it, not over the prompt, because both answers
    have the same prompt.

    Args:
        pooling: One or more of ``"mean"`` (the mean of the answer's states), ``"first"`` and
            ``"last"`` (the sequence's first and last state).

    >>> pool = Pool(["mean", "last"])
    >>> states = torch.tensor([[9.0, 9.0], [1.0, 0.0], [3.0, 0.0], [5.0, 1.0]])
    >>> pool(states, torch.tensor([3, 1]), torch.tensor([1, 0]))
    tensor([[2., 0., 3., 0.],
            [5., 1., 5., 1.]])
    """

    def __init__(self, pooling: Sequence[Pooling]):
        super().__init__()
        self.pooling = tuple(pooling)

    def forward(self, states: Tensor, lengths: Tensor, begins: Tensor) -> Tensor:
        """Return the features, (S, K W).

        Args:
            states: The hidden states of all sequences, (T, W).
            lengths: The number of states in each sequence, (S,), at least 1.
            begins: The index of each answer's first state in its sequence, (S,).
        """
        states = states.float()
        ends = lengths.cumsum(0)
        starts = ends - lengths
        pooled = []
        for kind in self.pooling:
            if kind == "first":
                pooled.append(states[starts])
            elif kind == "last":
                pooled.append(states[ends - 1])
            else:
                place = torch.arange(len(states), device=states.device)
                # an answer runs to the end of its sequence, so one bound is enough;
                # output_size avoids waiting for the GPU
                of_answer = place >= (starts + begins).repeat_interleave(
                    lengths, output_size=len(states)
                )
                # sums in a fixed order on every device, unlike index_add
                pooled.append(
                    torch.segment_reduce(
                        states[of_answer], "mean", lengths=lengths - begins, axis=0
                    )
                )
        return torch.cat(pooled, 1)

    def extra_repr(self) -> str:
        """Return the kinds of pooling to show in ``repr``."""
        return ", ".join(self.pooling)
