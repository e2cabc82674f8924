"""Stacks of a mixture's experts as transformers holds them, and `KroneckerExperts`: each matrix as a Kronecker sum.

Letters: E experts; H the block's width; I hidden neurons of each; N tokens, k experts of each.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from .. import init
from .._eager import build, scaled
from ..config import KroneckerConfig
from ..functional import kron_linear
from .weights import StandsFor, start

GROUPED = 8  # what sizes of experts are multiples of: transformers multiplies all of a stack in one grouped product


@dataclass(frozen=True)
class ExpertsLayout:
    """How a stack of experts holds its weights, as transformers 5 says on the module.

    Elsewhere they are in canonical form: matrices (E, out, in), the gate's rows before those that it gates, (2 I, H);
    experts without a gate have (I, H).
    """

    up: str = "gate_up_proj"  # the matrices that read the block's width
    rows: str = "halves"  # where the rows of a neuron are in them: halves, interleaved or plain
    transposed: bool = False  # (E, in, out)
    biased: bool = False

    @property
    def matrices(self) -> tuple[str, str]:
        """Names of the parameters that are matrices: those that write hidden neurons, those that read them."""
        return self.up, "down_proj"

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the biases, in the same order."""
        return (f"{self.up}_bias", "down_proj_bias") if self.biased else ()

    @property
    def neuron_dims(self) -> dict[str, int]:
        """Along which dimension the parameters have hidden neurons, those that have, as the stack holds them."""
        up, down = (2, 1) if self.transposed else (1, 2)
        return {self.up: up, "down_proj": down} | ({f"{self.up}_bias": 1} if self.biased else {})

    def neurons(self, shape: torch.Size) -> int:
        """How many hidden neurons each expert has, by the shape of ``down_proj``."""
        return shape[self.neuron_dims["down_proj"]]

    @property
    def canonical_rows(self) -> str:
        """Where a neuron's rows are in canonical form: halves or plain."""
        return "plain" if self.rows == "plain" else "halves"

    def canonical(self, name: str, tensor: Tensor) -> Tensor:
        """A stack's parameter in canonical form."""
        if self.transposed and name in self.matrices:
            tensor = tensor.mT
        if self.rows == "interleaved" and name.startswith(self.up):
            tensor = torch.cat([tensor[:, ::2], tensor[:, 1::2]], 1)
        return tensor.contiguous()

    def stock(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter as the stack holds it, from the canonical form."""
        if self.rows == "interleaved" and name.startswith(self.up):
            tensor = torch.stack(tensor.chunk(2, dim=1), 2).flatten(1, 2)
        return (tensor.mT if self.transposed and name in self.matrices else tensor).contiguous()


def experts_layout(module: nn.Module) -> ExpertsLayout | None:
    """How a module holds its experts; None where it is no stack of experts, or one that nothing here is for."""
    gated, concatenated = getattr(module, "has_gate", True), getattr(module, "is_concatenated", True)
    layout = ExpertsLayout(
        "gate_up_proj" if gated else "up_proj",
        ("halves" if concatenated else "interleaved") if gated else "plain",
        transposed=getattr(module, "is_transposed", False),
        biased=getattr(module, "has_bias", False),
    )
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) != {*layout.matrices, *layout.biases} or getattr(module, "has_post_expert_norm", False):
        return None
    up, down = (parameters[n].shape for n in layout.matrices)
    if len(up) != 3 or len(down) != 3 or not (hasattr(module, "_apply_gate") or hasattr(module, "act_fn")):
        return None
    up, down = ((e, b, a) if layout.transposed else (e, a, b) for e, a, b in (up, down))
    return layout if up == (down[0], (2 if gated else 1) * down[2], down[1]) else None


def is_experts(module: nn.Module) -> bool:
    """Whether it is a stack of experts as transformers 5 holds them."""
    return experts_layout(module) is not None


def layout_of(module: nn.Module) -> ExpertsLayout:
    """That of a stack of experts."""
    layout = experts_layout(module)
    assert layout is not None
    return layout


def canonical_parameters(experts: nn.Module) -> dict[str, Tensor]:
    """A stack's parameters in canonical form."""
    layout = layout_of(experts)
    return {n: layout.canonical(n, p.detach()) for n, p in experts.named_parameters(recurse=False)}


def between(experts: nn.Module, layout: ExpertsLayout, said: Tensor) -> Tensor:
    """What each of them does between its matrices: (N, 2 I) in canonical form, or (N, I), to (N, I)."""
    act_fn: Any = getattr(experts, "act_fn", None)
    if layout.rows == "plain":
        return act_fn(said)
    first, second = said.chunk(2, dim=-1)
    if (gate := getattr(experts, "_apply_gate", None)) is None:  # transformers' own: some families do it in another way
        return act_fn(first) * second
    return gate(torch.stack([first, second], -1).flatten(-2) if layout.rows == "interleaved" else said)


class KroneckerExperts(StandsFor):
    """Experts with compressed matrices; routing is the model's own.

    Parameters: ``gate_up_a`` (E or 1, r, O1, I1), ``gate_up_b`` (E, r, O2, I2), ``down_a``, ``down_b`` (``up_a`` and
    ``up_b`` where nothing gates) and, when asked for, ``gate_up_scales``, ``down_scales`` (E, r); biases as they were.
    One A for all experts with ``share_a``.

    Args:
        stock: The stack that it stands for, whose matrices it does not keep and whose biases it copies.
        config: For the matrices that read the block's width; those that write it have the opposite shapes.

    Raises:
        ValueError: It is no stack of experts, or shapes do not divide.
    """

    stock: nn.Module

    def __init__(self, stock: nn.Module, config: KroneckerConfig):
        super().__init__()
        if (layout := experts_layout(stock)) is None:
            raise ValueError(f"KroneckerExperts: a {type(stock).__name__} came, needed a stack of experts")
        parameters = dict(stock.named_parameters(recurse=False))
        self.config, self.layout = config, layout
        self.stands_for = layout.matrices
        self.num_experts = len(parameters["down_proj"])
        self.empty_shape = (self.num_experts, 2, 0)  # transformers takes stacks apart when it saves them
        place: dict[str, Any] = {"dtype": parameters["down_proj"].dtype, "device": parameters["down_proj"].device}
        self.b_shapes: dict[str, tuple[int, int]] = {}
        meta = {n: torch.empty_like(p, device="meta") for n, p in parameters.items()}
        for name, own in self._configs().items():
            a, b = own.shapes(*layout.canonical(name, meta[name]).shape[1:], operation="KroneckerExperts")
            self.b_shapes[name] = b
            count, short = 1 if config.share_a else self.num_experts, _short(name)
            self.register_parameter(f"{short}_a", nn.Parameter(torch.zeros(count, own.rank, *a, **place)))
            self.register_parameter(f"{short}_b", nn.Parameter(torch.zeros(self.num_experts, own.rank, *b, **place)))
            scales = nn.Parameter(torch.ones(self.num_experts, own.rank, **place)) if config.scales else None
            self.register_parameter(f"{short}_scales", scales)
        for name in layout.biases:
            self.register_parameter(name, nn.Parameter(parameters[name].detach().clone()))
        shell = copy.copy(stock)
        shell._parameters = {n: nn.Parameter(p) for n, p in meta.items()}
        object.__setattr__(self, "stock", shell)  # not a child: what `to_experts` fills, and what gates
        self.train(stock.training)

    def _configs(self) -> dict[str, KroneckerConfig]:
        return dict(zip(self.layout.matrices, (self.config, self.config.opposite()), strict=True))

    def _factors(self, name: str, expert: int) -> tuple[Tensor, Tensor, Tensor | None]:
        a, b, scales = (getattr(self, f"{_short(name)}_{part}") for part in ("a", "b", "scales"))
        return a[expert if len(a) > 1 else 0], b[expert], None if scales is None else scales[expert]

    @torch.no_grad()
    def set_factors_(self, name: str, a: Tensor, b: Tensor, expert: int | slice = slice(None)) -> None:
        """Take these factors of a matrix, of all experts (A (E or 1, r, O1, I1), B (E, r, O2, I2)) or of one."""
        getattr(self, f"{_short(name)}_a").data[expert] = a
        getattr(self, f"{_short(name)}_b").data[expert] = b

    @classmethod
    @torch.no_grad()
    def from_experts(cls, experts: nn.Module, config: KroneckerConfig) -> Self:
        """A compressed stack, started from its weights: by Van Loan where the config asks for calibration, too.

        With ``share_a`` the experts' matrices are one tall matrix: its A is shared, and each expert has its own B.
        """
        layer, weights = cls(experts, config), canonical_parameters(experts)
        for name, part in layer._configs().items():
            weight, (o2, i2) = weights[name], layer.b_shapes[name]
            if config.share_a:
                count, o, i = weight.shape
                tall = weight.view(count, o // o2, o2, i).transpose(0, 1).reshape(o * count, i)
                factors = init.van_loan(tall, (count * o2, i2), part.rank)  # B of all experts, one above the other
                b = factors.b.view(part.rank, count, o2, i2).transpose(0, 1)
                layer.set_factors_(name, factors.a[None], b)
                continue
            pairs = [start(w, (o2, i2), part, None, alone=True) for w in weight]
            layer.set_factors_(name, torch.stack([f.a for f in pairs]), torch.stack([f.b for f in pairs]))
        return layer

    @torch.no_grad()
    def dense_weights(self) -> dict[str, Tensor]:
        """The stock stack's matrices, as it holds them."""
        weights = {}
        for name in self._configs():
            factors = [self._factors(name, e) for e in range(self.num_experts)]
            weights[name] = self.layout.stock(name, torch.stack([build(a, scaled(b, s)) for a, b, s in factors]))
        return weights

    def to_experts(self) -> nn.Module:
        """The stock stack with the same function."""
        stack = copy.copy(self.stock)
        biases = {name: getattr(self, name).detach().clone() for name in self.layout.biases}
        stack._parameters = {name: nn.Parameter(w) for name, w in (self.dense_weights() | biases).items()}
        return stack.train(self.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens (N, H), their experts (N, k) and weights (N, k) to (N, H)."""
        up, down = self.layout.matrices
        biases = {n.removesuffix("_bias"): self.layout.canonical(n, getattr(self, n)) for n in self.layout.biases}
        out = torch.zeros_like(hidden_states)

        def linear(name: str, expert: int, x: Tensor) -> Tensor:
            a, b, scales = self._factors(name, expert)
            return kron_linear(x, a, b, biases[name][expert] if biases else None, scales)

        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if not len(token):
                continue
            hidden = between(self.stock, self.layout, linear(up, expert, hidden_states[token]))
            said = linear(down, expert, hidden) * top_k_weights[token, place, None]
            out.index_add_(0, token, said.to(out.dtype))
        return out

    def extra_repr(self) -> str:
        """Shapes."""
        shapes = ", ".join(f"{n} {list(p.shape)}" for n, p in self.named_parameters(recurse=False))
        return f"{self.num_experts} experts: {shapes}"


def _short(name: str) -> str:
    return name.removesuffix("_proj")
