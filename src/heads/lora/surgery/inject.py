"""`inject_lora_`: LoRA for any module, by peft's own injection."""

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
        layers: Their names.
        trained: Numbers that train.
        total: Numbers of the whole module.
    """

    layers: tuple[str, ...]
    trained: int
    total: int

    def summary(self) -> list[str]:
        """Count layers and parameters."""
        return [
            f"{len(self.layers)} layers with LoRA; {self.trained:,} of {self.total:,} numbers train"
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
    """Put `LoraLinear` in the place of a module's linear layers, and freeze everything else.

    The module stays an ordinary one. peft knows it, too: `peft.get_peft_model_state_dict` gives the
    updates alone, and `peft.set_peft_model_state_dict` loads them.

    Args:
        module: Any module with `nn.Linear`, or transformers' `Conv1D`, inside. For a model of
            transformers, `prepare_lora` also gives peft's own model around it.
        r: Rank of the updates.
        alpha: Updates are multiplied by ``alpha / r``.
        dropout: Share of the inputs that updates do not see in training.
        filter_fn: Function of a linear layer and its name that says whether it is changed; default:
            all.
        impl: ``"auto"``, or ``"reference"`` for peft's own forward.

    Returns:
        The layers, and how many numbers train.

    Raises:
        ValueError: No such layer, or a value out of range.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> print(inject_lora_(model, r=2, filter_fn=lambda module, name: name == "0"))
    1 layers with LoRA; 24 of 82 numbers train
    """
    names = [
        name
        for name, child in module.named_modules()
        if type(child) in STOCK and (filter_fn is None or filter_fn(child, name))
    ]
    if "" in names:
        raise ValueError(
            f"{OPERATION}: module is a linear layer itself; expected LoraLinear.from_linear(module)"
        )
    if not names:
        raise ValueError(
            f"{OPERATION}: {type(module).__name__} has no nn.Linear that filter_fn chooses, "
            "expected one or more"
        )
    inject_(OPERATION, module, names, r, alpha, dropout, impl)
    counts = [(p.numel(), p.requires_grad) for p in module.parameters()]
    trained = sum(count for count, trains in counts if trains)
    return InjectionReport(tuple(names), trained, sum(count for count, _ in counts))
