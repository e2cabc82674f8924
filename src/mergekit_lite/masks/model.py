"""`MaskedModel`: several frozen models of one architecture, merged by masks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_components._modes import evaluating

from .components import (
    component_hashes,
    refuse_different,
    refuse_not_finite,
    share_frozen,
    without_adapter,
)
from .config import MaskConfig
from .layers import MaskedLayer, Output, Selection
from .low_rank import LowRankLinear, has_factors
from .surgery import Surgeon

# config fields of Gemma 2, Cohere, Granite and Falcon-H1 that change logits after the head
_HEAD_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class StoredAs(NamedTuple):
    """The path or hub id that a component was loaded from, and a fingerprint of its files.

    The fingerprint changes when the files change. It is None if `merge_models` cannot read the
    files.
    """

    name: str
    fingerprint: object


def _labels_of(models: Sequence[PreTrainedModel], labels: Sequence[str] | None) -> list[str]:
    """Return the labels, or by default the path or hub id that each model was loaded from."""
    if labels is None:
        return [m.config.name_or_path or f"model {place}" for place, m in enumerate(models)]
    if len(labels) != len(models):
        raise ValueError(
            "Merger: expected one label per model, with the base's label at the end, got "
            f"{len(labels)} labels for {len(models)} models"
        )
    return list(labels)


class MaskedModel(nn.Module):
    """The components and masks of a `Merger`, and the selection of the model that runs.

    Either the merged model runs, or one component. Distillation and storage use only this part of
    `Merger`. See `Merger` for the arguments and errors.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        config: MaskConfig | None = None,
        *,
        base: PreTrainedModel | None = None,
        labels: Sequence[str] | None = None,
        strict: bool = True,
    ):
        super().__init__()
        self.count = len(models)
        self.over_base = base is not None
        self.mask_config = (config or MaskConfig()).resolved(over_base=self.over_base)
        # a PeftModel would differ from the other models in its class and parameter names
        models = [without_adapter(model) for model in models]
        if base is not None:
            models.append(without_adapter(base))
        self.labels = _labels_of(models, labels)
        self._refuse_different(models, strict=strict)
        # 0 * NaN is NaN, so no mask could exclude such a weight
        refuse_not_finite(models, self.labels)
        self.selection = Selection()
        # how much packed examples influence each other; None until packed rows are seen
        self.packed_change: float | None = None
        shared = share_frozen(models, over_base=self.over_base)
        # masked layers are put into this model, so the merged model has its settings and buffers
        model = shared.pop(-1 if self.over_base else 0)
        # only submodules are replaced, so a parameter of the root module would not be merged
        for name, _ in model.named_parameters(recurse=False):
            raise ValueError(
                f"Merger: expected all parameters in submodules, but {type(model).__name__} itself "
                f"has the parameter {name}"
            )
        stored = model.state_dict()
        # checkpoints and hashes have only stored buffers, not rotary frequencies
        self._stored_buffers = {}
        for name, value in model.named_buffers():
            if name in stored:
                self._stored_buffers[name] = value
        surgeon = Surgeon(self.mask_config, self.selection, over_base=self.over_base)
        surgeon.replace(model, shared)
        if not any(mask.requires_grad for mask in surgeon.raw.values()):
            raise ValueError(self._no_mask_message(next(iter(surgeon.raw)).rpartition(".")[0]))
        self.model = model
        self._layers = surgeon.layers
        self._raw = surgeon.raw
        self._hashes: list[str] | None = None
        self._plain_head: bool | None = None
        # where each component is stored, or None if that is not known
        self.sources: list[StoredAs] | None = None
        self.eval()

    def _refuse_different(self, models: Sequence[PreTrainedModel], *, strict: bool) -> None:
        """Raise an error if models differ; ignore models that are the base plus adapter factors."""
        whole = []
        labels = []
        for model, label in zip(models, self.labels, strict=True):
            if not has_factors(model):
                whole.append(model)
                labels.append(label)
        # if all other models are adapters, only the base is left, with nothing to compare
        if len(whole) > 1 or not self.over_base:
            whose = "base's" if self.over_base else "first component's"
            refuse_different(whole, labels, strict=strict, whose=whose)

    def _no_mask_message(self, example: str) -> str:
        """Return the error message if no mask is trained; ``example`` is the name of a module."""
        modules = self.mask_config.modules
        if self.over_base:
            return (
                "Merger: expected a component that differs from the base in the modules to train "
                f"({modules or 'all'}), got none; a pattern is, for example, {example!r}"
            )
        return (
            f"Merger: expected patterns of module names such as {example!r}, got {modules}, which "
            "match no module"
        )

    @property
    def config(self) -> Any:
        """The config of the base, or of the first component if there is no base."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The components' dtype."""
        return self.model.dtype

    def gradient_checkpointing_enable(self, **options: object) -> None:
        """Enable gradient checkpointing: backward recomputes each block from its input.

        Args:
            **options: Passed to the same method of the transformers model.
        """
        self.model.gradient_checkpointing_enable(**options)

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Enable gradient checkpointing, under the name that newer transformers versions use."""
        self.model.activation_checkpointing_enable(**options)

    def gradient_checkpointing_disable(self) -> None:
        """Disable gradient checkpointing, so that activations are kept until backward."""
        self.model.gradient_checkpointing_disable()

    def can_generate(self) -> bool:
        """Return whether the model supports `generate`."""
        return self.model.can_generate()

    def generate(self, *args: object, **options: object) -> Output:
        """Generate tokens with the merged model, or with the selected component.

        In evaluation mode, weights are blended once for all tokens. Until this method returns, the
        merged weights take the memory of one more model.

        Args:
            *args: Passed to transformers' ``generate``.
            **options: Passed to transformers' ``generate``.
        """
        # weights that the caller folded stay folded; a component has nothing to blend
        fold = not self.training and self.selection.component is None and not self.is_folded
        if fold:
            self.fold_()
        try:
            # pyrefly: ignore[not-callable]: transformers' method, though nn.Module says Tensor
            return self.model.generate(*args, **options)
        finally:
            if fold:
                self.unfold_()

    @property
    def is_folded(self) -> bool:
        """Return whether all layers hold weights merged from the current masks and components."""
        return all(layer.is_folded for layer in self.layers().values())

    def forward(self, *args: object, **inputs: object) -> Output:
        """Return the output of the merged model, or of the selected component."""
        return self.model(*args, **inputs)

    @contextlib.contextmanager
    def component(self, k: int) -> Iterator[Self]:
        """Run component ``k`` instead of the merged model within this context.

        The component runs with its own weights, unchanged. The base, if there is one, has the index
        after the last component.

        Raises:
            ValueError: ``k`` is not the index of a component or of the base.
        """
        if not isinstance(k, int) or not 0 <= k < len(self.labels):
            raise ValueError(f"Merger.component: k is {k}, expected 0 to {len(self.labels) - 1}")
        before = self.selection.component
        self.selection.component = k
        try:
            yield self
        finally:
            self.selection.component = before

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; training mode drops the weights that `fold_` stored."""
        if mode:
            self.unfold_()
        return super().train(mode)

    def fold_(self) -> Self:
        """Store the merged weights, so that evaluation and generation do not blend them again.

        The stored weights take the memory of one more model. `unfold_` and training mode drop them,
        and so does a change of masks or components.
        """
        for layer in self.layers().values():
            layer.fold_()
        return self

    def unfold_(self) -> Self:
        """Drop the merged weights that `fold_` stored."""
        for layer in self.layers().values():
            layer.unfold_()
        return self

    def _apply(self, fn: object, recurse: bool = True) -> Self:
        before = self.model.dtype
        # saved before the cast, because a cast to bfloat16 and back loses digits
        masks = {name: mask.data for name, mask in self._raw.items()}
        super()._apply(fn, recurse)
        # masks stay float32, because half precision would round small training steps away
        for name, mask in self._raw.items():
            if mask.dtype != masks[name].dtype:
                mask.data = masks[name].to(mask.device)
        # _apply folded the layers with rounded masks, and setting .data does not invalidate these
        self.unfold_()
        if self.model.dtype != before:
            self._hashes = None
        return self

    def layers(self) -> dict[str, MaskedLayer]:
        """Return the masked layers by module name."""
        return {
            n.removeprefix("model."): m
            for n, m in self.named_modules()
            if isinstance(m, MaskedLayer)
        }

    def masks(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters of the masks (values before the constraint) by weight name.

        Tied weights share one mask, which is listed under the first of their names.
        """
        return dict(self._raw)

    def effective_masks(self) -> dict[str, Tensor]:
        """Return the masks after the constraint, by weight name.

        If there is a base, its mask is the last: 1 minus the sum of the components' masks.
        """
        return {name: layer.mask(own) for name, (layer, own) in self._layers.items()}

    def places(self) -> dict[str, tuple[MaskedLayer, str]]:
        """Return the masked layer that owns each weight, and the weight's name in that layer."""
        return dict(self._layers)

    def trained_masks(self) -> list[Tensor]:
        """Return the masks that are trained, after the constraint and without the base's masks."""
        trained = [place for name, place in self._layers.items() if self._raw[name].requires_grad]
        return [layer.mask(own)[: self.count] for layer, own in trained]

    def state(self, k: int) -> dict[str, Tensor]:
        """Return component ``k``'s weights and stored buffers, by their names in checkpoints."""
        weights = {
            name: getattr(layer.components[k], own).detach()
            for name, (layer, own) in self._layers.items()
        }
        return weights | self._stored_buffers

    def task_vectors(self) -> list[dict[str, Tensor]]:
        """Return each component's difference from the base, by tensor name.

        The differences are in the models' dtype, and all are in memory at once. Tensors that no
        component changes are left out.

        Raises:
            ValueError: There is no base.
        """
        if not self.over_base:
            raise ValueError("Merger.task_vectors: expected a merger with a base, got one without")
        return [
            {
                name: _change(layer, k, own)
                for name, (layer, own) in self._layers.items()
                if not layer.is_same(own)
            }
            for k in range(self.count)
        ]

    def hashes(self) -> list[str]:
        """Return a SHA-256 hash of each component's weights and stored buffers.

        If an adapter is kept as factors, the factors are hashed instead of the weight.
        """
        if self._hashes is None:
            self._hashes = component_hashes([self._hashed(k) for k in range(len(self.labels))])
        return self._hashes

    def _hashed(self, k: int) -> Iterator[tuple[str, Tensor]]:
        for name in sorted(self._layers):
            layer, own = self._layers[name]
            module = layer.components[k]
            if own == "weight" and isinstance(module, LowRankLinear):
                yield f"{name} down", module.down
                yield f"{name} up {module.scale}", module.up
            else:
                yield name, getattr(module, own)
        yield from sorted(self._stored_buffers.items())

    def output_head(self) -> MaskedLayer | None:
        """Return the output head, or None if logits are not exactly hidden states times the head.

        The config and the logits of a short input show whether they are.
        """
        head = self.model.get_output_embeddings()
        if not isinstance(head, MaskedLayer) or "weight" not in head.masks:
            return None
        if self._plain_head is None:
            self._plain_head = self._is_plain(head)
        return head if self._plain_head else None

    def head_options(self) -> dict[str, Any] | None:
        """Return the masked output head as keyword arguments for `masked_kl`.

        Return None if logits are not exactly the head's product with the hidden states.
        """
        head = self.output_head()
        if head is None:
            return None
        options: dict[str, Any] = {"heads": head.frozen("weight")}
        if head.masks["weight"].requires_grad:
            options["masks"] = head.mask("weight")
        else:
            # blended once per batch, instead of multiplying by the head of every component
            options["head"] = head.current("weight").detach()
        # Phi and GPT-J have a bias in the head
        if "bias" in head.masks:
            options["bias"] = head.current("bias")
            options["teacher_biases"] = head.frozen("bias")
        return options

    @torch.no_grad()
    def _is_plain(self, head: MaskedLayer) -> bool:
        """Return whether logits are exactly the head's product with the final hidden states.

        The model runs on a short input: with a soft cap, a scale or a transform, its logits would
        differ from the head's product.
        """
        ids = torch.tensor([[0, 1]], device=self.model.device)
        with evaluating(self), self.component(0):
            logits = self.model(**self.uncached({"input_ids": ids})).logits
            logits_again = head(self.final_hidden(input_ids=ids))
        # check the config as well, because a soft cap may not change the small logits of this input
        changed = [
            key
            for key in _HEAD_SETTINGS
            if getattr(self.model.config, key, None) not in (None, 1, 1.0)
        ]
        same = torch.equal(logits_again, logits) and not changed
        if not same:
            warnings.warn(
                f"Merger: {type(self.model).__name__} does more than apply the head to its hidden "
                "states (for example, it scales or caps the logits), so the loss takes more "
                "memory: it needs the full logits, of shape (tokens, vocabulary)",
                stacklevel=2,
            )
        return same

    def final_hidden(self, **inputs: object) -> Tensor:
        """Return the final hidden states, (B, L, H), of the merged model.

        Inside the context of `component`, return the hidden states of the selected component.
        """
        hidden = self.model.base_model(**self.uncached(inputs))[0]
        # Mamba returns float32 for weights of any dtype; autocast's lower precision is kept
        return hidden.to(self.model.dtype) if hidden.dtype == torch.float32 else hidden

    def uncached(self, inputs: Mapping[str, object]) -> dict[str, object]:
        """Return the inputs, and turn off the cache of keys and values if the model has one."""
        # an encoder's forward has no argument use_cache
        if self.model.can_generate():
            return {**inputs, "use_cache": False}
        return dict(inputs)


def _change(layer: MaskedLayer, k: int, name: str) -> Tensor:
    """Return a component's parameter minus the base's, in the base's dtype."""
    module = layer.components[k]
    base = getattr(layer.plain, name)
    # subtracting rounded weights would lose small changes
    if name == "weight" and isinstance(module, LowRankLinear):
        return module.weight_delta().to(base.dtype).detach()
    return (getattr(module, name) - base).detach()
