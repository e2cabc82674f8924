"""Merge methods written as passes of compiled kernels over the blocks of a tensor.

A program is a function of a tensor and its method's parameters. It may first compute dot products,
thresholds or norms in passes over all blocks. It returns the function that computes a block of the
result. The formulas are in the methods' docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .. import methods
from ..dtypes import Array
from ..methods import MergeMethod, coefficients
from ..methods.averaging import normalized, normalizer
from ..methods.trimming import middle_counts, trimmed_count
from . import native
from .passes import Finish, FusedTensor, Kept, float32, summed


def _linear(x: FusedTensor, weight: list[float], normalize: bool) -> Finish:
    return x.combined(normalized(weight, normalize))


def _passthrough(x: FusedTensor, scale: list[float | None]) -> Finish:
    # without a scale, this runs only to change the dtype: a factor of 1 rounds the values
    return x.combined([1.0 if scale[0] is None else scale[0]])


def _task_arithmetic(
    x: FusedTensor, weight: list[float], lambda_: float, normalize: bool
) -> Finish:
    return x.shifted(weight, lambda_ / normalizer(weight, normalize))


def _slerp(x: FusedTensor, t: float) -> Finish:
    g = x.gram(shifted=False)[::-1, ::-1]  # `coefficients.slerp` expects the base first
    return x.combined(coefficients.slerp(g, t, np)[::-1])


def _along_angles(x: FusedTensor, factors: Callable[[Array], Array]) -> Finish:
    """Return a `Finish` that combines the models or, with a base, their task vectors.

    ``factors`` computes the coefficients from the dot products.
    """
    based = x.plan.base is not None
    c = factors(x.gram(shifted=based))
    return x.shifted(c) if based else x.combined(c)


def _nuslerp(x: FusedTensor, weight: list[float], **_: object) -> Finish:
    # the ignored parameters select an angle per row, for which there is no kernel
    return _along_angles(x, lambda g: coefficients.nuslerp(g, weight, np))


def _multislerp(x: FusedTensor, weight: list[float], normalize_weights: bool, eps: float) -> Finish:
    return _along_angles(
        x, lambda g: coefficients.multislerp(g, weight, normalize_weights, eps, np)
    )


def _karcher(x: FusedTensor, max_iter: int, tol: float) -> Finish:
    return _along_angles(x, lambda g: coefficients.karcher(g, max_iter, tol, np))


def _model_stock(x: FusedTensor, **_: object) -> Finish:
    return _along_angles(x, lambda g: coefficients.model_stock(g, np))


def _largest(x: FusedTensor, density: Sequence[float]) -> Kept:
    return x.trimmed([trimmed_count(x.size, d) for d in density])


def _middling(x: FusedTensor, density: Sequence[float], gamma: Sequence[float]) -> Kept:
    pairs = [middle_counts(x.size, d, g) for d, g in zip(density, gamma, strict=True)]
    # the kernel expects a model's outlier threshold K entries after its lower threshold
    return x.trimmed([*(outer for outer, _ in pairs), *(inner for _, inner in pairs)])


def _keeping(keep: Callable[..., Kept], *, vote: bool) -> Callable[..., Finish]:
    """Return a program that adds λ times the weighted sum of the kept task vectors to B.

    With ``vote``, it adds λ times the consensus of the kept task vectors instead.
    """

    def program(
        x: FusedTensor,
        density: list[float],
        weight: list[float],
        normalize: bool,
        rescale: bool,
        lambda_: float,
        **of_method: list[float],
    ) -> Finish:
        # `of_method` holds gamma for breadcrumbs, and epsilon for della
        kept = Kept() if min(density) >= 1 else keep(x, density, **of_method)
        scales = x.restoring(kept, rescale)
        if vote:
            return x.shifted(weight, lambda_, kept, scales, normalize)
        return x.shifted(weight, lambda_ / normalizer(weight, normalize), kept, scales)

    return program


def _sce(x: FusedTensor, select_topk: float) -> Finish:
    selector = x.selected(select_topk)
    selecting = select_topk < 1
    cut = np.float32(selector.threshold)

    def work(raw: Array, count: int, place: int, block: int) -> Array:
        sums = np.zeros(x.models)
        arguments = (selecting, cut, selector.budget(block), x.work(), sums)
        native.run("energy", raw, count, x.models, *arguments)
        return sums

    energy = summed(x.each(work))
    total = energy.sum()
    # if no selected element differs from the base, the result is the base for all weights
    weights = np.full_like(energy, 1 / x.models)
    if total > 0:
        weights = energy / total
    weights = float32(weights)

    def finish(raw: Array, count: int, place: int, block: int, out: Array) -> bool:
        arguments = (selecting, cut, selector.budget(block), weights, x.work(), out)
        return native.run("erase_minority", raw, count, x.models, *arguments)

    return finish


PROGRAMS: Mapping[MergeMethod, Callable[..., Finish]] = {
    methods.linear: _linear,
    methods.passthrough: _passthrough,
    methods.task_arithmetic: _task_arithmetic,
    methods.slerp: _slerp,
    methods.nuslerp: _nuslerp,
    methods.multislerp: _multislerp,
    methods.karcher: _karcher,
    methods.model_stock: _model_stock,
    methods.ties: _keeping(_largest, vote=True),
    methods.breadcrumbs: _keeping(_middling, vote=False),
    methods.breadcrumbs_ties: _keeping(_middling, vote=True),
    methods.sce: _sce,
    methods.arcee_fusion: FusedTensor.fused_by_importance,
    methods.della: _keeping(FusedTensor.chosen, vote=True),
    methods.della_linear: _keeping(FusedTensor.chosen, vote=False),
    methods.dare_linear: _keeping(FusedTensor.drawn, vote=False),
    methods.dare_ties: _keeping(FusedTensor.drawn, vote=True),
}
"""The program of every method that has kernels."""
