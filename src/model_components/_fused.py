"""Fused paths, and the measurements of which are correct and faster on this machine's device.

`measure_kernels` writes a small file in the user's cache; ``impl="auto"`` reads it through
`fused_pays`. A path that was never measured on a kind of card is not used there.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ._folders import cache_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP = "model_components.fused"
"""The group of entry points; each is a function that returns the fused paths of a package."""
# looked up once, because torch.compile cannot trace the search
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_VERSIONS = ("model-components", "torch", "triton")  # a measurement depends on their versions


class Trial(NamedTuple):
    """One fused path at one size.

    Attributes:
        fused: The fused path, a function of the inputs on the device.
        eager: The eager path.
        reference: The definition, in any float dtype, on the CPU.
        inputs: Tensors on the CPU by argument name.
    """

    fused: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class FusedPath:
    """A fused path of a package.

    Attributes:
        name: Its name, such as ``"masks.blend"``.
        problem: Function of (out_features, in_features), a device and a dtype that returns why the
            path cannot run, or None.
        make: Function of (out_features, in_features), tokens, device and dtype that returns a
            `Trial`.
        odd: The shape for the test of equivalence, not a multiple of a tile size.
    """

    name: str
    problem: Callable[[tuple[int, int], torch.device, torch.dtype], str | None]
    make: Callable[[tuple[int, int], int, torch.device, torch.dtype], Trial]
    odd: tuple[int, int] = (33, 300)


def kernel_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no Triton kernel can run on a device, or None."""
    if not _HAS_TRITON:
        return "triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the device is {device.type}, and the kernel needs CUDA (or TRITON_INTERPRET=1)"
    if device.type != "cuda" and str(dtype) == "torch.bfloat16":
        return "triton's interpreter stores bfloat16 wrongly; try float16"
    return None


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Return a context manager that makes a tensor's GPU current, as Triton requires."""
    import torch

    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def random_tensor(*shape: int) -> Tensor:
    """Return normal numbers on the CPU, the same for the same shape."""
    import torch

    # with one seed for all, tensors of different sizes would begin with the same numbers
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def known_paths() -> list[FusedPath]:
    """Return the fused paths of all installed packages."""
    found: list[FusedPath] = []
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name):
        found += entry.load()()
    return found


def cache_file() -> Path:
    """Return the file with measurements in the user's cache."""
    return cache_folder() / "kernels.json"


def versions() -> dict[str, str | None]:
    """Return the installed versions of the packages that a measurement depends on."""
    found: dict[str, str | None] = {}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def device_name(device: torch.device) -> str | None:
    """Return the name of a card, or None for a device that needs no measurement."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.get_device_name(device)


def read_measurements() -> dict[str, Any]:
    """Return the measurements in the cache's file by card; empty if it is missing or damaged."""
    try:
        devices = json.loads(cache_file().read_text(encoding="utf-8"))["devices"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return devices if isinstance(devices, dict) else {}


# called in every forward, so the file is read only once
@functools.cache
def _paying(device: str) -> frozenset[str]:
    """Return the names of the fused paths that are right and faster on a card."""
    entry = read_measurements().get(device)
    if not isinstance(entry, dict) or entry.get("versions") != versions():
        return frozenset()
    paths = entry.get("paths")
    if not isinstance(paths, dict):
        return frozenset()
    paying = set()
    for name, path in paths.items():
        # somebody may have edited the file, so only a literal True counts
        if isinstance(path, dict) and path.get("fused") is True:
            paying.add(name)
    return frozenset(paying)


def fused_pays(name: str, device: torch.device) -> bool:
    """Return whether measurements found a fused path correct and faster on this kind of card.

    Args:
        name: The path's name.
        device: The device that it would run on.
    """
    card = device_name(device)
    return card is not None and name in _paying(card)


def takes_fused(
    operation: str, impl: str, path: str, x: Tensor, unsupported: Callable[[], str | None]
) -> bool:
    """Return whether an operation uses its Triton path; raise if an explicit choice cannot run.

    ``"auto"`` uses it if measurements on this kind of card found it correct and faster.

    Args:
        operation: The name that error messages begin with.
        impl: ``"auto"``, ``"fused"``, or another path.
        path: The fused path's name.
        x: One of the tensors.
        unsupported: Function that returns why the path does not support the tensors, or None. It
            may import the kernels.
    """
    from ._autograd import needs_plain, transforming

    if impl == "auto":
        if needs_plain(x) or not fused_pays(path, x.device):
            return False
    elif impl != "fused":
        return False
    if not _HAS_TRITON:
        reason: str | None = "triton is not installed"
    elif transforming():
        reason = "it has no rules for torch.func and forward-mode differentiation"
    else:
        reason = unsupported()
    if reason is not None and impl == "fused":
        raise ValueError(f"{operation}: impl 'fused' cannot run: {reason}")
    return reason is None


def forget() -> None:
    """Clear the cache of `fused_pays`, so that the file is read again on the next call."""
    _paying.cache_clear()
