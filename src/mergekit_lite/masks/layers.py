"""Masked layers: each merges several frozen layers of one kind by masks.

A masked layer keeps the layers to merge in ``components``, and one mask tensor for each of their
parameters in ``masks``. Its `Selection` sets whether the merged layer or one component runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from model_components._autograd import needs_plain, transforming
from model_components._checks import check_choice
from model_components._layers import ReadOnlyWeight, is_conv1d

from ._eager.linear import linear
from .config import Constraint, Granularity
from .constraints import acting_masks, initial_masks, mask_shape, unconstrain
from .functional import IMPLS, blend, masked_embedding, masked_linear

Output = Any
"""The result of a stock module: a tensor, a tuple, or an output of transformers."""

Initial = float | str | Sequence[float]

# the blend of a parameter with at least this many elements is computed again in backward instead
# of kept; for smaller ones (norms, biases) a second forward would cost more than it saves
_WORTH_REPEATING = 1 << 16


@dataclass
class Selection:
    """The index of the component that runs, shared by all layers of a merger.

    If ``component`` is None, the merged model runs.
    """

    component: int | None = None


class _Components(nn.ModuleList):
    """A list of components that cannot be replaced by layers with new parameters.

    The merged layer uses only the components' original parameters, so new parameters, such as peft
    adds, would have no effect. Wrappers and replicas, which add no parameters, are allowed.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; raise an error for a component with new parameters."""
        # names that are not numbers are the list's own attributes, such as training
        present = self._modules.get(name) if name.isdecimal() else None
        known = {id(p) for p in present.parameters()} if present is not None else set()
        if known and any(id(p) not in known for p in value.parameters()):
            raise ValueError(
                f"component {name} of a masked layer cannot be replaced by {type(value).__name__}, "
                "since the merged layer would ignore its new parameters; convert the masked layer "
                "with to_linear() or to_layer() first"
            )
        super().__setattr__(name, value)


class MaskedLayer(nn.Module):
    """K frozen layers of one kind, such as norms, and a mask for each of their parameters.

    The layer runs the components' forward with the merged parameters ``Σ_k mask_k * parameter_k``.
    Subclasses are more efficient for linear layers and embeddings.

    Args:
        components: The layers to merge: two or more, or with a base one or more. Their parameters
            are frozen in place.
        granularity: One mask value for each weight (``"scalar"``), input column (``"input"``),
            output row (``"output"``) or element (``"element"``). Vectors have one value per
            element, except with ``"scalar"``.
        constraint: Condition on the K mask values of one element; see `constrain`. ``"auto"`` is
            ``"sum_to_one"``, or ``"none"`` with a base.
        initial: Initial value of the masks: a number, one number per component, ``"average"``
            (1 / K), ``"component:1"`` (only component 1, counted from 0), or ``"random"``.
        base: Optional base layer. The merged parameters are then
            ``base + Σ mask_k * (component_k - base)``.
        generator: The random generator for ``"random"``; default: torch's global generator.
        impl: ``"eager"``, ``"fused"`` (Triton) or ``"auto"``; see `masked_linear`.
        strict: Whether to raise an error if components differ in class, settings or buffers. If
            False, use the class, settings and buffers of the base, or of the first component if
            there is no base.

    Raises:
        ValueError: An option is invalid, or there are too few components. Components differ (see
            ``strict``) or have parameters in inner layers. A parameter differs in shape or dtype
            between components, or is missing in one of them.

    >>> MaskedLayer([nn.LayerNorm(4), nn.LayerNorm(4)])(torch.zeros(2, 4)).shape
    torch.Size([2, 4])
    """

    mode: ClassVar[str] = "accurate"
    impls: ClassVar[tuple[str, ...]] = IMPLS

    def __init__(
        self,
        components: Sequence[nn.Module],
        *,
        granularity: Granularity = "output",
        constraint: Constraint = "auto",
        initial: Initial = "average",
        base: nn.Module | None = None,
        generator: torch.Generator | None = None,
        impl: str = "auto",
        strict: bool = True,
    ):
        super().__init__()
        name = type(self).__name__
        # a Sequential can be iterated, so its layers would be mistaken for components
        if isinstance(components, nn.Module):
            raise ValueError(f"{name}: expected a list of layers, got {type(components).__name__}")
        check_choice(name, "impl", impl, self.impls)
        least = 2 if base is None else 1
        if len(components) < least:
            raise ValueError(
                f"{name}: got {len(components)} components, expected at least 2, or 1 with a base"
            )
        check_choice(name, "granularity", granularity, get_args(Granularity))
        check_choice(name, "constraint", constraint, get_args(Constraint))
        if self.mode == "efficient" and granularity == "element":
            raise ValueError(
                f"{name}: expected granularity scalar, input or output, got 'element'; use "
                "AccurateMaskedLinear for element masks"
            )
        self.granularity = granularity
        self.constraint = constraint
        if constraint == "auto":
            self.constraint = "sum_to_one" if base is None else "none"
        self.initial = initial
        self.impl = impl
        self.selection = Selection()
        self.over_base = base is not None
        self.components = _Components([*components] if base is None else [*components, base])
        # GPT-2's Conv1D and the experts of GPT-OSS store weights as (in, out)
        self.transposed = is_conv1d(self.plain) or bool(getattr(self.plain, "is_transposed", False))
        self.folded: dict[str, Tensor] | None = None
        self._folded_at: list[tuple[int, int]] = []
        self._same: set[str] = set()  # parameters that no component changes
        self.masks = nn.ParameterDict()
        self._check_parameters()
        if strict:
            self._check_settings()
        for parameter, value in self.plain.named_parameters(recurse=False):
            if self._freeze(parameter):
                self._same.add(parameter)
            # a copy, because safetensors cannot save views
            raw = self._initial_masks(parameter, generator).to(value.device).clone()
            self.masks[parameter] = nn.Parameter(raw, requires_grad=parameter not in self._same)

    def _check_parameters(self) -> None:
        """Raise an error if components' parameters differ in name, shape or dtype."""
        names: dict[str, None] = {}
        for component in self.components:
            # factors of a low-rank component have no counterpart in the base
            if type(component) is type(self.plain):
                names |= dict.fromkeys(n for n, _ in component.named_parameters(recurse=False))
        for name in names:
            parameters = [getattr(component, name, None) for component in self.components]
            kinds = [
                None if p is None else f"shape {list(p.shape)} and dtype {p.dtype}"
                for p in parameters
            ]
            if len(set(kinds)) > 1:
                raise ValueError(
                    f"{type(self).__name__}: expected {name} to have one shape and dtype in all "
                    f"components, got {'; '.join(map(str, kinds))}"
                )

    def _check_settings(self) -> None:
        """Raise an error if components differ in settings, or have parameters in inner layers."""
        name = type(self).__name__
        first = self.plain
        for component in self.components:
            if type(component) is not type(first) or component.extra_repr() != first.extra_repr():
                raise ValueError(
                    f"{name}: expected components of one class with the same options, got "
                    f"{first} and {component}"
                )
            for (key, value), other in zip(first.named_buffers(), component.buffers(), strict=True):
                if not value.is_meta and not torch.equal(value, other):
                    raise ValueError(
                        f"{name}: expected the buffer {key} to be the same in all components, got "
                        "different values; masks merge only parameters"
                    )
            inside = [key for key, _ in component.named_parameters() if "." in key]
            if inside:
                raise ValueError(
                    f"{name}: expected components without parameters in inner layers, got a "
                    f"{type(component).__name__} with {inside[0]}; mask its inner layers instead"
                )

    def _freeze(self, name: str) -> bool:
        """Freeze a parameter in all components; return whether all use the base's own tensor."""
        parameters = self.frozen(name)
        for parameter in parameters:
            parameter.requires_grad_(False)
        # `share_frozen` made equal parameters one tensor, so values need not be compared
        return self.over_base and all(p is parameters[0] for p in parameters)

    def _initial_masks(self, name: str, generator: torch.Generator | None) -> Tensor:
        """Return the initial values of a parameter's masks, before the constraint."""
        value = 0.0 if name in self._same else self.initial
        weight = self.plain.get_parameter(name)
        shape = mask_shape(weight.shape, self.granularity, self.transposed)
        count = len(self.components) - self.over_base
        masks = initial_masks(count, shape, value, generator)
        return unconstrain(masks, self._constraint(name))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset all masks to their initial values; random masks are drawn again."""
        for name, mask in self.masks.items():
            mask.copy_(self._initial_masks(name, None))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Apply ``fn`` to all tensors, and call `fold_` again if the layer is folded."""
        super()._apply(fn, recurse)
        if self.folded is not None:
            self.fold_()
        return self

    @property
    def plain(self) -> nn.Module:
        """The base, or the first component if there is no base."""
        return self.components[-1 if self.over_base else 0]

    def frozen(self, name: str) -> list[Tensor]:
        """Return the named parameter of every component, ending with the base's, if any."""
        return [getattr(c, name) for c in self.components]

    def is_same(self, name: str) -> bool:
        """Return whether all components share the base's parameter, so masks have no effect."""
        return name in self._same

    def mask(self, name: str) -> Tensor:
        """Return a parameter's masks after the constraint, one for each tensor in `frozen`.

        The first size of the result is the number of these tensors, and the other sizes broadcast
        over the parameter. If there is a base, its mask is the last.
        """
        return self._rule(name)(self.masks[name])

    def _constraint(self, name: str) -> str:
        if name in self._same:
            # these masks are 0, which violates sum_to_one and is not the value of any sigmoid
            return "none"
        return self.constraint

    def _rule(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return the function from the trained values to the constrained masks."""
        return partial(acting_masks, constraint=self._constraint(name), over_base=self.over_base)

    def merged(self, name: str) -> Tensor:
        """Return the merged parameter, which is differentiable with respect to its masks."""
        if name in self._same:
            # the base's own tensor, because rounding may change a blend of equal values
            return getattr(self.plain, name)
        return blend(self.frozen(name), self.mask(name))

    def current(self, name: str) -> Tensor:
        """Return the parameter in use: the selected component's, the folded or the merged one.

        The merged parameter is computed in every call.
        """
        if self.selection.component is not None:
            return getattr(self.components[self.selection.component], name)
        folded = self._usable_fold()
        if folded is None:
            return self.merged(name)
        return folded[name]

    @property
    def weight(self) -> Tensor:
        """The weight in use, read-only, for modules that read the weights of their submodules."""
        return ReadOnlyWeight.of(self.current("weight"))

    @property
    def bias(self) -> Tensor | None:
        """The bias in use, read-only, or None if there is no bias."""
        if "bias" in self.masks:
            return ReadOnlyWeight.of(self.current("bias"))
        return None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # `plain` itself reads these two attributes, so this lookup would recurse forever
            if name in ("components", "over_base"):
                raise
            return getattr(self.plain, name)  # for example, in_features or padding_idx

    @torch.no_grad()
    def to_layer(self) -> nn.Module:
        """Return an ordinary layer of the components' kind with the merged parameters."""
        layer = copy.deepcopy(self.plain)
        for name in self.masks:
            # cloned, because `merged` returns the base's own tensor if no component changes it
            layer.register_parameter(name, nn.Parameter(self.merged(name).clone()))
        return layer.train(self.training)

    @torch.no_grad()
    def fold_(self) -> None:
        """Store the merged parameters, so that evaluation does not blend again.

        The stored parameters are not used in training mode. `unfold_` drops them, and so does a
        change of masks or components.
        """
        self.folded = {name: self.merged(name) for name in self.masks}
        self._folded_at = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        """Return numbers that change when a mask or a component changes or is replaced."""
        return [(id(p), p._version) for p in self.parameters()]

    @property
    def is_folded(self) -> bool:
        """Return whether stored merged parameters match the current masks and components."""
        return self.folded is not None and self._folded_at == self._versions()

    def _usable_fold(self) -> dict[str, Tensor] | None:
        """Return the folded parameters, or None if there are none or they must not be used.

        They are dropped first if masks or components have changed since `fold_`. They must not be
        used in training mode or under a transform of torch.func.
        """
        if not self.is_folded:
            self.folded = None
        # folded parameters pass no gradient to the masks
        if self.training or transforming():
            return None
        return self.folded

    def unfold_(self) -> None:
        """Drop the parameters that `fold_` stored."""
        self.folded = None

    def forward(self, *args: object, **kwargs: object) -> Output:
        """Return the output of the merged layer, or of the selected component."""
        k = self.selection.component
        if k is not None:
            return self.components[k](*args, **kwargs)
        folded = self._usable_fold()
        if folded is not None:
            return self.stock(folded, *args, **kwargs)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Output:
        """Return the merged layer's output: the components' forward with merged parameters."""
        # look up tensors now, because they may be replaced before backward recomputes the output
        tensors = {name: (self.masks[name], self.frozen(name)) for name in self.masks}
        used = [
            tensor for tensor in tree_leaves((tensors, args, kwargs)) if torch.is_tensor(tensor)
        ]

        def blended() -> Output:
            merged = {}
            for name, (masks, frozen) in tensors.items():
                if name in self._same:
                    merged[name] = frozen[0]
                else:
                    merged[name] = blend(frozen, self._rule(name)(masks), impl=self.impl)
            return self.stock(merged, *args, **kwargs)

        large = any(p.numel() >= _WORTH_REPEATING for p in self.plain.parameters(recurse=False))
        traced = any(needs_plain(mask) for mask in self.masks.values())
        if not large or traced or not torch.is_grad_enabled():
            return blended()
        # autograd detects changes of tensors that it saves, but not of tensors in a closure
        versions = [tensor._version for tensor in used]

        def unchanged() -> Output:
            if [tensor._version for tensor in used] != versions:
                raise RuntimeError(
                    f"{type(self).__name__}: a mask, a component or the input was changed in "
                    "place between forward and backward"
                )
            return blended()

        # recompute in backward instead of keeping the blended parameters
        return checkpoint(unchanged, use_reentrant=False)

    def stock(self, parameters: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Output:
        """Return the output of the components' forward with the given parameters."""
        return functional_call(self.plain, dict(parameters), args, kwargs)

    def extra_repr(self) -> str:
        """Return the granularity and the masks' shapes, for printing."""
        shapes = ", ".join(f"{name} {list(m.shape)}" for name, m in self.masks.items())
        return f"{self.granularity} masks: {shapes}"


class MaskedLinear(MaskedLayer):
    """A masked linear layer that picks the faster path.

    It computes ``x @ (Σ m_k W_k).T + Σ m_k b_k``. For few tokens it works like
    `EfficientMaskedLinear`, otherwise like `AccurateMaskedLinear`. See `MaskedLayer` for the
    arguments.
    """

    mode: ClassVar[str] = "auto"

    def run(self, x: Tensor) -> Tensor:
        """Return the output of `masked_linear` for ``x``, computed in the layer's mode."""
        rule = None
        if self.over_base or self.constraint != "none":
            rule = self._rule("weight")
        bias = self.merged("bias") if "bias" in self.masks else None
        return masked_linear(
            x,
            self.frozen("weight"),
            self.masks["weight"],
            bias,
            rule=rule,
            mode=self.mode,
            transposed=self.transposed,
            impl=self.impl,
        )

    def to_linear(self) -> nn.Module:
        """Return an ordinary linear layer with the merged weight and bias.

        >>> a, b = nn.Linear(4, 3), nn.Linear(4, 3)
        >>> layer, x = AccurateMaskedLinear([a, b]), torch.randn(5, 4)
        >>> torch.equal(layer.to_linear()(x), layer(x))
        True
        """
        return self.to_layer()

    def stock(self, parameters: Mapping[str, Tensor], *args: Any, **kwargs: object) -> Output:
        """Return the output of a stock linear layer with the given parameters."""
        return linear(args[0], parameters["weight"], parameters.get("bias"), self.transposed)


class AccurateMaskedLinear(MaskedLinear):
    """A linear layer that blends the components' weights, then multiplies once.

    It computes ``x @ (Σ m_k W_k).T + Σ m_k b_k``. The components are frozen and the masks are
    trained. In evaluation mode the output is bit-identical to the output of the layer that
    `to_linear` returns. See `MaskedLayer` for the arguments.

    >>> layer = AccurateMaskedLinear([nn.Linear(4, 3), nn.Linear(4, 3)], granularity="output")
    >>> layer(torch.zeros(5, 4)).shape, layer.mask("weight").shape
    (torch.Size([5, 3]), torch.Size([2, 3, 1]))
    """

    mode = "accurate"


class EfficientMaskedLinear(MaskedLinear):
    """A linear layer that adds the masked products of all components and builds no merged weight.

    For scalar and input masks it computes ``Σ (m_k * x) @ W_k.T + Σ m_k b_k``, for output masks
    ``Σ m_k * (x @ W_k.T) + Σ m_k b_k``. It is faster than `AccurateMaskedLinear` for few tokens,
    but rounds every product separately. The components are frozen and the masks are trained.
    ``granularity`` is ``"scalar"``, ``"input"`` or ``"output"``; see `MaskedLayer` for the other
    arguments.

    >>> layer = EfficientMaskedLinear([nn.Linear(4, 3), nn.Linear(4, 3)])
    >>> layer(torch.zeros(5, 4)).shape, layer.mask("weight").shape
    (torch.Size([5, 3]), torch.Size([2, 3, 1]))
    """

    mode = "efficient"
    impls = ("eager", "auto")  # nothing is blended, so there is nothing to fuse


class MaskedEmbedding(MaskedLayer):
    """An embedding that gathers the tokens' rows from all components, then blends these rows.

    The components are K frozen `nn.Embedding`. If they multiply rows by an ``embed_scale``, as in
    Gemma, so does the masked embedding. See `MaskedLayer` for the arguments.

    >>> MaskedEmbedding([nn.Embedding(9, 4), nn.Embedding(9, 4)])(torch.tensor([[1, 8]])).shape
    torch.Size([1, 2, 4])
    """

    def run(self, ids: Tensor) -> Tensor:
        """Return the output of `masked_embedding`, scaled if the components scale theirs."""
        rows = masked_embedding(ids, self.frozen("weight"), self.mask("weight"), impl=self.impl)
        return self._scaled(rows)

    def to_embedding(self) -> nn.Module:
        """Return an ordinary embedding with the merged table."""
        return self.to_layer()

    def _scaled(self, rows: Tensor) -> Tensor:
        scale = getattr(self.plain, "embed_scale", None)
        if scale is None:
            return rows
        # scale in the dtype that the stock layers use
        return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)
