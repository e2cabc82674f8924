"""Compute the coefficients of a combination from the dot products of its inputs.

All methods that interpolate along angles use these functions.

Each function takes ``xp``, the module that computes: torch, which supports gradients, or numpy, for
the engine of compiled kernels.

Notation: x_i inputs, G_ij = <x_i, x_j>, n_i = sqrt(G_ii), u_i = x_i / n_i.
Shape letters: K inputs. The dimensions ... are the rows (R,), or none if there is one result for
the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TypeVar

from .._torch import Tensor
from ..dtypes import Array

A = TypeVar("A", Tensor, Array)

_COLINEAR = 1e-8  # inputs with a sin θ of at most this count as colinear
_CANCELLED = 1e-6  # a sum of unit vectors that is shorter than this is a rounding error
# the least divisor; its inverse is still finite in float64
_TINY = 1e-300


def great_circle(
    cosine: A,  # (...)
    t: float,
    straight: Tensor | Array,  # (...), boolean
    xp: ModuleType,
) -> A:  # (..., 2)
    """Return the coefficients of the point at ``t`` on the arc from input 0 to input 1.

    Where ``straight`` is true, the point is on the straight line instead.
    """
    # `where` replaces cosines of ±1, at which the gradient is infinite
    angle = xp.arccos(xp.where(straight, 0.0, cosine))
    sine = xp.sin(angle)
    arc = xp.stack([xp.sin((1 - t) * angle) / sine, xp.sin(t * angle) / sine], -1)
    line = xp.stack([xp.full_like(cosine, 1 - t), xp.full_like(cosine, t)], -1)
    return xp.where(straight[..., None], line, arc)


def cosines(g: A, xp: ModuleType) -> A:
    """Return the cosine between inputs 0 and 1 from their dot products (..., 2, 2).

    If one of the inputs is zero, the cosine is 0 (a right angle), as in mergekit.
    """
    squared = g[..., 0, 0] * g[..., 1, 1]
    # `where` computes both branches: a root of 0 in the unused one would make the gradient NaN
    defined = squared > 0
    return xp.where(defined, g[..., 0, 1] / xp.sqrt(xp.where(defined, squared, 1.0)), 0.0)


def slerp(g: A, t: float, xp: ModuleType) -> A:
    """Return the coefficients of the base and the model at ``t`` on the arc between them."""
    cosine = cosines(g, xp)
    # the same bound as in mergekit: angles below 1.8 degrees count as straight
    return great_circle(cosine, t, abs(cosine) > 0.9995, xp)


def nuslerp(g: A, weight: Sequence[float], xp: ModuleType) -> A:
    """Return the coefficients of two models, or of their task vectors."""
    # the same bound as in mergekit, and the same result if the weights sum to 0
    t = 0.5 if abs(sum(weight)) < 1e-6 else weight[1] / sum(weight)
    cosine = cosines(g, xp)
    # 1 - cos² is sin², so the bound is squared, too
    return great_circle(cosine, t, 1 - cosine * cosine <= _COLINEAR**2, xp)


def unit_gram(g: A, eps: float, xp: ModuleType) -> tuple[A, A]:
    """Return the dot products of the inputs scaled to length 1, and the inputs' norms (..., K).

    ``eps`` is added to the norms before the division. Zero inputs stay zero.
    """
    squared = xp.stack([g[..., i, i] for i in range(g.shape[-1])], -1)
    present = squared > 0
    norms = xp.where(present, xp.sqrt(xp.where(present, squared, 1.0)), 0.0)
    inverse = xp.where(present, 1 / (norms + eps).clip(min=_TINY), 0.0)
    return g * inverse[..., :, None] * inverse[..., None, :], norms


def multislerp(
    g: A, weight: Sequence[float], normalize_weights: bool, eps: float, xp: ModuleType
) -> A:
    """Return the coefficients of the mean direction, scaled to the weighted mean length.

    If the directions cancel, return the coefficients of the weighted sum instead.
    """
    units, norms = unit_gram(g, eps, xp)
    if normalize_weights:
        shares = [w / sum(weight) for w in weight]
    else:
        shares = list(weight)
    w = xp.stack([xp.full_like(norms[0], share) for share in shares], -1)
    # w U w is the squared length of Σ w_i u_i; rounding may leave it below 0
    length = xp.sqrt((w @ units @ w).clip(min=0))
    least = max(eps, _CANCELLED * sum(abs(share) for share in shares))
    direction = w * xp.where(norms > 0, 1 / (norms + eps).clip(min=_TINY), 0.0)
    return xp.where(length > least, direction / length.clip(min=_TINY) * (w @ norms), w)


def karcher(g: A, max_iter: int, tol: float, xp: ModuleType) -> A:
    """Return the coefficients of the Karcher mean, found by fixed-point iteration.

    The mean always lies in the span of the inputs.
    """
    units, norms = unit_gram(g, 0.0, xp)
    count = norms.shape[-1]
    present = xp.where(norms > 0, xp.ones_like(norms), xp.zeros_like(norms))
    plain = xp.full_like(norms, 1 / count)
    share = present / present.sum().clip(min=1)
    start = xp.sqrt((share @ units @ share).clip(min=0))
    if (
        start < _CANCELLED
    ):  # all inputs are zero or their directions cancel: there is no mean direction
        return plain
    mean = share / start
    for _ in range(max_iter):
        cosine = (units @ mean).clip(-1, 1)
        angle = xp.arccos(cosine)
        sine = xp.sin(angle)
        # if the mean equals an input or its opposite, there is no direction toward that input
        pull = share * xp.where(sine > _CANCELLED, angle / sine.clip(min=_CANCELLED), 1.0)
        tangent = pull - (pull @ cosine) * mean
        length = xp.sqrt((tangent @ units @ tangent).clip(min=0))
        if length < tol:
            break
        mean = xp.cos(length) * mean + xp.sin(length) / length * tangent
        size = xp.sqrt((mean @ units @ mean).clip(min=0))
        if size < _CANCELLED:  # the directions cancel: there is no mean direction to continue from
            return plain
        mean = mean / size
    return mean * (norms.sum() / count) / norms.clip(min=_TINY) * present


def model_stock(g: A, xp: ModuleType) -> A:  # (..., K)
    """Return the coefficient t / K of every task vector, with t = K cos / (1 + (K - 1) cos).

    cos is the mean cosine between two task vectors.
    """
    units, norms = unit_gram(g, 0.0, xp)
    count = norms.shape[-1]
    pairs = sum(units[..., i, j] for i in range(count) for j in range(i))
    cosine = pairs / (count * (count - 1) / 2)
    below = 1 + (count - 1) * cosine
    singular = abs(below) < 1e-6
    t = xp.where(singular, 0.0, count * cosine / xp.where(singular, 1.0, below))
    return xp.stack([t / count] * count, -1)
