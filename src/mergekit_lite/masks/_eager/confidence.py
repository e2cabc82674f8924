"""The mixture of teachers by confidence.

Shares at a position follow from the teachers' entropies there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .logits import logaddexp_, stretches


class ByConfidence:
    """Shares that are the softmax over teachers of -entropy / temperature.

    At temperature 0 the surest teacher alone.

    Teachers are added one by one to a buffer (n, V), which becomes the log probabilities of the
    mixture.

    Weights are kept relative to the surest teacher so far: at a small temperature they are huge
    numbers, whose difference rounding would swallow.
    """

    def __init__(self, target: Tensor, temperature: float):
        self.target = target.fill_(-math.inf)
        self.temperature = temperature
        self.least = torch.full(
            (target.shape[0], 1), math.inf, dtype=target.dtype, device=target.device
        )
        self.total = torch.full_like(self.least, -math.inf)

    def add(self, logs: Tensor, entropy: Tensor) -> None:
        """Another teacher."""
        least = torch.minimum(self.least, entropy)
        if self.temperature:
            for mixture in (self.target, self.total):
                mixture += (least - self.least) / self.temperature
            weight = (least - entropy) / self.temperature
            torch.logaddexp(self.total, weight, out=self.total)
            logaddexp_(self.target, logs.add_(weight), slice(None))
        else:
            # NaN wins and stays, since no entropy is less: a broken teacher must be seen
            surer = ((entropy < self.least) | entropy.isnan())[:, 0].nonzero()[:, 0]
            # cut only for its number of rows, by which pieces are sized
            for piece in stretches(self.target[: surer.numel()]):
                self.target[surer[piece]] = logs[surer[piece]]
        self.least = least

    def finish(self) -> None:
        """Shares that sum to one."""
        if self.temperature:
            self.target -= self.total
