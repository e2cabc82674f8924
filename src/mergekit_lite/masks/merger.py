"""`Merger`: several models of one architecture side by side, frozen, with masks that make one model of them."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..merge import MergeReport
from .components import load_components, refuse_different, share_frozen
from .config import KLConfig, MaskConfig
from .distillation import distill
from .initial import recipe_weights
from .layers import MaskedLayer, Selection
from .storage import bake, component_hashes, load_masks, read_config, save_masks
from .surgery import Surgeon

if TYPE_CHECKING:
    from .report import MaskReport


_HEAD_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
_OTHERWISE = {
    "save_pretrained": "bake(out) writes the merged model, save_masks(path) the masks",
    "push_to_hub": "bake(out) writes the merged model, which huggingface_hub can upload",
    "resize_token_embeddings": "change the components before they are merged",
}  # what the model inside has, and would do to all components' weights


class Merger(nn.Module):
    """Several frozen models and the masks that merge them; forward and generate are the merged model's.

    Every weight of the merged model is ``Σ_k mask_k * W_k``. Only the masks can be trained. Weights are shared with
    ``models``, not copied, and ``models`` are not changed.

    Args:
        models: Two or more models of one architecture, dtype and vocabulary.
        config: How masks lie over the weights.
        labels: What to call the models; default: where they were loaded from.

    Raises:
        ValueError: Models that differ in architecture, shapes, dtypes, ties, settings or buffers, or hold NaN.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> tiny = GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    >>> merger = Merger([GPT2LMHeadModel(tiny), GPT2LMHeadModel(tiny)], MaskConfig(granularity="scalar"))
    >>> merger(input_ids=torch.tensor([[1, 2]])).logits.shape
    torch.Size([1, 2, 11])
    >>> merger.masks()["transformer.h.0.attn.c_attn.weight"].flatten().tolist()
    [0.5, 0.5]
    """

    accepts_loss_kwargs = True  # the Trainer counts the items of all micro-batches of a step and hands them over

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        config: MaskConfig | None = None,
        *,
        labels: Sequence[str] | None = None,
    ):
        super().__init__()
        labels = labels or [m.config.name_or_path or f"model {k}" for k, m in enumerate(models)]
        refuse_different(models, labels)
        self.mask_config, self.labels, self.count = config or MaskConfig(), list(labels), len(models)
        self.selection = Selection()
        weights = None
        if isinstance(self.mask_config.initial, str) and self.mask_config.initial.endswith((".yml", ".yaml")):
            weights = recipe_weights(self.mask_config.initial, self.labels)
        model, *others = [share_frozen(model) for model in models]
        if loose := [name for name, _ in model.named_parameters(recurse=False)]:
            raise ValueError(f"Merger: {type(model).__name__} itself owns {loose[0]}; needed parameters of its modules")
        stored = model.state_dict()
        self._stored_buffers = {name: value for name, value in model.named_buffers() if name in stored}
        surgeon = Surgeon(self.mask_config, self.selection, weights)
        surgeon.replace(model, others)
        self.model = model
        self._layers, self._raw = surgeon.layers, surgeon.raw
        self._hashes: list[str] | None = None
        self._plain_head: bool | None = None
        self.paths: list[str] | None = None  # where the components are stored, if that is known for sure
        self.eval()

    @classmethod
    def from_pretrained(
        cls,
        paths: Sequence[str | os.PathLike[str]],
        *,
        masks: str | os.PathLike[str] | None = None,
        auto_class: Any = AutoModelForCausalLM,
        dtype: str | torch.dtype = "auto",
        model_options: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> Self:
        """Load the components, each once, and lay masks over them.

        Args:
            paths: Folders or hub ids, in the order of the masks.
            masks: A file of `save_masks` to go on from; it also says the config.
            auto_class: Which head, for example ``AutoModelForSequenceClassification``.
            dtype: Of all components; ``"auto"``: as stored.
            model_options: More for ``auto_class.from_pretrained``, such as ``attn_implementation``.
            **config: Fields of `MaskConfig`.

        Raises:
            ValueError: Components that do not fit together; masks of other components.
        """
        if masks is not None and config:
            raise ValueError(
                f"Merger.from_pretrained: {next(iter(config))} was given beside masks, which say it already"
            )
        known = [field.name for field in fields(MaskConfig)]
        if unknown := [name for name in config if name not in known]:
            raise ValueError(f"Merger.from_pretrained: {unknown[0]!r} is no field of MaskConfig: {', '.join(known)}")
        settings = read_config(Path(masks)) if masks is not None else MaskConfig(**config)
        models = load_components(paths, auto_class, dtype, model_options or {})
        begun = replace(settings, initial="average") if masks is not None else settings  # its recipe may be gone
        merger = cls(models, begun, labels=[os.fspath(p) for p in paths])
        merger.mask_config, merger.paths = settings, list(merger.labels)
        if masks is not None:
            merger.load_masks(masks)
        return merger

    # -- the model ---------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            if name in _OTHERWISE:
                raise AttributeError(f"Merger has no {name}: {_OTHERWISE[name]}") from None
            return getattr(self.model, name)  # config, device, generate, gradient_checkpointing_enable, ...

    def forward(self, *args: Any, kl: KLConfig | None = None, **inputs: Any) -> Any:
        """The merged model's output; with ``kl`` the loss of `distill` instead (through here, so that DDP sees it)."""
        return self.model(*args, **inputs) if kl is None else self.distill(kl, **inputs)

    @contextlib.contextmanager
    def component(self, k: int) -> Iterator[Self]:
        """Within it, component ``k`` runs, with its own weights and bits.

        Raises:
            ValueError: There is no such component.
        """
        if not 0 <= k < self.count:
            raise ValueError(f"Merger.component: k is {k}, needed 0 to {self.count - 1}")
        before, self.selection.component = self.selection.component, k
        try:
            yield self
        finally:
            self.selection.component = before

    def train(self, mode: bool = True) -> Self:
        """Training mode drops what `fold_` keeps, which training would outdate."""
        if mode:
            self.unfold_()
        return super().train(mode)

    def fold_(self) -> Self:
        """Keep the merged weights, for fast generation, as one more model in memory; until `unfold_` or new masks."""
        for layer in self.layers().values():
            layer.fold_()
        return self

    def unfold_(self) -> Self:
        """Drop the merged weights that `fold_` keeps."""
        for layer in self.layers().values():
            layer.unfold_()
        return self

    # -- the masks ---------------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = self.model.dtype
        super()._apply(fn, recurse)
        self.unfold_()
        if self.model.dtype != before:
            self._hashes = None
        return self

    def layers(self) -> dict[str, MaskedLayer]:
        """The masked layers by module name."""
        return {n.removeprefix("model."): m for n, m in self.named_modules() if isinstance(m, MaskedLayer)}

    def masks(self) -> dict[str, nn.Parameter]:
        """The trainable tensors, (K, ...), by the name of the weight that they lie over; a tied weight's once."""
        return dict(self._raw)

    def effective_masks(self) -> dict[str, Tensor]:
        """The masks as they act: constrained."""
        return {name: layer.mask(own) for name, (layer, own) in self._layers.items()}

    def state(self, k: int) -> dict[str, Tensor]:
        """Component ``k``'s weights and the stored buffers, by the names that a checkpoint has."""
        weights = {name: layer.frozen(own)[k].detach() for name, (layer, own) in self._layers.items()}
        return weights | self._stored_buffers

    def hashes(self) -> list[str]:
        """A SHA-256 of each component's weights."""
        if self._hashes is None:
            self._hashes = component_hashes([self.state(k) for k in range(self.count)])
        return self._hashes

    def save_masks(self, path: str | os.PathLike[str]) -> Path:
        """Write the masks, their config and the components' hashes as safetensors."""
        return save_masks(self, Path(path))

    def load_masks(self, path: str | os.PathLike[str]) -> None:
        """Read masks that `save_masks` wrote for these components.

        Raises:
            ValueError: They belong to other components, or were made with another config.
        """
        loaded = load_masks(self, Path(path))
        with torch.no_grad():
            for name, values in loaded.items():
                self._raw[name].copy_(values)
        self.unfold_()

    def bake(self, out: str | os.PathLike[str], **options: Any) -> MergeReport:
        """Write the merged model as an ordinary checkpoint, streaming, by the engine of `merge_models`.

        In accurate mode its logits are this merger's in evaluation mode, bit for bit.

        Args:
            out: Folder to write; it must not exist or be empty.
            **options: ``max_shard_size``, ``progress``, ``threads``, ``resume`` of `merge_models`.

        Raises:
            ValueError: A mask that is not finite; and what `merge_models` raises.
        """
        return bake(self, Path(out), options)

    def report(self) -> MaskReport:
        """Each weight's masks: means, spread, which component is the larger; print it, or ``.plot(path)``."""
        from .report import MaskReport

        return MaskReport.of(self.effective_masks(), self.labels)

    # -- training ----------------------------------------------------------------------------------------------

    def output_head(self) -> MaskedLayer | None:
        """The output head where logits are exactly its product with the final hidden state, else None."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, MaskedLayer) or "weight" not in head.masks:
            return None
        if self._plain_head is None:
            self._plain_head = self._is_plain(head)
        return head if self._plain_head else None

    @torch.no_grad()
    def _is_plain(self, head: MaskedLayer) -> bool:
        """Try it: a head with a soft cap, a scale or a transform in between gives other logits."""
        ids = torch.tensor([[0, 1]], device=self.model.device)
        with self.evaluating(), self.component(0):
            logits = self.model(**self.uncached({"input_ids": ids})).logits
            own = head(self.final_hidden(input_ids=ids))
        changed = [key for key in _HEAD_SETTINGS if getattr(self.model.config, key, None) not in (None, 1, 1.0)]
        same = torch.equal(own, logits) and not changed
        if not same:
            warnings.warn(
                f"{type(self.model).__name__} does more to its logits than one product, so the loss needs whole "
                "(tokens, vocabulary) tensors here",
                stacklevel=2,
            )
        return same

    def final_hidden(self, **inputs: Any) -> Tensor:
        """The final hidden states, (B, L, H), of whatever runs now: the merged model, or a component."""
        return self.model.base_model(**self.uncached(inputs))[0]

    def uncached(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A model's inputs, and that it need not keep keys and values."""
        return {**inputs, "use_cache": False} if self.model.can_generate() else dict(inputs)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode within; afterwards each module is in the mode it was in."""
        before = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            yield
        finally:
            for module, training in before:
                module.training = training

    def distill(self, kl: KLConfig, **batch: Any) -> Tensor:
        """The loss of one batch; see `mergekit_lite.masks.distillation.distill` for what a batch holds."""
        return distill(self, kl, **batch)
