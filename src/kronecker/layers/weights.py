"""Weights that are made of smaller ones, and the initialization of Kronecker factors.

Letters: r terms; A is (r, O1, I1), B is (r, O2, I2), for a weight (O, I) = (O1 O2, I1 I2). For low
rank, A is (r, I) and B is (O, r).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_components._layers import ReadOnlyWeight, is_conv1d

from .. import init
from .._eager import build, scaled
from ..config import KroneckerConfig, LowRankConfig
from ..moments import Moments

Device = torch.device | str | None


class SmallerWeight(nn.Module):
    """A weight that is made of two smaller parameters, or several of each."""

    a: nn.Parameter
    b: nn.Parameter
    config: Any  # sizes and initializer of this layer

    def reset_parameters(self) -> None:
        """Draw new factors that keep the scale of activations, and set the bias to zero."""
        raise NotImplementedError  # each structure has its own

    def dense_weight(self) -> Tensor:
        """Return the weight, (rows, columns), differentiable."""
        raise NotImplementedError  # each structure has its own

    @property
    def weight(self) -> Tensor:
        """The dense weight, read-only. Some models read it: T5 reads its dtype."""
        return ReadOnlyWeight.of(self.dense_weight())

    @property
    def structure(self) -> str:
        """The number and shapes of the parts."""
        raise NotImplementedError  # each structure has its own

    @property
    def compression(self) -> float:
        """The number of parameters divided by that of the dense weight."""
        # the bias is as large as before, so only what replaces the weight is compared
        rows, columns = self._sizes()
        return sum(p.numel() for n, p in self.named_parameters(recurse=False) if n != "bias") / (
            rows * columns
        )

    def _sizes(self) -> tuple[int, int]:
        raise NotImplementedError  # each structure has its own

    def extra_repr(self) -> str:
        """Return structure and compression, for printing."""
        return f"{self.structure}, {self.compression:.1%} of the dense weight"


class KroneckerLayer(SmallerWeight):
    """A weight (rows, columns) held as factors ``a``, ``b`` and ``scales``.

    All are ordinary parameters.
    """

    scales: nn.Parameter | None

    def __init__(
        self,
        rows: int,
        columns: int,
        config: KroneckerConfig,
        dtype: torch.dtype | None,
        device: Device,
    ):
        super().__init__()
        self.config = config
        self.a_shape, self.b_shape = config.shapes(rows, columns, operation=type(self).__name__)
        place = {"dtype": dtype or torch.get_default_dtype(), "device": device}
        self.a = nn.Parameter(torch.empty(config.rank, *self.a_shape, **place))
        self.b = nn.Parameter(torch.empty(config.rank, *self.b_shape, **place))
        self.register_parameter(
            "scales", nn.Parameter(torch.ones(config.rank, **place)) if config.scales else None
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new factors; see `SmallerWeight`."""
        # `like` makes meta layers, where random draws would cost time and advance the generator
        if self.a.is_meta:
            return
        factors = init.random(self._sizes(), self.b_shape, len(self.a), dtype=self.a.dtype)
        self.set_factors_(factors)
        _zero_bias_(self)

    @torch.no_grad()
    def set_factors_(self, factors: init.Factors) -> None:
        """Set the factors; with ``scales``, the norm of each term goes into its scale."""
        a = factors.a
        b = factors.b
        if self.scales is not None:
            size = (
                a.double().flatten(1).norm(dim=1) * b.double().flatten(1).norm(dim=1)
            ).clamp_min(1e-30)
            unit = (self.a_shape[0] * self.b_shape[0]) ** 0.5  # a weight whose rows have norm 1
            self.scales.copy_(size / unit)
            a = a / (size / unit).view(-1, 1, 1).to(a.dtype)
        self.a.copy_(a)
        self.b.copy_(b)

    def _sizes(self) -> tuple[int, int]:
        return self.a_shape[0] * self.b_shape[0], self.a_shape[1] * self.b_shape[1]

    def dense_weight(self) -> Tensor:
        """Return Σ s A ⊗ B, (rows, columns), differentiable."""
        return build(self.a, scaled(self.b, self.scales))

    @property
    def structure(self) -> str:
        """The number and shapes of the terms."""
        return f"{self.config.rank} x {self.a_shape} ⊗ {self.b_shape}"


