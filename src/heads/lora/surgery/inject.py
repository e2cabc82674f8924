"""`inject_lora_`: add LoRA layers to any module, using peft's own injection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from model_components._report import Report

from ..layers import STOCK, inject_

OPERATION = "inject_lora_"


@dataclass(frozen=True)
class InjectionReport(Report):
    """The layers that `inject_lora_` changed.

    Attributes:
        layers: Names of the changed layers.
        trained: Number of trainable parameters.
        total: Number of all parameters.
    """

    layers: tuple[str, ...]
    trained: int
    total: int

    def summary(self) -> list[str]:
        """Return the numbers of layers and of parameters."""
        return [
            f"LoRA layers: {len(self.layers)}; trainable parameters: {self.trained:,} of "
            f"{self.total:,}"
        ]


def inject_lora_(
    module: nn.Module,
    *,
    r: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    impl: str = "auto",
) -> InjectionReport:
    """Replace a module's linear layers with `LoraLinear`, and freeze everything else.

    The module keeps its class and works with peft's functions: `peft.get_peft_model_state_dict`
    returns only the parameters of the updates, and `peft.set_peft_model_state_dict` loads them.

    Args:
        module: Any module that contains `nn.Linear` or transformers' `Conv1D` layers. For a model
            of transformers, consider `prepare_lora`, which returns a `PeftModel`.
        r: Rank of the updates.
        alpha: Updates are multiplied by ``alpha / r``.
        dropout: Dropout probability on the input of the updates.
        filter_fn: Function ``(module, name) -> bool`` that selects linear layers; default: all.
        impl: ``"auto"`` for the lean forward, or ``"reference"`` for peft's own.

    Returns:
        The names of the changed layers, and the numbers of trainable and of all parameters.

    Raises:
        ValueError: The module contains no layer to replace, is such a layer itself, or already has
            LoRA layers; or an argument is out of range.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> print(inject_lora_(model, r=2, filter_fn=lambda module, name: name == "0"))
    LoRA layers: 1; trainable parameters: 24 of 82
    """
    # a shared layer has several names
    places: dict[int, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        # no subclasses: MultiheadAttention reads the weight of its out_proj without calling it
        if type(child) in STOCK and (filter_fn is None or filter_fn(child, name)):
            places.setdefault(id(child), []).append(name)
    names = [same[0] for same in places.values()]
    if "" in names:
        raise ValueError(
            f"{OPERATION}: expected a module that contains linear layers, got a linear layer; use "
            "LoraLinear.from_linear(module)"
        )
    if not names:
        accepted = "" if filter_fn is None else " that filter_fn accepts"
        raise ValueError(
            f"{OPERATION}: expected at least one nn.Linear or Conv1D{accepted}, got none in "
            f"{type(module).__name__}"
        )
    layers = inject_(OPERATION, module, names, r, alpha, dropout, impl)
    for layer, same in zip(layers, places.values(), strict=True):
        # peft has replaced the layer under its first name only
        for name in same[1:]:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, layer)
    for child in module.modules():
        if isinstance(child, nn.TransformerEncoderLayer):
            # otherwise torch's fast path reads the frozen weights and ignores the updates
            child.activation_relu_or_gelu = 0
    total = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return InjectionReport(tuple(names), trained, total)
