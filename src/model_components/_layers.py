"""Parts that layers share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._autograd import needs_plain


def is_conv1d(module: object) -> bool:
    """Return whether a module is transformers' `Conv1D`, a linear layer whose weight is (I, O).

    Importing transformers takes longer than most of what is done with one layer. A module can only
    be a `Conv1D` if that class was imported before.
    """
    loaded = sys.modules.get("transformers.pytorch_utils")
    return loaded is not None and isinstance(module, loaded.Conv1D)


_DATA = vars(torch._C.TensorBase)["data"]


class ReadOnlyWeight(Tensor):
    """A weight that a layer computes, to be read.

    A change in place would change nothing but a temporary tensor, so it raises. Everything else
    gives plain tensors.
    """

    @classmethod
    def of(cls, weight: Tensor) -> Tensor:
        """Return a computed weight as a read-only one.

        A parameter is returned as it is, and so is any weight while torch traces or transforms.

        >>> weight = ReadOnlyWeight.of(torch.ones(2))
        >>> weight + 1
        tensor([2., 2.])
        >>> weight.zero_()
        Traceback (most recent call last):
        RuntimeError: zero_: this weight is computed from the layer's parameters, ...
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
        """Refuse changes in place, run everything else on the plain tensor."""
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        if (in_place and name != "requires_grad_") or name == "__setitem__":
            raise RuntimeError(
                f"{name}: this weight is computed from the layer's parameters, and a change in "
                "place would be lost; expected a change of the parameters"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if (
            getattr(func, "__self__", None) is _DATA
        ):  # of `weight.data.normal_()`, which must raise, too
            return result.as_subclass(cls)
        return result.as_subclass(Tensor) if type(result) is cls else result