class LowRankLayer(SmallerWeight):
    """A weight (rows, columns) held as the product of ``b`` (rows, r) and ``a`` (r, columns)."""

    def __init__(
        self,
        rows: int,
        columns: int,
        config: LowRankConfig,
        dtype: torch.dtype | None,
        device: Device,
    ):
        super().__init__()
        self.config = config
        rank = config.rank_of(rows, columns, operation=type(self).__name__)
        place = {"dtype": dtype or torch.get_default_dtype(), "device": device}
        self.a = nn.Parameter(torch.empty(rank, columns, **place))
        self.b = nn.Parameter(torch.empty(rows, rank, **place))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new factors; see `SmallerWeight`."""
        rank, columns = self.a.shape
        for matrix, std in zip((self.a, self.b), self._fresh_stds(rank, columns), strict=True):
            nn.init.normal_(matrix, std=std)
        _zero_bias_(self)

    def _fresh_stds(self, rank: int, columns: int) -> tuple[float, float]:
        """Return standard deviations of A and B that keep the scale of a linear layer's inputs."""
        return columns**-0.5, rank**-0.5

    @torch.no_grad()
    def set_factors_(self, factors: init.Factors) -> None:
        """Set the factors."""
        self.a.copy_(factors.a)
        self.b.copy_(factors.b)

    def _sizes(self) -> tuple[int, int]:
        return len(self.b), self.a.shape[1]

    def dense_weight(self) -> Tensor:
        """Return the weight B A, (rows, columns), differentiable."""
        return self.b @ self.a

    @property
    def structure(self) -> str:
        """The rank."""
        return f"rank {len(self.a)}"


def _zero_bias_(layer: nn.Module) -> None:
    bias = layer._parameters.get("bias")
    if bias is not None:
        nn.init.zeros_(bias)


def dense(linear: nn.Module) -> Tensor:
    """Return the weight of an `nn.Linear` or `Conv1D` as (O, I)."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    if is_conv1d(linear):
        return weight.detach().T
    return weight.detach()


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes the same as `nn.Linear` or transformers' `Conv1D`."""
    # compare the forward, not the class: quantized or scaled subclasses have another forward
    if type(module).forward is nn.Linear.forward or is_conv1d(module):
        return True
    return isinstance(module, nn.Linear) and _computes_a_product(module)


@torch.no_grad()
def _computes_a_product(linear: nn.Linear) -> bool:
    """Return whether a subclass of `nn.Linear`, such as Falcon's, computes what its parent does.

    Both are run on the same numbers.
    """
    # nothing can be tried on the meta device or with packed integers
    if linear.weight.is_meta or not linear.weight.is_floating_point():
        return False
    # two correct ways to multiply differ by a few roundings
    near = 100 * torch.finfo(linear.weight.dtype).eps
    x = torch.linspace(
        -1, 1, linear.in_features, dtype=linear.weight.dtype, device=linear.weight.device
    )[None]
    try:
        return torch.allclose(
            linear(x), F.linear(x, linear.weight, linear.bias), rtol=near, atol=near
        )
    except (TypeError, RuntimeError, ValueError):
        return False


def bias_of(linear: nn.Module) -> Tensor | None:
    """Return the bias of an `nn.Linear` or `Conv1D`, or None."""
    bias = getattr(linear, "bias", None)
    if isinstance(bias, Tensor):
        return bias.detach()
    return None


def start(
    weight: Tensor,
    b_shape: tuple[int, int],
    config: KroneckerConfig,
    moments: Moments | None,
) -> init.Factors:
    """Return the initial factors of a weight, by a config's ``init``.

    ``"sequential"`` starts from pruning (one term) or Van Loan (several terms), and continues with
    alternating least squares on the layer's moments.
    """
    weight = weight.contiguous()
    name = config.init
    if name == "random":
        # pyrefly: ignore[bad-argument-type]: a matrix has two sizes
        return init.random(tuple(weight.shape), b_shape, config.rank, dtype=weight.dtype)
    if name.startswith("van_loan") or (name != "prune" and config.rank > 1):
        factors = init.van_loan(
            weight, b_shape, config.rank, normalize=name == "van_loan_normalized"
        )
    else:
        factors = init.prune(weight, b_shape, keep=config.keep)
        if config.rank > 1:  # further terms fit what pruning leaves
            left = weight - factors.weight()
            if left.any():
                rest = init.van_loan(left, b_shape, config.rank - 1)
            else:
                # nothing is left to fit: A is zero and B is not, so that A receives gradients
                rest = init.van_loan(weight, b_shape, config.rank - 1)
                rest = init.Factors(torch.zeros_like(rest.a), rest.b, rest.error)
            a = torch.cat([factors.a, rest.a])
            b = torch.cat([factors.b, rest.b])
            factors = init.Factors(a, b, init.relative_error(weight, build(a.double(), b.double())))
    if name != "sequential":
        return factors
    if moments is None:
        raise ValueError(
            f"kronecker: expected calibration data for init {config.init!r}, since it uses a "
            "layer's inputs, got none"
        )
    return init.als(moments, factors, rounds=config.rounds)
