"""`KroneckerLinear` and `LowRankLinear`: linear layers whose weight is made of smaller factors.

Letters: as in `weights`. For low rank, A is (r, I) and B is (O, r).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_components._checks import check_choice
from model_components._layers import is_conv1d

from .. import init
from ..config import (
    Config,
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
    """The base class of linear layers with a smaller weight, which can be made dense again."""

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
        # whether `to_linear` returns a `Conv1D`; `like` sets this to the original layer's kind
        self.conv1d = False
        self.reset_parameters()

    @classmethod
    def like(cls, linear: nn.Module, config: Config) -> Self:
        """Return a layer with uninitialized factors that can replace a dense layer.

        Sizes, dtype, device, bias and training mode are taken from the dense layer.
        """
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
        """Return a dense layer of the original's class that computes the same function.

        The class is `nn.Linear` or `Conv1D`.
        """
        weight = self.dense_weight()
        if self.conv1d:
            # imported here, since the import is slow and only GPT-2's family needs it
            from transformers.pytorch_utils import Conv1D

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

    @classmethod
    def from_config(cls, linear: nn.Module, config: Any, moments: Moments | None = None) -> Self:
        """Return a smaller layer, initialized by ``config.init`` from a weight and moments."""
        raise NotImplementedError  # each structure has its own

    def product(self, x: Tensor) -> Tensor:
        """Compute the output (*B, out_features) of x (*B, in_features) from the factors."""
        raise NotImplementedError  # each structure has its own

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output (*B, out_features) of x (*B, in_features)."""
        return self.product(x)

    def extra_repr(self) -> str:
        """Return the sizes, structure and compression for the module's repr."""
        bias = "" if self.bias is not None else ", no bias"
        return f"{self.in_features} to {self.out_features}, {super().extra_repr()}{bias}"


def checked_init(operation: str, init: str, known: Sequence[str], inputs: Tensor | None) -> Any:
    """Check that from_linear's ``init`` fits ``inputs``; return the ``init`` to use in a config."""
    # a single layer has no sequence of blocks, so from_linear has "fitted" instead of "sequential"
    names = ["fitted" if name == "sequential" else name for name in known]
    check_choice(f"{operation}.from_linear", "init", init, names)
    if (init == "fitted") != (inputs is not None):
        given = "without" if inputs is None else "with"
        raise ValueError(
            f"{operation}.from_linear: expected init='fitted' with inputs, or another init "
            f"without inputs, got init={init!r} {given} inputs"
        )
    return "sequential" if init == "fitted" else init


def sizes_of(linear: nn.Module, operation: str) -> tuple[int, int]:
    """Return the sizes (O, I) of a linear layer; raise a ValueError for any other layer."""
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not is_linear(linear):
        raise ValueError(f"{operation}: expected nn.Linear or Conv1D, got {type(linear).__name__}")
    rows, columns = dense(linear).shape
    return rows, columns


def moments_of(linear: nn.Module, inputs: Tensor | None) -> Moments | None:
    """Return the moments of a layer's inputs (*B, I) and outputs, or None without inputs."""
    if inputs is None:
        return None
    features = dense(linear).shape[1]
    if inputs.dim() < 2 or inputs.shape[-1] != features or not inputs.numel():
        raise ValueError(
            f"from_linear: expected inputs (*B, {features}) with at least one row, got shape "
            f"{list(inputs.shape)}"
        )
    flat = inputs.detach().flatten(0, -2)
    return Moments.of(flat, dense(linear), bias_of(linear))


Layer = TypeVar("Layer", bound=SmallerLinear)
LINEAR: dict[type[Config], type[SmallerLinear]] = {}
"""The linear layer of each structure, by the class of its config."""


def layer_for(config: type[Config]) -> Callable[[type[Layer]], type[Layer]]:
    """Return a decorator that registers a linear layer for a config class."""

    def put(layer: type[Layer]) -> type[Layer]:
        LINEAR[config] = layer
        return layer

    return put


def linear_of(config: Config) -> type[SmallerLinear]:
    """Return the linear layer for a config, which may be a subclass of a registered config."""
    return next(LINEAR[kind] for kind in type(config).__mro__ if kind in LINEAR)


