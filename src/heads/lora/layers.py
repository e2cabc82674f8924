"""`LoraLinear`: peft's LoRA layers with a leaner forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as module_state
from transformers.pytorch_utils import Conv1D

from ._eager.autograd import Adapter, Spans, add_adapters, autocast_dtype, linear, run, transforming

BASE = "__base__"  # peft's name for no adapter in a mixed batch
STOCK = (nn.Linear, Conv1D)  # layers whose product we make ourselves
KINDS = ("Linear", "Linear8bitLt", "Linear4bit", "HqqLoraLinear", "TorchaoLoraLinear")
"""peft's layers whose forward is the base layer's plus the adapters': their class can be exchanged
for ours."""

_FEW = 256  # tokens up to which keeping a dropout's mask is cheaper than computing it again
# times the break-even in flops, since a merged weight also has to be written to memory
_MERGE_ABOVE = 2
_PLAIN = (nn.Parameter, Tensor, FakeTensor)


class LeanForward:
    """A forward for peft's LoRA layers: the layer's own product, and updates added to it in place.

    Calls that it does not support go to peft's own forward, see `route`. Everything but the forward
    is peft's: parameters, state dict, merging, switching, several adapters (active together or one
    a sample).
    """

    def forward(self: Any, x: Tensor, *args: object, **kwargs: Any) -> Tensor:
        """Peft's arguments and result."""
        names = kwargs.get("adapter_names") if kwargs else None
        other = args or (
            kwargs and any(v is not None and k != "adapter_names" for k, v in kwargs.items())
        )
        if other or self._disable_adapters or self.merged_adapters:
            # pyrefly: ignore[missing-attribute]: peft's layer stands beside it in the bases
            return super().forward(x, *args, **kwargs)
        spans = None
        if names is not None:
            self._check_forward_args(x, adapter_names=names)
            spans = spans_of(names, x.shape[1:-1].numel())
        chosen_path = route(self, spans)
        if isinstance(chosen_path, str):
            # pyrefly: ignore[missing-attribute]: peft's layer stands beside it in the bases
            return super().forward(x, *args, **kwargs)
        return compute(chosen_path, x)

    def _get_name(self) -> str:
        """In a printed model: peft's name, with a mark."""
        return f"{lean(type(self)).__name__} accelerated"


class LoraLinear(LeanForward, lora.Linear):
    """peft's `lora.Linear` whose forward is `lora_linear`.

    `accelerate_lora_` makes them of a model's own layers.
    """


def can_be_lean(kind: type) -> bool:
    """Return whether a class is peft's own and named in `KINDS`.

    A user's class of the same name is not.
    """
    return kind.__name__ in KINDS and kind.__module__.startswith("peft.tuners.lora")


def lora_layers(model: nn.Module) -> dict[str, lora.LoraLayer]:
    """All of peft's LoRA layers, by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, lora.LoraLayer)
    }


@cache
def lean(kind: type) -> type:
    """Exchange peft's layer class for ours with the lean forward, and ours for peft's."""
    if kind is lora.Linear:
        return LoraLinear
    if LeanForward in kind.__bases__:
        return kind.__bases__[1]
    return type(f"Lean{kind.__name__}", (LeanForward, kind), {"__doc__": LeanForward.__doc__})


class Route(NamedTuple):
    """Parts that a layer's output is computed from in one call."""

    base: nn.Module
    weight: Tensor | None  # None: the base layer's own forward is called
    factors: list[Tensor]
    adapters: list[Adapter]


def route(layer: Any, spans: dict[str, Spans] | None = None) -> Route | str:
    """Return what the lean forward of this call needs, or why peft's own forward must run.

    Args:
        layer: A layer of peft's.
        spans: The rows that each named adapter is for; None: the active adapters, for all rows.

    Evaluated in every call, since adapters, hooks, dtypes and parameters may have changed since the
    last one.
    """
    if _hooks_on_all_modules():
        return "there are hooks on all modules"
    modules = layer._modules
    base = modules["base_layer"]
    active = (layer._active_adapter if spans is None else spans) or ()
    a_of, b_of, drop_of = (modules[n]._modules for n in ("lora_A", "lora_B", "lora_dropout"))
    factors: list[Any] = []
    adapters = []
    for name in (active,) if isinstance(active, str) else active:
        a = a_of.get(name)
        if a is None:
            continue
        b = b_of[name]
        drop = drop_of[name]
        reason = (
            _unsupported_adapter(layer, name, drop)
            or _unsupported_factor(a)
            or _unsupported_factor(b)
        )
        if reason is not None:
            return reason
        factors += [a._parameters["weight"], b._parameters["weight"]]
        p = drop.p if drop.training and type(drop) is nn.Dropout else 0.0
        adapters.append(Adapter(layer.scaling[name], p, None if spans is None else spans[name]))
    if type(base) in STOCK and not _is_touched(base):
        weight = base._parameters.get("weight")
    else:
        weight = None
    return Route(base, weight if _is_plain(weight) else None, factors, adapters)


