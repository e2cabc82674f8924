"""`accelerate_lora_` and `restore_lora_`: switch a peft model to the lean forward and back.

Only the class of the layers changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from model_components._report import Report, Table

from ..layers import LeanForward, can_be_lean, lean, lora_layers, route


@dataclass(frozen=True)
class AccelerationReport(Report):
    """The layers that `accelerate_lora_` changed, and why other layers keep peft's own forward.

    Attributes:
        accelerated: Names of the changed layers.
        skipped: For each other layer, by name, the reason why it keeps peft's own forward.
    """

    accelerated: tuple[str, ...]
    skipped: Mapping[str, str]

    def summary(self) -> list[str]:
        """Return the number of accelerated layers."""
        return [f"{len(self.accelerated)} layers accelerated"]

    def table(self) -> Table:
        """Return a table of the number of skipped layers for each reason."""
        rows = [(why, str(n)) for why, n in Counter(self.skipped.values()).items()]
        return Table(("reason to keep peft's own forward", "layers"), rows)


def accelerate_lora_(model: nn.Module) -> AccelerationReport:
    """Give every supported layer of a peft model the lean forward of `LoraLinear`, in place.

    The lean forward computes the same output as peft's in fewer steps and with fewer intermediate
    tensors. Only the class of the layers changes. Parameters, their names, checkpoints, merging and
    hooks stay as in peft, and new adapters can still be added. If the base layer is of another kind
    (for example, quantized) or has hooks, its own forward runs, and the updates are added to its
    output. Unsupported layers, such as DoRA and embeddings, keep peft's forward. The report lists
    these layers with the reasons.

    Args:
        model: A `PeftModel`, or any module with peft's LoRA layers inside.

    Returns:
        The names of the changed layers, and the reasons why other layers were skipped.

    Raises:
        ValueError: The model has no LoRA layers.

    >>> from peft import LoraConfig, get_peft_model
    >>> model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    >>> print(accelerate_lora_(model))
    1 layers accelerated
    """
    layers = lora_layers(model) if isinstance(model, nn.Module) else {}
    if not layers:
        raise ValueError(
            f"accelerate_lora_: {type(model).__name__} has no LoRA layers; expected a model from "
            "peft.get_peft_model or PeftModel.from_pretrained"
        )
    done = []
    skipped = {}
    for name, layer in layers.items():
        kind = type(layer)
        _forget_own_forward(layer)
        if not issubclass(kind, LeanForward):
            if not can_be_lean(kind):
                skipped[name] = f"lora.{kind.__name__}"
                continue
            layer.__class__ = lean(kind)
        if "forward" in vars(layer):
            chosen_path = "its forward was replaced, for example by an accelerate hook"
        else:
            chosen_path = route(layer)
        if isinstance(chosen_path, str):
            # the lean class stays, because each call decides again: a hook may be gone by then
            skipped[name] = chosen_path
        else:
            done.append(name)
    return AccelerationReport(tuple(done), skipped)


def restore_lora_(model: nn.Module) -> int:
    """Undo `accelerate_lora_`: give all layers peft's own forward again.

    Args:
        model: The model that `accelerate_lora_` changed.

    Returns:
        The number of layers that were changed.

    Raises:
        ValueError: A layer was changed again in the meantime, for example sharded by FSDP2 or
            wrapped by a hook. Undo that change first.

    >>> from peft import LoraConfig, get_peft_model
    >>> model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    >>> _ = accelerate_lora_(model)
    >>> restore_lora_(model), restore_lora_(model)
    (1, 0)
    """
    layers: dict[str, LeanForward] = {
        name: m for name, m in model.named_modules() if isinstance(m, LeanForward)
    }
    for name, layer in layers.items():
        _forget_own_forward(layer)
        # FSDP2 replaces the class with a subclass, so LeanForward is no longer a direct base
        if LeanForward not in type(layer).__bases__ or "forward" in vars(layer):
            raise ValueError(
                f"restore_lora_: expected a layer unchanged since accelerate_lora_, got {name}, a "
                f"{type(layer).__name__} whose class or forward was replaced; undo that change "
                "first"
            )
    # change the classes only after all checks, so that no model is left partly restored
    for layer in layers.values():
        layer.__class__ = lean(type(layer))
    return len(layers)


def _forget_own_forward(layer: object) -> None:
    """Delete an instance's ``forward`` if it only repeats the forward of its class.

    Accelerate leaves such an attribute behind when it removes its hooks.
    """
    forward = vars(layer).get("forward")
    if forward is not None and getattr(forward, "__func__", None) is getattr(
        type(layer), "forward", None
    ):
        del vars(layer)["forward"]
