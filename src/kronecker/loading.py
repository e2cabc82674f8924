"""Load the inputs of the commands: models, compressed or not, and batches of tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from model_components._hub import find_folder

from .data.batches import positions_of
from .data.text import text_batches, text_of
from .storage.checkpoints import from_pretrained, is_compressed, model_class


def load(name: str, device: str = "cpu") -> PreTrainedModel:
    """Load a model, compressed or not, in evaluation mode and its own dtype.

    Args:
        name: Folder or hub id.
        device: Where to put it.

    Raises:
        ValueError: No whole model can be loaded from this name.
    """
    name = str(find_folder(name, operation="kronecker"))
    if is_compressed(name):
        compressed: Any = from_pretrained(name)
        return compressed.to(device)
    if Path(name, "adapter_config.json").is_file() and not Path(name, "config.json").is_file():
        raise ValueError(f"kronecker: {name} is an adapter, expected a whole model: merge it first")
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as error:
        first = str(error).splitlines()[0]
        raise ValueError(
            f"kronecker: {name} is no model's folder, nor found on the hub ({first})"
        ) from None
    architectures = config.architectures or []
    if not architectures:
        raise ValueError(f"kronecker: {name} does not say its architecture in config.json")
    try:
        loaded: Any = model_class(architectures[0], "kronecker").from_pretrained(
            name, output_loading_info=True
        )
        model, loading_info = loaded
    except Exception as error:  # whatever a damaged file or a config that was edited gives
        raise ValueError(
            f"kronecker: {name} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    for what in ("missing_keys", "mismatched_keys"):
        if loading_info[what]:
            names = sorted(map(str, loading_info[what]))
            raise ValueError(
                f"kronecker: {name} has no {names[0]} that fits its config "
                f"({len(names)} weights, which would be random)"
            )
    if unexpected := loading_info["unexpected_keys"]:
        print(
            f"kronecker: {len(unexpected)} weights in {name} are not used by the model",
            file=sys.stderr,
        )
    return model.eval().to(device)


def tokens_of(
    file: Path, tokenizer: str, models: Sequence[PreTrainedModel], *, tokens: int, context: int
) -> list[Tensor]:
    """Return batches of token ids from the beginning of a text.

    Args:
        file: A file of text, or of rows with texts.
        tokenizer: Folder or hub id.
        models: Rows are not longer than these models have positions for.
        tokens: Number of tokens to read.
        context: The largest length of a row.

    Raises:
        ValueError: There is no tokenizer.
    """
    try:
        encode = AutoTokenizer.from_pretrained(find_folder(tokenizer))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"kronecker: {tokenizer} has no tokenizer, expected --tokenizer FOLDER"
        ) from error
    return text_batches(
        text_of(file),
        # pyrefly: ignore[not-callable]: AutoTokenizer may give None; find_folder found one
        lambda text: encode(text, verbose=False)["input_ids"],
        tokens=tokens,
        context=context_of(models, context),
    )


def calibration_of(rows: list[Tensor], model: PreTrainedModel) -> list[object]:
    """Return calibration inputs of a model. An encoder-decoder gets the text on both sides."""
    if model.config.is_encoder_decoder:
        return [{"input_ids": ids, "decoder_input_ids": ids} for ids in rows]
    return list(rows)


def context_of(models: Sequence[PreTrainedModel], context: int) -> int:
    """Return ``context``, or the smallest number of positions of the models if that is less."""
    return min([context, *(limit for model in models if (limit := positions_of(model)))])
