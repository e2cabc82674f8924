"""Processes of a `torchrun` that share a merge: who leads, who takes which tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeVar

from ..planning import TensorPlan

T = TypeVar("T")


def _process_group() -> ModuleType | None:
    """torch.distributed, where somebody has imported and initialised it."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist
    return None


class Ranks:
    """The processes of a `torchrun`, or this one alone."""

    def __init__(self) -> None:
        self._dist = _process_group()
        self.rank = self._dist.get_rank() if self._dist else 0
        self.count = self._dist.get_world_size() if self._dist else 1

    def barrier(self) -> None:
        """Wait for all."""
        if self._dist:
            self._dist.barrier()

    def share(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self._dist is None:
            return value
        box = [value]
        self._dist.broadcast_object_list(box)
        return box[0]

    def lead(self, work: Callable[[], object]) -> None:
        """Rank 0 does the work while the others wait; what it raises is raised everywhere."""
        error = None
        if self.rank == 0:
            try:
                work()
            except BaseException as raised:
                error = raised
        error = self.share(error)
        if error is not None:
            raise error

    def gather(self, value: list[T]) -> list[T]:
        """All ranks' lists as one, on every rank."""
        if self._dist is None:
            return value
        boxes: list[list[T]] = [[]] * self.count
        self._dist.all_gather_object(boxes, value)
        return [item for box in boxes for item in box]

    def mine(self, tensors: Sequence[TensorPlan]) -> list[TensorPlan]:
        """This rank's tensors: largest first to the rank with least, in a fixed order."""
        loads = [0] * self.count
        chosen = []
        for t in sorted(tensors, key=lambda t: -t.nbytes):
            rank = loads.index(min(loads))
            loads[rank] += t.nbytes
            if rank == self.rank:
                chosen.append(t)
        return sorted(chosen, key=lambda t: t.offset)
