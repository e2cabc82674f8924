"""`KroneckerLinear`: a linear layer held as factors; and what every layer of that kind shares.

Letters: r terms; A is (r, O1, I1), B is (r, O2, I2); out_features O = O1 O2, in_features I = I1 I2.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .. import init
from .._eager import build, scaled
from ..config import NEEDS_CALIBRATION, KroneckerConfig
from ..functional import kron_linear


class KroneckerLayer(nn.Module):
    """A weight (rows, columns) held as factors ``a``, ``b`` and ``scales``, all ordinary parameters."""

    a: nn.Parameter
    b: nn.Parameter
    scales: nn.Parameter | None

    def __init__(self, rows: int, columns: int, config: KroneckerConfig, dtype: torch.dtype | None, device: Any = None):
        super().__init__()
        self.config = config
        self.a_shape, self.b_shape = config.shapes(rows, columns, type(self).__name__)
        place = {"dtype": dtype or torch.get_default_dtype(), "device": device}
        self.a = nn.Parameter(torch.empty(config.rank, *self.a_shape, **place))
        self.b = nn.Parameter(torch.empty(config.rank, *self.b_shape, **place))
        self.register_parameter("scales", nn.Parameter(torch.ones(config.rank, **place)) if config.scales else None)
        if self.a.device.type != "meta":
            self.set_factors_(init.random((rows, columns), self.b_shape, config.rank))

    @torch.no_grad()
    def set_factors_(self, factors: init.Factors) -> None:
        """Take these factors; with ``scales``, each term's size goes there."""
        a, b = factors.a, factors.b
        if self.scales is not None:
            size = (a.double().flatten(1).norm(dim=1) * b.double().flatten(1).norm(dim=1)).clamp_min(1e-30)
            unit = (self.a_shape[0] * self.b_shape[0]) ** 0.5  # a weight whose rows have norm 1
            self.scales.copy_(size / unit)
            a = a / (size / unit).view(-1, 1, 1).to(a.dtype)
        self.a.copy_(a)
        self.b.copy_(b)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:  # pyrefly: ignore
        """Files have A under the name of the weight it stands for (see `kronecker.storage`)."""
        if f"{prefix}a" not in state_dict and f"{prefix}weight" in state_dict:
            state_dict[f"{prefix}a"] = state_dict.pop(f"{prefix}weight")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def dense_weight(self) -> Tensor:
        """Σ s A ⊗ B, (rows, columns), differentiable."""
        return build(self.a, scaled(self.b, self.scales))

    @property
    def weight(self) -> Tensor:
        """The same, for code that reads a stock layer's weight (T5 asks for its dtype): made when it is read."""
        return self.dense_weight()

    def learning_rate_multipliers(self) -> dict[str, float]:
        """For Adam, by parameter: I / (I_k times the number of factors) (arXiv 2406.06248, section 3)."""
        columns = self.a_shape[1] * self.b_shape[1]
        return {"a": columns / self.a_shape[1] / 2, "b": columns / self.b_shape[1] / 2}

    @property
    def compression(self) -> float:
        """Parameters of the factors over those of the dense weight."""
        held = sum(p.numel() for p in (self.a, self.b, self.scales) if p is not None)
        return held / (self.a_shape[0] * self.b_shape[0] * self.a_shape[1] * self.b_shape[1])

    def extra_repr(self) -> str:
        """Shapes and compression."""
        return f"{self.config.rank} x {self.a_shape} ⊗ {self.b_shape}, {self.compression:.1%} of the dense weight"


