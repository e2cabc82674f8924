"""What keeps masks in check while they learn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import KLConfig


def mask_penalty(masks: Sequence[Tensor], config: KLConfig) -> Tensor:
    """What `KLConfig`'s regularisers add to the loss; every mask tensor (K, ...) counts by its number of elements.

    Args:
        masks: As they act, constrained.
        config: Its weights ``l1``, ``l2``, ``similarity``, ``closeness`` and ``decay``.

    >>> mask_penalty([torch.tensor([[1.0], [0.5]])], KLConfig(l1=1.0, decay=1.0))
    tensor(0.9500)
    """
    total = masks[0].new_zeros(())
    if not config.penalises:
        return total
    count, places = masks[0].shape[0], sum(m[0].numel() for m in masks)
    # sums over all tensors, so that they need not be one
    products = torch.stack([torch.mm(m.flatten(1), m.flatten(1).T) for m in masks]).sum(0)
    energy = products.diagonal()
    if config.l1:
        total = total + config.l1 * sum(m.abs().sum() for m in masks) / (count * places)
    if config.l2:
        total = total + config.l2 * energy.sum() / (count * places)
    pairs = torch.triu_indices(count, count, 1, device=energy.device)
    own, other, both = energy[pairs[0]], energy[pairs[1]], products[pairs[0], pairs[1]]
    if config.similarity:
        total = total + config.similarity * (both / (own * other).sqrt().clamp_min(1e-12)).mean()
    if config.closeness:
        apart = sum((m[pairs[0]] - m[pairs[1]]).square().sum() for m in masks)
        total = total + config.closeness * apart / (places * pairs.shape[1])
    if config.decay:
        total = total + config.decay * energy[1:].sum() / energy.sum().clamp_min(1e-12)
    return total
