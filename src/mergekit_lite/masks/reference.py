"""The definitions: dense, slow, obvious, in any float dtype.

The fast paths are judged against these.

Letters: K components, O out_features, I in_features, V vocabulary, H hidden size, N positions, *B
any leading shape. A mask tensor has one more dimension than the weight it belongs to: K, then sizes
that broadcast over the weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def blend(weights: Sequence[Tensor], masks: Tensor) -> Tensor:
    """Σ_k masks[k] * weights[k]."""
    return torch.stack([m * w for m, w in zip(masks, weights, strict=True)]).sum(0)


def masked_linear(
    x: Tensor,  # (*B, I)
    weights: Sequence[Tensor],  # K of (O, I), or (I, O) when transposed
    masks: Tensor,  # (K, broadcasts over a weight)
    bias: Tensor | None = None,  # (O,)
    *,
    mode: str = "accurate",
    transposed: bool = False,
) -> Tensor:
    """``x @ (Σ m_k W_k).T + b``.

    Efficient: each component's own product, its input or output masked.
    """
    if transposed:
        weights = [w.T for w in weights]
        masks = masks.transpose(1, 2)
    if mode == "accurate":
        return F.linear(x, blend(weights, masks), bias)
    if masks.shape[1] > 1:  # one value an output row
        terms = [(x @ w.T) * m[:, 0] for w, m in zip(weights, masks, strict=True)]
    else:
        terms = [(x * m[0]) @ w.T for w, m in zip(weights, masks, strict=True)]
    total = torch.stack(terms).sum(0)
    return total if bias is None else total + bias


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
