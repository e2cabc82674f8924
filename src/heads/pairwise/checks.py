"""Checks of encoders, tokenizers and token limits, for building and loading judges."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from model_components._modes import evaluating

from .config import encoder_config
from .packing import PackingReport, embedding_weight, encode_padded


@torch.no_grad()
def check_encoder(encoder: PreTrainedModel) -> None:
    """Check that an encoder returns hidden states for two tokens.

    Raises:
        ValueError: The encoder fails, or its output has no hidden states.
    """
    try:
        with evaluating(encoder):
            encode_padded(
                encoder, torch.ones(2, dtype=torch.long, device=encoder.device), [2], None
            )
    # models that are not encoders fail in many ways; NotImplementedError is a RuntimeError, too
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ValueError(
            "from_encoder: expected an encoder that returns hidden states, but "
            f"{type(encoder).__name__} fails on a test input of two tokens: {error}"
        ) from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, encoder: PreTrainedModel) -> None:
    """Check that a tokenizer has tokens for text, and that its token ids match the encoder's.

    Raises:
        ValueError: The tokenizer has only special tokens, more tokens than the encoder has
            embeddings, or special token ids that differ from the ids in the encoder's config.
    """
    # from a folder without tokenizer files, transformers builds one that has only special tokens
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(
            "from_encoder: expected a tokenizer with tokens for text, got one with "
            f"{len(tokenizer)} tokens, all of them special (does its folder lack tokenizer.json?)"
        )
    rows = len(embedding_weight(encoder))
    if len(tokenizer) > rows:
        raise ValueError(
            f"from_encoder: expected the encoder's own tokenizer, got one with {len(tokenizer)} "
            f"tokens for an encoder with only {rows} embeddings"
        )
    for name in ("pad", "cls", "sep", "bos", "eos"):
        theirs = getattr(encoder.config, f"{name}_token_id", None)
        ours = getattr(tokenizer, f"{name}_token_id", None)
        # some configs, such as Llama 3's, list several end-of-text ids
        known = theirs if isinstance(theirs, list) else [theirs]
        # many configs and tokenizers do not set some of these ids
        if theirs is not None and ours is not None and ours not in known:
            raise ValueError(
                f"from_encoder: expected the encoder's own tokenizer, got one whose "
                f"{name}_token_id is {ours}, while the encoder's is {theirs}"
            )


def check_loadable(encoder: PreTrainedModel) -> None:
    """Check that an encoder can be rebuilt from its config.

    Nothing is computed or downloaded, because the rebuilt encoder is on the meta device.

    Raises:
        ValueError: The encoder cannot be rebuilt, or the tensors of the rebuilt encoder differ in
            name or shape.
    """
    name = type(encoder).__name__
    try:
        config = encoder_config(encoder.config.to_dict())
        with torch.device("meta"):
            rebuilt = AutoModel.from_config(config, dtype=encoder.dtype)
    except Exception as error:  # a config's own checks may raise anything
        raise ValueError(
            f"from_encoder: expected an encoder that AutoModel.from_config can build, but for "
            f"{name} this fails: {error}"
        ) from error
    before, after = _shapes(encoder), _shapes(rebuilt)
    if before != after:
        different = sorted(key for key in before | after if before.get(key) != after.get(key))
        raise ValueError(
            "from_encoder: expected an encoder that AutoModel.from_config can rebuild, got "
            f"{name}, from whose config it builds a {type(rebuilt).__name__} that differs in "
            f"{different[0]}"
        )


def _shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Return the shapes of a model's tensors, except in modules that a judge does not run."""
    tensors = model.state_dict().items()
    unused = ("pooler.", "contact_head.")
    return {key: tensor.shape for key, tensor in tensors if not key.startswith(unused)}


def most_tokens(
    operation: str, asked: int | None, encoder: nn.Module, packing: PackingReport, tokenizer: object
) -> int:
    """Return the maximum number of tokens in a sequence.

    This is ``asked`` if it is given, otherwise the lower of the encoder's and the tokenizer's
    limits.

    Raises:
        ValueError: ``asked`` exceeds the encoder's number of positions.
    """
    positions = getattr(encoder.config, "max_position_embeddings", None)
    if positions is not None and positions < 1:  # as in XLNet, whose positions have no limit
        positions = None
    first = getattr(getattr(encoder, "embeddings", None), "padding_idx", None)
    # RoBERTa and MPNet start to count positions after the padding id
    if packing.packed or first is None:
        counted = packing.offset
    else:
        counted = first + 1
    # 512, as in BERT, if the config has no number of positions
    most = (positions or 512) - counted
    if asked is not None and positions and asked > most:
        raise ValueError(
            f"{operation}: max_tokens is {asked}, but {type(encoder).__name__} has only {most} "
            "positions"
        )
    # a tokenizer without a limit has a model_max_length of 1e30
    return asked or min(most, getattr(tokenizer, "model_max_length", most))
