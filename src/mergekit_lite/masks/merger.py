"""`Merger`: the masked model that users load, run, train, save and bake."""

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
    ``Σ_k mask_k * W_k``, or over a base ``W + Σ_k mask_k * (W_k - W)``. Only the masks can be
    trained. Weights are shared with ``models``, not copied, and ``models`` are not changed.

    Args:
        models: Two or more models (with a base, one or more) of one architecture, dtype and
            vocabulary. The adapter of a `PeftModel` is folded into a copy.
        config: The settings of the masks.
        base: The model that the others were fine-tuned from. Masks then apply to their differences
            from it. It is no teacher.
        labels: The names of the models, the base last; default: where they were loaded from.
        strict: Whether to refuse components whose settings or buffers differ; otherwise warn, and
            use those of the base or else of the first component.

    Raises:
        ValueError: Models that differ in architecture, shapes, dtypes, ties, settings or buffers,
            or hold NaN.

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

    # the Trainer passes the number of items in all micro-batches of a step
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
        """Load each component once, and create masks for all of them.

        Args:
            paths: Folders or hub ids, in the order of the masks; ``"model+adapter"`` and folders of
                LoRA adapters too.
            base: The model that the components were fine-tuned from. Masks then apply to
                differences from it. Adapters of its linear layers stay factors, so all models take
                about the memory of one (not with element masks, which need full weights).
            masks: A file from `save_masks` to start from; it also sets the config.
            auto_class: The transformers class that loads the models, for example
                ``AutoModelForSequenceClassification``.
            dtype: The dtype of all components; ``"auto"``: as stored.
            model_options: Further arguments of ``auto_class.from_pretrained``, such as
                ``attn_implementation``, or fields of the config. They apply to all components.
            strict: Whether to refuse components whose tokenizers, settings or buffers differ;
                otherwise warn, and use the settings and buffers of the base or else of the first
                component.
            **config: Fields of `MaskConfig`.

        Raises:
            ValueError: Components that do not fit together; masks of other components.
        """
        if masks is not None and config:
            raise ValueError(
                "Merger.from_pretrained: expected masks or fields of MaskConfig, got masks and "
                f"{next(iter(config))}; the file of masks sets these fields"
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
        # only here, because models that were passed in memory may differ from every file
        merger.sources = [stored_as(label) for label in labels]
        if masks is not None:
            merger.load_masks(masks)
        return merger

    def forward(self, *args: object, kl: KLConfig | None = None, **inputs: object) -> Output:
        """Return the merged model's output, or with ``kl`` an output that holds only a loss.

        This loss is the result of `distill`.
        """
        if kl is None:
            return super().forward(*args, **inputs)
        # through forward, since DDP sees no other call
        return CausalLMOutput(loss=self.distill(kl, **inputs))

    def save_pretrained(self, *ignored: object, **named: object) -> None:
        """Raise an error: a merger is saved as a merged model (`bake`) or masks (`save_masks`).

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "Merger.save_pretrained is not supported; bake(out) saves a merged model, and "
            "save_masks(path) the masks"
        )

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
                # in place, since an optimizer and tied layers hold these very parameters
                self._raw[name].copy_(values)
        self.unfold_()

    def bake(self, out: str | os.PathLike[str], **options: object) -> MergeReport:
        """Write the merged model as an ordinary checkpoint.

        The engine of `merge_models` streams it to disk. In accurate mode the checkpoint gives the
        same logits as this merger in evaluation mode, bit for bit.

        Args:
            out: Folder to write: a new path, or an empty folder.
            **options: ``max_shard_size``, ``progress``, ``threads``, ``fresh`` of `merge_models`,
                and ``dtype``; a dtype other than the components' changes the logits by one
                rounding.

        Raises:
            ValueError: A mask is not finite, an option is unknown, or `merge_models` refuses.
        """
        return bake(self, Path(out), options)

    def report(self) -> MaskReport:
        """Return a report of each weight's masks: means, spread, and which component's is largest.

        Print it, or call its ``plot``. Over a base it has the components' masks of each weight that
        a component changes. The base's mask is 1 minus their sum.
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
