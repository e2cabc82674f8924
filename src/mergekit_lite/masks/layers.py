"""Masked layers.

The components' stock layers, frozen, masks over their parameters, and the merged layer as forward.

A masked layer keeps the components' own layers as ``components`` and one mask tensor for each of
their parameters in ``masks``. `Selection` says whether the merged layer or one component runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model_components._layers import is_conv1d

from ._eager.linear import linear
from .config import MaskConfig
from .constraints import acting_masks, initial_masks, mask_shape, unconstrain
from .functional import blend, masked_embedding, masked_linear

Output = Any
"""Of a stock module: a tensor, a tuple, what transformers returns."""

# elements of a parameter from which its blend is made again in backward, not kept
_WORTH_REPEATING = 1 << 16


@dataclass
class Selection:
    """Which component runs, shared by the layers of a merger; None is the merged model."""

    component: int | None = None


class MaskedLayer(nn.Module):
    """K frozen layers of one kind, and a mask for each parameter.

    Norms, expert stacks, routers, anything.

    Its forward is the stock one on blended parameters. Subclasses do better for linear layers and
    embeddings.

    Args:
        components: The stock layers; their parameters are frozen in place.
        config: Mode, granularity, constraint and initial value.
        base: The stock layer that masks lie over the differences from:
            ``base + Σ mask_k * (component k - base)``.
        selection: Shared with other layers; default: one of its own.
        masks: Existing mask parameters to use, by parameter name, for tied weights; the others are
            created.
        initial: Initial value by parameter name, where it is not the config's.
        trained: Whether masks are trained, or keep their initial value.
        generator: What random masks are drawn from; default: one of the config's seed.

    Raises:
        ValueError: Fewer than two components, or a parameter that differs in shape or dtype.

    >>> MaskedLayer([nn.LayerNorm(4), nn.LayerNorm(4)])(torch.zeros(2, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        components: Sequence[nn.Module],
        config: MaskConfig | None = None,
        *,
        base: nn.Module | None = None,
        selection: Selection | None = None,
        masks: Mapping[str, nn.Parameter] | None = None,
        initial: Callable[[str], float | str | Sequence[float]] | None = None,
        trained: bool = True,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        count = len(components)
        if count < (2 if base is None else 1):
            raise ValueError(
                f"{type(self).__name__}: got {count} components, expected at least 2, or a base "
                "and 1"
            )
        self.config = (config or MaskConfig()).resolved(over_base=base is not None)
        self.selection = selection or Selection()
        self.over_base = base is not None
        self.components = nn.ModuleList([*components] if base is None else [*components, base])
        self.transposed = is_conv1d(self.plain) or bool(getattr(self.plain, "is_transposed", False))
        self.folded: dict[str, Tensor] | None = None
        self._folded_at: list[int] = []
        self.masks = nn.ParameterDict()
        generator = generator or torch.Generator().manual_seed(self.config.seed)
        self._same: set[str] = set()  # parameters that no component changes
        for name, first in self.plain.named_parameters(recurse=False):
            same = self._freeze(name)
            if same:
                self._same.add(name)
            if masks and name in masks:
                self.masks[name] = masks[name]
                continue
            if same:
                value = 0.0
            elif initial:
                value = initial(name)
            else:
                value = self.config.initial
            shape = mask_shape(first.shape, self.config.granularity, self.transposed)
            raw = unconstrain(initial_masks(count, shape, value, generator), self._constraint(name))
            self.masks[name] = nn.Parameter(
                raw.to(first.device), requires_grad=trained and not same
            )

    def _freeze(self, name: str) -> bool:
        """Freeze one parameter in all components; return whether all share the base's tensor."""
        parameters = [getattr(component, name, None) for component in self.components]
        shapes = [None if p is None else (tuple(p.shape), p.dtype) for p in parameters]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"{type(self).__name__}: {name} is {shapes} in the components, expected one shape "
                "and dtype"
            )
        for parameter in parameters:
            assert parameter is not None
            parameter.requires_grad_(False)
        return self.over_base and all(p is parameters[0] for p in parameters)

    @property
    def plain(self) -> nn.Module:
        """The base, or the first component."""
        return self.components[-1 if self.over_base else 0]

    def frozen(self, name: str) -> list[Tensor]:
        """The components' parameters of that name, and the base's."""
        return [getattr(c, name) for c in self.components]

    def is_same(self, name: str) -> bool:
        """Return whether every component has the base's parameter, so that masks do nothing."""
        return name in self._same

    def mask(self, name: str) -> Tensor:
        """The constrained masks over a parameter's `frozen` values, (as many, broadcasts over it).

        A base's is last.
        """
        return self._rule(name)(self.masks[name])

    def _constraint(self, name: str) -> str:
        if name in self._same:
            return "none"
        return self.config.constraint

    def _rule(self, name: str) -> Callable[[Tensor], Tensor]:
        """The function from the trained values to the constrained masks."""
        return partial(acting_masks, constraint=self._constraint(name), over_base=self.over_base)

    def merged(self, name: str) -> Tensor:
        """The merged parameter, differentiable in its mask."""
        if name in self._same:
            return getattr(self.plain, name)
        return blend(self.frozen(name), self.mask(name))

    def current(self, name: str) -> Tensor:
        """Return the parameter of whatever runs.

        The selected component's, the folded one, or the merged one, built anew.
        """
        if self.selection.component is not None:
            return getattr(self.components[self.selection.component], name)
        folded = self._usable_fold()
        if folded is None:
            return self.merged(name)
        return folded[name]

    @property
    def weight(self) -> Tensor:
        """The weight of whatever runs, for modules that look at their children's."""
        return self.current("weight")

    @property
    def bias(self) -> Tensor | None:
        """The bias of whatever runs, or None."""
        if "bias" in self.masks:
            return self.current("bias")
        return None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("components", "over_base"):
                raise
            return getattr(self.plain, name)  # in_features, padding_idx, ...

    @torch.no_grad()
    def fold_(self) -> None:
        """Keep merged parameters, so that evaluation blends nothing.

        Until `unfold_`, training, or new masks.
        """
        self.folded = {name: self.merged(name) for name in self.masks}
        self._folded_at = self._versions()

    def _versions(self) -> list[int]:
        return [mask._version for mask in self.masks.values()]

    @property
    def is_folded(self) -> bool:
        """Return whether merged parameters are kept, and are those of the masks."""
        return self.folded is not None and self._folded_at == self._versions()

    def _usable_fold(self) -> dict[str, Tensor] | None:
        """The folded parameters in evaluation mode.

        Dropped first if the masks have changed since.
        """
        if not self.is_folded:
            self.folded = None
        return None if self.training else self.folded

    def unfold_(self) -> None:
        """Drop what `fold_` keeps."""
        self.folded = None

    def forward(self, *args: object, **kwargs: object) -> Output:
        """The merged layer; one component's where the selection says so."""
        k = self.selection.component
        if k is not None:
            return self.components[k](*args, **kwargs)
        folded = self._usable_fold()
        if folded is not None:
            return self.stock(folded, *args, **kwargs)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Output:
        """The merged layer's arithmetic: the stock forward on blended parameters."""

        def blended() -> Output:
            return self.stock({name: self.merged(name) for name in self.masks}, *args, **kwargs)

        large = any(p.numel() >= _WORTH_REPEATING for p in self.plain.parameters(recurse=False))
        # run again in backward, so that no blended parameter is kept until then
        if large and torch.is_grad_enabled():
            return checkpoint(blended, use_reentrant=False)
        return blended()

    def stock(self, parameters: Mapping[str, Tensor], *args: object, **kwargs: object) -> Output:
        """The stock layer's own forward, with these in the place of its parameters."""
        first = self.plain
        replaced = {name: first._parameters[name] for name in parameters}
        try:
            # pyrefly: ignore[no-matching-overload]: blended tensors stand in for parameters
            first._parameters.update(parameters)
            return first(*args, **kwargs)
        finally:
            first._parameters.update(replaced)

    def extra_repr(self) -> str:
        """Mode, granularity and mask shapes."""
        shapes = ", ".join(f"{name} {list(m.shape)}" for name, m in self.masks.items())
        return f"{self.config.granularity} masks: {shapes}"


class MaskedLinear(MaskedLayer):
    """K frozen `nn.Linear` (or transformers' `Conv1D`) and masks.

    ``x @ (Σ m_k W_k).T + Σ m_k b_k``.

    In mode ``"accurate"`` evaluation gives the bits of a stock layer with the baked weight.
    ``"efficient"`` multiplies by every component, ``Σ (m_k x) @ W_k.T``, and builds no weight: each
    product is rounded, not the blended weight.

    >>> layer = MaskedLinear([nn.Linear(4, 3), nn.Linear(4, 3)])
    >>> layer(torch.zeros(5, 4)).shape, layer.mask("weight").shape
    (torch.Size([5, 3]), torch.Size([2, 1, 4]))
    """

    def run(self, x: Tensor) -> Tensor:
        """`masked_linear` in the layer's mode."""
        weights = self.frozen("weight")
        masks = self.masks["weight"]
        rule = None
        if self.over_base or self.config.constraint != "none":
            rule = self._rule("weight")
        bias = self.merged("bias") if "bias" in self.masks else None
        return masked_linear(
            x, weights, masks, bias, rule=rule, mode=self.config.mode, transposed=self.transposed
        )

    def stock(self, parameters: Mapping[str, Tensor], *args: Any, **kwargs: object) -> Output:
        """The stock layer's product."""
        return linear(args[0], parameters["weight"], parameters.get("bias"), self.transposed)


class MaskedEmbedding(MaskedLayer):
    """K frozen `nn.Embedding` and masks: rows are gathered first, then blended.

    A subclass that multiplies by an ``embed_scale`` (Gemma) keeps doing so.

    >>> MaskedEmbedding([nn.Embedding(9, 4), nn.Embedding(9, 4)])(torch.tensor([[1, 8]])).shape
    torch.Size([1, 2, 4])
    """

    def run(self, ids: Tensor) -> Tensor:
        """`masked_embedding`, scaled where the stock layer is."""
        return self._scaled(masked_embedding(ids, self.frozen("weight"), self.mask("weight")))

    def _scaled(self, rows: Tensor) -> Tensor:
        scale = getattr(self.plain, "embed_scale", None)
        if scale is None:
            return rows
        # as the stock layers do
        return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)
