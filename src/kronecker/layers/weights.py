"""Weights that are made of smaller factors, and the initialization of Kronecker factors.

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
    """The base class of modules whose weight is made of smaller factors ``a`` and ``b``."""

    a: nn.Parameter
    b: nn.Parameter
    config: Any  # sizes and initializer of this layer

    def reset_parameters(self) -> None:
        """Draw new factors that keep the activations' scale, and set the bias, if any, to zero."""
        raise NotImplementedError  # each structure has its own

    def dense_weight(self) -> Tensor:
        """Return the dense weight (rows, columns), through which gradients reach the factors."""
        raise NotImplementedError  # each structure has its own

    @property
    def weight(self) -> Tensor:
        """The dense weight, read-only, for models that read a weight: T5 reads its dtype."""
        return ReadOnlyWeight.of(self.dense_weight())

    @property
    def structure(self) -> str:
        """The number and shapes of the factors, as text."""
        raise NotImplementedError  # each structure has its own

    @property
    def compression(self) -> float:
        """The number of parameters of the factors, as a fraction of the dense weight's."""
        # without the bias, which is as large as before
        rows, columns = self._sizes()
        return sum(p.numel() for n, p in self.named_parameters(recurse=False) if n != "bias") / (
            rows * columns
        )

    def _sizes(self) -> tuple[int, int]:
        raise NotImplementedError  # each structure has its own

    def extra_repr(self) -> str:
        """Return the structure and compression for the module's repr."""
        return f"{self.structure}, {self.compression:.1%} of the dense weight"


class KroneckerLayer(SmallerWeight):
    """A weight (rows, columns) held as a sum of Kronecker products.

    The factors ``a`` and ``b``, and the optional ``scales``, are ordinary parameters.
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
        """Draw new factors that keep the activations' scale, and set the bias, if any, to zero."""
        # `like` builds layers on the meta device, for which random draws would cost time and change
        # the state of the generator
        if self.a.is_meta:
            return
        factors = init.random(self._sizes(), self.b_shape, len(self.a), dtype=self.a.dtype)
        self.set_factors_(factors)
        _zero_bias_(self)

    @torch.no_grad()
    def set_factors_(self, factors: init.Factors) -> None:
        """Set the factors; with ``scales``, move the norm of each term into the term's scale."""
        a = factors.a
        b = factors.b
        if self.scales is not None:
            size = (
                a.double().flatten(1).norm(dim=1) * b.double().flatten(1).norm(dim=1)
            ).clamp_min(1e-30)
            # the norm of a weight whose rows have norm 1
            unit = (self.a_shape[0] * self.b_shape[0]) ** 0.5
            self.scales.copy_(size / unit)
            a = a / (size / unit).view(-1, 1, 1).to(a.dtype)
        self.a.copy_(a)
        self.b.copy_(b)

    def _sizes(self) -> tuple[int, int]:
        return self.a_shape[0] * self.b_shape[0], self.a_shape[1] * self.b_shape[1]

    def dense_weight(self) -> Tensor:
        """Return the dense weight Σ s A ⊗ B, (rows, columns); gradients reach the factors."""
        return build(self.a, scaled(self.b, self.scales))

    @property
    def structure(self) -> str:
        """The number and shapes of the terms, as text."""
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
        """Draw new factors that keep the activations' scale, and set the bias, if any, to zero."""
        rank, columns = self.a.shape
        for matrix, std in zip((self.a, self.b), self._fresh_stds(rank, columns), strict=True):
            nn.init.normal_(matrix, std=std)
        _zero_bias_(self)

    def _fresh_stds(self, rank: int, columns: int) -> tuple[float, float]:
        """Return initial standard deviations of A and B that keep outputs at the inputs' scale."""
        return columns**-0.5, rank**-0.5

    @torch.no_grad()
    def set_factors_(self, factors: init.Factors) -> None:
        """Copy the factors into the parameters."""
        self.a.copy_(factors.a)
        self.b.copy_(factors.b)

    def _sizes(self) -> tuple[int, int]:
        return len(self.b), self.a.shape[1]

    def dense_weight(self) -> Tensor:
        """Return the dense weight B A, (rows, columns); gradients reach the factors."""
        return self.b @ self.a

    @property
    def structure(self) -> str:
        """The rank, as text."""
        return f"rank {len(self.a)}"


def _zero_bias_(layer: nn.Module) -> None:
    bias = layer._parameters.get("bias")
    if bias is not None:
        nn.init.zeros_(bias)


def dense(linear: nn.Module) -> Tensor:
    """Return the weight of an `nn.Linear`, `Conv1D` or embedding as (O, I), without gradients."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    if is_conv1d(linear):
        return weight.detach().T
    return weight.detach()


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes the function of `nn.Linear` or transformers' `Conv1D`."""
    # compare the forward method, not the class: quantized or scaled subclasses override it
    if type(module).forward is nn.Linear.forward or is_conv1d(module):
        return True
    return isinstance(module, nn.Linear) and _computes_a_product(module)


@torch.no_grad()
def _computes_a_product(linear: nn.Linear) -> bool:
    """Return whether a subclass of `nn.Linear`, such as Falcon's, computes the same function.

    The function compares the outputs of both for the same inputs.
    """
    # layers on the meta device, or with packed integers, cannot be run
    if linear.weight.is_meta or not linear.weight.is_floating_point():
        return False
    # two correct ways to multiply differ by a few rounding errors
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
    """Return the bias of an `nn.Linear` or `Conv1D`, or None if there is none."""
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
    """Return the initial factors of a weight, by the method that a config's ``init`` names.

    ``"sequential"`` begins with the factors of ``"prune"`` (one term) or ``"van_loan"`` (several
    terms), and continues with alternating least squares on the layer's moments.
    """
    weight = weight.contiguous()
    name = config.init
    if name == "random":
        # pyrefly: ignore[bad-argument-type]: a matrix has two sizes
        return init.random(tuple(weight.shape), b_shape, config.rank, dtype=weight.dtype)
    if name == "van_loan" or (name != "prune" and config.rank > 1):
        factors = init.van_loan(weight, b_shape, config.rank)
    else:
        factors = init.prune(weight, b_shape, keep=config.keep)
        if config.rank > 1:  # the other terms approximate the weight minus the first term
            left = weight - factors.weight()
            if left.any():
                rest = init.van_loan(left, b_shape, config.rank - 1)
            else:
                # nothing is left to approximate: A is zero, and B is not, so that A gets gradients
                rest = init.van_loan(weight, b_shape, config.rank - 1)
                rest = init.Factors(torch.zeros_like(rest.a), rest.b, rest.error)
            a = torch.cat([factors.a, rest.a])
            b = torch.cat([factors.b, rest.b])
            factors = init.Factors(a, b, init.relative_error(weight, build(a.double(), b.double())))
    if name != "sequential":
        return factors
    if moments is None:
        raise ValueError(
            f"kronecker: expected calibration data for init={config.init!r}, which is computed "
            "from a layer's inputs, got none"
        )
    return init.als(moments, factors, rounds=config.rounds)
