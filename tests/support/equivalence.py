"""The one judge of numerical equivalence.

Inputs are rounded once to the working dtype. The reference in float64 on those inputs is the truth.
The reference's own error in the working dtype, times two, plus a little for the last bits, is the
budget, for the output and for every gradient, by maximum and by root mean square. No test has a
tolerance of its own.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MAX_ULPS, _RMS_ULPS = 2.0, 0.25
_FLOOR = 2.0**-22  # of the scale of what went in: what is left of terms that cancel to 0 in float32


@dataclass(frozen=True)
class Row:
    """One judged case."""

    op: str
    impl: str
    dtype: str
    case: str
    worst: float
    what: str


ROWS: list[Row] = []
DEVICE = "cpu"
"""Where what is judged runs; ``--device`` says it, and conftest.py takes a GPU where there is one."""


class NotEquivalent(AssertionError):
    """A result outside its budget."""


def place(thing: Any) -> Any:
    """Tensors and modules, alone or in lists, tuples and dicts, on the device of what is judged;
    the rest as it is."""
    if isinstance(thing, (Tensor, torch.nn.Module)):
        return thing.to(DEVICE)
    if isinstance(thing, dict):
        return {key: place(value) for key, value in thing.items()}
    return type(thing)(map(place, thing)) if isinstance(thing, (list, tuple)) else thing


def run(
    function: Callable[..., Tensor], inputs: Mapping[str, Tensor], cotangent: Tensor | None
) -> dict[str, Tensor]:
    """The output, and with a cotangent the gradient of every floating input."""
    leaves = {
        k: v.detach().clone().requires_grad_(cotangent is not None and v.is_floating_point())
        for k, v in inputs.items()
    }
    output = function(**leaves)
    results = {"output": output.detach()}
    if cotangent is not None:
        output.backward(cotangent.to(output))
        for name, leaf in leaves.items():
            if leaf.requires_grad:
                results[f"gradient of {name}"] = (
                    torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                )
    return {name: value.cpu() for name, value in results.items()}


def judge(
    op: str,
    impl: str,
    fast: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    working: torch.dtype | None = None,
    gradients: bool = True,
    case: str = "",
    device: str | None = None,
) -> Row:
    """Compare ``fast`` with ``reference``; raise `NotEquivalent` with the numbers, or record a row
    and return it.

    Args:
        op: The operation's public name.
        impl: Which implementation ``fast`` is.
        fast: Called with the inputs in ``dtype``.
        reference: The definition; works in any float dtype.
        inputs: Tensors by argument name, any dtype; floats are rounded to ``dtype`` once.
        dtype: The dtype of inputs and result.
        working: The dtype that the reference sets its budget in, when better than ``dtype``: an
            operation that promises float32 arithmetic and one rounding is held to that.
        gradients: Compare the gradient of every floating input too.
        case: Tells rows of one op apart.
        device: Where ``fast`` runs; default `DEVICE`. What it uses beside its inputs, it places
            there itself.
    """
    working = working or dtype

    def cast(target: torch.dtype) -> dict[str, Tensor]:
        rounded = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        return {k: v.to(target) if v.is_floating_point() else v for k, v in rounded.items()}

    exact = cast(torch.float64)
    shape = run(reference, exact, None)["output"].shape
    generator = torch.Generator().manual_seed(0)
    cotangent = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).double()
        if gradients
        else None
    )
    truth = run(reference, exact, cotangent)
    own = {k: v.to(dtype) for k, v in run(reference, cast(working), cotangent).items()}
    ours = run(fast, {k: v.to(device or DEVICE) for k, v in cast(dtype).items()}, cotangent)
    worst, worst_of = 0.0, "output"
    scale = max(
        (float(v.abs().max()) for v in exact.values() if v.is_floating_point() and v.numel()),
        default=0.0,
    )
    if cotangent is not None and cotangent.numel():
        scale = max(scale, float(cotangent.abs().max()))
    for name, true in truth.items():
        got = ours[name]
        if got.shape != true.shape:
            raise NotEquivalent(
                f"{op} {impl} {case}: {name} has shape {list(got.shape)}, expected {list(true.shape)}"
            )
        if got.dtype != dtype:
            raise NotEquivalent(
                f"{op} {impl} {case}: {name} has dtype {got.dtype}, expected {dtype}"
            )
        if not torch.isfinite(got).all():
            raise NotEquivalent(f"{op} {impl} {case}: {name} is not finite everywhere")
        if not true.numel():
            continue
        error, allowed = (got.double() - true).abs(), (own[name].double() - true).abs()
        eps = torch.finfo(dtype).eps
        floor = scale * min(_FLOOR, torch.finfo(working).eps)
        measures = {
            "maximum": (
                error.max(),
                2 * allowed.max() + _MAX_ULPS * eps * true.abs().max() + floor,
            ),
            "rms": (rms(error), 2 * rms(allowed) + _RMS_ULPS * eps * rms(true) + floor),
        }
        for measure, (value, budget) in measures.items():
            ratio = float(value / budget) if budget > 0 else (0.0 if value == 0 else float("inf"))
            if ratio > 1:
                raise NotEquivalent(
                    f"{op} {impl} {dtype!s} {case}: {name}, {measure} error {float(value):.3e} is "
                    f"{ratio:.2f} of its budget {float(budget):.3e}"
                )
            if ratio > worst:
                worst, worst_of = ratio, f"{name}, {measure}"
    row = Row(op, impl, str(dtype).removeprefix("torch."), case, worst, worst_of)
    ROWS.append(row)
    return row


def rms(x: Tensor) -> Tensor:
    """Root mean square."""
    return x.double().square().mean().sqrt()


def write_numerics(path: Path) -> None:
    """docs/numerics.md from the rows judged in this session: for each op, impl and dtype the worst
    case."""
    worst: dict[tuple[str, str, str], Row] = {}
    counts: dict[tuple[str, str, str], int] = {}
    for row in ROWS:
        key = (row.op, row.impl, row.dtype)
        counts[key] = counts.get(key, 0) + 1
        if key not in worst or row.worst > worst[key].worst:
            worst[key] = row
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else f"{platform.machine()} CPU"
    hardware = f"{where}, torch {torch.__version__}"
    lines = [
        "# Numerical equivalence",
        "",
        "Written by the test suite (`make numerics`). Each line is the worst of its cases: the "
        "error against the float64 reference, divided by the budget that the reference's own error "
        "in the working dtype sets (`tests/support/equivalence.py`). Above 1 the suite fails. "
        "Outputs and all gradients are judged, by maximum and by root mean square; `stream` and, "
        "of merge methods, `fused` write files and have no gradients.",
        "",
        f"Hardware: {hardware}." + ("" if DEVICE == "cuda" else " Not measured on a GPU yet."),
        "",
        "| op | impl | dtype | cases | worst error ÷ budget | in | worst case |",
        "|---|---|---|---|---|---|---|",
    ]
    for key in sorted(worst):
        row = worst[key]
        lines.append(
            f"| `{row.op}` | {row.impl} | {row.dtype} | {counts[key]} | {row.worst:.3f} | "
            f"{row.what} | {row.case} |"
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
