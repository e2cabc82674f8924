"""The judge as the suite uses it: on the device of the tests, with a row for docs/numerics.md."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_components.testing import check_equivalent


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


def place(thing: Any) -> Any:
    """Tensors and modules, alone or in lists, tuples and dicts, on the device of what is judged;
    the rest as it is."""
    if isinstance(thing, (Tensor, torch.nn.Module)):
        return thing.to(DEVICE)
    if isinstance(thing, dict):
        return {key: place(value) for key, value in thing.items()}
    return type(thing)(map(place, thing)) if isinstance(thing, (list, tuple)) else thing


def judge(
    op: str,
    impl: str,
    fast: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    case: str = "",
    device: str | None = None,
    **options: Any,
) -> Row:
    """`check_equivalent` on the device of the tests; record a row and return it.

    Args:
        op: The operation's public name.
        impl: Which implementation ``fast`` is.
        fast: As in `check_equivalent`.
        reference: As in `check_equivalent`.
        inputs: As in `check_equivalent`.
        dtype: As in `check_equivalent`.
        case: Tells rows of one op apart.
        device: Where ``fast`` runs; default `DEVICE`. What it uses beside its inputs, it places
            there itself.
        options: More of `check_equivalent`.
    """
    judgment = check_equivalent(
        fast,
        reference,
        inputs,
        dtype=dtype,
        device=device or DEVICE,
        name=f"{op} {impl} {case}",
        **options,
    )
    row = Row(op, impl, str(dtype).removeprefix("torch."), case, judgment.worst, judgment.what)
    ROWS.append(row)
    return row


def write_numerics(path: Path) -> None:
    """docs/numerics.md with the rows judged in this session: for each op, impl and dtype the worst
    case. Other rows of the page stay."""
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
        "The test suite writes this page (`make numerics`). Each row shows its worst case: the "
        "error relative to the float64 reference, divided by a budget. The budget depends on the "
        "reference's own error in the working dtype "
        "(`model_components.testing.check_equivalent`). The suite fails if the result is above 1. "
        "Outputs and all gradients are judged, by maximum and by root mean square. `stream` writes "
        "files and has no gradients; for merge methods, this is also true of `fused`.",
        "",
        f"Hardware: {hardware}. On an H100 the tests of masks, Kronecker layers, LoRA, packed attention "
        "and the thinker passed on 2026-11-26, except for rotary positions in float64, whose angles are "
        "float32 and differ in the last bit.",
        "",
        "| op | impl | dtype | cases | worst error ÷ budget | in | worst case |",
        "|---|---|---|---|---|---|---|",
    ]
    rows: dict[tuple[str, str, str], str] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if found := re.match(r"\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ", line):
                rows[found[1], found[2], found[3]] = line
    for key, row in worst.items():
        rows[key] = (
            f"| `{row.op}` | {row.impl} | {row.dtype} | {counts[key]} | {row.worst:.3f} | "
            f"{row.what} | {row.case} |"
        )
    lines += [rows[key] for key in sorted(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
