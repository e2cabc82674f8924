"""Settings of a calibrated merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any

import numpy as np
from transformers import AutoModelForCausalLM

from model_components._checks import Range, Whole, check_value

from ..methods import CALIBRATED


@dataclass(frozen=True, kw_only=True)
class CalibratedMerge:
    """Settings of a calibrated merge.

    Args:
        method: ``"regmean"``, or ``"regmean++"``, in which the inputs of layers come from the
            blocks that are already merged.
        weight: The weight of each model, or one number for all; default: equal weights.
        reduce: The factor, from 0 to 1, of the Gram matrices' entries off the diagonal.
        auto_class: The AutoModel class of transformers that builds the models.
        batch_size: Examples per batch.
        max_length: Largest number of tokens of an example. Further tokens are cut off, and so are
            tokens beyond the model's number of positions.

    Raises:
        ValueError: A value has a wrong type or is out of range.
    """

    method: str
    weight: float | Sequence[float] | None = None
    reduce: float = 0.9
    auto_class: object = AutoModelForCausalLM
    batch_size: int = 8
    max_length: int = 512

    def __post_init__(self) -> None:
        if self.method not in CALIBRATED:
            raise ValueError(
                f"merge_models: expected a method with calibration ({', '.join(CALIBRATED)}), got "
                f"{self.method!r}"
            )
        if not isinstance(self.reduce, Real) or not 0 <= self.reduce <= 1:
            raise ValueError(
                f"merge_models: reduce is {self.reduce!r}, expected a number from 0 to 1"
            )
        if not hasattr(self.auto_class, "from_config"):
            raise ValueError(
                f"merge_models: auto_class is {self.auto_class!r}, expected one of the AutoModel "
                "classes of transformers"
            )
        check_value("merge_models", "batch_size", self.batch_size, Whole)
        check_value("merge_models", "max_length", self.max_length, Annotated[int, Range(least=2)])

    def shares(self, count: int) -> list[float]:
        """Return each model's share of the merge; they sum to 1."""
        given: Any = 1.0 if self.weight is None else self.weight
        if np.ndim(given) == 0:
            given = [given] * count
        try:
            # float would read the string "2" as a number
            weights = [float(weight) for weight in given if not isinstance(weight, str)]
        except (TypeError, ValueError):
            weights = []
        in_range = all(0 <= weight < math.inf for weight in weights)
        if len(weights) != count or not in_range or not sum(weights):
            raise ValueError(
                f"merge_models: weight is {self.weight!r}, expected {count} numbers of 0 or more "
                "that are not all 0"
            )
        return [weight / sum(weights) for weight in weights]
