"""`KroneckerConfig`, `LowRankConfig`, `PruneConfig`: what a layer becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Self, get_args

INITS = ("sequential", "van_loan", "van_loan_normalized", "prune", "random")
LOW_RANK_INITS = ("sequential", "svd")
Granularity = Literal["neuron", "block"]
Refit = Literal["all", "writing", "none"]


class _Config:
    """Methods that all configs share."""

    def opposite(self) -> Self:
        """The same for a layer of transposed shape: itself, where a config has no shapes."""
        return self

    def to_dict(self) -> dict:
        """Return the fields that differ from the defaults, as JSON has them."""
        # pyrefly: ignore[bad-argument-type]: its subclasses are dataclasses
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return {
            n: list(v) if isinstance(v, tuple) else v
            for n, (v, default) in values.items()
            if v != default
        }

    @classmethod
    def from_dict(cls, values: Mapping) -> Self:
        """From `to_dict`; unknown names are refused."""
        # pyrefly: ignore[bad-argument-type]: its subclasses are dataclasses
        if unknown := sorted(set(values) - {f.name for f in fields(cls)}):
            raise ValueError(f"{cls.__name__}: unknown fields {', '.join(unknown)}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class KroneckerConfig(_Config):
    """Settings of a weight's replacement by Σ_r s_r A_r ⊗ B_r, and of where it starts.

    Give one of the two shapes; the layer's own shape divided by it is the other.

    Args:
        a_shape: (O1, I1) of every A.
        b_shape: (O2, I2) of every B.
        rank: Number of terms r.
        scales: A trainable number s_r for each term.
        init: ``"sequential"``: fitted to calibration data, block by block, on what the smaller
            model really feeds it; from the weight alone: ``"van_loan"``, ``"van_loan_normalized"``
            the nearest weight, the second with the norm of the original; ``"prune"`` some rows and
            columns; ``"random"``.
        keep: What ``"prune"`` keeps: ``"even"``, ``"odd"``, ``"energy"``, or the position (row,
            column) within B.
        rounds: Of alternating least squares in a sequential fit.
        epochs: Of descent after that, over the calibration tokens, on all matrices of an MLP
            together; 0: none.

    Raises:
        ValueError: Neither or both shapes, sizes below 1, an unknown init.

    >>> KroneckerConfig(b_shape=(2, 1)).shapes(3072, 768)
    ((1536, 768), (2, 1))
    >>> KroneckerConfig(b_shape=(2, 1)).opposite().b_shape
    (1, 2)
    """

    a_shape: tuple[int, int] | None = None
    b_shape: tuple[int, int] | None = None
    rank: int = 1
    scales: bool = False
    init: str = "sequential"
    keep: str | tuple[int, int] = "even"
    rounds: int = 10
    epochs: int = 3

    def __post_init__(self) -> None:
        for name in ("a_shape", "b_shape", "keep"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        if (self.a_shape is None) == (self.b_shape is None):
            raise ValueError(
                f"KroneckerConfig: a_shape is {self.a_shape} and b_shape is {self.b_shape}, "
                "expected one of them"
            )
        shape = self.a_shape or self.b_shape
        if not _is_whole_pair(shape, 1):
            raise ValueError(
                f"KroneckerConfig: {'b_shape' if self.a_shape is None else 'a_shape'} is {shape}, "
                "expected two whole numbers, 1 or more"
            )
        for name, least in (("rank", 1), ("rounds", 1), ("epochs", 0)):
            value = getattr(self, name)
            if not is_whole(value, least):
                raise ValueError(
                    f"KroneckerConfig: {name} is {value}, expected a whole number, {least} or more"
                )
        if not isinstance(self.scales, bool):
            raise ValueError(f"KroneckerConfig: scales must be True or False, got {self.scales!r}")
        if self.init not in INITS:
            raise ValueError(
                f"KroneckerConfig: init is {self.init!r}, expected one of {', '.join(INITS)}"
            )
        if self.keep not in ("even", "odd", "energy") and not _is_whole_pair(self.keep, 0):
            raise ValueError(
                f"KroneckerConfig: keep is {self.keep!r}, expected even, odd, energy or (row, "
                "column)"
            )

    def shapes(
        self, out_features: int, in_features: int, *, operation: str = "KroneckerConfig"
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of A and B for a weight of (out_features, in_features)."""
        known = self.a_shape or self.b_shape
        assert known is not None
        weight = (out_features, in_features)
        if any(n % g for n, g in zip(weight, known, strict=True)):
            near = " and ".join(f"{_near(n, g)} of {n}" for n, g in zip(weight, known, strict=True))
            name = "a_shape" if self.a_shape else "b_shape"
            raise ValueError(
                f"{operation}: {name} {known} does not divide a weight of {weight}; the nearest "
                f"that do: {near}"
            )
        other = (out_features // known[0], in_features // known[1])
        a, b = (known, other) if self.a_shape else (other, known)
        most = min(a[0] * a[1], b[0] * b[1])
        if self.rank > most:
            raise ValueError(
                f"{operation}: rank is {self.rank}, but A {a} and B {b} need at most {most}, where "
                "it is exact"
            )
        return a, b

    def opposite(self) -> Self:
        """The same for a layer of transposed shape: for c_proj when this is for c_fc."""
        a_shape, b_shape = (
            None if s is None else (s[1], s[0]) for s in (self.a_shape, self.b_shape)
        )
        keep = self.keep if isinstance(self.keep, str) else self.keep[::-1]
        return replace(self, a_shape=a_shape, b_shape=b_shape, keep=keep)

    def count(self, out_features: int, in_features: int) -> int:
        """Parameters of the compressed weight, scales included.

        >>> KroneckerConfig(a_shape=(1024, 256), rank=2).count(3072, 768)
        524306
        """
        a, b = self.shapes(out_features, in_features)
        return self.rank * (a[0] * a[1] + b[0] * b[1] + (1 if self.scales else 0))


@dataclass(frozen=True, kw_only=True)
class LowRankConfig(_Config):
    """Settings of a weight's replacement by two thin ones: (O, I) becomes (O, r) and (r, I).

    Args:
        keep: Share of a weight's parameters that stays (default: half); r is what that leaves.
        rank: r instead of ``keep``.
        init: ``"sequential"``: the best on calibration data, by the singular values of the weight
            times the root of its inputs' second moments (SVD-LLM, arXiv 2403.07378), block by block
            on what the smaller model feeds it; ``"svd"``: the nearest weight.
        epochs: Epochs of gradient descent after that, on all matrices of an MLP together; 0 for
            none.

    Raises:
        ValueError: A value out of range.

    >>> LowRankConfig(keep=0.5).rank_of(3072, 768), LowRankConfig(rank=8).count(3072, 768)
    (307, 30720)
    """

    keep: float | None = None
    rank: int | None = None
    init: str = "sequential"
    epochs: int = 3

    def __post_init__(self) -> None:
        if self.keep is not None and (not is_number(self.keep) or not 0 < self.keep < 1):
            raise ValueError(
                f"LowRankConfig: keep is {self.keep}, expected a share between 0 and 1"
            )
        if self.rank is not None and not is_whole(self.rank, 1):
            raise ValueError(
                f"LowRankConfig: rank is {self.rank}, expected a whole number, 1 or more"
            )
        if self.keep is not None and self.rank is not None:
            raise ValueError(
                f"LowRankConfig: keep is {self.keep} and rank {self.rank}, expected one of them"
            )
        if self.init not in LOW_RANK_INITS:
            raise ValueError(
                f"LowRankConfig: init is {self.init!r}, expected one of {', '.join(LOW_RANK_INITS)}"
            )
        if not is_whole(self.epochs, 0):
            raise ValueError(
                f"LowRankConfig: epochs is {self.epochs}, expected a whole number, 0 or more"
            )

    @property
    def share(self) -> float:
        """Return the share of a weight's parameters that stays where no rank says it."""
        return 0.5 if self.keep is None else self.keep

    def rank_of(
        self, out_features: int, in_features: int, *, operation: str = "LowRankConfig"
    ) -> int:
        """R for a weight of (out_features, in_features)."""
        rank = self.rank or max(
            1, int(self.share * out_features * in_features / (out_features + in_features))
        )
        if rank > min(out_features, in_features):
            raise ValueError(
                f"{operation}: rank is {rank}, but a weight of {(out_features, in_features)} has "
                f"at most {min(out_features, in_features)}"
            )
        return rank

    def count(self, out_features: int, in_features: int) -> int:
        """Parameters of the two factors."""
        return self.rank_of(out_features, in_features) * (out_features + in_features)


@dataclass(frozen=True, kw_only=True)
class PruneConfig(_Config):
    """Settings of pruning: what is dropped, and how what stays makes up for it.

    Args:
        keep: Fraction of hidden neurons, or of blocks, to keep; default: 0.5. Every layer keeps the
            same number, so that transformers alone loads the result.
        granularity: neuron (hidden neurons of the MLPs) or block (whole blocks).
        budget: Number of parameters of the whole model; give it instead of keep.
        refit: Weights that are fitted again to the original's outputs. writing: the matrix that
            writes to the block's output, by least squares. all: then also the matrices before it,
            by gradient descent. none: no weights.
        epochs: Passes over the calibration tokens in that gradient descent.
        multiple_of: Round the number of neurons to a multiple of this. The neurons of experts are
            also rounded to a multiple of 8.
        ridge: Ridge penalty of the least squares, as a fraction of the inputs' mean second moment.
            It pulls towards the original matrix.

    Raises:
        ValueError: A value out of range.

    >>> PruneConfig(keep=0.3, multiple_of=64).to_dict()
    {'keep': 0.3, 'multiple_of': 64}
    """

    keep: float | None = None
    granularity: Granularity = "neuron"
    budget: int | None = None
    refit: Refit = "all"
    epochs: int = 3
    multiple_of: int = 1
    ridge: float = 3e-2
    init: ClassVar[str] = "sequential"  # always; the other configs have a field of this name

    def __post_init__(self) -> None:
        if self.keep is not None and (not is_number(self.keep) or not 0 < self.keep <= 1):
            raise ValueError(
                f"PruneConfig: keep is {self.keep!r}, expected a share above 0, at most 1"
            )
        for name, kind in (("granularity", Granularity), ("refit", Refit)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ValueError(
                    f"PruneConfig: {name} is {value!r}, expected one of {', '.join(get_args(kind))}"
                )
        for name, least in (("epochs", 1), ("multiple_of", 1)):
            if not is_whole(getattr(self, name), least):
                raise ValueError(
                    f"PruneConfig: {name} is {getattr(self, name)}, expected a whole number, "
                    f"{least} or more"
                )
        if self.multiple_of > 1 and self.granularity != "neuron":
            raise ValueError(
                f"PruneConfig: multiple_of is {self.multiple_of} for {self.granularity}s, expected "
                "1"
            )
        if self.budget is not None:
            self._check_budget(self.budget)
        if not is_number(self.ridge) or not 0 < self.ridge < 1:
            raise ValueError(
                f"PruneConfig: ridge is {self.ridge}, expected a share between 0 and 1"
            )

    def _check_budget(self, budget: int) -> None:
        """Check that the budget is a number, and that there is no share beside it."""
        if not is_whole(budget, 1):
            raise ValueError(f"PruneConfig: budget is {budget}, expected a number of parameters")
        if self.keep is not None:
            raise ValueError(
                f"PruneConfig: keep is {self.keep} and budget {budget:,}, expected one of them"
            )

    @property
    def share(self) -> float:
        """Return the share of the neurons that stays where no budget says it."""
        return 0.5 if self.keep is None else self.keep

    def neurons(self, count: int, multiple_of: int | None = None) -> int:
        """Return how many of ``count`` hidden neurons stay.

        >>> PruneConfig(keep=0.5, multiple_of=64).neurons(1000)
        512
        """
        unit = multiple_of or self.multiple_of
        return min(count, max(1, round(self.share * count / unit)) * unit)


def is_whole(value: object, least: int) -> bool:
    """Return whether it is a whole number, at least so large."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_whole_pair(values: object, least: int) -> bool:
    """Return whether it is a tuple of two whole numbers, both at least so large."""
    return (
        isinstance(values, tuple) and len(values) == 2 and all(is_whole(n, least) for n in values)
    )


def is_number(value: object) -> bool:
    """Return whether it is a number; True is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _near(total: int, wanted: int) -> str:
    """Divisors of ``total`` nearest to ``wanted``."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    return ", ".join(map(str, sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:5])))


Config = KroneckerConfig | LowRankConfig | PruneConfig
"""What an MLP's layers can become; single layers take the first two, stacks of experts the last."""

STRUCTURES: dict[str, type[Config]] = {
    "kronecker": KroneckerConfig,
    "low_rank": LowRankConfig,
    "prune": PruneConfig,
}


def structure_of(config: Config) -> str:
    """Return ``"kronecker"``, ``"low_rank"`` or ``"prune"``."""
    return next(name for name, cls in STRUCTURES.items() if isinstance(config, cls))


def to_dict(config: Config) -> dict:
    """Return a config and the name of its structure, as JSON holds them."""
    return {"structure": structure_of(config)} | config.to_dict()


def from_dict(values: Mapping) -> Config:
    """Return the config that `to_dict` gave."""
    rest = dict(values)
    name = rest.pop("structure", "kronecker")
    if name not in STRUCTURES:
        raise ValueError(
            f"kronecker: structure must be one of {', '.join(STRUCTURES)}, got {name!r}"
        )
    return STRUCTURES[name].from_dict(rest)
