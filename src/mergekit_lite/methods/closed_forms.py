"""Compute the merged weight of a linear layer from sums over its inputs, with one solve.

Products are computed in float32, or in float64 if ``reduce`` is 1. Sums and the solution are
computed in float64. Everything runs on the device of the inputs.

RegMean (Jin et al., arXiv 2212.09849): W = (Σ_k W_k G_k)(Σ_k G_k)⁻¹ with G_k = X_kᵀ X_k / N_k,
whose entries off the diagonal are multiplied by ``reduce``.

Letters: K models, N tokens, O out_features, I in_features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .._torch import Tensor, torch

# relative to the mean diagonal element; for features that are always 0, it makes the merged weights
# the averages of the models' weights
_RIDGE = 1e-6


class InputStatistics:
    """The mean of xᵀ x over the tokens that a layer has read.

    Args:
        in_features: The number of input features, I.
        products: The dtype of the products; default: float32.
    """

    def __init__(self, in_features: int, products: torch.dtype | None = None):
        self.products = products or torch.float32
        self.total = torch.zeros((in_features, in_features), dtype=torch.float64)
        self.count = 0

    def add(self, x: Tensor) -> None:  # (N, I)
        """Add the inputs of N tokens."""
        x = x.detach().to(self.products)
        self.count += len(x)
        self.total = self.total.to(x.device)
        self.total += x.T @ x

    def mean(self) -> Tensor:  # (I, I)
        """Return the mean over all tokens."""
        return self.total / max(1, self.count)


def merge_by_inputs(
    weights: Sequence[Tensor],  # K of (O, I)
    statistics: Sequence[InputStatistics],
    *,
    reduce: float,
    shares: Sequence[float],
) -> Tensor:  # (O, I) float64
    """Return the merged weight of a linear layer.

    Args:
        weights: The weights of the models.
        statistics: The input statistics of each model.
        reduce: The factor of the Gram matrices' entries off the diagonal.
        shares: The weight of each model.
    """
    means = [share * s.mean() for share, s in zip(shares, statistics, strict=True)]
    size = sum(float(m.diagonal().mean()) for m in means)
    ridge = _RIDGE * size / len(weights) or 1.0  # if all inputs are 0, the result is the average
    right = torch.zeros_like(means[0])
    left = right.new_zeros(weights[0].shape)
    for w, gram in zip(weights, means, strict=True):
        # the diagonal is not reduced; the ridge is in both sums, so it pulls toward the average
        gram = reduce * gram + torch.diag((1 - reduce) * gram.diagonal() + ridge)
        left.addmm_(w.double(), gram)
        right += gram
    # right is symmetric, so W right = left is solved as right Wᵀ = leftᵀ
    factor, failed = torch.linalg.cholesky_ex(right)
    if int(failed):  # rounding made `right` indefinite
        # only the CPU has a solver (gelsd) for matrices without full rank
        solution = torch.linalg.lstsq(right.cpu(), left.T.cpu(), driver="gelsd").solution
        return solution.T.to(left.device)
    return torch.cholesky_solve(left.T, factor).T


class ClosedForm(NamedTuple):
    """A calibrated merge method: its formula, and the blocks that the data run through.

    Attributes:
        merge: The function that computes the merged weight from the models' weights and statistics.
        merged_inputs: Whether the data run through the merged blocks instead of each model's own.
    """

    merge: Callable[..., Tensor]
    merged_inputs: bool = False


CALIBRATED = {
    "regmean": ClosedForm(merge_by_inputs),
    "regmean++": ClosedForm(merge_by_inputs, merged_inputs=True),
}
"""The methods that need calibration data of each model, by name; see `mergekit_lite.layerwise`."""
