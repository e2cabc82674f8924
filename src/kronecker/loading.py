"""Load models, compressed or not, and tokenizers for the commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from model_components._hub import find_folder
from model_components._loading import read_config
from model_components._model_folders import load_tokenizer

from .data.batches import positions_of
from .storage.checkpoints import from_pretrained, is_compressed, model_class

_COMPARED = 20_000  # tokenizers are compared on this many characters of a text


class ModelFolder(NamedTuple):
    """A model's folder and the name of its class.

    Attributes:
        path: The path of the folder.
        architecture: The name of the class, or an empty string if the model is compressed.
    """

    path: str
    architecture: str


def find_model(name: str) -> ModelFolder:
    """Find the folder and the architecture of a model, without loading its weights.

    Args:
        name: The model's folder or hub id.

    Raises:
        ValueError: There is no model or only an adapter, or the config names no architecture.
    """
    folder = str(find_folder(name, operation="kronecker"))
    if is_compressed(folder):
        return ModelFolder(folder, "")
    if Path(folder, "adapter_config.json").is_file() and not Path(folder, "config.json").is_file():
        raise ValueError(
            f"kronecker: expected a whole model, got the adapter {folder}; merge the adapter first "
            "with model-components lora merge"
        )
    config = read_config(folder, "kronecker")
    architectures = config.architectures or []
    if not architectures:
        raise ValueError(
            f"kronecker: expected the name of a model class in the field architectures, got none "
            f"in {folder}/config.json"
        )
    return ModelFolder(folder, architectures[0])


def load(found: ModelFolder, device: str = "cpu") -> PreTrainedModel:
    """Load a model, compressed or not, in its own dtype, and set it to evaluation mode.

    Args:
        found: The folder and the architecture, as `find_model` returns them.
        device: The device of the loaded model.

    Raises:
        ValueError: The files cannot be read, or weights are missing or have another shape.
    """
    name, architecture = found
    if not architecture:
        compressed: Any = from_pretrained(name)
        return compressed.to(device)
    try:
        loaded: Any = model_class(architecture, "kronecker").from_pretrained(
            name, output_loading_info=True
        )
        model, loading_info = loaded
    except Exception as error:  # any error that a damaged file or an edited config raises
        raise ValueError(
            f"kronecker: {name} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    # transformers initializes missing weights at random and only logs a warning
    for what in ("missing_keys", "mismatched_keys"):
        if loading_info[what]:
            names = sorted(map(str, loading_info[what]))
            raise ValueError(
                f"kronecker: expected the weights that the config of {name} describes, but "
                f"some are missing or have another shape ({len(names)}), such as {names[0]}"
            )
    # an old checkpoint may hold a buffer or a head that its class no longer has
    if unexpected := loading_info["unexpected_keys"]:
        print(
            f"kronecker: the model does not use {len(unexpected)} of the weights in {name}",
            file=sys.stderr,
        )
    return model.eval().to(device)


def encoder_of(tokenizer: str) -> Callable[[str], list[int]]:
    """Load a tokenizer, and return a function from text to token ids.

    Args:
        tokenizer: The tokenizer's folder or hub id.

    Raises:
        ValueError: There is no tokenizer.
    """
    found: Any = load_tokenizer(tokenizer)
    if found is None:
        raise ValueError(f"kronecker: {tokenizer} has no tokenizer, expected --tokenizer FOLDER")
    # verbose=False, since the tokenizer would warn that a whole text is longer than the context
    return lambda text: found(text, verbose=False)["input_ids"]


def check_tokenizers(
    names: Sequence[str], encode: Callable[[str], list[int]], texts: Iterable[str]
) -> None:
    """Raise a ValueError if a model's own tokenizer splits a text differently from ``encode``.

    Losses are per token, so they are comparable only with the same tokens.

    Args:
        names: Folders or hub ids of the models. Models without a tokenizer are not checked.
        encode: The function from text to token ids that is used for all models.
        texts: The texts.
    """
    starts = [text[:_COMPARED] for text in texts]
    for name in names:
        own: Any = load_tokenizer(name)
        if own is not None and any(own(text)["input_ids"] != encode(text) for text in starts):
            raise ValueError(
                "compare: expected models that share one tokenizer, since losses are per token, "
                f"but the tokenizer of {name} splits the text differently; compare {name} only "
                "with models that use its tokenizer"
            )


def calibration_of(rows: list[Tensor], model: PreTrainedModel) -> list[object]:
    """Return calibration batches; both parts of an encoder-decoder get the same text."""
    if model.config.is_encoder_decoder:
        return [{"input_ids": ids, "decoder_input_ids": ids} for ids in rows]
    return list(rows)


def context_of(models: Sequence[PreTrainedModel], context: int) -> int:
    """Return ``context`` or, if it is smaller, the shortest maximum input length of the models."""
    for model in models:
        # one context for all models, so that they are compared on the same sequences
        limit = positions_of(model)
        if limit:
            context = min(context, limit)
    return context
