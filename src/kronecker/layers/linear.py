"""`KroneckerLinear` and `LowRankLinear`: linear layers whose weight is made of smaller ones.

Letters: as in `weights`; for low rank A is (r, I) and B (O, r).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_components._checks import check_choice
from model_components._layers import is_conv1d

from .. import init
from ..config import (
    Init,
    KroneckerConfig,
    LowRankConfig,
    LowRankInit,
    kronecker_sizes,
    low_rank_sizes,
)
from ..functional import IMPLS, kron_linear
from ..moments import Moments
from .weights import (
    KroneckerLayer,
    LowRankLayer,
    SmallerWeight,
    bias_of,
    dense,
    is_linear,
    start,
)


class SmallerLinear(SmallerWeight):
    """The base of linear layers with a smaller weight, which can become stock layers again."""

    in_features: int
    out_features: int
    bias: nn.Parameter | None

    def _set_linear(self, in_features: int, out_features: int, bias: bool) -> None:
        self.in_features = in_features
        self.out_features = out_features
        if bias:
            zeros = torch.zeros(out_features, dtype=self.a.dtype, device=self.a.device)
        else:
            zeros = None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros))
        # set here and changed by `like`: a layer made by its constructor becomes an nn.Linear
        self.conv1d = False  # whether `to_linear` returns a `Conv1D`
        self.original: nn.Module | None = None
        self.share = 1.0
        self.reset_parameters()

    @classmethod
    def like(cls, linear: nn.Module, config: KroneckerConfig | LowRankConfig) -> Self:
        """Return a layer with a dense one's sizes, dtype, device and bias, and unset factors."""
        out_features, in_features = dense(linear).shape
        bias = getattr(linear, "bias", None)
        weight = linear.weight
        assert isinstance(weight, Tensor)
        smaller = cls(
            in_features,
            out_features,
            **config.sizes(),
            bias=bias is not None,
            dtype=weight.dtype,
            device="meta",
        )
        smaller.config = config
        smaller.to_empty(device=weight.device)
        smaller.conv1d = is_conv1d(linear)
        if bias is not None and smaller.bias is not None and not bias.is_meta:
            smaller.bias.data.copy_(bias.data)
        return smaller.train(linear.training)

    @torch.no_grad()
    def to_linear(self) -> nn.Module:
        """Return the dense layer of the same kind, `nn.Linear` or `Conv1D`, with the same function.

        Raises:
            ValueError: The original layer still runs, see `fade_in_`.
        """
        if self.original is not None:
            raise ValueError(
                f"{type(self).__name__}.to_linear: the original layer still runs; call "
                "fade_in_(None) first"
            )
        weight = self.dense_weight()
        if self.conv1d:
            from transformers.pytorch_utils import Conv1D  # heavy, and only GPT-2's family has it

            linear: nn.Module = Conv1D(self.out_features, self.in_features)
            linear.weight = nn.Parameter(weight.T.contiguous())
        else:
            linear = nn.Linear(
                self.in_features, self.out_features, bias=self.bias is not None, device="meta"
            )
            linear.weight = nn.Parameter(weight)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone())
        return linear.train(self.training)

    def _apply(self, fn: object, recurse: bool = True) -> Self:
        # the original is not a child module, so model.to(device) would leave it behind
        if self.original is not None:
            self.original._apply(fn)
        return super()._apply(fn, recurse)

    def fade_in_(self, original: nn.Module | None, share: float = 0.0) -> None:
        """Mix (1 - share) of the original layer and share of the smaller weights; None ends it."""
        if original is not None:
            # it is dropped at the end, and anything that it learned would be lost
            original.requires_grad_(False)
        object.__setattr__(self, "original", original)  # not a child: it is not saved
        self.share = share if original is not None else 1.0

    def product(self, x: Tensor) -> Tensor:
        """Compute the output (*B, out_features) of x (*B, in_features) from the smaller weights."""
        raise NotImplementedError  # each structure has its own

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output (*B, out_features) of x (*B, in_features)."""
        if self.original is None:
            return self.product(x)
        before = self.original(x)
        # before a layer's turn in FadeIn its factors need not run
        if self.share == 0.0:
            return before
        return torch.lerp(before, self.product(x), self.share)

    def extra_repr(self) -> str:
        """Return sizes, structure and compression, for printing."""
        bias = "" if self.bias is not None else ", no bias"
        return f"{self.in_features} to {self.out_features}, {super().extra_repr()}{bias}"


def _checked_init(operation: str, init: str, known: Sequence[str], inputs: Tensor | None) -> Any:
    """Return the config's name of an initializer, and check that ``inputs`` fit it."""
    # one layer alone has no sequence of blocks, so from_linear calls the fit `fitted`
    names = ["fitted" if name == "sequential" else name for name in known]
    check_choice(f"{operation}.from_linear", "init", init, names)
    if (init == "fitted") != (inputs is not None):
        given = "without" if inputs is None else "with"
        raise ValueError(
            f"{operation}.from_linear: expected init='fitted' with inputs, or another init "
            f"without, got init={init!r} {given} inputs"
        )
    return "sequential" if init == "fitted" else init


