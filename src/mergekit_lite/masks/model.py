"""`MaskedModel`: several frozen models of one architecture, which masks merge into one."""

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

# config fields by which Gemma 2, Cohere, Granite and Falcon-H1 change logits after the head
_HEAD_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class StoredAs(NamedTuple):
    """The name that a component was loaded from, and a fingerprint of its files.

    The fingerprint consists of sizes and times. It is None for files that no merge can read.
    """

    name: str
    fingerprint: object


def _labels_of(models: Sequence[PreTrainedModel], labels: Sequence[str] | None) -> list[str]:
    """Return the models' names for messages: the labels, or where models were loaded from."""
    if labels is None:
        return [m.config.name_or_path or f"model {place}" for place, m in enumerate(models)]
    if len(labels) != len(models):
        raise ValueError(
            f"Merger: expected one label per model (the base's last), got {len(labels)} labels "
            f"for {len(models)} models"
        )
    return list(labels)


class MaskedModel(nn.Module):
    """The part of `Merger` that distillation and storage use.

    It holds the components and masks, and selects what runs: the merged model or a component. See
    `Merger` for arguments and errors.
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
        # a PeftModel has another class and other names than the models it is compared with
        models = [without_adapter(model) for model in models]
        if base is not None:
            models.append(without_adapter(base))
        self.labels = _labels_of(models, labels)
        self._refuse_different(models, strict=strict)
        # 0 * NaN is NaN: no mask could keep such a weight out
        refuse_not_finite(models, self.labels)
        self.selection = Selection()
        shared = share_frozen(models, over_base=self.over_base)
        # this one gets the masked layers; its settings and buffers are the merged model's
        model = shared.pop(-1 if self.over_base else 0)
        # only children are replaced, so a parameter of the root would stay unmerged
        for name, _ in model.named_parameters(recurse=False):
            raise ValueError(
                f"Merger: expected all parameters in submodules, but {type(model).__name__} itself "
                f"owns {name}"
            )
        stored = model.state_dict()
        # for bakes and hashes; rotary frequencies are buffers that no checkpoint stores
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
        # where the components are stored, if that is known for sure
        self.sources: list[StoredAs] | None = None
        self.eval()

    def _refuse_different(self, models: Sequence[PreTrainedModel], *, strict: bool) -> None:
        """Refuse models that cannot be merged; skip models with factors, which copy the base."""
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
        """Return why no mask is trained, with the name of a module as an example."""
        modules = self.mask_config.modules
        if self.over_base:
            return (
                "Merger: no mask is trained, since no component changes the base in the modules to "
                f"train ({modules or 'any'}); expected patterns such as {example!r}, and "
                "components that differ from the base"
            )
        return f"Merger: no module has a name like {modules}; expected patterns such as {example!r}"

    @property
    def config(self) -> Any:
        """Return the config of the base, or of the first component."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the components' dtype."""
        return self.model.dtype

    def gradient_checkpointing_enable(self, **options: object) -> None:
        """Recompute blocks in backward, and keep only their inputs until then.

        The options are those of transformers' models.
        """
        self.model.gradient_checkpointing_enable(**options)

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Call `gradient_checkpointing_enable`; newer versions of transformers use this name."""
        self.model.activation_checkpointing_enable(**options)

    def gradient_checkpointing_disable(self) -> None:
        """Disable gradient checkpointing, so that activations are kept until backward."""
        self.model.gradient_checkpointing_disable()

    def can_generate(self) -> bool:
        """Return whether the model supports `generate`."""
        return self.model.can_generate()

    def generate(self, *args: object, **options: object) -> Output:
        """Generate with the merged model, or the selected component.

        In evaluation mode weights are blended once for all tokens, and take the memory of one more
        model meanwhile.

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
        """Return whether all layers keep merged weights that match the current masks."""
        return all(layer.is_folded for layer in self.layers().values())

    def forward(self, *args: object, **inputs: object) -> Output:
        """Return the output of the merged model, or of the selected component."""
        return self.model(*args, **inputs)

    @contextlib.contextmanager
    def component(self, k: int) -> Iterator[Self]:
        """Run component ``k``, with exactly its own weights, within this context.

        The base has the index after the last component.

        Raises:
            ValueError: There is no such component.
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
        """Set training or evaluation mode; training mode drops the weights that `fold_` keeps."""
        if mode:
            self.unfold_()
        return super().train(mode)

    def fold_(self) -> Self:
        """Store the merged weights for fast generation, in the memory of one more model.

        `unfold_`, training mode and new masks drop them.
        """
        for layer in self.layers().values():
            layer.fold_()
        return self

    def unfold_(self) -> Self:
        """Drop the merged weights that `fold_` keeps."""
        for layer in self.layers().values():
            layer.unfold_()
        return self

    def _apply(self, fn: object, recurse: bool = True) -> Self:
        before = self.model.dtype
        # kept from before the cast: a mask that went through bfloat16 has lost digits
        masks = {name: mask.data for name, mask in self._raw.items()}
        super()._apply(fn, recurse)
        # masks stay float32: half precision would round training steps away
        for name, mask in self._raw.items():
            if mask.dtype != masks[name].dtype:
                mask.data = masks[name].to(mask.device)
        # _apply folded the layers again with rounded masks; setting .data changes no version
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
        """Return the mask parameters, before `constrain`, by weight name.

        Tied weights share one mask, under the first of their names.
        """
        return dict(self._raw)

    def effective_masks(self) -> dict[str, Tensor]:
        """Return the constrained masks by weight name.

        Over a base the last mask is the base's: 1 minus the sum of the components' masks.
        """
        return {name: layer.mask(own) for name, (layer, own) in self._layers.items()}

    def places(self) -> dict[str, tuple[MaskedLayer, str]]:
        """Map a weight's name to the masked layer that owns it, and to its name in that layer."""
        return dict(self._layers)

    def trained_masks(self) -> list[Tensor]:
        """Return the constrained masks that are trained, without a base's masks."""
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

        The differences are in the models' dtype, and all are in memory at once.

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
        """Return a SHA-256 of each component's weights, or of its factors in their place."""
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
        """Return the output head, or None if logits are not its exact product with hidden states.

        A trial input shows whether they are.
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
            # blended once per batch, instead of products with every component's head
            options["head"] = head.current("weight").detach()
        # Phi and GPT-J have a bias in the head
        if "bias" in head.masks:
            options["bias"] = head.current("bias")
            options["teacher_biases"] = head.frozen("bias")
        return options

    @torch.no_grad()
    def _is_plain(self, head: MaskedLayer) -> bool:
        """Return whether logits are exactly the head's product with the final hidden states.

        A trial shows it: a soft cap, a scale or a transform in between would give other logits.
        """
        ids = torch.tensor([[0, 1]], device=self.model.device)
        with evaluating(self), self.component(0):
            logits = self.model(**self.uncached({"input_ids": ids})).logits
            logits_again = head(self.final_hidden(input_ids=ids))
        # check the config as well: a soft cap may not change the trial's small logits at all
        changed = [
            key
            for key in _HEAD_SETTINGS
            if getattr(self.model.config, key, None) not in (None, 1, 1.0)
        ]
        same = torch.equal(logits_again, logits) and not changed
        if not same:
            warnings.warn(
                f"Merger: {type(self.model).__name__} does more to its logits than one product "
                "with the head, so the loss needs full (tokens, vocabulary) tensors",
                stacklevel=2,
            )
        return same

    def final_hidden(self, **inputs: object) -> Tensor:
        """Return the final hidden states, (B, L, H), of the merged model.

        Within `component` they are those of the selected component.
        """
        return self.model.base_model(**self.uncached(inputs))[0]

    def uncached(self, inputs: Mapping[str, object]) -> dict[str, object]:
        """Return a model's inputs, with the cache of keys and values turned off."""
        # the forward of an encoder takes no use_cache
        if self.model.can_generate():
            return {**inputs, "use_cache": False}
        return dict(inputs)


def _change(layer: MaskedLayer, k: int, name: str) -> Tensor:
    """Return a component's difference from a parameter of the base, in the base's dtype."""
    module = layer.components[k]
    base = getattr(layer.plain, name)
    # a difference of rounded weights would lose small changes
    if name == "weight" and isinstance(module, LowRankLinear):
        return module.weight_delta().to(base.dtype).detach()
    return (getattr(module, name) - base).detach()
