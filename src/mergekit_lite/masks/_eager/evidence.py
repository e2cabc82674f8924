"""Evidence: how probable a teacher finds an example, and what shares follow from it.

Letters: N positions, H hidden size, V vocabulary, K components.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blend import work_dtype
from .logits import Heads, chunks, log_softmax_

_LEAST = -1e6  # of a log probability: an impossible token, which may not make all others NaN


def check_labels(labels: Tensor, vocabulary: int) -> None:
    """Refuse labels outside the vocabulary."""
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < vocabulary:
        span = f"{int(labels.min())} to {int(labels.max())}"
        raise ValueError(f"masked_kl: labels from {span}, expected 0 to {vocabulary - 1}")


def label_log_probs(states: Tensor, heads: Heads, k: int, labels: Tensor) -> Tensor:  # (N,)
    """The log probability that component k gives each label.

    Raises:
        ValueError: Labels outside the vocabulary.
    """
    check_labels(labels, states.shape[1] if heads.heads is None else heads.heads[0].shape[0])
    log_probs = torch.empty(states.shape[0], dtype=work_dtype(states.dtype), device=states.device)
    for chunk, (logits,) in chunks(states, heads, log_probs.dtype, buffers=1):
        log_softmax_(heads.teacher(k, states[chunk], logits))
        log_probs[chunk] = logits.gather(1, labels[chunk, None])[:, 0]
    return log_probs


def evidence(
    log_probs: Tensor,  # (N, K)
    example: Tensor,  # (N,), ascending
) -> Tensor:  # (N, K)
    """Return the teachers' shares at each position.

    c_k ∝ Π_t p_k(x_t) over the positions of its example.
    """
    # sums over thousands of tokens, and a difference of a few nats decides
    log_probs = log_probs.double().clamp_min(_LEAST)
    _, sizes = example.unique_consecutive(return_counts=True)
    parts = log_probs.split(sizes.tolist())
    sums = [part.sum(0).expand_as(part) for part in parts]
    return torch.cat(sums).softmax(1)
