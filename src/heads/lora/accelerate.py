"""`accelerate_lora_` and `restore_lora_`: the class of a loaded peft model's layers, and nothing else, is exchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peft.tuners import lora
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from model_components._report import Report, Table

from .functional import IMPLS
from .linear import LoraLinear, SharedInput, declines

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Names of layers that read the same x, in the order in which most models call them."""


@dataclass(frozen=True)
class AccelerationReport(Report):
    """What `accelerate_lora_` touched, what goes through peft's own forward and why, and who shares an input."""

    accelerated: tuple[str, ...]
    skipped: Mapping[str, str]
    shared: tuple[tuple[str, ...], ...]

    def summary(self) -> list[str]:
        """How many layers."""
        return [f"{len(self.accelerated)} layers accelerated, {len(self.shared)} groups share their input"]

    def table(self) -> Table:
        """Why others go through peft's own forward, and how many."""
        rows = [(why, str(n)) for why, n in Counter(self.skipped.values()).items()]
        return Table(("peft's own forward, because", "layers"), rows)


def accelerate_lora_(
    model: nn.Module, *, share_inputs: bool = True, order: str = "auto", impl: str = "auto"
) -> AccelerationReport:
    """Give every supported layer of a peft model the forward of `lora_linear`, in place.

    Only the class changes: parameters, their names, checkpoints, merging and hooks stay peft's, and new adapters can
    still be added. Layers of other kinds (quantised, DoRA, embeddings) keep peft's forward, and the report says why.

    Args:
        model: A `PeftModel`, or any module with peft's LoRA layers inside.
        share_inputs: Compute q, k and v (also gate and up) in one call where they read the same x. Layers that turn out
            not to, as in cross-attention, stop sharing within their first two forwards.
        order: ``"auto"`` or ``"factored"``; see `lora_linear`.
        impl: ``"auto"``, ``"eager"`` or ``"fused"``.

    Raises:
        ValueError: A model without LoRA layers, an unknown option.

    >>> from peft import LoraConfig, get_peft_model
    >>> model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    >>> print(accelerate_lora_(model))
    1 layers accelerated, 0 groups share their input
    """
    if impl not in IMPLS or impl == "reference":
        raise ValueError(f"accelerate_lora_: impl is {impl!r}, needed auto, eager or fused")
    if order not in ("auto", "factored"):
        raise ValueError(f"accelerate_lora_: order is {order!r}, needed auto or factored")
    layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    if not layers:
        raise ValueError(
            f"accelerate_lora_: {type(model).__name__} has no LoRA layers; needed a model of peft.get_peft_model or "
            "PeftModel.from_pretrained"
        )
    done, skipped = [], {}
    for name, layer in layers.items():
        if type(layer) not in (lora.Linear, LoraLinear):
            skipped[name] = f"lora.{type(layer).__name__}"
            continue
        reason = declines(layer)
        if reason is not None:
            skipped[name] = reason
            continue
        layer.__class__ = LoraLinear
        layer.order, layer.impl, layer.shared = order, impl, None
        done.append(name)
    return AccelerationReport(tuple(done), skipped, tuple(_share(model, set(done))) if share_inputs else ())


def _share(model: nn.Module, names: set[str]) -> list[tuple[str, ...]]:
    """Tie together the layers whose names say that they read the same x."""
    groups = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in names):
        for siblings in SIBLINGS:
            found = [f"{parent}.{s}" if parent else s for s in siblings]
            found = [name for name in found if name in names]
            layers: list[Any] = [model.get_submodule(name) for name in found]
            if len(found) > 1 and len({(layer.in_features, type(layer.get_base_layer())) for layer in layers}) == 1:
                shared = SharedInput(layers)
                for layer in layers:
                    layer.shared = shared
                groups.append(tuple(found))
    return groups


def restore_lora_(model: nn.Module) -> int:
    """Undo `accelerate_lora_`: peft's own forward everywhere. Returns how many layers were changed.

    >>> from peft import LoraConfig, get_peft_model
    >>> model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    >>> _ = accelerate_lora_(model)
    >>> restore_lora_(model), restore_lora_(model)
    (1, 0)
    """
    layers: list[Any] = [m for m in model.modules() if type(m) is LoraLinear]
    for layer in layers:
        layer.__class__ = lora.Linear
        for name in ("order", "impl", "shared"):
            layer.__dict__.pop(name, None)
    return len(layers)