class KroneckerLinear(KroneckerLayer):
    """A linear layer ``x @ (Σ_r s_r A_r ⊗ B_r).T + bias``.

    Its state is ``a``, ``b``, ``scales`` (when asked for) and ``bias``, stored as they stand.

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
        device: Any = None,
    ):
        super().__init__(out_features, in_features, config, dtype, device)
        self.in_features, self.out_features = in_features, out_features
        made = torch.zeros(out_features, dtype=self.a.dtype, device=self.a.device) if bias else None
        self.register_parameter("bias", None if made is None else nn.Parameter(made))
        self.conv1d = False  # what `to_linear` makes
        self.original: nn.Module | None = None
        self.share = 1.0

    @classmethod
    def like(cls, linear: nn.Module, config: KroneckerConfig) -> Self:
        """An empty layer of a dense one's sizes, dtype and device; its bias copied."""
        out_features, in_features = dense(linear).shape
        bias = getattr(linear, "bias", None)
        weight = linear.weight
        assert isinstance(weight, Tensor)
        made = cls(in_features, out_features, config, bias=bias is not None, dtype=weight.dtype, device="meta")
        made.to_empty(device=weight.device)
        made.conv1d = isinstance(linear, Conv1D)
        if bias is not None and made.bias is not None and not bias.is_meta:
            made.bias.data.copy_(bias.data)
        return made.train(linear.training)

    @classmethod
    def from_linear(cls, linear: nn.Module, config: KroneckerConfig, moments: init.Moments | None = None) -> Self:
        """A compressed `nn.Linear` or transformers' `Conv1D`, started as the config says.

        Args:
            linear: Left as it is.
            config: Shapes, terms and start.
            moments: What the layer sees, for the inits that need it; with them a bias is corrected.

        Raises:
            ValueError: No moments where the init needs them; a weight that is zero or not finite.

        >>> config = KroneckerConfig(b_shape=(2, 1), init="van_loan")
        >>> KroneckerLinear.from_linear(nn.Linear(4, 6), config).a.shape
        torch.Size([1, 3, 4])
        """
        made = cls.like(linear, config)
        factors = start(dense(linear), made.b_shape, config, moments, centred=made.bias is not None)
        made.set_factors_(factors)
        if moments is not None and made.bias is not None:
            made.bias.data.copy_(init.correct_bias(moments, factors.weight()))
        return made

    @torch.no_grad()
    def to_linear(self) -> nn.Module:
        """The dense layer of the same kind (`nn.Linear` or `Conv1D`) with the same function."""
        weight = self.dense_weight()
        if self.conv1d:
            made: nn.Module = Conv1D(self.out_features, self.in_features)
            made.weight = nn.Parameter(weight.T.contiguous())
        else:
            made = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
            made.weight = nn.Parameter(weight)
        if self.bias is not None:
            made.bias = nn.Parameter(self.bias.detach().clone())
        return made.train(self.training)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if self.original is not None:
            self.original._apply(fn)
        return super()._apply(fn, recurse)

    def fade_in_(self, original: nn.Module | None, share: float = 0.0) -> None:
        """Run (1 - share) of the original layer and share of the factors; None ends it."""
        if original is not None:
            original.requires_grad_(False)
        object.__setattr__(self, "original", original)  # not a child: it is not saved
        self.share = share if original is not None else 1.0

    def forward(self, x: Tensor) -> Tensor:
        """(*B, in_features) to (*B, out_features)."""
        if self.original is None:
            return kron_linear(x, self.a, self.b, self.bias, self.scales)
        kept = self.original(x)
        if self.share == 0.0:
            return kept
        return torch.lerp(kept, kron_linear(x, self.a, self.b, self.bias, self.scales), self.share)

    def extra_repr(self) -> str:
        """Sizes, shapes and compression."""
        bias = "" if self.bias is not None else ", no bias"
        return f"{self.in_features} to {self.out_features}, {super().extra_repr()}{bias}"


def dense(linear: nn.Module) -> Tensor:
    """The weight of an `nn.Linear` or `Conv1D` as (O, I)."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight.detach().T if isinstance(linear, Conv1D) else weight.detach()


def bias_of(linear: nn.Module) -> Tensor | None:
    """The bias of an `nn.Linear` or `Conv1D`."""
    bias = getattr(linear, "bias", None)
    return bias.detach() if isinstance(bias, Tensor) else None


def start(
    weight: Tensor,
    b_shape: tuple[int, int],
    config: KroneckerConfig,
    moments: init.Moments | None,
    *,
    centred: bool = False,
    alone: bool = False,
) -> init.Factors:
    """The factors that a config's ``init`` gives a weight.

    A sequential or activation-aware fit of one layer starts from pruning and, for more terms, from Van Loan; where
    there is no fit of that kind (``alone``: embeddings, experts, tied weights) it is Van Loan's.
    """
    weight, name = weight.contiguous(), config.init
    if alone and name in NEEDS_CALIBRATION:
        name = "van_loan"
    if name == "random":
        return init.random(tuple(weight.shape), b_shape, config.rank, dtype=weight.dtype)  # pyrefly: ignore
    if name.startswith("van_loan") or (name != "prune" and config.rank > 1):
        factors = init.van_loan(weight, b_shape, config.rank, normalize=name == "van_loan_normalized")
    else:
        factors = init.prune(weight, b_shape, keep=config.keep)
        if config.rank > 1:  # what pruning leaves, in further terms
            rest = init.van_loan(weight - factors.weight(), b_shape, config.rank - 1)
            a, b = torch.cat([factors.a, rest.a]), torch.cat([factors.b, rest.b])
            factors = init.Factors(a, b, init.relative_error(weight, a, b))
    if name not in NEEDS_CALIBRATION:
        return factors
    if moments is None:
        raise ValueError(f"kronecker: init {config.init!r} looks at a layer's inputs, needed calibration data")
    return init.als(moments.centred() if centred else moments, factors, rounds=config.rounds)
