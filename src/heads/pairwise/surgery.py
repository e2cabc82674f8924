"""Remove layers of an encoder, or freeze parts of it, in place."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from model_components._report import Report

from .judge import Judge


@dataclass(frozen=True)
class FreezeReport(Report):
    """The result of `freeze_`.

    Attributes:
        frozen: The names of the modules that were frozen.
        frozen_parameters: The number of the model's parameters that are not trained.
        trained_parameters: The number of the model's parameters that are trained.
    """

    frozen: tuple[str, ...]
    frozen_parameters: int
    trained_parameters: int

    def summary(self) -> list[str]:
        """Return a line on what is frozen, with the numbers of frozen and trained parameters."""
        what = ", ".join(self.frozen) if self.frozen else "nothing"
        return [
            f"frozen: {what} ({self.frozen_parameters:,} parameters); trained: "
            f"{self.trained_parameters:,} parameters"
        ]


def encoder_layers(
    operation: str, encoder: PreTrainedModel, instead: str
) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of an encoder's layers.

    Args:
        operation: The operation to name in the error message.
        encoder: The encoder.
        instead: The values to suggest in the error message.

    Raises:
        ValueError: The encoder has no list of ``num_hidden_layers`` layers, for example because
            layers share parameters.
    """
    config = encoder.config
    wanted = config.num_hidden_layers
    # in ALBERT with one group, all layers share the same parameters
    lists = [
        (name, module)
        for name, module in encoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == wanted
    ]
    # XLM has several such lists, one for each part of a layer
    parents = [name.rpartition(".")[0] for name, _ in lists]
    is_one_list = lists and parents.count(parents[0]) == 1
    if is_one_list and getattr(config, "num_hidden_groups", 0) != 1:
        return lists[0]
    raise ValueError(
        f"{operation}: {type(encoder).__name__} has no list of {wanted} layers (do its layers "
        f"share parameters?); use {instead}"
    )


def keep_lowest_(encoder: PreTrainedModel, depth: int) -> None:
    """Remove an encoder's layers above the lowest ``depth``, in place.

    Raises:
        ValueError: ``depth`` is below 1 or above the number of layers, or the encoder has no list
            of layers.
    """
    count = encoder.config.num_hidden_layers
    if not 1 <= depth <= count:
        raise ValueError(
            f"from_encoder: depth is {depth}, expected 1 to {count}, the number of layers of "
            f"{type(encoder).__name__}"
        )
    _, layers = encoder_layers("from_encoder", encoder, "depth=None")
    config = encoder.config
    kinds = list(getattr(config, "layer_types", None) or [])[:depth]
    windows = getattr(config, "attention_window", None)
    config.num_hidden_layers = depth
    # some configs compute the kinds from the number of layers, so the kinds are already right
    if kinds and list(config.layer_types) != kinds:
        try:
            config.layer_types = kinds
        except AttributeError as error:
            config.num_hidden_layers = count
            raise ValueError(
                f"from_encoder: depth is {depth}, expected None, because the config of "
                f"{type(encoder).__name__} computes the kinds of layers from other fields"
            ) from error
    if isinstance(windows, list):  # Longformer's, one for each layer
        config.attention_window = windows[:depth]
    del layers[depth:]
    if config.model_type == "gpt_neo":  # GPT-Neo lists its kinds of attention twice
        config.attention_layers = config.attention_layers[:depth]
        config.attention_types = [[[kind], 1] for kind in config.attention_layers]


