"""`LoraLinear` and `LeanForward`: a leaner forward for peft's LoRA layers.

The lean forward takes fewer steps, and creates fewer intermediate tensors, than peft's own forward.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners import lora
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as module_state
from transformers.pytorch_utils import Conv1D

from model_components._autograd import autocast_dtype, transforming
from model_components._checks import Range, Whole, check_choice, check_value

from ._eager.autograd import Adapter, add_adapters, linear, run
from .functional import IMPLS

STOCK = (nn.Linear, Conv1D)  # base layers whose output the lean forward computes itself
KINDS = ("Linear", "Linear8bitLt", "Linear4bit", "HqqLoraLinear", "TorchaoLoraLinear")
"""Names of peft's classes that have a lean version.

Layers of these classes return the output of the base layer plus the updates of the adapters.
"""

# devices on which backward recomputes dropout masks. Other devices use torch's own dropout, which
# keeps one byte per element but launches one kernel instead of dozens
_DROPS_AGAIN = ("cpu",)
_FEW = 256  # up to this many tokens, keeping a dropout mask is cheaper than recomputing it
# merging must save this many times the flops that it costs, because it also writes a weight
_MERGE_ABOVE = 2
# the exact classes of ordinary weights; the weights of quantizers and of FSDP2 are subclasses.
# functional_call replaces parameters with Tensors, and lora_report replaces them with FakeTensors
_PLAIN = (nn.Parameter, Tensor, FakeTensor)


class LeanForward:
    """A mixin that gives peft's LoRA layers a forward with fewer steps and intermediate tensors.

    This forward adds the updates to the output in place where possible. Calls that it does not
    support run peft's own forward; see `route`. Everything else is inherited from peft: parameters,
    state dict, merging, switching between adapters, several active adapters, and one adapter per
    sample.

    Attributes:
        impl: ``"auto"`` for the lean forward, or ``"reference"`` for peft's own.
    """

    impls: ClassVar[tuple[str, ...]] = IMPLS
    impl = "auto"

    def forward(self: Any, x: Tensor, *args: object, **kwargs: Any) -> Tensor:
        """Return the layer's output; the arguments are the same as for peft's forward."""
        if self.impl not in IMPLS:
            check_choice(type(self).__name__, "impl", self.impl, IMPLS)
        # for example adapter_names, which selects an adapter for each sample
        other = args or any(v is not None for v in kwargs.values())
        peft_runs = self.impl == "reference" or self._disable_adapters or self.merged_adapters
        if other or peft_runs:
            # pyrefly: ignore[missing-attribute]: subclasses also inherit from a layer of peft's
            return super().forward(x, *args, **kwargs)
        chosen_path = route(self)
        if isinstance(chosen_path, str):
            # pyrefly: ignore[missing-attribute]: subclasses also inherit from a layer of peft's
            return super().forward(x, *args, **kwargs)
        return compute(chosen_path, x)

    def _get_name(self) -> str:
        """Return the name for printing: peft's class name, then "accelerated"."""
        return f"{lean(type(self)).__name__} accelerated"


class LoraLinear(LeanForward, lora.Linear):
    """A frozen linear layer with a trainable low-rank update.

    It is peft's LoRA layer with a leaner forward. The output is
    ``x Wᵀ + b + (alpha / r) (drop(x) Aᵀ) Bᵀ``, where drop is dropout. To wrap one layer, call
    `from_linear`. `inject_lora_` replaces the linear layers of any module, and `accelerate_lora_`
    converts the layers of an existing peft model.

    >>> layer = LoraLinear.from_linear(nn.Linear(4, 3), r=2)
    >>> [name for name, p in layer.named_parameters() if p.requires_grad]
    ['lora_A.default.weight', 'lora_B.default.weight']
    """

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        *,
        r: int = 8,
        alpha: float = 16,
        dropout: float = 0.0,
        impl: str = "auto",
    ) -> LoraLinear:
        """Wrap an `nn.Linear` or transformers' `Conv1D`.

        The update starts at zero, so the output is unchanged.

        Args:
            linear: The layer to wrap. It becomes the base layer and is frozen.
            r: Rank of the update, at most the smaller dimension of the weight.
            alpha: The update is multiplied by ``alpha / r``.
            dropout: Dropout probability on the input of the update.
            impl: ``"auto"`` for the lean forward, or ``"reference"`` for peft's own.

        Raises:
            ValueError: ``linear`` is neither an `nn.Linear` nor a `Conv1D`, or an argument is out
                of range.

        >>> linear, x = nn.Linear(4, 3), torch.randn(5, 4)
        >>> torch.equal(LoraLinear.from_linear(linear, r=2)(x), linear(x))
        True
        """
        holder = nn.ModuleDict({"linear": linear})
        layers = inject_("LoraLinear.from_linear", holder, ["linear"], r, alpha, dropout, impl)
        return layers[0]

    @torch.no_grad()
    def to_linear(self) -> nn.Module:
        """Return an ordinary linear layer with the update added to its weight.

        If the adapters are disabled, the update is not added.

        >>> layer, x = LoraLinear.from_linear(nn.Linear(4, 3), r=2), torch.randn(5, 4)
        >>> torch.nn.init.normal_(layer.lora_B["default"].weight).shape
        torch.Size([3, 2])
        >>> torch.allclose(layer.to_linear()(x), layer(x), atol=1e-6)
        True
        """
        twin: Any = copy.deepcopy(self)
        if not twin.disable_adapters:
            twin.merge()
        return twin.get_base_layer().requires_grad_(True)

    def reset_parameters(self) -> None:
        """Reinitialize A and set B to zero, for all adapters."""
        for name in self.lora_A:
            self.reset_lora_parameters(name, True)


