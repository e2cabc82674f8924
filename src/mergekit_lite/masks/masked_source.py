"""`MaskedSource`: a component times its mask, as a source of a linear merge."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..dtypes import Array, byte_view, from_torch, stored_of, tensor_of
from ..files import Source, TensorInfo


class MaskedSource(Source):
    """A source of a component's tensors times their masks, in float32 or better.

    Each source is one term of the sum that a linear merge computes.

    Args:
        inner: The component's tensors.
        k: The component's index.
        masks: The masks of all components by tensor name, on the CPU. The first size is K, and the
            other sizes broadcast over the tensor.
        dtypes: The dtypes of the tensors that the merger holds, by tensor name. Other tensors are
            left out.
        rounds: A function that takes a tensor's name and returns whether to first round the values
            to the dtype in ``dtypes``. If the merger holds full weights, their values are rounded.
        lone: Whether to return floating-point tensors without a mask unchanged instead of as zeros.
            Exactly one source of a merge must do so.
    """

    def __init__(
        self,
        inner: Source,
        k: int,
        masks: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        *,
        rounds: Callable[[str], bool],
        lone: bool,
    ):
        self._inner = inner
        self._k = k
        self._masks = masks
        self._rounds = rounds
        self._lone = lone
        self.label = f"{inner.label} x mask {k}"
        self.config = inner.config
        self.folder = inner.folder
        self._dtypes = dtypes
        # in the merger's dtypes, since the merge derives the dtype of its result from them
        self.tensors = {
            name: TensorInfo(name, info.shape, dtype, info.file, info.start)
            for name, info in inner.tensors.items()
            if name in dtypes and (dtype := from_torch(dtypes[name])) is not None
        }

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements ``start`` to ``stop`` of a tensor times its mask, in float32 or better.

        Tensors of integers are returned unchanged.
        """
        stored = self._inner.read(name, start, stop)
        info = self.tensors[name]
        if not info.dtype.is_floating_point:
            return stored
        work = torch.float64 if info.dtype.name == "float64" else torch.float32
        values = tensor_of(stored)
        if self._rounds(name):
            values = values.to(self._dtypes[name]).to(work)
        else:
            values = values.to(work)
        if name in self._masks:
            values = values * stretch(self._masks[name][self._k], info.shape, start, stop)
        elif not self._lone:
            # only one source returns its buffers, because the merge adds up all sources
            values = torch.zeros_like(values)
        return stored_of(values.contiguous())

    def prefetch(self, name: str) -> None:
        """Prefetch a tensor of the component."""
        self._inner.prefetch(name)

    def fingerprint(self) -> object:
        """Return the component's fingerprint and a hash of its masks."""
        # an interrupted bake must not continue with other masks
        digest = hashlib.sha256()
        for name in sorted(self._masks):
            digest.update(
                name.encode() + byte_view(stored_of(self._masks[name][self._k].contiguous()))
            )
        return [self._inner.fingerprint(), digest.hexdigest()]


def stretch(mask: Tensor, shape: Sequence[int], start: int, stop: int) -> Tensor:
    """Return elements ``start`` to ``stop`` of a mask that is broadcast to ``shape`` and flattened.

    >>> stretch(torch.tensor([[1.0, 2.0, 3.0]]), (2, 3), 1, 5)
    tensor([2., 3., 1., 2.])
    """
    if not shape:
        return mask.expand(1)[start:stop]
    columns = shape[-1]
    first = start // columns
    last = math.ceil(stop / columns)
    index = []
    rows = torch.arange(first, last)
    for size, own in zip(reversed(shape[:-1]), reversed(mask.shape[:-1]), strict=True):
        # dividing a row's number by each size gives its index in the leading dimensions
        index.insert(0, rows % size if own > 1 else torch.zeros_like(rows))
        rows = rows // size
    mask_rows = (mask[tuple(index)] if index else mask[None]).expand(last - first, columns)
    return mask_rows.reshape(-1)[start - first * columns : stop - first * columns]
