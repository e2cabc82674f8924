"""`KroneckerLinear` and `LowRankLinear`: linear layers whose weight is made of smaller ones.

Letters: as in `weights`; for low rank A is (r, I) and B (O, r).
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_components._layers import is_conv1d

from .. import init
from ..config import KroneckerConfig, LowRankConfig
from ..functional import kron_linear
from ..moments import Moments
from .weights import KroneckerLayer, LowRankLayer, SmallerWeight, dense, start


class SmallerLinear(SmallerWeight):
    """A linear layer of a smaller weight: a stock layer's sizes and bias, and the way back."""

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
        self.conv1d = False  # what `to_linear` makes
        self.original: nn.Module | None = None
        self.share = 1.0

    @classmethod
    def like(cls, linear: nn.Module, config: object) -> Self:
        """An empty layer of a dense one's sizes, dtype and device; its bias copied."""
        out_features, in_features = dense(linear).shape
        bias = getattr(linear, "bias", None)
        weight = linear.weight
        assert isinstance(weight, Tensor)
        smaller = cls(
            in_features,
            out_features,
            config,
            bias=bias is not None,
            dtype=weight.dtype,
            device="meta",
        )
        smaller.to_empty(device=weight.device)
        smaller.conv1d = is_conv1d(linear)
        if bias is not None and smaller.bias is not None and not bias.is_meta:
            smaller.bias.data.copy_(bias.data)
        return smaller.train(linear.training)

    @torch.no_grad()
    def to_linear(self) -> nn.Module:
        """The dense layer of the same kind (`nn.Linear` or `Conv1D`) with the same function."""
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
        if self.original is not None:
            self.original._apply(fn)
        return super()._apply(fn, recurse)

    def fade_in_(self, original: nn.Module | None, share: float = 0.0) -> None:
        """Run (1 - share) of the original layer and share of the smaller weights; None ends it."""
        if original is not None:
            original.requires_grad_(False)
        object.__setattr__(self, "original", original)  # not a child: it is not saved
        self.share = share if original is not None else 1.0

    def product(self, x: Tensor) -> Tensor:
        """(*B, in_features) to (*B, out_features), by the smaller weights."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(*B, in_features) to (*B, out_features)."""
        if self.original is None:
            return self.product(x)
        before = self.original(x)
        if self.share == 0.0:
            return before
        return torch.lerp(before, self.product(x), self.share)

    def extra_repr(self) -> str:
        """Sizes, structure and compression."""
        bias = "" if self.bias is not None else ", no bias"
        return f"{self.in_features} to {self.out_features}, {super().extra_repr()}{bias}"


class KroneckerLinear(SmallerLinear, KroneckerLayer):
    """A linear layer ``x @ (Σ_r s_r A_r ⊗ B_r).T + bias``.

    Its parameters are ``a``, ``b``, ``scales`` (when asked for) and ``bias``, stored as they stand.

    Args:
        in_features: I.
        out_features: O.
        config: Shapes and terms.
        bias: Whether there is one.
        dtype: Of the parameters.
        device: Of the parameters.

    Raises:
        ValueError: Shapes that do not divide the layer's, a rank out of range.

    >>> layer = KroneckerLinear(768, 3072, KroneckerConfig(a_shape=(1024, 256), rank=2))
    >>> layer
    KroneckerLinear(768 to 3072, 2 x (1024, 256) ⊗ (3, 3), 22.2% of the dense weight)
    >>> layer(torch.zeros(2, 5, 768)).shape
    torch.Size([2, 5, 3072])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        config: KroneckerConfig,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        KroneckerLayer.__init__(self, out_features, in_features, config, dtype, device)
        self._set_linear(in_features, out_features, bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Module, config: KroneckerConfig, moments: Moments | None = None
    ) -> Self:
        """A smaller `nn.Linear` or transformers' `Conv1D`, started as the config says.

        Args:
            linear: Left as it is.
            config: Shapes, terms and start.
            moments: What the layer sees, for a sequential start; with them a bias is corrected.

        Raises:
            ValueError: No moments where the start needs them; a weight that is zero or not finite.

        >>> config = KroneckerConfig(b_shape=(2, 1), init="van_loan")
        >>> KroneckerLinear.from_linear(nn.Linear(4, 6), config).a.shape
        torch.Size([1, 3, 4])
        """
        layer = cls.like(linear, config)
        if moments is not None and layer.bias is not None:
            centred = moments.centred()
        else:
            centred = moments
        factors = start(dense(linear), layer.b_shape, config, centred)
        layer.set_factors_(factors)
        if moments is not None and layer.bias is not None:
            layer.bias.data.copy_(init.correct_bias(moments, factors.weight()))
        return layer

    def product(self, x: Tensor) -> Tensor:
        """Map (*B, in_features) to (*B, out_features).

        The weight is never built where that costs more.
        """
        return kron_linear(x, self.a, self.b, self.bias, self.scales)


class LowRankLinear(SmallerLinear, LowRankLayer):
    """A linear layer ``x @ A.T @ B.T + bias`` of thin A (r, in_features) and B (out_features, r).

    Its parameters are ``a``, ``b`` and ``bias``.

    Args:
        in_features: I.
        out_features: O.
        config: Its rank.
        bias: Whether there is one.
        dtype: Of the parameters.
        device: Of the parameters.

    Raises:
        ValueError: A rank above the smaller of the two sizes.

    >>> LowRankLinear(768, 3072, LowRankConfig(keep=0.5))
    LowRankLinear(768 to 3072, rank 307, 50.0% of the dense weight)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        config: LowRankConfig,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        LowRankLayer.__init__(self, out_features, in_features, config, dtype, device)
        self._set_linear(in_features, out_features, bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Module, config: LowRankConfig, moments: Moments | None = None
    ) -> Self:
        """A smaller `nn.Linear` or transformers' `Conv1D`; see `KroneckerLinear.from_linear`.

        >>> LowRankLinear.from_linear(nn.Linear(4, 6), LowRankConfig(rank=2, init="svd")).a.shape
        torch.Size([2, 4])
        """
        if config.init != "svd" and moments is None:
            raise ValueError(
                f"kronecker: init {config.init!r} looks at a layer's inputs, expected calibration "
                "data"
            )
        layer = cls.like(linear, config)
        seen = None if moments is None or config.init == "svd" else moments
        if seen is not None and layer.bias is not None:
            centred = seen.centred()
        else:
            centred = seen
        a, b = init.low_rank(dense(linear), len(layer.a), centred)
        layer.set_factors_(init.Factors(a, b, 0.0))
        if moments is not None and layer.bias is not None:
            layer.bias.data.copy_(init.correct_bias(moments, b @ a))
        return layer

    def product(self, x: Tensor) -> Tensor:
        """(*B, in_features) to (*B, out_features)."""
        return F.linear(F.linear(x, self.a), self.b, self.bias)
