"""The definitions of merges with calibration, weight by weight: dense, slow, obvious.

The streamed ones are judged by these.

Letters: K models, N tokens, O out_features, I in_features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def regmean(
    weights: Sequence[Tensor],  # K of (O, I)
    inputs: Sequence[Tensor],  # K of (N_k, I)
    *,
    reduce: float = 0.9,
    weight: Sequence[float] | None = None,
) -> Tensor:  # (O, I)
    """The weight whose outputs are nearest, in the mean square, to each model's on its own inputs.

    The Gram matrices' entries off the diagonal are multiplied by ``reduce``.
    """
    shares = [1.0] * len(weights) if weight is None else list(weight)
    left = 0
    right = 0
    for w, x, share in zip(weights, inputs, shares, strict=True):
        gram = share * x.double().T @ x.double() / len(x)
        gram = reduce * gram + (1 - reduce) * torch.diag(gram.diagonal())
        left = left + w.double() @ gram
        right = right + gram
    return torch.linalg.solve(torch.as_tensor(right), torch.as_tensor(left), left=False)


DEFINITIONS = {"regmean": regmean, "regmean++": regmean}
"""The definition of each data-driven method."""
