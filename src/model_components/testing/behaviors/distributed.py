"""Behaviors of training with several processes, checked in a single process."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .subject import Behavior, Subject, cotangent, gradients_of, same


def _in_one_process(work: Callable[[Subject], None]) -> Behavior:
    """Return a behavior that runs in a process group of this process alone."""

    @functools.wraps(work)
    def behavior(subject: Subject) -> None:
        if dist.is_initialized():
            # uses the caller's group, and leaves it as it is
            work(subject)
            return
        backend = "gloo" if subject.device.type == "cpu" else None  # with None, torch chooses
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            work(subject)
        finally:
            # Free objects that refer to the group before the group itself: otherwise torch can hang
            gc.collect()
            dist.destroy_process_group()

    return behavior


@_in_one_process
def data_parallel(subject: Subject) -> None:
    """Check that ``DistributedDataParallel`` gives the same output and gradients."""
    module = subject.module()
    expected = subject.step(module)
    wrapped = DistributedDataParallel(module)
    module.zero_grad()
    inputs = subject.inputs()
    y = subject.call(wrapped, *inputs)
    y.backward(cotangent(y))
    actual = {"the output": y.detach(), **gradients_of(module, inputs)}
    same(actual, expected, "DistributedDataParallel")


@_in_one_process
def fully_sharded(subject: Subject) -> None:
    """Check that ``fully_shard`` (FSDP2) gives the same output and gradients."""
    expected = subject.step(subject.module())
    module = subject.module()
    fully_shard(module, mesh=init_device_mesh(subject.device.type, (1,)))
    actual = {name: _whole(value) for name, value in subject.step(module).items()}
    same(actual, expected, "fully_shard")


def _whole(value: Tensor | None) -> Tensor | None:
    """Return a sharded tensor as a plain tensor; other values are unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value


BEHAVIORS: tuple[Behavior, ...] = (data_parallel, fully_sharded)
