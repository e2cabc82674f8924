"""Parameters of merge methods: names, types, ranges, and the values that recipes may have."""

from __future__ import annotations

import contextlib
import inspect
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# YAML reads these words as booleans, unless they are in quotes
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_LARGEST = 3.4028236e38  # the largest float32, the dtype in which methods compute

PerModel = Sequence[float]
"""The annotation of a parameter that has one value for each model."""


Value = bool | int | float | str | None
"""The type of a method's argument for one model."""

Bound = dict[str, Any]
"""A method's keyword arguments, checked and complete."""


@dataclass(frozen=True)
class Range:
    """The interval in which a parameter must lie.

    Args:
        low: The lower end of the interval.
        high: The upper end of the interval.
        open_low: Whether the lower end is excluded.
        open_high: Whether the upper end is excluded.
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        left = "(" if self.open_low else "["
        right = ")" if self.open_high else "]"
        return f"{left}{self.low:g}, {self.high:g}{right}"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method.

    Args:
        name: The public name.
        argument: The name of the Python argument.
        type: The type of its values.
        default: The default; `inspect.Parameter.empty` if the parameter is required.
        per_model: Whether the parameter has a separate value for each model.
        range: The range of its values, or None.
    """

    name: str
    argument: str
    type: type
    default: object = inspect.Parameter.empty
    per_model: bool = False
    range: Range | None = None

    @property
    def required(self) -> bool:
        """Return whether the parameter has no default."""
        return self.default is inspect.Parameter.empty

    def check(self, value: object, method: str) -> Value:
        """Return ``value`` converted to the parameter's type.

        Raises:
            ValueError: The value does not have that type, or is out of range. The message begins
                with ``method``.
        """
        if value is None and self.default is None:
            return None
        if self.type is bool:
            truth = _WORDS.get(value.lower()) if isinstance(value, str) else value
            if not isinstance(truth, (bool, int, float)) or truth not in (0, 1):
                raise ValueError(f"{method}: {self.name} is {value!r}, expected true or false")
            return bool(truth)
        return self._check_number(value, method)

    def _check_number(self, value: object, method: str) -> float:
        """Return a value as a number, if it is finite, in range and, for an int, whole."""
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)  # YAML reads 1e-5 as a string
        # a bool is an int in Python, but not a valid number here; `not <` is also true for NaN
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float, np.integer, np.floating))
            or not abs(value) < _LARGEST
        ):
            raise ValueError(
                f"{method}: {self.name} is {value!r}, expected a finite number in float32"
            )
        number = float(value)
        if self.type is int and number != int(number):
            raise ValueError(f"{method}: {self.name} is {number:g}, expected a whole number")
        if self.range is not None and number not in self.range:
            raise ValueError(
                f"{method}: {self.name} is {number:g}, expected a number in {self.range}"
            )
        return self.type(number)


def value_type(hint: object) -> type:
    """Return the first type in an annotation that is not None."""
    options = [t for t in typing.get_args(hint) if t is not type(None)] or [hint]
    return options[0]