def freeze_(model: Judge, what: str) -> FreezeReport:
    """Freeze part of a `PairwiseModel`'s encoder, in place.

    The rest of the encoder and the head are trained. Each call undoes earlier calls.

    Args:
        model: A `PairwiseModel`.
        what: The part to freeze: ``"all"`` (the whole encoder), ``"embeddings"``, ``"none"``, or
            ``"bottom:N"`` for the embeddings and the N lowest layers, such as ``"bottom:6"``.

    Returns:
        A report with the frozen modules and the numbers of frozen and trained parameters.

    >>> from heads.pairwise import PairwiseConfig, PairwiseModel
    >>> from transformers import BertConfig
    >>> small = BertConfig(
    ...     vocab_size=9,
    ...     hidden_size=8,
    ...     num_hidden_layers=2,
    ...     num_attention_heads=1,
    ...     intermediate_size=8,
    ... )
    >>> print(freeze_(PairwiseModel(PairwiseConfig(encoder=small)), "bottom:1"))
    frozen: embeddings, encoder.layer.0 (4,664 parameters); trained: 473 parameters

    Raises:
        ValueError: ``what`` has another value or asks for more layers than there are, layers share
            parameters, or the model has adapters.
    """
    # every peft layer has this attribute, whatever the kind of adapter
    if any(hasattr(module, "adapter_layer_names") for module in model.modules()):
        raise ValueError(
            "freeze_: expected a model without adapters, but the model has adapters of peft, which "
            "has already frozen all other parameters"
        )
    parts = encoder_parts(model.encoder, what)
    # undo earlier calls, so that only the last one counts; parameters that never trained, such as
    # sinusoidal position embeddings, stay frozen
    earlier = getattr(model, "_frozen_by_us", [])
    for parameter in earlier:
        parameter.requires_grad_(True)
    ours = []
    for _, module in parts:
        ours += [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in ours:
        parameter.requires_grad_(False)
    model.__dict__["_frozen_by_us"] = ours  # a plain attribute, so that no state dict has it
    trained = frozen = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            trained += parameter.numel()
        else:
            frozen += parameter.numel()
    return FreezeReport(tuple(name for name, _ in parts), frozen, trained)


def encoder_parts(encoder: PreTrainedModel, what: str) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of the part ``what`` of an encoder; see `freeze_`."""
    if what == "none":
        return []
    if what == "all":
        return [("encoder", encoder)]
    # BERT's module also has position embeddings and a norm; decoders have only token embeddings
    embeddings = getattr(encoder, "embeddings", None) or encoder.get_input_embeddings()
    parts = [("embeddings", embeddings)]
    if embeddings is encoder.get_input_embeddings():
        parts += _other_embeddings(encoder, embeddings)
    # between the embeddings and the layers of ELECTRA, ALBERT and BLOOM
    for name in (
        "embeddings_project",
        "encoder.embedding_hidden_mapping_in",
        "word_embeddings_layernorm",
        # modules that all layers of DeBERTa, MPNet or RoFormer share
        "encoder.rel_embeddings",
        "encoder.LayerNorm",
        "encoder.relative_attention_bias",
        "encoder.embed_positions",
    ):
        with contextlib.suppress(AttributeError):
            parts.append((name, encoder.get_submodule(name)))
    if what == "embeddings":
        return parts
    kind, _, count = str(what).partition(":")
    if kind != "bottom" or not count.isdigit():
        raise ValueError(
            "freeze_: expected what to be 'all', 'embeddings', 'none' or 'bottom:N' (the lowest N "
            f"layers), got {what!r}"
        )
    name, layers = encoder_layers("freeze_", encoder, "'all', 'embeddings' or 'none'")
    if not 0 < int(count) <= len(layers):
        raise ValueError(
            f"freeze_: expected 'bottom:N' with N from 1 to {len(layers)}, the number of layers of "
            f"{type(encoder).__name__}, got {what!r}"
        )
    return parts + [(f"{name}.{k}", layers[k]) for k in range(int(count))]


def _other_embeddings(encoder: nn.Module, tokens: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the embeddings other than token embeddings, such as GPT-2's position embeddings."""
    for module in encoder.modules():
        children = dict(module.named_children())
        if any(child is tokens for child in children.values()):
            return [
                (name, child)
                for name, child in children.items()
                if isinstance(child, nn.Embedding) and child is not tokens
            ]
    return []
