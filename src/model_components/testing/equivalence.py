"""Check a fast function numerically against its definition, which runs in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Allowed error from rounding the result, in units in the last place: maximum and root mean square
_MAX_ULPS = 2.0
_RMS_ULPS = 0.25
# Allowed error where terms cancel to 0, as a share of the largest input; at most the dtype's eps
_FLOOR = 2.0**-22


class NotEquivalent(AssertionError):
    """Raised if a result has a wrong shape or dtype, is not finite, or exceeds its error budget."""


@dataclass(frozen=True)
class Judgment:
    """The result of `check_equivalent`.

    Attributes:
        worst: The largest error divided by its budget, at most 1.
        what: The tensor that has the largest error, and how the error was measured.
    """

    worst: float
    what: str


class _Measure(NamedTuple):
    name: str
    error: float
    budget: float

    @property
    def ratio(self) -> float:
        if self.budget > 0:
            return self.error / self.budget
        # the budget is 0 if all inputs are 0; then only an error of 0 passes
        return 0.0 if self.error == 0 else float("inf")


def check_equivalent(
    fast: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    working: torch.dtype | None = None,
    gradients: bool = True,
    device: str | torch.device = "cpu",
    name: str = "check_equivalent",
) -> Judgment:
    """Check that a fast function and its definition agree in the output and every gradient.

    Inputs are rounded to ``dtype`` once. The exact result is computed by the reference in float64
    from these inputs. The error budget is twice the error of the reference itself in the working
    dtype, plus a little for rounding. There is one budget for the maximum error and one for the
    root mean square error, so you do not choose tolerances by hand.

    Args:
        fast: The function to check. It gets the inputs as keyword arguments, in ``dtype``.
        reference: The definition in plain torch. It must work in any float dtype.
        inputs: Tensors by argument name. Floating tensors are rounded to ``dtype``.
        dtype: The dtype of the inputs and of the result.
        working: The dtype in which the reference runs to set the budget; default: ``dtype``. Pass
            float32 for a function that promises float32 arithmetic and a single rounding.
        gradients: Whether to compare the gradient of every floating input, too.
        device: The device that ``fast`` runs on.
        name: The name that error messages begin with.

    Returns:
        A judgment with the largest error, as a share of its budget.

    Raises:
        ValueError: The reference overflows in the working dtype, so there is no budget.
        NotEquivalent: A result has a wrong shape or dtype, a value that is not finite, or an error
            above its budget.

    >>> inputs = {"x": torch.linspace(-1, 1, 8)}
    >>> check_equivalent(lambda x: x.sigmoid(), lambda x: 1 / (1 + (-x).exp()), inputs).worst < 1
    True
    >>> check_equivalent(lambda x: x.sigmoid() * 1.01, lambda x: 1 / (1 + (-x).exp()), inputs)
    Traceback (most recent call last):
    model_components.testing.equivalence.NotEquivalent: check_equivalent: output in ...
    """
    working = working or dtype
    rounded = _cast(inputs, dtype)
    exact = _cast(rounded, torch.float64)
    cotangent = None
    if gradients:
        output = _run(reference, exact, None)["output"]
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        # rounded once, so that every run gets exactly the same numbers
        cotangent = drawn.to(dtype).double()
    truth = _run(reference, exact, cotangent)
    working_result = _run(reference, _cast(rounded, working), cotangent)
    actual = _run(fast, {k: v.to(device) for k, v in rounded.items()}, cotangent)
    for what, value in working_result.items():
        if not torch.isfinite(value).all():
            raise ValueError(
                f"{name}: expected a reference that is finite in {working}, got NaN or infinity in "
                f"{what}; use smaller inputs"
            )
    floor = _scale(exact, cotangent) * min(_FLOOR, torch.finfo(working).eps)
    worst = Judgment(0.0, "output")
    for what, true in truth.items():
        _check_form(f"{name}: {what}", actual[what], true, dtype)
        if not true.numel():
            continue
        # `.to(dtype)`, because the fast function has to round its result, too
        for measure in _measures(actual[what], true, working_result[what].to(dtype), floor):
            if measure.ratio > 1:
                raise NotEquivalent(
                    f"{name}: {what} in {dtype}: {measure.name} error {measure.error:.3e} is "
                    f"{measure.ratio:.2f} times its budget {measure.budget:.3e}"
                )
            if measure.ratio > worst.worst:
                worst = Judgment(measure.ratio, f"{what}, {measure.name}")
    return worst


def _cast(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def _run(
    function: Callable[..., Tensor], inputs: Mapping[str, Tensor], cotangent: Tensor | None
) -> dict[str, Tensor]:
    """Return the output and, with a cotangent, the gradient of every floating input."""
    leaves = {}
    for name, value in inputs.items():
        trains = cotangent is not None and value.is_floating_point()
        leaves[name] = value.detach().clone().requires_grad_(trains)
    output = function(**leaves)
    results = {"output": output.detach().cpu()}
    if cotangent is None:
        return results
    output.backward(cotangent.to(output))
    for name, leaf in leaves.items():
        if leaf.requires_grad:
            # one function may ignore an input that the other function multiplies by 0
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            results[f"gradient of {name}"] = gradient.cpu()
    return results


def _scale(inputs: Mapping[str, Tensor], cotangent: Tensor | None) -> float:
    """Return the largest absolute value of the floating inputs and the cotangent."""
    values = [v for v in (*inputs.values(), cotangent) if v is not None and v.is_floating_point()]
    return max((float(v.abs().max()) for v in values if v.numel()), default=0.0)


def _check_form(what: str, actual: Tensor, true: Tensor, dtype: torch.dtype) -> None:
    """Raise an error if the shape or dtype is wrong, or if a value is not finite."""
    if actual.shape != true.shape:
        raise NotEquivalent(f"{what} has shape {list(actual.shape)}, expected {list(true.shape)}")
    if actual.dtype != dtype:
        raise NotEquivalent(f"{what} has dtype {actual.dtype}, expected {dtype}")
    if not torch.isfinite(actual).all():
        raise NotEquivalent(f"{what} has NaN or infinity, expected finite values")


def _measures(
    actual: Tensor, true: Tensor, working: Tensor, floor: float
) -> tuple[_Measure, _Measure]:
    """Return the maximum and RMS errors with their budgets."""
    error = (actual.double() - true).abs()
    allowed = (working.double() - true).abs()
    eps = torch.finfo(actual.dtype).eps
    largest = 2 * allowed.max() + _MAX_ULPS * eps * true.abs().max() + floor
    average = 2 * rms(allowed) + _RMS_ULPS * eps * rms(true) + floor
    return (
        _Measure("maximum", float(error.max()), float(largest)),
        _Measure("rms", float(rms(error)), float(average)),
    )


def rms(x: Tensor) -> Tensor:
    """Return the root mean square, in float64."""
    return x.double().square().mean().sqrt()