def inject_(
    operation: str,
    module: nn.Module,
    names: Sequence[str],
    r: int,
    alpha: float,
    dropout: float,
    impl: str,
) -> list[LoraLinear]:
    """Replace the named linear layers of a module with `LoraLinear`, using peft's injection."""
    check_value(operation, "r", r, Whole)
    check_value(operation, "alpha", alpha, Annotated[float, Range(above=0)])
    check_value(operation, "dropout", dropout, Annotated[float, Range(least=0, below=1)])
    check_choice(operation, "impl", impl, ("auto", "reference"))
    if lora_layers(module):
        raise ValueError(
            f"{operation}: expected a module without LoRA layers, got one that has some already"
        )
    training = {name: module.get_submodule(name).training for name in names}
    for name in names:
        linear: Any = module.get_submodule(name)
        if type(linear) not in STOCK:
            raise ValueError(
                f"{operation}: {name} is a {type(linear).__name__}, expected an nn.Linear or a "
                "transformers Conv1D"
            )
        if r > min(linear.weight.shape):
            sizes = " x ".join(map(str, linear.weight.shape))
            raise ValueError(
                f"{operation}: r is {r}, but the weight of {name} is {sizes}; expected at most "
                f"{min(linear.weight.shape)}"
            )
    # a regular expression, because peft matches entries of a list by the end of the name
    targets = "|".join(re.escape(name) for name in names)
    # pyrefly: ignore[bad-argument-type]: peft accepts fractions, although its type says int
    config = LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets)
    with quiet():
        inject_adapter_in_model(config, module)
    layers: list[LoraLinear] = []
    for name in names:
        layer: Any = module.get_submodule(name)
        layer.__class__ = LoraLinear
        layer.impl = impl
        # peft creates dropout in training mode, so it would be active in evaluation
        layer.train(training[name])
        for factor in (layer.lora_A, layer.lora_B):
            # float32, as in peft's own models: half precision would round small steps away
            if layer.get_base_layer().weight.dtype in (torch.float16, torch.bfloat16):
                factor.float()
        layers.append(layer)
    return layers


@contextmanager
def quiet() -> Iterator[None]:
    """Silence two harmless warnings.

    The first is about ``fan_in_fan_out``, which peft corrects by itself. The second is about the
    deprecated name ``is_gradient_checkpointing``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.* is deprecated")
        yield


def can_be_lean(kind: type) -> bool:
    """Return whether a class is defined by peft and has a name in `KINDS`.

    A class of the same name that is defined elsewhere does not count.
    """
    return kind.__name__ in KINDS and kind.__module__.startswith("peft.tuners.lora")


def lora_layers(model: nn.Module) -> dict[str, lora.LoraLayer]:
    """Return a model's LoRA layers (the instances of peft's ``LoraLayer``), by name."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, lora.LoraLayer):
            layers[name] = module
    return layers


@cache
def lean(kind: type) -> type:
    """Return the lean version of one of peft's layer classes.

    For a lean class, return peft's class.
    """
    if kind is lora.Linear:
        return LoraLinear
    if LeanForward in kind.__bases__:
        return kind.__bases__[1]
    return type(f"Lean{kind.__name__}", (LeanForward, kind), {"__doc__": LeanForward.__doc__})


class Route(NamedTuple):
    """The values that the lean forward needs to compute a layer's output in one call."""

    base: nn.Module
    weight: Tensor | None  # None: the base layer's own forward is called
    factors: list[Tensor]
    adapters: list[Adapter]


