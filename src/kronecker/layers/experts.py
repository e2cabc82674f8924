"""Stacks of experts, as transformers stores them.

Letters: E experts; H the model's width; I hidden neurons per expert; N tokens; k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# numbers of hidden neurons of experts must be multiples of this, since transformers runs a stack as
# one grouped product
GROUPED = 8


@dataclass(frozen=True)
class ExpertsLayout:
    """The layout of the weights of a stack of experts.

    Other modules of this package use the canonical form, in which matrices are (E, out, in). With a
    gate, an expert's first matrix is (2 I, H), with all rows of the gate before the rows that they
    gate. Without a gate, it is (I, H).
    """

    up: str = "gate_up_proj"  # the name of the experts' first matrices
    rows: str = "halves"  # the order of rows in these: "halves", "interleaved" or "plain"
    transposed: bool = False  # whether matrices are stored as (E, in, out)
    biased: bool = False

    @property
    def matrices(self) -> tuple[str, str]:
        """The names of the matrices: the first computes hidden neurons, the second the output."""
        return self.up, "down_proj"

    @property
    def biases(self) -> tuple[str, ...]:
        """The names of the biases, in the order of `matrices`; empty if there are none."""
        if self.biased:
            return (f"{self.up}_bias", "down_proj_bias")
        return ()

    @property
    def neuron_dims(self) -> dict[str, int]:
        """The dimension of hidden neurons in each parameter that has one, by name.

        Dimensions are those of the stack's layout, not of the canonical form.
        """
        up, down = (2, 1) if self.transposed else (1, 2)
        return {self.up: up, "down_proj": down} | ({f"{self.up}_bias": 1} if self.biased else {})

    def neurons(self, shape: torch.Size) -> int:
        """Return how many hidden neurons each expert has, given the shape of ``down_proj``."""
        return shape[self.neuron_dims["down_proj"]]

    @property
    def canonical_rows(self) -> str:
        """The order of the first matrices' rows in canonical form: ``"halves"`` or ``"plain"``."""
        if self.rows == "plain":
            return "plain"
        return "halves"

    def canonical(self, name: str, tensor: Tensor) -> Tensor:
        """Return a stack's parameter in canonical form."""
        if self.transposed and name in self.matrices:
            tensor = tensor.mT
        # GPT-OSS alternates rows of gate and up; startswith includes the bias, which has this order
        if self.rows == "interleaved" and name.startswith(self.up):
            tensor = torch.cat([tensor[:, ::2], tensor[:, 1::2]], 1)
        return tensor.contiguous()

    def stock(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter in the stack's layout, given its canonical form."""
        if self.rows == "interleaved" and name.startswith(self.up):
            tensor = torch.stack(tensor.chunk(2, dim=1), 2).flatten(1, 2)
        return (tensor.mT if self.transposed and name in self.matrices else tensor).contiguous()


def experts_layout(module: nn.Module) -> ExpertsLayout | None:
    """Return the layout of a stack of experts, from attributes that transformers 5 sets.

    Return None if the module is not a stack of experts, or has an unsupported layout.
    """
    gated = getattr(module, "has_gate", True)
    concatenated = getattr(module, "is_concatenated", True)
    layout = ExpertsLayout(
        "gate_up_proj" if gated else "up_proj",
        ("halves" if concatenated else "interleaved") if gated else "plain",
        transposed=getattr(module, "is_transposed", False),
        biased=getattr(module, "has_bias", False),
    )
    # exactly these parameters, since an unknown parameter might change the function
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) != {*layout.matrices, *layout.biases} or getattr(
        module, "has_post_expert_norm", False
    ):
        return None
    up, down = map(parameters.__getitem__, layout.matrices)
    if not hasattr(module, "_apply_gate") and not hasattr(module, "act_fn"):
        return None
    if up.dim() != 3 or down.dim() != 3:
        return None
    if layout.transposed:
        up = up.mT
        down = down.mT
    experts, width, neurons = down.shape
    if up.shape == (experts, (2 if gated else 1) * neurons, width):
        return layout
    return None


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is a stack of experts with a supported layout."""
    return experts_layout(module) is not None


def layout_of(module: nn.Module) -> ExpertsLayout:
    """Return the layout of a module that is known to be a stack of experts."""
    layout = experts_layout(module)
    assert layout is not None
    return layout


def canonical_parameters(experts: nn.Module) -> dict[str, Tensor]:
    """Return a stack's parameters in canonical form."""
    layout = layout_of(experts)
    return {n: layout.canonical(n, p.detach()) for n, p in experts.named_parameters(recurse=False)}


def between(experts: nn.Module, layout: ExpertsLayout, said: Tensor) -> Tensor:
    """Compute the hidden neurons of an expert, (N, I), from the outputs of its first matrix.

    The outputs ``said`` are (N, 2 I) in canonical form, or (N, I) without a gate.
    """
    act_fn: Any = getattr(experts, "act_fn", None)
    if layout.rows == "plain":
        return act_fn(said)
    first, second = said.chunk(2, dim=-1)
    # the module's own gate function if it has one, since some families compute the gate differently
    if (gate := getattr(experts, "_apply_gate", None)) is None:
        return act_fn(first) * second
    return gate(
        torch.stack([first, second], -1).flatten(-2) if layout.rows == "interleaved" else said
    )
