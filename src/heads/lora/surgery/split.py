"""GPT-2's fused q, k, v projection as three layers, so that each gets an adapter of its own, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PARTS = ("q_proj", "k_proj", "v_proj")
FUSED = "c_attn"


class SplitQKV(nn.Module):
    """A `Conv1D` (I, 3 O) as three: ``q_proj``, ``k_proj`` and ``v_proj``, side by side in its output.

    While no part carries an adapter its state dict is the fused layer's: a merged model saves a stock checkpoint.

    Args:
        fused: GPT-2's ``c_attn``.

    >>> fused = Conv1D(6, 2)
    >>> SplitQKV(fused)(torch.ones(1, 2)).equal(fused(torch.ones(1, 2)))
    True
    """

    def __init__(self, fused: Conv1D):
        super().__init__()
        ins, width = fused.nx, fused.nf // 3
        for j, name in enumerate(PARTS):
            part = Conv1D.__new__(Conv1D)
            nn.Module.__init__(part)
            part.nf, part.nx = width, ins
            columns = slice(j * width, (j + 1) * width)
            frozen = not fused.weight.requires_grad
            part.weight = nn.Parameter(fused.weight.detach()[:, columns].clone(), requires_grad=not frozen)
            part.bias = nn.Parameter(fused.bias.detach()[columns].clone(), requires_grad=not frozen)
            self.add_module(name, part)
        self.register_state_dict_post_hook(_fuse)
        self.register_load_state_dict_pre_hook(_unfuse)

    def forward(self, x: Tensor) -> Tensor:
        """(*B, I) to (*B, 3 O)."""
        return torch.cat([self.get_submodule(name)(x) for name in PARTS], -1)


def _fuse(module: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
    """The parts' entries become the fused layer's."""
    if all(isinstance(module.get_submodule(name), Conv1D) for name in PARTS):
        for which, dim in (("weight", 1), ("bias", 0)):
            names = [f"{prefix}{name}.{which}" for name in PARTS]
            if all(name in state for name in names):
                state[prefix + which] = torch.cat([state.pop(name) for name in names], dim)


def _unfuse(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """A fused layer's entries become the parts'."""
    del module
    for which, dim in (("weight", 1), ("bias", 0)):
        fused = state.pop(prefix + which, None)
        if fused is not None:
            for name, part in zip(PARTS, fused.chunk(3, dim), strict=True):
                state[f"{prefix}{name}.{which}"] = part


def split_fused_qkv_(model: nn.Module) -> list[str]:
    """Replace every fused ``c_attn`` of a GPT-2 by `SplitQKV`, in place; the function computed stays the same.

    Args:
        model: A GPT-2 of transformers.

    Returns:
        Names of the layers that were split.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    >>> split_fused_qkv_(model), join_fused_qkv_(model)
    (['h.0.attn.c_attn'], ['h.0.attn.c_attn'])

    Raises:
        ValueError: There is none: other architectures keep q, k and v apart, or fuse them differently.
    """
    fused = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, Conv1D) and name.rpartition(".")[2] == FUSED and m.nf == 3 * m.nx
    }
    if not fused:
        raise ValueError(
            f"split_fused_qkv_: {type(model).__name__} has no {FUSED} of (I, 3 I); needed GPT-2's fused projection"
        )
    for name, layer in fused.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, SplitQKV(layer))
    return list(fused)


def join_fused_qkv_(model: nn.Module) -> list[str]:
    """Undo `split_fused_qkv_`, for layers whose parts carry no adapters (any more).

    Args:
        model: What `split_fused_qkv_` was given.

    Returns:
        Names of the layers that were joined.

    Raises:
        ValueError: A part carries an adapter: merge it first.
    """
    split_names = [name for name, m in model.named_modules() if isinstance(m, SplitQKV)]
    for name in split_names:
        parts = [part for part in map(model.get_submodule(name).get_submodule, PARTS) if isinstance(part, Conv1D)]
        if len(parts) < len(PARTS):
            raise ValueError(f"join_fused_qkv_: {name} carries an adapter; needed merge_and_unload() before")
        fused = Conv1D.__new__(Conv1D)
        nn.Module.__init__(fused)
        fused.nx, fused.nf = parts[0].nx, sum(part.nf for part in parts)
        for which, dim in (("weight", 1), ("bias", 0)):
            parts_of_weight = [part.get_parameter(which) for part in parts]
            joined = torch.cat([p.detach() for p in parts_of_weight], dim)
            fused.register_parameter(which, nn.Parameter(joined, requires_grad=parts_of_weight[0].requires_grad))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, fused)
    return split_names
