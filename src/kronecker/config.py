"""`KroneckerConfig`, `LowRankConfig` and `PruneConfig`: settings of smaller layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from model_components._checks import CheckedConfig, Range, Whole, problem

Init = Literal["sequential", "van_loan", "prune", "random"]
LowRankInit = Literal["sequential", "svd"]
Method = Literal["best", "fast", "blocks"]
Allocation = Literal["uniform", "influence"]
Shape = Annotated[tuple[int, int] | None, Range(least=1)]
"""The numbers of rows and columns, both 1 or more."""
# if `size` is this large or larger, the default method is `fast`; on SmolLM2, `fast` gave a higher
# loss than `best`: by .003 nats at size .93, and by .12 nats at size .70
_LIGHT = 0.8


STRUCTURES: dict[str, type[Config]] = {}
"""The config of each structure, by the structure's name."""


@dataclass(frozen=True, kw_only=True)
class Config(CheckedConfig):
    """The base class of configs of smaller weights.

    A subclass is a dataclass with fields for sizes. It names its structure as in
    ``class LowRankConfig(Config, structure="low_rank")``; checkpoints store this name.

    Args:
        init: How the weight is initialized; ``"sequential"`` means fitted to data.
    """

    init: str = "sequential"

    # whether `fit_factors` fits all matrices of an MLP together; if not, each is fitted alone
    fits_mlps: ClassVar[bool] = False

    def __init_subclass__(cls, *, structure: str | None = None, **named: Any):
        super().__init_subclass__(**named)
        if structure is not None:
            STRUCTURES[structure] = cls

    @property
    def epochs(self) -> int:
        """The epochs of gradient descent: a field of configs with `fits_mlps`, 0 in all others."""
        return 0

    def sizes(self) -> dict[str, Any]:
        """Return the sizes as keyword arguments of the layer."""
        raise NotImplementedError  # each structure has its own

    def opposite(self) -> Self:
        """Return the config for a weight of transposed shape, such as an MLP's other matrix."""
        return self

    def check(self, out_features: int, in_features: int, *, operation: str) -> None:
        """Raise a ValueError if the sizes do not fit a weight of shape (O, I)."""
        raise NotImplementedError  # each structure has its own

    def count(self, out_features: int, in_features: int) -> int:
        """Count the parameters of the smaller weight."""
        raise NotImplementedError  # each structure has its own


