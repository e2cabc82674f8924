"""The fused path of `kron_linear`, for `model_components.measure_kernels`."""

from __future__ import annotations

import torch

from model_components._fused import FusedPath, Trial, kernel_problem, random_tensor

from . import reference
from .config import kronecker_sizes
from .functional import BALANCED, kron_linear


def paths() -> list[FusedPath]:
    """Return the fused path for balanced factors, as the only element of a list."""
    # with this odd shape, A is (17, 30) and B is (33, 32): the kernel pads three sides with zeros
    return [FusedPath(BALANCED, _problem, _trial, odd=(33 * 17, 48 * 20))]


def _sides(shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of A and B that `KroneckerLinear` chooses for a weight."""
    large = kronecker_sizes(*shape).a_shape
    assert large is not None  # chosen if neither shape is given
    return large, (shape[0] // large[0], shape[1] // large[1])


def _problem(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run for a weight of this shape, or None if it can."""
    # checked before the import of `_triton`, which fails if triton is not installed
    problem = kernel_problem(device, dtype)
    if problem is not None:
        return problem
    from . import _triton

    large, small = _sides(shape)
    return _triton.unsupported(1, (*large, *small), device, dtype)


def _trial(shape: tuple[int, int], tokens: int, device: torch.device, dtype: torch.dtype) -> Trial:
    large, small = _sides(shape)
    return Trial(
        fused=lambda x, a, b: kron_linear(x, a, b, impl="fused"),
        eager=lambda x, a, b: kron_linear(x, a, b, impl="eager"),
        reference=reference.kron_linear,
        inputs={
            "x": random_tensor(tokens, shape[1]),
            "a": random_tensor(1, *large),
            "b": random_tensor(1, *small),
        },
    )