def route(layer: Any) -> Route | str:
    """Return a layer's `Route`, or the reason why peft's own forward must run.

    This function runs in every call, because adapters, hooks, dtypes and parameters may have
    changed since the last call.
    """
    if _hooks_on_all_modules():
        return "global module hooks are registered"
    # read from the dictionaries, because attribute access on modules is slow
    modules = layer._modules
    base = modules["base_layer"]
    active = layer._active_adapter or ()
    a_of = modules["lora_A"]._modules
    b_of = modules["lora_B"]._modules
    drop_of = modules["lora_dropout"]._modules
    factors: list[Any] = []
    adapters = []
    for name in (active,) if isinstance(active, str) else active:
        a = a_of.get(name)
        # an active adapter may target only other layers
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
        adapters.append(Adapter(layer.scaling[name], p))
    weight = None
    # not isinstance: a subclass may compute more than the product with its weight
    if type(base) in STOCK and not _is_touched(base):
        weight = base._parameters.get("weight")
    if not _is_plain(weight):
        weight = None
    return Route(base, weight, factors, adapters)


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
        return f"adapter {name!r} uses {type(layer.lora_variant[name]).__name__}"
    if layer.lora_bias.get(name):
        return f"adapter {name!r} has a bias of its own"
    if (type(drop) is not nn.Dropout and type(drop) is not nn.Identity) or _is_touched(drop):
        return (
            f"the dropout of adapter {name!r} ({type(drop).__name__}) is unsupported or has hooks"
        )
    return None


def _unsupported_factor(factor: nn.Module) -> str | None:
    """Return why the lean forward does not support this factor, or None if it does."""
    if type(factor) is not nn.Linear:
        return f"lora_A or lora_B is a {type(factor).__name__}"
    if _is_touched(factor):
        return "lora_A or lora_B has hooks, or a forward that was replaced"
    weight = factor._parameters.get("weight")
    if _is_plain(weight):
        return None
    if _is_sharded(weight):
        return "the weight of lora_A or lora_B is sharded"
    kind = type(weight).__name__
    return f"the weight of lora_A or lora_B is a {kind}, not a plain floating-point tensor"


def _is_touched(module: nn.Module) -> bool:
    """Return whether a module has hooks, or a ``forward`` of its own instead of its class's."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def _is_plain(weight: Any) -> bool:
    """Return whether a weight is an ordinary floating-point tensor that is not sharded.

    DeepSpeed ZeRO-3 marks sharded parameters with ``ds_id``.
    """
    return type(weight) in _PLAIN and weight.is_floating_point() and not hasattr(weight, "ds_id")


def _is_sharded(weight: object) -> bool:
    return hasattr(weight, "device_mesh") or hasattr(weight, "ds_id")


def compute(chosen_path: Route, x: Tensor) -> Tensor:
    """Return a layer's output, computed in the cheapest way that supports this call."""
    base, weight, factors, adapters = chosen_path
    flat = x.reshape(-1, x.shape[-1])
    # call the base layer itself; if the dtypes differ, the layer raises the usual error
    if weight is None or (weight.dtype != x.dtype and autocast_dtype(x) is None):
        y = base(x)
        return add_adapters(y.reshape(-1, y.shape[-1]), flat, factors, adapters).view(y.shape)
    transposed = type(base) is Conv1D
    bias = base._parameters.get("bias")
    in_transform = transforming()
    recomputes = x.device.type in _DROPS_AGAIN and not torch.compiler.is_compiling()
    # with p = 1 `run` would divide by 0; torch's own dropout returns zeros
    drops = recomputes and any(0 < one.dropout_p < 1 for one in adapters)
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
    """Return whether computing ``x (W + s B A)ᵀ`` is cheaper and loses no precision.

    In half precision, rounding W + s B A would erase small updates.
    """
    # on a GPU, launching one more kernel costs more than the saved products
    if x.is_cuda or x.dtype.itemsize < 4 or not adapters:
        return False
    # backward would keep the merged weight and compute its dense gradient; a compiled graph must
    # not depend on the number of tokens
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or autocast_dtype(x) is not None:
        return False
    # with dropout each token has its own update, which no single weight can express
    if any(one.dropout_p for one in adapters):
        return False
    rank = sum(b.shape[1] for b in factors[1::2])
    written = weight.numel() * (rank + len(adapters))
    # the left side counts the multiplications of x Aᵀ and of the product with Bᵀ: T r (I + O)
    return x.shape[0] * rank * sum(weight.shape) > _MERGE_ABOVE * written


def merged(
    weight: Tensor, factors: Sequence[Tensor], adapters: Sequence[Adapter], transposed: bool
) -> Tensor:
    """Return the weight with all updates added, W + Σ s B A."""
    for a, b, one in zip(factors[::2], factors[1::2], adapters, strict=True):
        # a Conv1D's weight is (I, O), so its update is (B A)ᵀ = Aᵀ Bᵀ
        left, right = (a.T, b.T) if transposed else (b, a)
        weight = torch.addmm(
            weight, left.to(weight.dtype), right.to(weight.dtype), alpha=one.scaling
        )
    return weight