@layer_for(KroneckerConfig)
class KroneckerLinear(SmallerLinear, KroneckerLayer):
    """A linear layer ``x @ (Σ_r s_r A_r ⊗ B_r).T + bias``.

    Its parameters are ``a``, ``b``, ``scales`` (optional) and ``bias``.

    Args:
        in_features: The number of inputs, I.
        out_features: The number of outputs, O.
        rank: Number of terms r, or the share of the dense weight's parameters to use, between 0 and
            1.
        a_shape: Shape (O1, I1) of every A.
        b_shape: Shape (O2, I2) of every B. Give at most one of the two shapes. If neither is given,
            A's sizes are the divisors nearest to the square roots of O and I.
        scales: Whether there is a trainable scale s_r for each term.
        bias: Whether there is a bias.
        dtype: Dtype of the parameters.
        device: Device of the parameters.
        impl: The implementation, as for `kron_linear`.

    Raises:
        ValueError: A shape does not divide the weight's shape, the rank is out of range, or
            ``impl`` is unknown.

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
        """Return a smaller layer that replaces an `nn.Linear` or transformers' `Conv1D`.

        Args:
            linear: The layer, which is not changed.
            init: ``"van_loan"`` gives the Kronecker sum closest to the weight, in the Frobenius
                norm. ``"prune"`` takes selected rows and columns of the weight. ``"random"`` draws
                new factors. ``"fitted"`` minimizes the error of the outputs on ``inputs``, and also
                corrects the bias.
            rank: Number of terms, or a share of the weight's parameters, as in the class.
            a_shape: Shape (O1, I1) of every A.
            b_shape: Shape (O2, I2) of every B.
            scales: Whether there is a trainable scale for each term.
            keep: Rows and columns that ``"prune"`` keeps, as in `KroneckerConfig`: ``"even"``,
                ``"odd"``, ``"energy"``, or a position (row, column) within B.
            inputs: Inputs of the layer, (*B, I), for ``"fitted"``.
            impl: The implementation, as for `kron_linear`.

        Raises:
            ValueError: The layer is of another kind, a shape does not divide the weight's shape,
                the rank is out of range, ``init`` or ``impl`` is unknown, only one of ``inputs``
                and ``"fitted"`` is given, or the weight is all zeros or not finite.

        >>> KroneckerLinear.from_linear(nn.Linear(4, 6), init="van_loan", b_shape=(2, 1))
        KroneckerLinear(4 to 6, 1 x (3, 4) ⊗ (2, 1), 58.3% of the dense weight)
        """
        check_choice(cls.__name__, "impl", impl, IMPLS)
        config = kronecker_sizes(
            *sizes_of(linear, f"{cls.__name__}.from_linear"),
            rank=rank,
            a_shape=a_shape,
            b_shape=b_shape,
            scales=scales,
            keep=keep,
            init=checked_init(cls.__name__, init, get_args(Init), inputs),
        )
        layer = cls.from_config(linear, config, moments_of(linear, inputs))
        layer.impl = impl
        return layer

    @classmethod
    def from_config(
        cls, linear: nn.Module, config: KroneckerConfig, moments: Moments | None = None
    ) -> Self:
        """Return a smaller layer, initialized by ``config.init`` from a weight and moments."""
        layer = cls.like(linear, config)
        if moments is not None and layer.bias is not None:
            # the bias corrects the mean, so the weight is fitted to centered moments
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

        The dense weight is built only if that is cheaper.
        """
        return kron_linear(x, self.a, self.b, self.bias, self.scales, impl=self.impl)


@layer_for(LowRankConfig)
class LowRankLinear(SmallerLinear, LowRankLayer):
    """A linear layer ``x @ A.T @ B.T + bias`` with thin matrices A and B.

    A is (r, in_features), and B is (out_features, r). Its parameters are ``a``, ``b`` and ``bias``.

    Args:
        in_features: The number of inputs, I.
        out_features: The number of outputs, O.
        rank: The rank r, or the share of the dense weight's parameters to use, between 0 and 1.
        bias: Whether there is a bias.
        dtype: Dtype of the parameters.
        device: Device of the parameters.

    Raises:
        ValueError: The rank is below 1 or above the smaller of the two sizes.

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
        """Return a smaller layer that replaces an `nn.Linear` or transformers' `Conv1D`.

        Args:
            linear: The layer, which is not changed.
            rank: The rank r, or a share of the weight's parameters.
            init: ``"svd"`` gives the low-rank weight nearest to the original. ``"fitted"``
                minimizes the error of the outputs on ``inputs``, and also corrects the bias.
            inputs: Inputs of the layer, (*B, I), for ``"fitted"``.

        Raises:
            ValueError: The layer is of another kind, the rank is out of range, ``init`` is unknown,
                only one of ``inputs`` and ``"fitted"`` is given, or the weight is all zeros or not
                finite.

        >>> LowRankLinear.from_linear(nn.Linear(4, 6), rank=2)
        LowRankLinear(4 to 6, rank 2, 83.3% of the dense weight)
        """
        sizes_of(linear, f"{cls.__name__}.from_linear")
        config = low_rank_sizes(
            rank, init=checked_init(cls.__name__, init, get_args(LowRankInit), inputs)
        )
        return cls.from_config(linear, config, moments_of(linear, inputs))

    @classmethod
    def from_config(
        cls, linear: nn.Module, config: LowRankConfig, moments: Moments | None = None
    ) -> Self:
        """Return a smaller layer, initialized by ``config.init`` from a weight and moments."""
        if config.init != "svd" and moments is None:
            raise ValueError(
                f"kronecker: expected calibration data for init={config.init!r}, which is computed "
                "from a layer's inputs, got none"
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
            # with the original moments, because centered moments have means of zero
            layer.bias.data.copy_(init.correct_bias(moments, b @ a))
        return layer

    def product(self, x: Tensor) -> Tensor:
        """Compute the output (*B, out_features) of x (*B, in_features)."""
        return F.linear(F.linear(x, self.a), self.b, self.bias)
