"""Definitions of what masks compute, which only tests call.

Letters: K components, V vocabulary, H hidden size, N positions, *B any leading shape.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mergekit_lite.masks.reference import blend, masked_linear

__all__ = ["blend", "evidence", "masked_embedding", "masked_kl", "masked_linear"]


def masked_embedding(ids: Tensor, weights: Sequence[Tensor], masks: Tensor) -> Tensor:
    """Rows of the blended table: (*B,) → (*B, H)."""
    return F.embedding(ids, blend(weights, masks))


def masked_kl(
    student: Tensor,  # (N, H), or (N, V) logits where there are no heads
    teachers: Sequence[Tensor],  # K of the same
    heads: Sequence[Tensor] | None = None,  # K or more of (V, H)
    masks: Tensor | None = None,  # (as many, broadcasts over a head)
    *,
    coefficients: Tensor | str = "confidence",  # (N, K), rows sum to one
    confidence_temperature: float = 1.0,
    temperature: float = 1.0,
    direction: str = "forward",
    labels: Tensor | None = None,  # (N,)
    cross_entropy: float = 0.0,
) -> Tensor:
    """Mean over positions of T² · D(target, student), target = Σ c_k softmax(teacher_k / T)."""
    if heads is not None:
        head = heads[0] if masks is None else blend(heads, masks)
        student = student @ head.T
        # a base's head is the student's alone
        teachers = [t @ h.T for t, h in zip(teachers, heads, strict=False)]
    logs = torch.stack([torch.log_softmax(t / temperature, -1) for t in teachers], 1)  # (N, K, V)
    entropies = -(logs.exp() * logs).sum(-1)
    if isinstance(coefficients, Tensor):
        target = (coefficients[..., None] * logs.exp()).sum(1)
    else:
        if confidence_temperature == 0:
            shares = F.one_hot(entropies.argmin(-1), len(teachers)).to(logs.dtype)
        else:
            shares = torch.softmax(-entropies / confidence_temperature, -1)
        target = (shares[..., None] * logs.exp()).sum(1)
    log_s = torch.log_softmax(student / temperature, -1)
    if direction == "forward":
        # xlogy is 0 where the target underflows to 0; 0 * log 0 would be NaN
        loss = torch.xlogy(target, target) - target * log_s
    else:
        loss = log_s.exp() * (log_s - target.log())
    # gradients of softened targets shrink as 1 / T²; this keeps their size
    loss = temperature**2 * loss.sum(-1).mean()
    if cross_entropy:
        assert labels is not None
        loss = loss + cross_entropy * F.cross_entropy(student, labels)
    return loss


def evidence(
    log_probs: Tensor,  # (N, K)
    example: Tensor,  # (N,)
) -> Tensor:  # (N, K)
    """Return the probability that each teacher wrote the example.

    c_k ∝ Π_t p_k(x_t) over its positions.
    """
    coefficients = torch.empty_like(log_probs)
    for n in range(len(example)):
        coefficients[n] = torch.softmax(log_probs[example == example[n]].sum(0), 0)
    return coefficients
