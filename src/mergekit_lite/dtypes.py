"""Dtypes of tensors in files, and numpy arrays of their stored values, without torch.

numpy has no bfloat16. Arrays of stored values therefore hold the bit patterns of bfloat16 as
uint16. For every other dtype, they have the numpy dtype of the same name.
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
"""The dtypes that an output can have, by name."""

BY_CODE = {d.code: d for d in (*FLOATS.values(), *_WHOLE)}
_BFLOAT16_SIZE = 0x7FFF  # all bits of bfloat16 but the sign
_BFLOAT16_INFINITY = 0x7F80  # the pattern of infinity; NaN patterns are larger
_BFLOAT16_NAN = 0x7FC0
_BY_NAME = {d.name: d for d in (*FLOATS.values(), *_WHOLE)}


def promote(dtypes: Iterable[DType]) -> DType:
    """Return the smallest float dtype that holds all ``dtypes``, as ``torch.promote_types`` does.

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
    """Return the `DType` of an array of stored values."""
    # uint16 can only be bfloat16, because no integer dtype here is stored as uint16
    return next(d for d in _BY_NAME.values() if np.dtype(d.storage) == stored.dtype)


def from_torch(dtype: torch.dtype) -> DType | None:
    """Return the `DType` of a torch dtype, or None if merges do not support the dtype."""
    return _BY_NAME.get(str(dtype).removeprefix("torch."))


@cache
def to_torch(dtype: DType) -> torch.dtype:
    """Return the torch dtype of the same name."""
    return getattr(torch, dtype.name)


def numbers(stored: Array) -> Array:
    """Return stored values as numbers: bfloat16 and float16 as float32, others unchanged.

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
    # without the sign bit, patterns sort like the magnitudes of their numbers
    sizes = stored & np.uint16(_BFLOAT16_SIZE)
    return not sizes.size or int(sizes.max()) < _BFLOAT16_INFINITY


def stored_as(values: Array, dtype: DType) -> Array:
    """Round float32 values to a float dtype, with ties to even, and return the stored values.

    >>> numbers(stored_as(np.array([1.5, 1 + 2**-9], np.float32), BFLOAT16))
    array([1.5, 1. ], dtype=float32)
    """
    if dtype != BFLOAT16:
        return values.astype(dtype.storage)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # adding 0x7FFF plus the lowest kept bit carries into the kept bits exactly if rounding to
    # nearest even rounds up
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    # the carry could turn NaN into a number
    return np.where(np.isnan(values), _BFLOAT16_NAN, rounded).astype(np.uint16)


def tensor_of(stored: Array) -> Tensor:
    """Return a stored array as a tensor that shares its memory."""
    if stored.dtype == np.uint16:
        # via int16, because numpy has no bfloat16
        return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(stored)


def stored_of(values: Tensor) -> Array:
    """Return a contiguous CPU tensor as a stored array that shares its memory."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(np.uint16)
    return values.numpy()


def byte_view(stored: Array) -> memoryview:
    """Return a view of a contiguous array's memory as bytes."""
    if stored.size:
        return stored.reshape(-1).view(np.uint8).data
    return memoryview(b"")
