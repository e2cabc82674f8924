"""How benchmarks measure: implementations in turn within one process, and peaks of memory in
processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


def interleave(
    functions: Mapping[Any, Callable[[], object]],
    runs: int,
    device: str = "cpu",
    warm: bool = False,
) -> dict[Any, list[tuple[float, float]]]:
    """CPU and wall seconds of each function, called in turn ``runs`` times.

    A turn before them is not counted; there is none where the functions are ``warm``.
    Every turn begins with another one: what ran before leaves the caches and the allocator in its
    state.
    """
    held: dict[Any, list[tuple[float, float]]] = {key: [] for key in functions}
    keys = list(functions)
    for run in range(warm, runs + 1):
        first = run % len(functions)
        for key in (*keys[first:], *keys[:first]):
            function = functions[key]
            if device == "cuda":
                torch.cuda.synchronize()
            cpu, wall = time.process_time(), time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            if run:
                held[key].append((time.process_time() - cpu, time.perf_counter() - wall))
    return held


def cuda_peak(function: Callable[[], object]) -> int:
    """Return how far a GPU's allocated memory rises while ``function`` runs, in bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def saved_bytes(
    function: Callable[[], object], frozen: int = 0, resident: Iterable[torch.Tensor] = ()
) -> int:
    """Bytes that autograd keeps after ``function``, each storage once, less what is resident
    anyway."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = function()
    del result
    own = {tensor.untyped_storage().data_ptr() for tensor in resident}
    return sum(size for place, size in kept.items() if place not in own) - frozen


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _child(
    prepare: Callable[..., Callable[[], object]], arguments: tuple, device: str, pipe: Any
) -> None:
    step = prepare(*arguments)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        # the largest resident size counts anew from here
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident()
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        peak = int(status["VmHWM"].split()[0]) * 1024
    pipe.send((peak - before, (time.process_time() - cpu, time.perf_counter() - wall)))


def run_alone(
    prepare: Callable[..., Callable[[], object]], *arguments: Any, device: str = "cpu"
) -> tuple[int, tuple[float, float]]:
    """Run once, in a fresh process, the function that ``prepare`` returns.

    The allocator gives freed blocks of 2 MB and more back at once there, so that what counts is
    what is in use.

    Returns:
        How far memory rises above what ``prepare`` left, in bytes; CPU and wall seconds.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 21)  # read when the child starts
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(False)
    child = context.Process(target=_child, args=(prepare, arguments, device, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError(f"{prepare.__name__}{arguments} failed in its process") from None
    finally:
        child.join()
