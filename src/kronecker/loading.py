"""Load the inputs of the commands: models, compressed or not, and tokenizers."""

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

_COMPARED = 20_000  # characters of a text that tokenizers are compared on


class ModelFolder(NamedTuple):
    """A model's folder and the name of its class.

    Attributes:
        path: The folder.
        architecture: The class; an empty string if the model is compressed.
    """

    path: str
    architecture: str


def find_model(name: str) -> ModelFolder:
    """Find the folder and the architecture of a model. Only its config is read.

    Args:
        name: Folder or hub id.

    Raises:
        ValueError: There is no model, or only an adapter.
    """
    folder = str(find_folder(name, operation="kronecker"))
    if is_compressed(folder):
        return ModelFolder(folder, "")
    if Path(folder, "adapter_config.json").is_file() and not Path(folder, "config.json").is_file():
        raise ValueError(
            f"kronecker: {folder} is an adapter, expected a whole model: merge it first with "
            "model-components lora merge"
        )
    config = read_config(folder, "kronecker")
    architectures = config.architectures or []
    if not architectures:
        raise ValueError(f"kronecker: {folder}/config.json names no architecture, expected one")
    return ModelFolder(folder, architectures[0])


def load(found: ModelFolder, device: str = "cpu") -> PreTrainedModel:
    """Load a model, compressed or not, in evaluation mode and its own dtype.

    Args:
        found: The folder, as `find_model` returns it.
        device: The device to load it on.

    Raises:
        ValueError: No whole model can be loaded from the folder.
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
    # transformers initializes missing weights at random and only warns
    for what in ("missing_keys", "mismatched_keys"):
        if loading_info[what]:
            names = sorted(map(str, loading_info[what]))
            raise ValueError(
                f"kronecker: {name} has no {names[0]} that fits its config "
                f"({len(names)} weights are missing or have another shape)"
            )
    # an old checkpoint may carry a buffer or a head that its class no longer has
    if unexpected := loading_info["unexpected_keys"]:
        print(
            f"kronecker: {len(unexpected)} weights in {name} are not used by the model",
            file=sys.stderr,
        )
    return model.eval().to(device)


def encoder_of(tokenizer: str) -> Callable[[str], list[int]]:
    """Return a tokenizer's function from text to token ids.

    Args:
        tokenizer: Folder or hub id.

    Raises:
        ValueError: There is no tokenizer.
    """
    found: Any = load_tokenizer(tokenizer)
    if found is None:
        raise ValueError(f"kronecker: {tokenizer} has no tokenizer, expected --tokenizer FOLDER")
    # verbose=False: a whole text is longer than the context, and the tokenizer would warn
    return lambda text: found(text, verbose=False)["input_ids"]


def check_tokenizers(
    names: Sequence[str], encode: Callable[[str], list[int]], texts: Iterable[str]
) -> None:
    """Raise if a model's own tokenizer splits a text differently; losses are per token.

    Args:
        names: Folders or hub ids of the models; those without a tokenizer pass.
        encode: The function from text to token ids that all models are measured with.
        texts: The texts.
    """
    starts = [text[:_COMPARED] for text in texts]
    for name in names:
        own: Any = load_tokenizer(name)
        if own is not None and any(own(text)["input_ids"] != encode(text) for text in starts):
            raise ValueError(
                "compare: expected models with one tokenizer, since losses are per token, but that "
                f"of {name} splits the text differently; compare it with models of its tokenizer"
            )


def calibration_of(rows: list[Tensor], model: PreTrainedModel) -> list[object]:
    """Return calibration inputs of a model. An encoder-decoder gets the text on both sides."""
    if model.config.is_encoder_decoder:
        return [{"input_ids": ids, "decoder_input_ids": ids} for ids in rows]
    return list(rows)


def context_of(models: Sequence[PreTrainedModel], context: int) -> int:
    """Return ``context``, but at most the maximum length of each model."""
    for model in models:
        # one context for all models, so that they are compared on the same rows
        limit = positions_of(model)
        if limit:
            context = min(context, limit)
    return context
