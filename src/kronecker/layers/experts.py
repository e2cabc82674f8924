"""`KroneckerExperts`: a mixture's stack of experts (Mixtral and its kin), each expert's matrices as Kronecker sums."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from .. import init
from .._eager import build, scaled
from ..config import KroneckerConfig
from ..functional import kron_linear
from .weights import StandsFor, start

GROUPED = 8  # what sizes of experts are multiples of: transformers multiplies all of a stack in one grouped product


def is_experts(module: nn.Module) -> bool:
    """Whether it is a stack of gated experts as transformers 5 holds them: (E, 2 I, H) and (E, H, I)."""
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) != {"gate_up_proj", "down_proj"} or not hasattr(module, "act_fn"):
        return False
    up, down = parameters["gate_up_proj"].shape, parameters["down_proj"].shape
    return len(up) == len(down) == 3 and tuple(up[1:]) == (2 * down[2], down[1])


class KroneckerExperts(StandsFor):
    """Gated experts with compressed matrices; routing is the model's own.

    Parameters: ``gate_up_a`` (E or 1, r, O1, I1), ``gate_up_b`` (E, r, O2, I2), ``down_a``, ``down_b`` and, when asked
    for, ``gate_up_scales``, ``down_scales`` (E, r). One A for all experts with ``share_a``.

    Args:
        sizes: (E, 2 I, H) and (E, H, I) by name, ``gate_up_proj`` and ``down_proj``.
        config: For gate_up_proj; down_proj has the opposite shapes.
        act_fn: Between them.
        dtype: Of the parameters.
        device: Of the parameters.

    >>> sizes = {"gate_up_proj": (4, 16, 6), "down_proj": (4, 6, 8)}
    >>> made = KroneckerExperts(sizes, KroneckerConfig(b_shape=(2, 1), share_a=True), nn.SiLU())
    >>> made.gate_up_a.shape, made.gate_up_b.shape
    (torch.Size([1, 1, 8, 6]), torch.Size([4, 1, 2, 1]))
    """

    stands_for = ("gate_up_proj", "down_proj")
    stock: nn.Module

    def __init__(
        self,
        sizes: Mapping[str, tuple[int, int, int]],
        config: KroneckerConfig,
        act_fn: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        super().__init__()
        self.config, self.act_fn, self.sizes = config, act_fn, dict(sizes)
        self.num_experts = sizes["gate_up_proj"][0]
        self.empty_shape = (self.num_experts, 2, 0)  # transformers takes stacks apart when it saves them
        place = {"dtype": dtype or torch.get_default_dtype(), "device": device}
        self.b_shapes: dict[str, tuple[int, int]] = {}
        for name, own in self._configs().items():
            a, b = own.shapes(*sizes[f"{name}_proj"][1:], operation="KroneckerExperts")
            self.b_shapes[name] = b
            count = 1 if config.share_a else self.num_experts
            self.register_parameter(f"{name}_a", nn.Parameter(torch.zeros(count, own.rank, *a, **place)))
            self.register_parameter(f"{name}_b", nn.Parameter(torch.zeros(self.num_experts, own.rank, *b, **place)))
            made = nn.Parameter(torch.ones(self.num_experts, own.rank, **place)) if config.scales else None
            self.register_parameter(f"{name}_scales", made)

    def _configs(self) -> dict[str, KroneckerConfig]:
        return {"gate_up": self.config, "down": self.config.opposite()}

    def _factors(self, name: str, expert: int) -> tuple[Tensor, Tensor, Tensor | None]:
        a, scales = getattr(self, f"{name}_a"), getattr(self, f"{name}_scales")
        b = getattr(self, f"{name}_b")[expert]
        return a[expert if len(a) > 1 else 0], b, None if scales is None else scales[expert]

    @classmethod
    def like(cls, experts: nn.Module, config: KroneckerConfig) -> Self:
        """Empty factors of a dense stack's sizes."""
        weights = dict(experts.named_parameters(recurse=False))
        first = weights["gate_up_proj"]
        act_fn = experts.act_fn
        assert isinstance(act_fn, nn.Module)
        sizes = {name: tuple(w.shape) for name, w in weights.items()}
        layer = cls(sizes, config, act_fn, dtype=first.dtype, device=first.device)  # pyrefly: ignore
        shell = copy.copy(experts)
        shell._parameters = {name: nn.Parameter(w.detach().to("meta")) for name, w in weights.items()}
        object.__setattr__(layer, "stock", shell)  # not a child: only what `to_experts` fills
        return layer.train(experts.training)

    @classmethod
    @torch.no_grad()
    def from_experts(cls, experts: nn.Module, config: KroneckerConfig) -> Self:
        """A compressed stack, started from its weights: by Van Loan where the config asks for calibration, too.

        With ``share_a`` the experts' matrices are one tall matrix: its A is shared, and each expert has its own B.
        """
        layer = cls.like(experts, config)
        for name, part in layer._configs().items():
            weight, (o2, i2) = getattr(experts, f"{name}_proj").detach(), layer.b_shapes[name]
            if config.share_a:
                count, o, i = weight.shape
                tall = weight.view(count, o // o2, o2, i).transpose(0, 1).reshape(o * count, i)
                factors = init.van_loan(tall, (count * o2, i2), part.rank)  # B of all experts, one above the other
                layer._set(name, factors.a[None], factors.b.view(part.rank, count, o2, i2).transpose(0, 1))
                continue
            pairs = [start(w, (o2, i2), part, None, alone=True) for w in weight]
            layer._set(name, torch.stack([f.a for f in pairs]), torch.stack([f.b for f in pairs]))
        return layer

    def _set(self, name: str, a: Tensor, b: Tensor) -> None:
        getattr(self, f"{name}_a").copy_(a)
        getattr(self, f"{name}_b").copy_(b)

    @torch.no_grad()
    def dense_weights(self) -> dict[str, Tensor]:
        """``gate_up_proj`` (E, 2 I, H) and ``down_proj`` (E, H, I)."""
        weights = {}
        for name in self._configs():
            factors = [self._factors(name, e) for e in range(self.num_experts)]
            weights[f"{name}_proj"] = torch.stack([build(a, scaled(b, s)) for a, b, s in factors])
        return weights

    def to_experts(self) -> nn.Module:
        """The stock stack with the same function."""
        stack = copy.copy(self.stock)
        stack._parameters = {name: nn.Parameter(w) for name, w in self.dense_weights().items()}
        return stack.train(self.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens (N, H), their experts (N, k) and weights (N, k) to (N, H)."""
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if not len(token):
                continue
            a, b, scales = self._factors("gate_up", expert)
            gate, up = kron_linear(hidden_states[token], a, b, None, scales).chunk(2, dim=-1)
            a, b, scales = self._factors("down", expert)
            said = kron_linear(self.act_fn(gate) * up, a, b, None, scales) * top_k_weights[token, place, None]
            out.index_add_(0, token, said.to(out.dtype))
        return out

    def extra_repr(self) -> str:
        """Shapes."""
        shapes = ", ".join(f"{n} {list(p.shape)}" for n, p in self.named_parameters(recurse=False))
        return f"{self.num_experts} experts: {shapes}"