@dataclass(frozen=True, kw_only=True)
class KroneckerConfig(Config, structure="kronecker"):
    """Settings to replace a weight by Σ_r s_r A_r ⊗ B_r, and to initialize the factors.

    Give one of the two shapes. The other follows from the shape of the weight.

    Args:
        a_shape: Shape (O1, I1) of every A.
        b_shape: Shape (O2, I2) of every B.
        rank: Number of terms r.
        scales: Whether each term has a trainable scale s_r.
        init: ``"sequential"`` fits the factors to calibration data, block by block, on the layer's
            inputs in the smaller model. The other methods need no data. ``"van_loan"`` gives the
            sum nearest to the weight. ``"prune"`` takes selected rows and columns of the weight.
            ``"random"`` draws new factors.
        keep: The rows and columns that ``"prune"`` keeps: the first (``"even"``) or second
            (``"odd"``) of each group, those with the largest sum of squares (``"energy"``), or the
            ones at a position (row, column) within B.
        rounds: The number of rounds of alternating least squares in a sequential fit.
        epochs: The number of epochs of gradient descent after the rounds of a sequential fit. It
            runs over the calibration tokens and trains all matrices of an MLP together. 0 skips
            gradient descent.

    Raises:
        ValueError: Neither or both of the shapes are given, a size is below 1, or init is unknown.

    >>> KroneckerConfig(b_shape=(2, 1)).shapes(3072, 768)
    ((1536, 768), (2, 1))
    >>> KroneckerConfig(b_shape=(2, 1)).opposite().b_shape
    (1, 2)
    """

    a_shape: Shape = None
    b_shape: Shape = None
    rank: Whole = 1
    scales: bool = False
    init: Init = "sequential"
    fits_mlps: ClassVar[bool] = True
    keep: Annotated[Literal["even", "odd", "energy"] | tuple[int, int], Range(least=0)] = "even"
    rounds: Whole = 10
    epochs: Annotated[int, Range(least=0)] = 3

    def problems(self) -> Iterator[str]:
        """Yield a problem unless exactly one of the two shapes is given."""
        if (self.a_shape is None) == (self.b_shape is None):
            yield (
                f"a_shape is {self.a_shape} and b_shape is {self.b_shape}, expected exactly one of "
                "them"
            )

    def shapes(
        self, out_features: int, in_features: int, *, operation: str = "KroneckerConfig"
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B for a weight of shape (out_features, in_features)."""
        known = self.a_shape or self.b_shape
        assert known is not None
        weight = (out_features, in_features)
        if any(n % g for n, g in zip(weight, known, strict=True)):
            near = " and ".join(f"{_near(n, g)} of {n}" for n, g in zip(weight, known, strict=True))
            name = "a_shape" if self.a_shape else "b_shape"
            raise ValueError(
                f"{operation}: {name} {known} does not divide a weight of shape {weight}; the "
                f"nearest divisors are {near}"
            )
        other = (out_features // known[0], in_features // known[1])
        a, b = (known, other) if self.a_shape else (other, known)
        most = min(a[0] * a[1], b[0] * b[1])
        if self.rank > most:
            raise ValueError(
                f"{operation}: expected a rank of at most {most}, got {self.rank}; with A of shape "
                f"{a} and B of shape {b}, rank {most} already represents any weight exactly"
            )
        return a, b

    def check(self, out_features: int, in_features: int, *, operation: str) -> None:
        """Raise a ValueError if the shapes and the rank do not fit a weight."""
        self.shapes(out_features, in_features, operation=operation)

    def sizes(self) -> dict[str, Any]:
        """Return the sizes as keyword arguments of `KroneckerLinear`."""
        return {
            "rank": self.rank,
            "a_shape": self.a_shape,
            "b_shape": self.b_shape,
            "scales": self.scales,
        }

    def opposite(self) -> Self:
        """Return the config for a weight of transposed shape, such as an MLP's last matrix."""
        a_shape = self.a_shape and self.a_shape[::-1]
        b_shape = self.b_shape and self.b_shape[::-1]
        # transposed, too, so that both layers of an MLP keep the same hidden neurons
        keep = self.keep if isinstance(self.keep, str) else self.keep[::-1]
        return replace(self, a_shape=a_shape, b_shape=b_shape, keep=keep)

    def count(self, out_features: int, in_features: int) -> int:
        """Count the parameters of the compressed weight, scales included.

        >>> KroneckerConfig(a_shape=(1024, 256), rank=2).count(3072, 768)
        524306
        """
        a, b = self.shapes(out_features, in_features)
        return self.rank * (a[0] * a[1] + b[0] * b[1] + (1 if self.scales else 0))


@dataclass(frozen=True, kw_only=True)
class LowRankConfig(Config, structure="low_rank"):
    """Settings to replace a weight (O, I) by two thin matrices, (O, r) and (r, I).

    Args:
        keep: Fraction of a weight's parameters to keep, which sets r. The default is 0.5 if rank is
            not given either.
        rank: The rank r, which can be given instead of ``keep``.
        init: ``"sequential"`` minimizes the error of the outputs on calibration data, block by
            block, on the layer's inputs in the smaller model. It computes a truncated SVD of the
            weight times the root of the inputs' second moments (SVD-LLM, arXiv 2403.07378).
            ``"svd"`` gives the low-rank weight nearest to the original, without data.
        epochs: The number of epochs of gradient descent after the SVD in a sequential fit. It
            trains all matrices of an MLP together. 0 skips gradient descent.

    Raises:
        ValueError: A value is out of range, or both ``keep`` and ``rank`` are given.

    >>> LowRankConfig(keep=0.5).rank_of(3072, 768), LowRankConfig(rank=8).count(3072, 768)
    (307, 30720)
    """

    keep: Annotated[float | None, Range(above=0, below=1)] = None
    rank: Annotated[int | None, Range(least=1)] = None
    init: LowRankInit = "sequential"
    fits_mlps: ClassVar[bool] = True
    epochs: Annotated[int, Range(least=0)] = 3

    def problems(self) -> Iterator[str]:
        """Yield a problem if both ``keep`` and ``rank`` are given."""
        if self.keep is not None and self.rank is not None:
            yield f"keep is {self.keep} and rank is {self.rank}, expected only one of them"

    def check(self, out_features: int, in_features: int, *, operation: str) -> None:
        """Raise a ValueError if the rank does not fit a weight."""
        self.rank_of(out_features, in_features, operation=operation)

    def sizes(self) -> dict[str, Any]:
        """Return the sizes as keyword arguments of a low-rank layer's constructor."""
        return {"rank": self.share if self.rank is None else self.rank}

    def opposite(self) -> Self:
        """Return this config, which also applies to layers of transposed shape."""
        return self

    @property
    def share(self) -> float:
        """The fraction of a weight's parameters to keep if no rank is given."""
        return 0.5 if self.keep is None else self.keep

    def rank_of(
        self, out_features: int, in_features: int, *, operation: str = "LowRankConfig"
    ) -> int:
        """Return the rank r for a weight of shape (out_features, in_features)."""
        # each unit of rank costs O + I parameters; for a tiny share of a small weight, the quotient
        # rounds to 0, so the rank is at least 1
        rank = self.rank or max(
            1, int(self.share * out_features * in_features / (out_features + in_features))
        )
        if rank > min(out_features, in_features):
            raise ValueError(
                f"{operation}: rank is {rank}, expected at most {min(out_features, in_features)} "
                f"for a weight of shape {(out_features, in_features)}"
            )
        return rank

    def count(self, out_features: int, in_features: int) -> int:
        """Count the parameters of the two factors."""
        return self.rank_of(out_features, in_features) * (out_features + in_features)


@dataclass(frozen=True, kw_only=True)
class PruneConfig(CheckedConfig):
    """Settings of pruning: how much to drop, and how to fit the remaining weights.

    Args:
        keep: Fraction of the hidden neurons of the MLPs to keep or, with method=blocks, of the
            blocks. Default: 0.5.
        size: Fraction of all parameters of the model to keep. Give either keep or size.
        method: The method 'best' fits the MLPs one after another, each on its inputs in the smaller
            model, in closed form and by gradient descent. 'fast' fits all MLPs in closed form, on
            their inputs in the original model, in one pass. 'blocks' drops whole blocks, and fits
            the MLPs of the remaining blocks with the method 'best'. Default: 'fast' if size is 0.8
            or more, else 'best'.
        epochs: Number of passes over the calibration tokens in gradient descent, with the methods
            'best' and 'blocks'. With 0, only the last matrix of each MLP is fitted, in closed form.
        allocate: With 'uniform', every MLP keeps the same share of neurons, so transformers can
            load the result without this library. With 'influence', blocks that change the hidden
            states more keep more neurons. The MLPs then differ in size, so load the result with
            kronecker.from_pretrained. 'influence' is not available with method=blocks.
        multiple_of: Round the number of neurons to a multiple of this number. The neurons of
            experts are also rounded to a multiple of 8.
        ridge: Ridge penalty in least squares, as a fraction of the inputs' mean second moment.
            The penalty pulls the fit toward the original matrix.

    Raises:
        ValueError: A value is out of range, keep and size are both given, or multiple_of or
            allocate cannot be combined with method=blocks.

    >>> PruneConfig.from_dict({"keep": 0.3}).neurons(1000)
    300
    """

    keep: Annotated[float | None, Range(above=0, most=1)] = None
    size: Annotated[float | None, Range(above=0, most=1)] = None
    method: Method | None = None
    epochs: Annotated[int, Range(least=0)] = 3
    allocate: Allocation = "uniform"
    multiple_of: Whole = 1
    ridge: Annotated[float, Range(above=0, below=1)] = 3e-2

    def problems(self) -> Iterator[str]:
        """Yield a problem for each pair of fields that cannot be combined."""
        if self.multiple_of > 1 and self.method == "blocks":
            yield problem(self, "multiple_of", "1 with method=blocks")
        if self.allocate != "uniform" and self.method == "blocks":
            yield problem(self, "allocate", "uniform with method=blocks")
        if self.keep is not None and self.size is not None:
            yield f"keep is {self.keep} and size is {self.size}, expected only one of them"

    @property
    def chosen_method(self) -> Method:
        """The given method or, if there is none, the default, which depends on ``size``."""
        if self.method is not None:
            return self.method
        # only size is a share of the whole model; keep is a share of the MLPs alone
        return "fast" if self.size is not None and self.size >= _LIGHT else "best"

    @property
    def descends(self) -> bool:
        """True if all matrices of an MLP are fitted by gradient descent."""
        return self.chosen_method != "fast" and self.epochs > 0

    @property
    def share(self) -> float:
        """The fraction of the neurons, or blocks, to keep if no target size is given."""
        return 0.5 if self.keep is None else self.keep

    def neurons(self, count: int, multiple_of: int | None = None) -> int:
        """Return how many of ``count`` hidden neurons to keep.

        >>> PruneConfig(keep=0.5, multiple_of=64).neurons(1000)
        512
        """
        unit = multiple_of or self.multiple_of
        # keep at least one unit, so that no layer is empty, and at most all neurons, since a small
        # layer may have fewer than one unit
        return min(count, max(1, round(self.share * count / unit)) * unit)


def _near(total: int, wanted: int) -> str:
    """Return the divisors of ``total`` nearest to ``wanted``, separated by commas."""
    nearest = sorted(_divisors(total), key=lambda d: abs(d - wanted))[:5]
    return ", ".join(map(str, sorted(nearest)))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def kronecker_sizes(
    out_features: int,
    in_features: int,
    *,
    rank: int | float = 1,
    a_shape: Shape = None,
    b_shape: Shape = None,
    **options: Any,
) -> KroneckerConfig:
    """Return one layer's `KroneckerConfig`, from its sizes, and a rank or share of parameters.

    Args:
        out_features: The number of outputs, O.
        in_features: The number of inputs, I.
        rank: Number of terms, or the share of the dense weight's parameters to use, between 0 and
            1.
        a_shape: Shape (O1, I1) of A, or None.
        b_shape: Shape (O2, I2) of B, or None. If neither shape is given, A's sizes are the divisors
            of O and I nearest to their square roots, so that A and B have about the same size.
        **options: Other fields of `KroneckerConfig`.

    >>> config = kronecker_sizes(3072, 768, rank=0.5)
    >>> config.a_shape, config.rank
    ((48, 24), 368)
    """
    if a_shape is None and b_shape is None:
        # terms with sizes near the square roots have the fewest parameters, so that a whole number
        # of terms comes close to any share
        a_shape = (_divisor(out_features), _divisor(in_features))
    terms = rank if isinstance(rank, int) else 1
    config = KroneckerConfig(a_shape=a_shape, b_shape=b_shape, rank=terms, **options)
    if isinstance(rank, int):
        return config
    share = _checked_share("kronecker", rank)
    each = config.count(out_features, in_features)
    terms = int(share * out_features * in_features / each)
    # for example, two prime sizes leave only factors of shapes (1, 1) and (O, I)
    if terms < 1 and each >= out_features * in_features:
        raise ValueError(
            f"kronecker: expected factors smaller than the weight of shape "
            f"{(out_features, in_features)}, got factors of shapes "
            f"{config.shapes(out_features, in_features)}; prime sizes have no smaller factors"
        )
    if terms < 1:
        raise ValueError(
            f"kronecker: rank is {rank}, expected {each / out_features / in_features:.2f} or more, "
            f"which is one term's share of the parameters of a weight of shape "
            f"{(out_features, in_features)}"
        )
    a, b = config.shapes(out_features, in_features)
    # this many terms represent any weight exactly, so more terms add nothing
    most = min(a[0] * a[1], b[0] * b[1])
    return replace(config, rank=min(terms, most))


def low_rank_sizes(rank: int | float, **options: Any) -> LowRankConfig:
    """Return the config of one layer, from a rank or a share of the dense weight's parameters.

    >>> low_rank_sizes(8).rank, low_rank_sizes(0.5).keep
    (8, 0.5)
    """
    if isinstance(rank, int):
        return LowRankConfig(rank=rank, **options)
    return LowRankConfig(keep=_checked_share("low rank", rank), **options)


def _checked_share(what: str, rank: object) -> float:
    if not isinstance(rank, float) or not 0 < rank < 1:
        raise ValueError(
            f"{what}: expected rank to be a whole number of 1 or more, or a share of the weight's "
            f"parameters between 0 and 1, got {rank!r}"
        )
    return rank


def _divisor(size: int) -> int:
    """Return the divisor of ``size`` that is nearest to √size; on a tie, the smaller one."""
    root = size**0.5
    return min(_divisors(size), key=lambda d: abs(d - root))


def structure_of(config: Config) -> str:
    """Return the name of a config's structure: ``"kronecker"`` or ``"low_rank"``."""
    return next(name for name, cls in STRUCTURES.items() if isinstance(config, cls))


def to_dict(config: Config) -> dict:
    """Return the fields of a config and the name of its structure, as a JSON-serializable dict."""
    return {"structure": structure_of(config)} | config.to_dict()


def from_dict(values: Mapping) -> Config:
    """Return the config from the dictionary that `to_dict` returned."""
    rest = dict(values)
    name = rest.pop("structure", "kronecker")
    if name not in STRUCTURES:
        raise ValueError(
            f"kronecker: expected structure to be one of {', '.join(STRUCTURES)}, got {name!r}"
        )
    return STRUCTURES[name].from_dict(rest)
