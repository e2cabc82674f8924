"""Code shared by layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._autograd import needs_plain


def is_conv1d(module: object) -> bool:
    """Return whether a module is transformers' `Conv1D`, a linear layer whose weight is (I, O).

    transformers is not imported for this check, because that takes longer than most work on one
    layer. A module can only be a `Conv1D` if the class has been imported before.
    """
    loaded = sys.modules.get("transformers.pytorch_utils")
    return loaded is not None and isinstance(module, loaded.Conv1D)


# the descriptor of `Tensor.data`; tensors that are read through it must also be read-only
_DATA = vars(torch._C.TensorBase)["data"]


class ReadOnlyWeight(Tensor):
    """A read-only view of a weight that a layer computes.

    In-place changes raise an error, because they would change only a temporary tensor. All other
    operations return plain tensors.
    """

    @classmethod
    def of(cls, weight: Tensor) -> Tensor:
        """Return a read-only view of a computed weight.

        A parameter is returned unchanged, and so is any weight while torch traces or transforms a
        function.

        >>> weight = ReadOnlyWeight.of(torch.ones(2))
        >>> weight + 1
        tensor([2., 2.])
        >>> weight.zero_()
        Traceback (most recent call last):
        RuntimeError: zero_: a computed weight cannot be changed in place, ...
        """
        if isinstance(weight, nn.Parameter) or needs_plain(weight):
            return weight
        return weight.as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Raise an error for in-place changes, and run everything else on the plain tensor."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        uses_data = getattr(func, "__self__", None) is _DATA
        assigns = name == "__setitem__" or (uses_data and name == "__set__")
        # the names of torch's in-place operations end in _; `requires_grad_` changes no values
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        # in-place functions write into the first argument, which is a list in foreach functions
        targets = _listed(next(iter((*args, *kwargs.values())), None))
        written = _listed(kwargs.get("out"))
        if assigns or in_place or kwargs.get("inplace") is True:
            written += targets
        if any(isinstance(target, cls) for target in written):
            raise RuntimeError(
                f"{name}: a computed weight cannot be changed in place, because the change would "
                "be lost; change the layer's parameters instead"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)

        def guarded(value: Any) -> Any:
            # views of a weight, such as `weight[0]` and `weight.data`, are read-only, too
            if uses_data or (name != "detach" and _is_view_of(value, targets)):
                return value.as_subclass(cls)
            return value.as_subclass(Tensor) if type(value) is cls else value

        if name == "__iter__":
            return map(guarded, result)
        # such as `weight.chunk(2)`; named tuples, such as the result of `max`, hold no views
        if type(result) in (tuple, list):
            return type(result)(map(guarded, result))
        return guarded(result)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _is_view_of(result: object, sources: Sequence[object]) -> bool:
    """Return whether a tensor shares the memory of one of the sources."""
    # empty tensors have no place in memory to compare
    if not isinstance(result, Tensor) or not result.numel():
        return False
    place = result.untyped_storage().data_ptr()
    for source in sources:
        if isinstance(source, ReadOnlyWeight):
            # otherwise reading its storage would call `__torch_function__` again
            with torch._C.DisableTorchFunctionSubclass():
                if source.untyped_storage().data_ptr() == place:
                    return True
    return False