def _hooks_on_all_modules() -> bool:
    return bool(
        module_state._global_forward_hooks
        or module_state._global_forward_pre_hooks
        or module_state._global_backward_hooks
        or module_state._global_backward_pre_hooks
    )


def _unsupported_adapter(layer: Any, name: str, drop: nn.Module) -> str | None:
    """Return why the lean forward does not support this adapter, or None if it does."""
    if name in layer.lora_variant:
        return f"adapter {name!r} is a {type(layer.lora_variant[name]).__name__}"
    if layer.lora_bias.get(name):
        return f"adapter {name!r} has a bias of its own"
    if (type(drop) is not nn.Dropout and type(drop) is not nn.Identity) or _is_touched(drop):
        return f"adapter {name!r} has a {type(drop).__name__}, or hooks on its dropout"
    return None


def _unsupported_factor(factor: nn.Module) -> str | None:
    """Return why the lean forward does not support this factor, or None if it does."""
    if type(factor) is not nn.Linear:
        return f"a factor is a {type(factor).__name__}"
    if _is_touched(factor):
        return "a factor has hooks, or a forward that was replaced"
    weight = factor._parameters.get("weight")
    if _is_plain(weight):
        return None
    if _is_sharded(weight):
        return "a factor's weight is sharded"
    return f"a factor is a {type(weight)}"


def _is_touched(module: nn.Module) -> bool:
    """Return whether more happens in a module's call than its class's forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def _is_plain(weight: Any) -> bool:
    """Return whether a weight is an ordinary floating tensor, whole on this process.

    ZeRO-3 marks others by ``ds_id``.
    """
    return type(weight) in _PLAIN and weight.is_floating_point() and not hasattr(weight, "ds_id")


def _is_sharded(weight: object) -> bool:
    return hasattr(weight, "device_mesh") or hasattr(weight, "ds_id")


def compute(chosen_path: Route, x: Tensor) -> Tensor:
    """Return a layer's output: by `_Lora` for dropout over many tokens, else by plain products."""
    base, weight, factors, adapters = chosen_path
    flat = x.reshape(-1, x.shape[-1])
    # which raises as a stock layer does
    if weight is None or (weight.dtype != x.dtype and autocast_dtype(x) is None):
        y = base(x)
        return add_adapters(y.reshape(-1, y.shape[-1]), flat, factors, adapters).view(y.shape)
    transposed = type(base) is Conv1D
    bias = base._parameters.get("bias")
    in_transform = transforming()
    drops = not torch.compiler.is_compiling() and any(0 < one.dropout_p < 1 for one in adapters)
    if not in_transform and drops and flat.shape[0] > _FEW:
        y = run(flat, weight, bias, factors, adapters, transposed=transposed)
    elif _merges(flat, weight, factors, adapters):
        y = linear(flat, merged(weight, factors, adapters, transposed), bias, transposed)
    else:
        y = linear(flat, weight, bias, transposed)
        y = add_adapters(y, flat, factors, adapters, in_place=not in_transform)
    return y.view(*x.shape[:-1], y.shape[-1])


def _merges(
    x: Tensor, weight: Tensor, factors: Sequence[Tensor], adapters: Sequence[Adapter]
) -> bool:
    """Return whether ``x (W + s B A)ᵀ`` is cheaper and loses nothing.

    Half precision would round the update away.
    """
    if (
        torch.is_grad_enabled()
        or x.dtype.itemsize < 4
        or x.is_cuda
        or torch.compiler.is_compiling()
        or not adapters
    ):
        return False
    if (
        any(one.dropout_p or one.spans is not None for one in adapters)
        or autocast_dtype(x) is not None
    ):
        return False
    rank = sum(b.shape[1] for b in factors[1::2])
    written = weight.numel() * (rank + len(adapters))
    return x.shape[0] * rank * sum(weight.shape) > _MERGE_ABOVE * written


def merged(
    weight: Tensor, factors: Sequence[Tensor], adapters: Sequence[Adapter], transposed: bool
) -> Tensor:
    """W + Σ s B A."""
    for a, b, one in zip(factors[::2], factors[1::2], adapters, strict=True):
        left, right = (a.T, b.T) if transposed else (b, a)
        weight = torch.addmm(
            weight, left.to(weight.dtype), right.to(weight.dtype), alpha=one.scaling
        )
    return weight


def spans_of(names: Sequence[str], each: int) -> dict[str, Spans]:
    """Each adapter's ranges of tokens, where every sample has ``each`` tokens.

    Adjacent samples make one range.

    >>> spans_of(["a", "a", "__base__", "b", "a"], 10)
    {'a': ((0, 20), (40, 50)), 'b': ((30, 40),)}
    """
    spans: dict[str, Spans] = {}
    for name, run_ in groupby(enumerate(names), key=lambda pair: pair[1]):
        places = [place for place, _ in run_]
        if name != BASE:
            spans[name] = (*spans.get(name, ()), (places[0] * each, (places[-1] + 1) * each))
    return spans
