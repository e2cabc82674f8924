"""`PruneConfig`: how much of what is dropped, and how the rest makes up for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

REFITS = ("all", "writing", "none")


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """What is dropped, and how what stays makes up for it.

    Args:
        keep: Share of the hidden neurons that stays; all layers keep the same number, so that the result is a
            stock model.
        budget: Parameters of the whole model instead of ``keep``.
        refit: What is fitted towards the original's outputs: ``"writing"``: the matrix that writes the block's width,
            by least squares in closed form; ``"all"``: then also those that feed it, by descent on the same error,
            layer by layer; ``"none"``: nothing.
        epochs: Of that descent, over the calibration tokens.
        multiple_of: Sizes are rounded to a multiple of this (and those of experts to one of 8).
        ridge: What least squares add to the inputs' second moments, as a share of their mean.

    Raises:
        ValueError: A value out of range.

    >>> PruneConfig(keep=0.3, multiple_of=64).to_dict()
    {'keep': 0.3, 'multiple_of': 64}
    """

    keep: float = 0.5
    budget: int | None = None
    refit: str = "all"
    epochs: int = 3
    multiple_of: int = 1
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        if not isinstance(self.keep, (int, float)) or not 0 < self.keep <= 1:
            raise ValueError(f"PruneConfig: keep is {self.keep}, needed a share above 0, at most 1")
        if self.refit not in REFITS:
            raise ValueError(f"PruneConfig: refit is {self.refit!r}, needed one of {', '.join(REFITS)}")
        for name, least in (("epochs", 1), ("multiple_of", 1)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ValueError(
                    f"PruneConfig: {name} is {getattr(self, name)}, needed a whole number, {least} or more"
                )
        if self.budget is not None and (not isinstance(self.budget, int) or self.budget < 1):
            raise ValueError(f"PruneConfig: budget is {self.budget}, needed a number of parameters")
        if not 0 < self.ridge < 1:
            raise ValueError(f"PruneConfig: ridge is {self.ridge}, needed a share between 0 and 1")

    def to_dict(self) -> dict:
        """As JSON has it; only what differs from the defaults."""
        default = asdict(type(self)())
        return {name: value for name, value in asdict(self).items() if value != default[name]}

    @classmethod
    def from_dict(cls, values: Mapping) -> PruneConfig:
        """From `to_dict`; unknown names are refused."""
        if unknown := sorted(set(values) - {f.name for f in fields(cls)}):
            raise ValueError(f"PruneConfig: unknown fields {', '.join(unknown)}")
        return cls(**values)
