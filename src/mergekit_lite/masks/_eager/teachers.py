"""Distributions of the teachers at a chunk of positions, and a student's divergence from them.

Letters: N positions, H hidden size, V vocabulary, K components.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from .blend import work_dtype


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """The distributions of K teachers at N positions.

    Args:
        states: The teachers' final hidden states, (N, H) each, or logits, (N, V) each; None for a
            teacher without a share.
        heads: The teachers' output heads, (V, H) each; None if ``states`` are logits.
        biases: The biases of the heads, (V,) each, or None for a head without a bias.
        shares: The teachers' shares, (N, K), with one or more above 0 in each row; None if shares
            are chosen by confidence.
        temperature: The number that logits are divided by.
        confidence_temperature: The number that entropies are divided by; at 0 only the most
            confident teacher counts.
    """

    states: Sequence[Tensor | None]
    heads: Sequence[Tensor] | None
    biases: Sequence[Tensor | None]
    shares: Tensor | None = None
    temperature: float = 1.0
    confidence_temperature: float = 1.0

    def log_probs(self, k: int, rows: slice | Tensor) -> Tensor:  # (n, V)
        """Return the log probabilities of one teacher at some positions."""
        states = self.states[k]
        assert states is not None
        logits = states[rows]
        if self.heads is not None:
            head = self.heads[k]
            bias = self.biases[k]
            # states may have autocast's dtype, and a bias another dtype than its head
            own_bias = None if bias is None else bias.to(head.dtype)
            logits = F.linear(logits.to(head.dtype), head, own_bias)
        logits = logits.to(work_dtype(logits.dtype))
        if self.temperature != 1:
            logits = logits / self.temperature
        return logits.log_softmax(-1)

    @cached_property
    def has_share(self) -> Tensor:  # (N, K)
        """A mask of the shares above 0, on the CPU, so that reading it does not wait for a GPU."""
        assert self.shares is not None
        return (self.shares > 0).cpu()

    def mixture(self, rows: slice) -> Tensor:  # (n, V)
        """Return the log probabilities of the mixture at some positions."""
        if self.shares is None:
            return self._by_confidence(rows)
        mixture: Tensor | None = None
        for k in range(len(self.states)):
            places = self.has_share[rows, k].nonzero()[:, 0]
            if not len(places):
                continue
            if len(places) == rows.stop - rows.start:
                chosen, where = rows, slice(None)
            else:
                where = places.to(self.shares.device)
                chosen = where + rows.start
            logs = self.log_probs(k, chosen) + self.shares[chosen, k, None].log()
            if mixture is None and isinstance(where, slice):
                mixture = logs
                continue
            if mixture is None:
                mixture = logs.new_full((rows.stop - rows.start, logs.shape[1]), -math.inf)
            mixture[where] = torch.logaddexp(mixture[where], logs)
        assert mixture is not None
        return mixture

    def _by_confidence(self, rows: slice) -> Tensor:
        """Return `mixture` for shares softmax(-entropy / ``confidence_temperature``)."""
        logs = [self.log_probs(k, rows) for k in range(len(self.states))]
        entropies = torch.stack([_entropy(one) for one in logs])  # (K, n)
        if self.confidence_temperature:
            # subtract the smallest entropy before dividing, because a small temperature gives huge
            # numbers, whose differences rounding would lose
            scaled = (entropies.amin(0) - entropies) / self.confidence_temperature
            log_shares = scaled.log_softmax(0)
        else:
            # if there is a NaN, argmin returns its index, so the loss also becomes NaN
            others = F.one_hot(entropies.argmin(0), len(logs)).T == 0
            log_shares = torch.zeros_like(entropies).masked_fill_(others, -math.inf)
        mixture = logs[0].add_(log_shares[0, :, None])
        for one, log_share in zip(logs[1:], log_shares[1:, :, None], strict=True):
            torch.logaddexp(mixture, one.add_(log_share), out=mixture)
        return mixture


def _entropy(logs: Tensor) -> Tensor:  # (n,)
    """Return the entropies of rows of log probabilities."""
    p = logs.exp()
    # an impossible token has the log probability -inf, and 0 * -inf is NaN
    return -torch.where(p == 0, 0, p * logs).sum(-1)


# in both divergences, a term of probability 0 is 0, and a term of probability NaN is NaN


def forward_kl(target: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(target, student), summed over rows, and the gradient of the student's logits.

    Both arguments are log probabilities, (n, V), and are overwritten.
    """
    p = target.exp()
    terms = target.sub_(logs).mul_(p).masked_fill_(p == 0, 0)
    # the gradient is the student's softmax minus the target
    return _sum_of(terms), logs.exp_().sub_(p)


def reverse_kl(target: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(student, target), summed over rows, and the gradient of the student's logits.

    Both arguments are log probabilities, (n, V), and are overwritten.
    """
    p = logs.exp()
    difference = logs.sub_(target).masked_fill_(p == 0, 0)
    rows = (p * difference).sum(-1, keepdim=True)
    # the gradient through softmax: p times (each difference minus the mean difference under p)
    return rows.sum(dtype=torch.float64), difference.sub_(rows).mul_(p)


def _sum_of(terms: Tensor) -> Tensor:
    """Return the sum of all terms: first within rows, then over rows in float64."""
    return terms.sum(-1).sum(dtype=torch.float64)
