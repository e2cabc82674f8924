"""Fused paths (Triton kernels), and the measurements that decide whether they are used.

`measure_kernels` writes a small file to the user's cache, and ``impl="auto"`` reads it through
`fused_pays`. A path that was never measured on a model of GPU is not used there.
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
"""The entry-point group; each entry point is a function that returns a package's fused paths."""
# looked up once, because torch.compile cannot trace the search
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_VERSIONS = ("model-components", "torch", "triton")  # a measurement depends on their versions


class Trial(NamedTuple):
    """A fused path at one size, and the functions that it is compared with.

    Attributes:
        fused: The fused path, a function of the inputs on the device.
        eager: The eager path, a function of the same inputs.
        reference: The definition of the operation, on the CPU and in any float dtype.
        inputs: The inputs by argument name, on the CPU.
    """

    fused: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class FusedPath:
    """A fused path of a package.

    Attributes:
        name: The name of the path, such as ``"masks.blend"``.
        problem: A function of (out_features, in_features), a device and a dtype that returns why
            the path cannot run, or None if it can.
        make: A function of (out_features, in_features), the number of tokens, a device and a dtype
            that returns a `Trial`.
        odd: The (out_features, in_features) of the equivalence test, not multiples of a tile size.
    """

    name: str
    problem: Callable[[tuple[int, int], torch.device, torch.dtype], str | None]
    make: Callable[[tuple[int, int], int, torch.device, torch.dtype], Trial]
    odd: tuple[int, int] = (33, 300)


def kernel_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Triton kernels cannot run on a device in a dtype, or None if they can."""
    if not _HAS_TRITON:
        return "triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the device is {device.type}, and the kernel needs CUDA (or TRITON_INTERPRET=1)"
    if device.type != "cuda" and str(dtype) == "torch.bfloat16":
        return "triton's interpreter stores wrong values in bfloat16; try float16"
    return None


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Return a context manager that makes a tensor's GPU current, as Triton requires."""
    import torch

    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def random_tensor(*shape: int) -> Tensor:
    """Return standard normal numbers on the CPU; equal shapes give equal numbers."""
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
    """Return the path of the file with measurements, in the user's cache."""
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
    """Return the name of a GPU, or None for other devices, which are not measured."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.get_device_name(device)


def read_measurements() -> dict[str, Any]:
    """Return the stored measurements by GPU name; empty if the file is missing or damaged."""
    try:
        devices = json.loads(cache_file().read_text(encoding="utf-8"))["devices"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return devices if isinstance(devices, dict) else {}


# called in every forward, so the file is read only once
@functools.cache
def _paying(device: str) -> frozenset[str]:
    """Return the names of the fused paths that were measured correct and faster on a GPU."""
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
    """Return whether measurements found a fused path correct and faster on this model of GPU.

    Args:
        name: The path's name.
        device: The device that the path would run on.
    """
    card = device_name(device)
    return card is not None and name in _paying(card)


def takes_fused(
    operation: str, impl: str, path: str, x: Tensor, unsupported: Callable[[], str | None]
) -> bool:
    """Return whether an operation uses its Triton path; raise an error if ``"fused"`` cannot run.

    With ``"auto"``, the path is used if it supports the tensors and if measurements on this model
    of GPU found it correct and faster.

    Args:
        operation: The name that error messages begin with.
        impl: ``"auto"``, ``"fused"``, or the name of another path, for which the result is False.
        path: The fused path's name.
        x: One of the operation's tensors.
        unsupported: A function that returns why the path does not support the tensors, or None if
            it does. It may import the kernels.

    Raises:
        ValueError: ``impl`` is ``"fused"``, and the path cannot run.
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
        reason = "it does not support torch.func transforms and forward-mode differentiation"
    else:
        reason = unsupported()
    if reason is not None and impl == "fused":
        raise ValueError(f"{operation}: impl 'fused' cannot run: {reason}")
    return reason is None


def forget() -> None:
    """Clear the cache of `fused_pays`, so that its next call reads the file again."""
    _paying.cache_clear()
