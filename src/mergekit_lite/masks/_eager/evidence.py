"""Evidence: the probability that a teacher assigns to an example, and shares based on it.

Letters: N positions, H hidden size, V vocabulary, K components.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blend import pieces
from .teachers import Teachers

_LEAST = -1e6  # least log probability, so that an impossible token does not make shares NaN


def label_log_probs(teachers: Teachers, k: int, labels: Tensor, size: int) -> Tensor:  # (N,)
    """Return the log probability that teacher k gives each label, ``size`` positions at a time."""
    parts = [
        teachers.log_probs(k, rows).gather(1, labels[rows, None])[:, 0]
        for rows in pieces(len(labels), size)
    ]
    return torch.cat(parts)


def evidence(
    log_probs: Tensor,  # (N, K)
    example: Tensor,  # (N,), ascending
) -> Tensor:  # (N, K)
    """Return the teachers' shares at each position.

    The shares are c_k ∝ Π_t p_k(x_t), over the positions t of the same example.
    """
    # in float64: sums are over thousands of tokens, and a difference of a few nats decides
    log_probs = log_probs.double().clamp_min(_LEAST)
    _, sizes = example.unique_consecutive(return_counts=True)
    parts = log_probs.split(sizes.tolist())
    sums = [part.sum(0).expand_as(part) for part in parts]
    return torch.cat(sums).softmax(1)
