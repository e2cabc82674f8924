"""`count_operations`: the torch operations that a call runs, and the bytes that they write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that move no data: views and allocations
_FREE = {
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "diagonal",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "lift_fresh",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unfold",
    "unsqueeze",
    "view",
    "view_as_real",
}


@dataclass(frozen=True)
class OperationCount:
    """The operations of one call.

    Attributes:
        operations: The number of operations that moved or computed data; views do not count.
        bytes_written: The number of bytes of the results of these operations.
        largest: The number of bytes of the largest result.
        by_name: The number of operations of each name in torch.
    """

    operations: int
    bytes_written: int
    largest: int
    by_name: Mapping[str, int]


@dataclass
class _Counter(TorchDispatchMode):
    by_name: Counter = field(default_factory=Counter)
    bytes_written: int = 0
    largest: int = 0

    def __post_init__(self):
        # the __init__ of the dataclass does not call the __init__ of TorchDispatchMode
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # use the packet's name, which is add for both add.Tensor and add.Scalar
        name = func.overloadpacket.__name__
        if name in _FREE:
            return result
        self.by_name[name] += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                size = tensor.numel() * tensor.element_size()
                self.bytes_written += size
                self.largest = max(self.largest, size)
        return result


def count_operations(function: Callable[[], object]) -> OperationCount:
    """Count the torch operations of a call, such as one training step.

    On a GPU, each operation is at least one kernel launch. A large count therefore reveals too many
    small operations, even if it is taken on a machine without a GPU.

    Args:
        function: A function that is called once without arguments. A backward pass inside it is
            counted as well.

    Returns:
        The counts of operations and bytes.

    >>> count_operations(lambda: torch.ones(4, 2) @ torch.ones(2, 3)).by_name
    {'ones': 2, 'mm': 1}
    """
    counter = _Counter()
    with counter:
        function()
    return OperationCount(
        operations=sum(counter.by_name.values()),
        bytes_written=counter.bytes_written,
        largest=counter.largest,
        by_name=dict(counter.by_name),
    )
