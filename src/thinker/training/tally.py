"""Counts of a training run: correct answers and all answers by length, and losses."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Counts = dict[str, Tensor]
"""``right`` and ``total``, (L + 1,), count correct answers and all answers by length. ``loss``,
(3,), has the sum of the finite losses, their number, and the number of other losses. All are
float64."""


class Tally:
    """Counts since the start of a run.

    `mark` returns the current counts, and `since` returns the counts since a mark.

    Args:
        max_length: The length of the longest samples.
        device: The device of the counts.
        total: A function that sums a tensor over processes.
    """

    def __init__(self, max_length: int, device: torch.device, total: Callable[[Tensor], Tensor]):
        self._total = total
        self._device = device
        sizes = {"right": max_length + 1, "total": max_length + 1, "loss": 3}
        # float64: float32 stops counting at 2^24 answers
        self.counts: Counts = {
            n: torch.zeros(size, dtype=torch.float64, device=device) for n, size in sizes.items()
        }

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor, lengths: Tensor, loss: Tensor) -> None:
        """Count a batch: logits (B, O, V), labels (B, O), lengths (B,)."""
        counted = labels != -100
        right = ((logits.argmax(-1) == labels) & counted).sum(1)
        self.counts["right"].index_add_(0, lengths, right.double())
        self.counts["total"].index_add_(0, lengths, counted.sum(1).double())
        loss = loss.detach().double()
        finite = loss.isfinite()
        self.counts["loss"] += torch.stack(
            # replaced and not multiplied by 0, since nan times 0 is nan
            [loss.where(finite, torch.zeros_like(loss)), finite, ~finite]
        )

    def mark(self) -> Counts:
        """Return a copy of the current counts."""
        return {name: value.clone() for name, value in self.counts.items()}

    def since(self, mark: Counts) -> Counts:
        """Return the counts since ``mark`` over all processes, and update ``mark``."""
        passed = {}
        for name, value in self.counts.items():
            passed[name] = self._total(value - mark[name])
            mark[name] = value.clone()
        return passed

    def loaded(self, counts: Counts) -> Counts:
        """Return a checkpoint's counts, moved to the device of this process."""
        return {name: value.to(self._device) for name, value in counts.items()}


def mean_loss(counts: Counts) -> float:
    """Return the mean of the finite losses.

    The result is infinite if no loss is finite, and nan if there are no losses.
    """
    total, finite, other = counts["loss"].tolist()
    if finite:
        return total / finite
    if other:
        return math.inf
    return math.nan
