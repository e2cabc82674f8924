"""Training with several processes, tried with one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .subject import Behavior, Subject, cotangent, gradients_of, same


@contextmanager
def _one_process() -> Iterator[None]:
    """Make a process group of this process alone, or use the one that there is."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def data_parallel(subject: Subject) -> None:
    """``DistributedDataParallel`` gives the same gradients."""
    module = subject.module()
    expected = subject.step(module)
    with _one_process():
        wrapped = DistributedDataParallel(module)
        module.zero_grad()
        inputs = subject.inputs()
        y = subject.call(wrapped, *inputs)
        y.backward(cotangent(y))
        same(
            {"the output": y.detach(), **gradients_of(module, inputs)},
            expected,
            "DistributedDataParallel",
        )


def fully_sharded(subject: Subject) -> None:
    """``fully_shard`` (FSDP2) gives the same gradients."""
    expected = subject.step(subject.module())
    with _one_process():
        module = subject.module()
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        found = {name: _whole(value) for name, value in subject.step(module).items()}
    same(found, expected, "fully_shard")


def _whole(value: Tensor | None) -> Tensor | None:
    """Return a sharded tensor as a plain one."""
    return value.full_tensor() if isinstance(value, DTensor) else value


BEHAVIORS: tuple[Behavior, ...] = (data_parallel, fully_sharded)
