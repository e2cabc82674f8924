"""`Merger`: the masked model that users load, run, train, and write as a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from ..report import MergeReport
from .config import KLConfig, MaskConfig
from .distillation import distill
from .layers import Output
from .loading import load_components
from .model import MaskedModel
from .report import MaskReport
from .storage import bake, load_masks, read_config, save_masks, stored_as


class Merger(MaskedModel):
    """Several frozen models and the masks that merge them.

    ``forward`` and ``generate`` run the merged model. Each of its weights is
    ``Σ_k mask_k * W_k``, or with a base ``W + Σ_k mask_k * (W_k - W)``. Only the masks can be
    trained. Weights are shared with ``models``, not copied, and ``models`` are not changed.

    Args:
        models: Two or more models (with a base, one or more) of one architecture, dtype and
            vocabulary. The adapter of a `PeftModel` is folded into a copy of its model.
        config: The settings of the masks.
        base: The model that the others were fine-tuned from. Masks then apply to their differences
            from the base. The base is not a teacher.
        labels: The names of the models, with the name of the base last; default: the paths or hub
            ids that they were loaded from.
        strict: Whether to raise an error if settings or buffers of the components differ. If False,
            warn, and use the settings and buffers of the base, or of the first component if there
            is no base.

    Raises:
        ValueError: The models differ in architecture, shapes, dtypes, tied weights, settings or
            buffers. A weight is NaN or infinite. The number of labels is wrong. No mask would be
            trained.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> tiny = GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    >>> merger = Merger(
    ...     [GPT2LMHeadModel(tiny), GPT2LMHeadModel(tiny)], MaskConfig(granularity="scalar")
    ... )
    >>> merger(input_ids=torch.tensor([[1, 2]])).logits.shape
    torch.Size([1, 2, 11])
    >>> merger.effective_masks()["transformer.h.0.attn.c_attn.weight"].flatten().tolist()
    [0.5, 0.5]
    """

    # makes the Trainer pass the number of items in all micro-batches of a step
    accepts_loss_kwargs = True

    @classmethod
    def from_pretrained(
        cls,
        paths: Sequence[str | os.PathLike[str]],
        *,
        base: str | os.PathLike[str] | None = None,
        masks: str | os.PathLike[str] | None = None,
        auto_class: object = AutoModelForCausalLM,
        dtype: str | torch.dtype = "auto",
        model_options: Mapping[str, object] | None = None,
        strict: bool = True,
        **config: Any,
    ) -> Self:
        """Load the components, and create masks over their weights.

        Args:
            paths: The components, in the order of the masks: folders, hub ids,
                ``"model+adapter"``, or folders of LoRA adapters whose config names their base.
            base: The model that the components were fine-tuned from. Masks then apply to
                differences from the base. LoRA adapters of the base's linear layers are kept as
                low-rank factors, so that all models together take about the memory of one. Element
                masks need full weights, so with them adapters are folded in.
            masks: A file that `save_masks` wrote. Masks and config are read from this file.
            auto_class: The transformers class that loads the models, for example
                ``AutoModelForSequenceClassification``.
            dtype: The dtype of all components; ``"auto"``: the dtype of their files.
            model_options: Further arguments of ``auto_class.from_pretrained``, such as
                ``attn_implementation``, or fields of the config. They apply to all components.
            strict: Whether to raise an error if tokenizers, settings or buffers of the components
                differ. If False, warn, and use the settings and buffers of the base, or of the
                first component if there is no base. `bake` then writes the first component's
                tokenizer.
            **config: Fields of `MaskConfig`, unless ``masks`` is given.

        Raises:
            ValueError: The components cannot be merged, a field is unknown or invalid, or ``masks``
                belongs to other components.
        """
        if masks is not None and config:
            raise ValueError(
                "Merger.from_pretrained: expected either masks or fields of MaskConfig, got masks "
                f"and {next(iter(config))}; the file of masks sets all fields"
            )
        # a dataclass's own TypeError would not list the fields
        known = [field.name for field in fields(MaskConfig)]
        if unknown := [name for name in config if name not in known]:
            raise ValueError(
                f"Merger.from_pretrained: expected fields of MaskConfig ({', '.join(known)}), got "
                f"{unknown[0]!r}"
            )
        if masks is not None:
            settings = read_config(Path(masks))
        else:
            settings = MaskConfig(**config)
        models, labels = load_components(
            paths,
            auto_class,
            dtype,
            model_options or {},
            base=base,
            low_rank=base is not None and settings.granularity != "element",
            strict=strict,
        )
        base_model = None if base is None else models.pop()
        merger = cls(models, settings, base=base_model, labels=labels, strict=strict)
        # set only here, because models that are passed in memory may differ from all files
        merger.sources = [stored_as(label) for label in labels]
        if masks is not None:
            merger.load_masks(masks)
        return merger

    def forward(self, *args: object, kl: KLConfig | None = None, **inputs: object) -> Output:
        """Return the output of the merged model, or of the selected component.

        With ``kl``, return an output that holds only a loss: the result of `distill`.
        """
        if kl is None:
            return super().forward(*args, **inputs)
        # called in forward, because DDP synchronizes the gradients of no other method
        return CausalLMOutput(loss=self.distill(kl, **inputs))

    def save_pretrained(self, *ignored: object, **named: object) -> None:
        """Raise an error: a merger is saved as a merged model (`bake`) or masks (`save_masks`).

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "Merger.save_pretrained is not supported; use bake(out) to save the merged model, or "
            "save_masks(path) to save the masks"
        )

    def save_masks(self, path: str | os.PathLike[str]) -> Path:
        """Write the masks, their config and the components' hashes to a safetensors file."""
        return save_masks(self, Path(path))

    def load_masks(self, path: str | os.PathLike[str]) -> None:
        """Load masks that `save_masks` wrote for the same components.

        Raises:
            ValueError: The file is not a complete file of masks, or the masks belong to other
                components or another config.
        """
        loaded = load_masks(self, Path(path))
        with torch.no_grad():
            for name, values in loaded.items():
                # in place, because optimizers and tied layers hold references to these parameters
                self._raw[name].copy_(values)
        self.unfold_()

    def bake(self, out: str | os.PathLike[str], **options: object) -> MergeReport:
        """Write the merged model as an ordinary checkpoint.

        `merge_models` streams the checkpoint to disk. In accurate mode, the checkpoint gives the
        same logits as this merger in evaluation mode, bit for bit. If adapters are kept as factors,
        logits differ by rounding.

        Args:
            out: Folder to write: a new path, or an empty folder.
            **options: ``max_shard_size``, ``progress``, ``threads``, ``fresh`` and ``dtype`` of
                `merge_models`. If ``dtype`` is not the components' dtype, logits differ by
                rounding.

        Returns:
            The report of `merge_models`.

        Raises:
            ValueError: A mask is not finite, an option is unknown, a component's files have changed
                since they were loaded, or `merge_models` raises an error.
        """
        return bake(self, Path(out), options)

    def report(self) -> MaskReport:
        """Return a report on each weight's masks: means, spread, and the largest mask's component.

        The report can be printed, and its ``plot`` method draws a heat map. With a base, the report
        covers only weights that a component changes. It leaves out the base's masks, which are 1
        minus the sum of the components' masks.
        """
        chosen = [name for name, (layer, own) in self._layers.items() if not layer.is_same(own)]
        masks = self.effective_masks()
        return MaskReport.of(
            {name: masks[name][: self.count] for name in chosen}, self.labels[: self.count]
        )

    def distill(self, kl: KLConfig, **batch: Any) -> Tensor:
        """Return the distillation loss of one batch.

        See `mergekit_lite.masks.distillation.distill` for the keys of a batch.
        """
        return distill(self, kl, **batch)
