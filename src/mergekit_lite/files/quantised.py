"""Read tensors in float8 as numbers.

Values of float8_e4m3fn, times the scales that lie beside them, if any.

``X.weight_scale`` (compressed-tensors, Transformer Engine) and ``X.weight_scale_inv`` (DeepSeek)
both multiply the values of ``X.weight``: one number, one a row, or one a block of 128 x 128.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..dtypes import BFLOAT16, FLOAT8, Array, numbers
from .headers import CheckpointError, TensorInfo

_SUFFIXES = ("_scale", "_scale_inv")
METHODS = ("fp8", "compressed-tensors", "modelopt")  # whose configs may describe such tensors


def _values() -> Array:
    """Return the 256 numbers of float8_e4m3fn.

    A sign, four bits of exponent (bias 7), three of mantissa, no infinity.
    """
    codes = np.arange(128)
    exponent = codes >> 3
    mantissa = (codes & 7) / 8
    size = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - 7), mantissa * 2.0**-6)
    size[127] = np.nan
    return np.concatenate([size, -size]).astype(np.float32)


VALUES = _values()


class Float8:
    """The float8 tensors of a checkpoint, and their scales.

    Args:
        tensors: All tensors of the checkpoint.
        read: Reads a stretch of one, as stored.

    Raises:
        CheckpointError: A scale that does not fit its tensor.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo], read: Callable[[str, int, int], Array]):
        self._read = read
        self.names = {name for name, info in tensors.items() if info.dtype == FLOAT8}
        self._scales: dict[str, Array] = {}
        self._by_row: set[str] = set()
        self.helpers: set[str] = set()
        self._columns = {
            name: tensors[name].shape[-1] if tensors[name].shape else 1 for name in self.names
        }
        for name in self.names:
            for suffix in _SUFFIXES:
                if (info := tensors.get(name + suffix)) is not None:
                    scale = (
                        numbers(read(info.name, 0, info.count))
                        .astype(np.float32)
                        .reshape(info.shape)
                    )
                    self._scales[name] = self._fitted(tensors[name], scale)
                    self.helpers.add(info.name)
            self.helpers |= {
                other
                for other in (name.removesuffix("weight") + "input_scale",)
                if other in tensors
            }

    def _fitted(self, info: TensorInfo, scale: Array) -> Array:
        """The scale as a matrix: of one number, of one a row, or of one a block."""
        if scale.size == 1:
            return scale.reshape(1, 1)
        if len(info.shape) == 2:
            rows, columns = info.shape
            blocks = -(-rows // 128), -(-columns // 128)
            if scale.shape in ((rows,), (rows, 1)):
                self._by_row.add(info.name)
                return scale.reshape(rows, 1)
            if scale.shape == blocks:
                return scale
        raise CheckpointError(
            f"{info.name} of shape {list(info.shape)} has scales of shape {list(scale.shape)}"
        )

    def shown(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return the tensors as others see them.

        Numbers are written as bfloat16 unless a merge says otherwise.
        """
        return {
            name: TensorInfo(name, info.shape, BFLOAT16) if name in self.names else info
            for name, info in tensors.items()
            if name not in self.helpers
        }

    def read(self, name: str, start: int, stop: int) -> Array:
        """Elements ``start`` to ``stop`` as float32."""
        values = VALUES[self._read(name, start, stop)]
        scale = self._scales.get(name)
        if scale is None or start == stop:
            return values
        if scale.size == 1:
            return values * scale[0, 0]
        place = np.arange(start, stop)
        rows = place // self._columns[name]
        columns = place % self._columns[name]
        if name in self._by_row:
            return values * scale[rows, 0]
        return values * scale[rows // 128, columns // 128]
