"""Dtypes of tensors in files, by name, and numpy arrays of what is stored: no torch.

numpy has no bfloat16, so an array of uint16 holds bfloat16 bit patterns wherever this package
passes stored values about; every other dtype is numpy's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from ._torch import Tensor, torch

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DType:
    """A dtype: its torch name, its safetensors code, and the numpy dtype of its stored values."""

    name: str
    code: str
    storage: str
    is_floating_point: bool = False

    @property
    def itemsize(self) -> int:
        """The number of bytes of one element."""
        return np.dtype(self.storage).itemsize

    def __str__(self) -> str:
        return self.name


FLOAT64 = DType("float64", "F64", "f8", True)
FLOAT32 = DType("float32", "F32", "f4", True)
FLOAT16 = DType("float16", "F16", "f2", True)
BFLOAT16 = DType("bfloat16", "BF16", "u2", True)

_WHOLE = [
    DType("int64", "I64", "i8"),
    DType("int32", "I32", "i4"),
    DType("int16", "I16", "i2"),
    DType("int8", "I8", "i1"),
    DType("uint8", "U8", "u1"),
    DType("bool", "BOOL", "?"),
]
FLOATS = {d.name: d for d in (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)}
"""What an output can be in, by name."""

BY_CODE = {d.code: d for d in (*FLOATS.values(), *_WHOLE)}
_BFLOAT16_SIZE = 0x7FFF  # all bits of bfloat16 but the sign
_BFLOAT16_INFINITY = 0x7F80  # its pattern; those of NaN are larger
_BFLOAT16_NAN = 0x7FC0
_BY_NAME = {d.name: d for d in (*FLOATS.values(), *_WHOLE)}


def promote(dtypes: Iterable[DType]) -> DType:
    """The smallest float dtype that holds all of these, as ``torch.promote_types`` has it.

    >>> promote([BFLOAT16, FLOAT16]).name
    'float32'
    """

    def wider(a: DType, b: DType) -> DType:
        if a == b:
            return a
        # bfloat16 has more range, float16 more digits: float32 is the smallest to hold both
        return FLOAT64 if FLOAT64 in (a, b) else FLOAT32

    return reduce(wider, dtypes)


def from_numpy(stored: Array) -> DType:
    """The dtype of a stored array."""
    # uint16 can only be bfloat16, as no whole dtype here is stored so
    return next(d for d in _BY_NAME.values() if np.dtype(d.storage) == stored.dtype)


def from_torch(dtype: torch.dtype) -> DType | None:
    """The dtype of that torch dtype; None for those that no merge reads."""
    return _BY_NAME.get(str(dtype).removeprefix("torch."))


@cache
def to_torch(dtype: DType) -> torch.dtype:
    """Return torch's dtype of the same name."""
    return getattr(torch, dtype.name)


def numbers(stored: Array) -> Array:
    """The values of a stored array: float32 for bfloat16 patterns and float16, others as they are.

    >>> numbers(np.array([0x3FC0], np.uint16))
    array([1.5], dtype=float32)
    """
    if stored.dtype == np.uint16:
        # bfloat16 is the upper half of a float32
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if stored.dtype == np.float16:
        return stored.astype(np.float32)
    return stored


def all_finite(stored: Array) -> bool:
    """Return whether a stored array of a float dtype has neither NaN nor infinity.

    >>> all_finite(np.array([0x3FC0, 0x7F7F], np.uint16)), all_finite(np.array([0xFF80], np.uint16))
    (True, False)
    """
    if stored.dtype != np.uint16:
        return bool(np.isfinite(stored).all())
    # patterns without their sign sort as the sizes of their numbers do
    sizes = stored & np.uint16(_BFLOAT16_SIZE)
    return not sizes.size or int(sizes.max()) < _BFLOAT16_INFINITY


def stored_as(values: Array, dtype: DType) -> Array:
    """Round float32 numbers to nearest even, as they are stored in a float dtype.

    >>> numbers(stored_as(np.array([1.5, 1 + 2**-9], np.float32), BFLOAT16))
    array([1.5, 1. ], dtype=float32)
    """
    if dtype != BFLOAT16:
        return values.astype(dtype.storage)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # 0x7FFF plus the lowest kept bit carries exactly where nearest-even rounds up
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    # the carry could turn NaN into a number
    return np.where(np.isnan(values), _BFLOAT16_NAN, rounded).astype(np.uint16)


def tensor_of(stored: Array) -> Tensor:
    """A stored array as a tensor that shares its memory."""
    if stored.dtype == np.uint16:
        # by way of int16, since numpy has no bfloat16 to hand over
        return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(stored)


def stored_of(values: Tensor) -> Array:
    """A contiguous CPU tensor as a stored array that shares its memory."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(np.uint16)
    return values.numpy()


def byte_view(stored: Array) -> memoryview:
    """The memory of a contiguous array, as bytes."""
    if stored.size:
        return stored.reshape(-1).view(np.uint8).data
    return memoryview(b"")
