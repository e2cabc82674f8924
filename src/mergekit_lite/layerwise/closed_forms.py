"""The merged weight of a linear layer from its inputs: sums over tokens, then one solve.

Products are float32 (float64 if ``reduce`` is 1), sums and the solve float64, all on the device of
the inputs.

RegMean (Jin et al., arXiv 2212.09849): W = (Σ_k W_k G_k)(Σ_k G_k)⁻¹ with G_k = X_kᵀ X_k / N_k,
whose entries off the diagonal are multiplied by ``reduce``.

Letters: K models, N tokens, O out_features, I in_features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_RIDGE = 1e-6  # as a share of the mean diagonal; weights of features without input are averaged


class InputStatistics:
    """The mean of xᵀ x over the tokens that a layer has read.

    Args:
        in_features: I.
        products: Dtype of the products.
    """

    def __init__(self, in_features: int, products: torch.dtype = torch.float32):
        self.products = products
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
    """Return the merged weight.

    Args:
        weights: The weights of the models.
        statistics: The input statistics of each model.
        reduce: The factor of entries off the diagonal.
        shares: The weight of each model.
    """
    means = [share * s.mean() for share, s in zip(shares, statistics, strict=True)]
    size = sum(float(m.diagonal().mean()) for m in means)
    ridge = _RIDGE * size / len(weights) or 1.0  # no input at all: the average
    right = torch.zeros_like(means[0])
    left = right.new_zeros(weights[0].shape)
    for w, gram in zip(weights, means, strict=True):
        # the diagonal stays whole; the ridge enters both sums, so it pulls to the average
        gram = reduce * gram + torch.diag((1 - reduce) * gram.diagonal() + ridge)
        left.addmm_(w.double(), gram)
        right += gram
    # right is symmetric, so W right = left is solved as right Wᵀ = leftᵀ
    factor, failed = torch.linalg.cholesky_ex(right)
    if int(failed):  # rounding made it indefinite
        # only the CPU has a solver (gelsd) for matrices without full rank
        solution = torch.linalg.lstsq(right.cpu(), left.T.cpu(), driver="gelsd").solution
        return solution.T.to(left.device)
    return torch.cholesky_solve(left.T, factor).T


class ClosedForm(NamedTuple):
    """A data-driven method.

    Attributes:
        merge: The function from the models' weights and statistics to the merged weight.
        merged_inputs: Whether data run through the blocks that are merged already.
    """

    merge: Callable[..., Tensor]
    merged_inputs: bool = False


CLOSED_FORMS = {
    "regmean": ClosedForm(merge_by_inputs),
    "regmean++": ClosedForm(merge_by_inputs, merged_inputs=True),
}
"""The data-driven methods by name, which `mergekit_lite.methods.CALIBRATED` lists, too."""
