"""`PairwiseHead`: two answers' features to logits of A, B and tie; `Pool`: tokens to features.

Shapes: T tokens of all sequences, S sequences, W width of the features, F of surface features, P
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

# width of a network, and of what it sees of the features
_INNER = 64
_COMBINATIONS = 16
# a feature counts as constant if its spread is at most this share of the median spread; in MiniLM
# and SmolLM2 those that vary have a third of the median or more
_SHARE_OF_MEDIAN = 1e-3
# or this share of the largest spread, for encoders most of whose features hardly vary
_SHARE_OF_LARGEST = 1e-6


class PairwiseHead(nn.Module):
    """Logits of A, B and tie from the features of two answers.

    - ``"davidson"`` gives each answer a score, by a network on its features and one on its surface.
    - ``"antisymmetric"`` compares: a weighted difference of the features, and a network that sees a
      few of their combinations, differences and means, beside the surface of both. Half the
      difference of its outputs for both orders goes into the win's logit, half their sum into the
      tie's.
    - ``"concat"`` is a classifier over both answers' features, side by side.

    But for ``"concat"``, swapping the answers swaps the first two logits and moves no bit: both
    answers go through the same products, one after the other, and what follows treats them alike.
    Features are divided by the buffer ``scale``, which `fit_` sets. A calibrated model's logits are
    divided in evaluation by the buffer ``temperature``. With ``uncertainty`` the buffer
    ``covariance`` makes verdicts in evaluation less sure the less the training pairs say about
    them; `fit_uncertainty_` sets it.

    Args:
        in_features: W.
        link: See `PairwiseConfig`.
        ties: Whether there is a class for ties.
        hidden_features: Inner width; 0 for a linear head, and for networks of 64.
        dropout: The dropout on the features and inside; half of it is on the surface's encodings.
        surface: Kinds of surface features that it looks at, too; none for ``"concat"``.
        uncertainty: Whether there is a covariance of the last layers; for ``"antisymmetric"``.

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
            # a bias would cancel in the differences of both answers
            self.project = nn.Linear(in_features, _COMBINATIONS, bias=False)
            # 2: differences and means of the combinations; the second output is the tie's
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
        concat = link == "concat"  # in the other links a bias would cancel, or favor a side
        self.outer = nn.Linear(width, 2 + ties if concat else 1, bias=concat)
        if ties and link != "concat":
            self.tie = nn.Parameter(torch.zeros(1))  # FSDP2 shards no scalars
        else:
            self.tie = None
        self.temperature: Tensor
        self.scale: Tensor
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("scale", torch.ones(in_features))
        self.covariance: Tensor | None
        width = in_features + (hidden_features or _INNER)  # of what the last layers read
        self.register_buffer("covariance", torch.zeros(width, width) if uncertainty else None)
        self.reset_parameters()

    @property
    def _lasts(self) -> list[nn.Linear]:
        """The last layers."""
        beside: Any = self.beside
        if beside is None:
            return [self.outer]
        return [self.outer, beside[-1]]

    def reset_parameters(self) -> None:
        """Zero the last layers: at first all classes are equally likely."""
        for module in self.modules():
            # the layers below the last stay random: from zeros alone no gradient would reach them
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
        # ν = 1: A, B and a tie are alike while the scores are
        self.set_tie_rate_(1 / 3)

    @torch.no_grad()
    def fit_(self, a: Tensor, b: Tensor, surface_a: Tensor, surface_b: Tensor) -> None:
        """Take scales from (N, W) features and bins from (N, F) surface features.

        They are of answers and their rivals.
        """
        # one scale for both sides, or the head would treat A and B differently
        spread = torch.cat([a, b]).float().std(0)
        # the last norm of MiniLM multiplies three dimensions by 1e-32 to 1e-8: divided by their
        # spread, they would give the encoder infinite gradients
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
        """Let answers that seem equal tie with this probability.

        A head starts nearer to data with few or many ties.

        Raises:
            ValueError: A rate outside (0, 1), or a head without ties.
        """
        if not self.ties:
            if rate == 1 / 3:  # what every head starts from
                return
            raise ValueError("PairwiseHead: there is no class for ties; expected ties=True")
        if not 0 < rate < 1:
            raise ValueError(f"PairwiseHead: rate is {rate}, expected a share between 0 and 1")
        # of equal answers rate = ν / (2 + ν), solved for ν
        log_nu = math.log(2 * rate / (1 - rate))
        if self.tie is None:
            # concat has no tie parameter; its last bias does the same
            self.outer.bias[-1] = log_nu
        else:
            self.tie.fill_(log_nu)

    @property
    def untrained(self) -> bool:
        """Return whether the last layers are still all zeros."""
        return not any(bool(last.weight.any()) for last in self._lasts)

    def score(self, features: Tensor, surface: Tensor | None = None) -> Tensor:
        """Return scores (*B,) of single answers from their (*B, W) and (*B, F) surface features.

        Raises:
            ValueError: A link that only compares.
        """
        if self.link != "davidson":
            raise ValueError(
                f"PairwiseHead: link {self.link!r} compares answers and gives single ones no score"
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
                    f"PairwiseHead: expected features (*B, {self.in_features}) of both answers, "
                    f"got {list(a.shape)} and {list(b.shape)}"
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
        # outer has no bias: with the order its part changes the sign and no other bit
        wins = (self.outer(a - b)[..., 0] + (made[0][..., 0] - made[1][..., 0])) / 2
        if self.covariance is not None and not self.training:
            read = torch.cat([a - b, hidden[0] - hidden[1]], -1) / 2
            variance = (read @ self.covariance * read).sum(-1)
            # MacKay 1992: the mean of a sigmoid of a normal number of mean m and variance v is near
            # sigmoid(m / sqrt(1 + pi v / 8)); here m is 2 wins, with 4 times the variance
            wins = wins / (1 + math.pi / 2 * variance).sqrt()
        logits = [wins, -wins]
        if self.tie is not None:
            logits.append((made[0][..., 1] + made[1][..., 1]) / 2 + self.tie.squeeze(0))
        return torch.stack(logits, -1)

    def _hidden(
        self, a: Tensor, b: Tensor, surface_a: Tensor | None, surface_b: Tensor | None
    ) -> list[Tensor]:
        """Return what the network's last layer reads, for A before B and for B before A."""
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
        """Return what the win's logit is linear in, (*B, W + inner width), for ``covariance``."""
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
        """Show the settings that it was made with."""
        return f"{self.in_features}, link={self.link!r}, ties={self.ties}"

    def _read(self, *features: Tensor) -> Tensor:
        seen = self._dropped(torch.cat([one / self.scale for one in features], -1))
        return self.outer(self.inner(seen))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def _network(width: int, inner: int, outs: int, dropout: float) -> nn.Sequential:
    """A network for encodings of the surface and combinations of features."""
    return nn.Sequential(
        nn.Dropout(dropout / 2),
        nn.Linear(width, inner),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(inner, inner),
        nn.GELU(),
        nn.Dropout(dropout),
        # a bias would cancel between the answers, and ties have a parameter of their own
        nn.Linear(inner, outs, bias=False),
    )


def _given(surface: Tensor | None) -> Tensor:
    if surface is None:
        raise ValueError(
            "PairwiseHead: surface features are None; expected them, as the head has a part for "
            "them"
        )
    return surface


class Pool(nn.Module):
    """(T, W) states of all sequences to (S, K W) float32 features, of K kinds side by side.

    What answers have in common says nothing about which is better: a mean is over the answer and
    what follows it, not over the prompt.

    Args:
        pooling: One or more of ``"mean"`` (over the answer), ``"first"`` and ``"last"`` (the
            sequence's first and last state).

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
        """Pool states; ``lengths`` are (S,), at least 1 each.

        ``begins``, (S,), are where answers start in their sequences.
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
                # with output_size nothing waits for the GPU
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
        """The kinds."""
        return ", ".join(self.pooling)