def _sizes_of(linear: nn.Module, operation: str) -> tuple[int, int]:
    """Return (O, I) of a linear layer; refuse any other layer."""
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not is_linear(linear):
        raise ValueError(f"{operation}: expected nn.Linear or Conv1D, got {type(linear).__name__}")
    rows, columns = dense(linear).shape
    return rows, columns


def _moments(linear: nn.Module, inputs: Tensor | None) -> Moments | None:
    """Return the moments of a layer's inputs (*B, I)."""
    if inputs is None:
        return None
    flat = inputs.detach().flatten(0, -2)
    return Moments.of(flat, dense(linear), bias_of(linear))


class KroneckerLinear(SmallerLinear, KroneckerLayer):
    """A linear layer ``x @ (Σ_r s_r A_r ⊗ B_r).T + bias``.

    Its parameters are ``a``, ``b``, ``scales`` (when asked for) and ``bias``.

    Args:
        in_features: I.
        out_features: O.
        rank: Number of terms r, or a share of the dense weight's parameters between 0 and 1.
        a_shape: (O1, I1) of every A.
        b_shape: (O2, I2) of every B; give one of the two shapes. Without either, A's sizes are the
            divisors nearest to the square roots of O and I.
        scales: Whether there is a trainable number s_r for each term.
        bias: Whether there is a bias.
        dtype: Dtype of the parameters.
        device: Device of the parameters.
        impl: Path of `kron_linear`.

    Raises:
        ValueError: Shapes that do not divide the layer's, a rank out of range.

    >>> layer = KroneckerLinear(768, 3072, a_shape=(1024, 256), rank=2)
    >>> layer
    KroneckerLinear(768 to 3072, 2 x (1024, 256) ⊗ (3, 3), 22.2% of the dense weight)
    >>> layer(torch.zeros(2, 5, 768)).shape
    torch.Size([2, 5, 3072])
    """

    impls: ClassVar[tuple[str, ...]] = IMPLS

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int | float = 1,
        a_shape: tuple[int, int] | None = None,
        b_shape: tuple[int, int] | None = None,
        scales: bool = False,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        impl: str = "auto",
    ):
        config = kronecker_sizes(
            out_features, in_features, rank=rank, a_shape=a_shape, b_shape=b_shape, scales=scales
        )
        KroneckerLayer.__init__(self, out_features, in_features, config, dtype, device)
        check_choice(type(self).__name__, "impl", impl, IMPLS)
        self.impl = impl
        self._set_linear(in_features, out_features, bias)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        *,
        init: str = "van_loan",
        rank: int | float = 1,
        a_shape: tuple[int, int] | None = None,
        b_shape: tuple[int, int] | None = None,
        scales: bool = False,
        keep: str | tuple[int, int] = "even",
        inputs: Tensor | None = None,
        impl: str = "auto",
    ) -> Self:
        """Return a smaller layer for an `nn.Linear` or transformers' `Conv1D`.

        Args:
            linear: The layer, left as it is.
            init: ``"van_loan"``: the Kronecker sum closest to the weight, in the Frobenius norm.
                ``"van_loan_normalized"``: the same, rescaled to the norm of the weight.
                ``"prune"``: selected rows and columns of the weight. ``"random"``. ``"fitted"``:
                the best outputs on ``inputs``; the bias is corrected as well.
            rank: Number of terms, or a share of the weight's parameters, as in the class.
            a_shape: (O1, I1) of every A.
            b_shape: (O2, I2) of every B.
            scales: Whether there is a trainable number for each term.
            keep: Rows and columns that ``"prune"`` keeps: ``"even"``, ``"odd"``, ``"energy"``, or
                the position (row, column) within B.
            inputs: Inputs of the layer, (*B, I), for ``"fitted"``.
            impl: Path of `kron_linear`.

        Raises:
            ValueError: Another kind of layer, shapes that do not divide the layer's, a rank out of
                range, ``inputs`` without ``"fitted"``, ``"fitted"`` without ``inputs``, a weight
                that is zero or not finite.

        >>> KroneckerLinear.from_linear(nn.Linear(4, 6), init="van_loan", b_shape=(2, 1))
        KroneckerLinear(4 to 6, 1 x (3, 4) ⊗ (2, 1), 58.3% of the dense weight)
        """
        check_choice(cls.__name__, "impl", impl, IMPLS)
        config = kronecker_sizes(
            *_sizes_of(linear, f"{cls.__name__}.from_linear"),
            rank=rank,
            a_shape=a_shape,
            b_shape=b_shape,
            scales=scales,
            keep=keep,
            init=_checked_init(cls.__name__, init, get_args(Init), inputs),
        )
        layer = cls.from_config(linear, config, _moments(linear, inputs))
        layer.impl = impl
        return layer

    @classmethod
    def from_config(
        cls, linear: nn.Module, config: KroneckerConfig, moments: Moments | None = None
    ) -> Self:
        """Return a smaller layer, initialized by a config and the moments of its inputs."""
        layer = cls.like(linear, config)
        if moments is not None and layer.bias is not None:
            # the bias takes care of means, so the weight is fitted to centered moments
            centered = moments.centered()
        else:
            centered = moments
        factors = start(dense(linear), layer.b_shape, config, centered)
        layer.set_factors_(factors)
        if moments is not None and layer.bias is not None:
            layer.bias.data.copy_(init.correct_bias(moments, factors.weight()))
        return layer

    def product(self, x: Tensor) -> Tensor:
        """Compute the output (*B, out_features) of x (*B, in_features).

        The weight is built only if that costs less.
        """
        return kron_linear(x, self.a, self.b, self.bias, self.scales, impl=self.impl)


