"""Find devices by name, tell which dtypes are fast on them, and measure memory use."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def find_device(name: str, operation: str) -> str:
    """Return the device's name; under torchrun, ``"cuda"`` becomes the process's own GPU.

    Args:
        name: The name of the device, such as ``"cuda"`` or ``"cuda:1"``.
        operation: The name that error messages begin with.

    Raises:
        ValueError: The device does not exist or cannot hold tensors, or it is ``"meta"``, which
            holds no values.

    >>> find_device("cpu", "merge_models")
    'cpu'
    """
    if name == "cpu":  # returned before torch is imported, which a merge of files does not need
        return name
    import torch

    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no values")
        if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        # torch accepts the name of a missing GPU until a tensor is put on it
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{operation}: device {name} cannot be used here ({error})") from error
    return str(device)


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a CPU or GPU has instructions for bfloat16 products; False for others."""
    import torch

    if device.type == "cpu":
        known = torch.backends.mkldnn.is_available()
        return known and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


def is_faster_in_bfloat16(device: torch.device) -> bool:
    """Return whether matrix products are expected to be faster in bfloat16 than in float32.

    x86 processors need AMX. With AVX-512 alone, products in bfloat16 took 1.8 times as long as in
    float32.
    """
    import torch

    if device.type == "cpu" and platform.machine() in ("x86_64", "AMD64"):
        return has_bfloat16(device) and torch.cpu._is_amx_tile_supported()
    return has_bfloat16(device)


def warn_if_slow(operation: str, module: nn.Module) -> None:
    """Warn if a module is in bfloat16 on a processor without instructions for it.

    A matrix product then takes about 50 times as long as in float32.
    """
    import torch

    slow = [p for p in module.parameters() if p.device.type == "cpu" and p.dtype == torch.bfloat16]
    if slow and not has_bfloat16(torch.device("cpu")):
        warnings.warn(
            f"{operation}: {type(module).__name__} is in bfloat16, which this processor does not "
            "support natively; convert the module to float32, which is many times faster here",
            stacklevel=3,
        )


def on_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a batch with its tensors on a device."""
    import torch

    moved = dict(batch)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            moved[name] = value.to(device)
    return moved


def reset_peak_memory() -> None:
    """Reset the peak that `peak_memory` returns, on Linux only.

    On other systems, `peak_memory` always returns the peak since the start of the process.
    """
    with contextlib.suppress(OSError):
        # writing 5 resets the peak resident set size (man proc)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak_memory() -> int:
    """Return the peak resident set size of this process, in bytes."""
    # preferred to getrusage, whose value a process inherits from its parent
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        if found := re.search(r"^VmHWM:\s*(\d+) kB", status, re.M):
            return 1024 * int(found[1])
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        used = psutil.Process().memory_info()
        return getattr(used, "peak_wset", used.rss)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, other systems KiB
    return largest if sys.platform == "darwin" else 1024 * largest
