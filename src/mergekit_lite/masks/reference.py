"""Reference implementations: dense, slow and simple, in any float dtype.

Tests and `model_components.measure_kernels` compare the fast paths with these functions.

Letters: K components, O out_features, I in_features, *B any leading shape. A mask tensor has one
more dimension than its weight: the first size is K, and the other sizes broadcast over the weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def blend(weights: Sequence[Tensor], masks: Tensor) -> Tensor:
    """Return Σ_k masks[k] * weights[k]."""
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
    """Return ``x @ (Σ m_k W_k).T + b``.

    In efficient mode, sum the components' products, each with its input or its output masked.
    """
    if mode == "accurate":
        # keep the layout of the weights, as the stock layers do
        merged = blend(weights, masks)
        total = x @ (merged if transposed else merged.T)
        return total if bias is None else total + bias
    if transposed:
        weights = [w.T for w in weights]
        masks = masks.transpose(1, 2)
    if masks.shape[1] > 1:  # one mask value per output feature
        terms = [(x @ w.T) * m[:, 0] for w, m in zip(weights, masks, strict=True)]
    else:
        terms = [(x * m[0]) @ w.T for w, m in zip(weights, masks, strict=True)]
    total = torch.stack(terms).sum(0)
    return total if bias is None else total + bias
