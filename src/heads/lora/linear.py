"""`LoraLinear`: peft's `lora.Linear` with a leaner forward, and layers that read the same x computed at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .autograd import Adapter, autocast_dtype, run

_MISSES = 2  # after which layers stop sharing
BASE = "__base__"  # peft's name for no adapter in a mixed batch


class LoraLinear(lora.Linear):
    """peft's `lora.Linear` whose forward is `lora_linear`. `accelerate_lora_` makes them of a model's own layers.

    Parameters, state dict, merging, switching, several adapters (active together or one a sample) and every other
    method are peft's. What the forward cannot do is peft's own forward, each time it is asked for: see `declines`.

    Attributes:
        order: ``"auto"`` or ``"factored"``; see `lora_linear`.
        impl: ``"eager"``, ``"fused"`` or ``"auto"``.
        shared: The layers that read the same x, computed when the first is called; None where there are none.
    """

    order: str = "auto"
    impl: str = "auto"
    shared: SharedInput | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Peft's arguments and result."""
        names = kwargs.get("adapter_names")
        rest = {k: v for k, v in kwargs.items() if k != "adapter_names" and v is not None}
        if args or rest or self.disable_adapters or self.merged or declines(self) is not None:
            return super().forward(x, *args, **kwargs)
        if x.dtype != self.get_base_layer().weight.dtype and autocast_dtype(x) is None:
            return super().forward(x, *args, **kwargs)  # and raise as the stock layer does
        if names is not None:
            self._check_forward_args(x, adapter_names=names)
        elif self.shared is not None:
            made = self.shared.take(self, x)
            if made is not None:
                return made
        return compute([self], x, names)[0]


class SharedInput:
    """Layers that read the same x: the first one called computes all, the others find theirs waiting.

    What waits is for one thread, one x and unchanged `_circumstances`. Where some of it is not asked for twice running,
    the layers do not share after all, and each computes its own from then on.
    """

    def __init__(self, layers: Sequence[LoraLinear]):
        self.layers = tuple(layers)
        self.misses = 0
        self._waiting: dict[int, tuple[Tensor, tuple, dict[int, Tensor]]] = {}  # by thread: x, circumstances, outputs

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "misses": self.misses, "_waiting": {}}

    def take(self, layer: LoraLinear, x: Tensor) -> Tensor | None:
        """The layer's output for x, or None where it has to compute its own."""
        thread = 0 if torch.compiler.is_compiling() else threading.get_ident()
        waiting = self._waiting.pop(thread, None)
        if waiting is not None:
            of, then, made = waiting
            if of is x and id(layer) in made and then == self._circumstances(x):
                output = made.pop(id(layer))
                if made:
                    self._waiting[thread] = waiting
                else:
                    self.misses = 0
                return output
            self.misses += 1
        if self.misses >= _MISSES or getattr(layer, "_is_replica", False) or not all(map(_can_share, self.layers)):
            return None
        outputs = compute(self.layers, x)
        made = {id(one): y for one, y in zip(self.layers, outputs, strict=True)}
        output = made.pop(id(layer))
        self._waiting[thread] = (x, self._circumstances(x), made)
        return output

    def _circumstances(self, x: Tensor) -> tuple:
        """What else the outputs depend on: gradients, autocast, adapters, changes in place."""
        active = tuple(tuple(layer.active_adapters) for layer in self.layers)
        if torch.compiler.is_compiling() or x.is_inference():
            return torch.is_grad_enabled(), autocast_dtype(x), active
        versions = [x._version]
        for layer in self.layers:
            versions += [p._version for p in layer.parameters() if not p.is_inference()]
        return torch.is_grad_enabled(), autocast_dtype(x), active, tuple(versions)


def _can_share(layer: LoraLinear) -> bool:
    """Whether a layer may be computed by another's call: nothing of its own happens before its forward."""
    return not (layer._forward_pre_hooks or layer.disable_adapters or layer.merged or declines(layer))


def compute(layers: Sequence[LoraLinear], x: Tensor, names: Sequence[str] | None = None) -> list[Tensor]:
    """Outputs of layers that share x, with their active adapters, or with one named for each sample."""
    bases: list[Any] = [layer.get_base_layer() for layer in layers]
    spans = None if names is None else spans_of(names, x.shape[1:-1].numel())
    adapters, lora_as, lora_bs = [], [], []
    for j, layer in enumerate(layers):
        for name in layer.active_adapters if spans is None else spans:
            if name in layer.lora_A:
                drop = layer.lora_dropout[name]
                p = drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0
                adapters.append(Adapter(j, float(layer.scaling[name]), p, None if spans is None else spans[name]))
                lora_as.append(layer.lora_A[name].weight)
                lora_bs.append(layer.lora_B[name].weight)
    return run(
        x, [base.weight for base in bases], [base.bias for base in bases], lora_as, lora_bs, adapters,
        transposed=isinstance(bases[0], Conv1D), order=layers[0].order, impl=layers[0].impl,
    )  # fmt: skip


def spans_of(names: Sequence[str], each: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """For each adapter its ranges of tokens, where every sample has ``each``; neighbours are one range.

    >>> spans_of(["a", "a", "__base__", "b", "a"], 10)
    {'a': ((0, 20), (40, 50)), 'b': ((30, 40),)}
    """
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for name, run_ in groupby(enumerate(names), key=lambda pair: pair[1]):
        places = [place for place, _ in run_]
        if name != BASE:
            found[name] = (*found.get(name, ()), (places[0] * each, (places[-1] + 1) * each))
    return found


def declines(layer: lora.Linear) -> str | None:
    """Why a layer goes through peft's own forward; None where it goes through ours."""
    base = layer.get_base_layer()
    if type(base) not in (nn.Linear, Conv1D):
        return f"its base layer is a {type(base).__name__}"
    if layer.fan_in_fan_out != isinstance(base, Conv1D):
        return "fan_in_fan_out does not say how its base layer stores its weight"
    parts: list[nn.Module] = [base]
    for name in layer.lora_A:
        if name in layer.lora_variant:
            return f"adapter {name!r} is a {type(layer.lora_variant[name]).__name__}"
        if layer.lora_bias.get(name):
            return f"adapter {name!r} has a bias of its own"
        if type(layer.lora_dropout[name]) not in (nn.Dropout, nn.Identity):
            return f"adapter {name!r} has a {type(layer.lora_dropout[name]).__name__}"
        parts += [layer.lora_A[name], layer.lora_B[name]]
    for part in parts:
        if part is not base and type(part) is not nn.Linear:
            return f"a factor is a {type(part).__name__}"
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return "a hook is on its base layer or on a factor"
        if hasattr(part, "_hf_hook"):
            return "accelerate moves its weights"
        weight: Any = part.weight
        if hasattr(weight, "device_mesh") or hasattr(weight, "ds_id"):
            return "its weights are sharded"
        if not weight.is_floating_point():
            return f"its weights are {weight.dtype}"
    return None
