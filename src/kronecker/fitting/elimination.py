"""Choose which inputs of a linear layer to drop, and compute the best weight for the others.

All computations are in float64.

Letters: O outputs; I inputs; S the inputs that are kept. A layer with the weight W has inputs x
with second moments C = E[x xᵀ] and targets t with cross moments E[t xᵀ]. The error to minimize is
E‖(W - Ŵ) x‖² = ‖(W - Ŵ) C^½‖².
"""

from __future__ import annotations

import torch
from torch import Tensor

# C⁻¹ is compacted when less than this share of its columns is left: dropped columns still take part
# in products, but compacting takes a copy
_COMPACT_BELOW = 0.8


def eliminate(cross: Tensor, moment: Tensor, keep: int, *, step: int = 1) -> Tensor:
    """Drop the inputs that cost least, ``step`` at a time, and refit the others after each step.

    The cost of an input j is ‖w_j‖² / (C⁻¹)_jj. After each step, the weight and C⁻¹ are updated for
    the inputs that are left. This is the optimal brain surgeon (Hassibi and Stork 1993), which
    SlimGPT (arXiv 2412.18110) applies to layers of language models.

    Args:
        cross: The cross moment of targets t and inputs x, E[t xᵀ], (O, I).
        moment: The second moment C, (I, I), positive definite.
        keep: Number of inputs to keep.
        step: Number of inputs to drop at a time. Larger steps are faster and less exact.

    Returns:
        The indices of the inputs that are kept, (S,), in ascending order.

    >>> eliminate(torch.tensor([[1.0, 2.0, 3.0]]), torch.eye(3), 2)
    tensor([1, 2])
    """
    root = torch.linalg.cholesky(moment.double())
    weight = torch.cholesky_solve(cross.double().T, root).T  # the best weight for all inputs
    inverse = torch.cholesky_inverse(root)
    del root  # to free memory: it is as large as C
    inputs = torch.arange(weight.shape[1], device=weight.device)  # the input index of each column
    alive = torch.ones(len(inputs), dtype=torch.bool, device=weight.device)
    remaining = len(inputs)
    while remaining > keep:
        costs = weight.square().sum(0) / inverse.diagonal()
        costs[~alive] = torch.inf
        # stable, so that all machines drop inputs of equal cost in the same order
        dropped = costs.argsort(stable=True)[: min(step, remaining - keep)]
        # block elimination in C⁻¹, in place, needs neither another inverse nor a copy
        rows = inverse[dropped]
        solved = torch.linalg.solve(rows[:, dropped], rows)
        weight.addmm_(weight[:, dropped], solved, alpha=-1)
        inverse.addmm_(inverse[:, dropped], solved, alpha=-1)
        alive[dropped] = False
        remaining -= len(dropped)
        if remaining < _COMPACT_BELOW * len(alive):
            rest = alive.nonzero()[:, 0]
            weight = weight[:, rest]
            inverse = inverse[rest][:, rest]
            inputs = inputs[rest]
            alive = alive[rest]
    return inputs[alive]


def refitted(cross: Tensor, moment: Tensor, kept: Tensor) -> Tensor:
    """Return the best weight for the kept inputs, E[t x_Sᵀ] E[x_S x_Sᵀ]⁻¹, (O, S).

    >>> refitted(
    ...     torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 0.5], [0.5, 1.0]]), torch.tensor([0])
    ... )
    tensor([[2.]], dtype=torch.float64)
    """
    # from the moments, because the updates in `eliminate` accumulate rounding errors
    factor = torch.linalg.cholesky(moment.double()[kept][:, kept])
    return torch.cholesky_solve(cross.double()[:, kept].T, factor).T