class LowRankLinear(SmallerLinear, LowRankLayer):
    """A linear layer ``x @ A.T @ B.T + bias`` of thin A (r, in_features) and B (out_features, r).

    Its parameters are ``a``, ``b`` and ``bias``.

    Args:
        in_features: I.
        out_features: O.
        rank: r, or a share of the dense weight's parameters between 0 and 1.
        bias: Whether there is a bias.
        dtype: Dtype of the parameters.
        device: Device of the parameters.

    Raises:
        ValueError: A rank above the smaller of the two sizes.

    >>> LowRankLinear(768, 3072, rank=0.5)
    LowRankLinear(768 to 3072, rank 307, 50.0% of the dense weight)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int | float,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        config = low_rank_sizes(rank)
        LowRankLayer.__init__(self, out_features, in_features, config, dtype, device)
        self._set_linear(in_features, out_features, bias)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        *,
        rank: int | float,
        init: str = "svd",
        inputs: Tensor | None = None,
    ) -> Self:
        """Return a smaller layer for an `nn.Linear` or transformers' `Conv1D`.

        Args:
            linear: The layer, left as it is.
            rank: r, or a share of the weight's parameters.
            init: ``"svd"``, the nearest weight, or ``"fitted"``, the best outputs on ``inputs``.
            inputs: Inputs of the layer, (*B, I), for ``"fitted"``; the bias is then corrected.

        Raises:
            ValueError: Another kind of layer, a rank out of range, ``inputs`` without ``"fitted"``,
                ``"fitted"`` without ``inputs``.

        >>> LowRankLinear.from_linear(nn.Linear(4, 6), rank=2)
        LowRankLinear(4 to 6, rank 2, 83.3% of the dense weight)
        """
        _sizes_of(linear, f"{cls.__name__}.from_linear")
        config = low_rank_sizes(
            rank, init=_checked_init(cls.__name__, init, get_args(LowRankInit), inputs)
        )
        return cls.from_config(linear, config, _moments(linear, inputs))

    @classmethod
    def from_config(
        cls, linear: nn.Module, config: LowRankConfig, moments: Moments | None = None
    ) -> Self:
        """Return a smaller layer, initialized by a config and the moments of its inputs."""
        if config.init != "svd" and moments is None:
            raise ValueError(
                f"kronecker: expected calibration data for init {config.init!r}, since it uses a "
                "layer's inputs, got none"
            )
        layer = cls.like(linear, config)
        seen = None if moments is None or config.init == "svd" else moments
        if seen is not None and layer.bias is not None:
            centered = seen.centered()
        else:
            centered = seen
        a, b = init.low_rank(dense(linear), len(layer.a), centered)
        layer.set_factors_(init.Factors(a, b, 0.0))
        if moments is not None and layer.bias is not None:
            # with the original moments, because centered ones have lost the means
            layer.bias.data.copy_(init.correct_bias(moments, b @ a))
        return layer

    def product(self, x: Tensor) -> Tensor:
        """Compute the output (*B, out_features) of x (*B, in_features)."""
        return F.linear(F.linear(x, self.a), self.b, self.bias)
