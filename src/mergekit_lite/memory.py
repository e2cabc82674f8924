"""Keeping the C allocator from holding more than a merge needs.

Blocks are allocated and freed by the thousand. glibc serves torch's aligned requests from holes only when they happen
to fit, so a heap of such blocks can grow without end although little of it is in use. Two calls keep it in bounds;
elsewhere than on glibc both do nothing.
"""

from __future__ import annotations

import ctypes
import os

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def keep_freed_blocks() -> None:
    """Let glibc learn, from one large free, to keep freed blocks; else each is mapped and faulted in afresh."""
    torch.empty(31 << 20, dtype=torch.uint8)


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


class HeapWatch:
    """Returns freed memory to the system whenever the process has grown by more than its allowance.

    Args:
        allowance: Bytes that may be resident beyond what is when the watch begins.
    """

    def __init__(self, allowance: int):
        self._limit = resident() + allowance
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if resident() else None
        self._calls = 0

    def check(self) -> None:
        """Look at every fourth call, and trim when it is time; cheap enough for every block."""
        self._calls += 1
        if self._calls % 4 == 0 and self._trim is not None and resident() > self._limit:
            self._trim(0)
