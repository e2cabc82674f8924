"""Refuse encoders that cannot read and tokenizers of others, before `from_encoder` begins."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from model_components._modes import evaluating

from .config import encoder_config
from .packing import PackingReport, embedding_weight, encode_padded


@torch.no_grad()
def check_encoder(encoder: PreTrainedModel) -> None:
    """Refuse what gives no hidden states of two tokens."""
    try:
        with evaluating(encoder):
            encode_padded(
                encoder, torch.ones(2, dtype=torch.long, device=encoder.device), [2], None
            )
    # models of other kinds fail in many ways; NotImplementedError is a RuntimeError, too
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ValueError(
            f"from_encoder: {type(encoder).__name__} cannot read two tokens: {error}"
        ) from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, encoder: PreTrainedModel) -> None:
    """Refuse a tokenizer without words, and one whose ids mean something else to the encoder."""
    # transformers makes such a tokenizer of a folder that has none
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"from_encoder: the tokenizer has {len(tokenizer)} tokens, all of them special; "
            "expected one with words (does its folder lack tokenizer.json?)"
        )
    rows = len(embedding_weight(encoder))
    if len(tokenizer) > rows:
        raise ValueError(
            f"from_encoder: the tokenizer has {len(tokenizer)} tokens, the encoder {rows}; is it "
            "another's?"
        )
    for name in ("pad", "cls", "sep", "bos", "eos"):
        theirs, ours = (
            getattr(side, f"{name}_token_id", None) for side in (encoder.config, tokenizer)
        )
        # some configs list several ids that end a text, as Llama 3's
        known = theirs if isinstance(theirs, list) else [theirs]
        # many configs and tokenizers leave some of these ids out
        if theirs is not None and ours is not None and ours not in known:
            raise ValueError(
                f"from_encoder: the tokenizer's {name}_token_id is {ours}, the encoder's {theirs}; "
                "is it another's?"
            )


def check_loadable(encoder: PreTrainedModel) -> None:
    """Refuse an encoder that could not be made again from its config.

    Nothing of it is computed or downloaded; the copy is on the meta device.
    """
    name = type(encoder).__name__
    try:
        config = encoder_config(encoder.config.to_dict())
        with torch.device("meta"):
            rebuilt = AutoModel.from_config(config, dtype=encoder.dtype)
    except Exception as error:  # whatever a config's own checks raise
        raise ValueError(
            f"from_encoder: expected an encoder that can be loaded by its config, got {name}, for "
            f"which AutoModel.from_config fails: {error}"
        ) from error
    before, after = _shapes(encoder), _shapes(rebuilt)
    if before != after:
        different = sorted(key for key in before | after if before.get(key) != after.get(key))
        raise ValueError(
            f"from_encoder: expected an encoder that can be loaded by its config, got {name}; its "
            f"config makes a {type(rebuilt).__name__} that differs in {different[0]}"
        )


def _shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Return the shapes of a model's tensors, without parts that a judge does not run."""
    tensors = model.state_dict().items()
    unused = ("pooler.", "contact_head.")
    return {key: tensor.shape for key, tensor in tensors if not key.startswith(unused)}


def most_tokens(
    operation: str, asked: int | None, encoder: nn.Module, packing: PackingReport, tokenizer: object
) -> int:
    """Most tokens of a sequence: what was asked for, if the encoder has so many positions."""
    positions = getattr(encoder.config, "max_position_embeddings", None)
    if positions is not None and positions < 1:  # XLNet, whose positions have no limit
        positions = None
    first = getattr(getattr(encoder, "embeddings", None), "padding_idx", None)
    # as RoBERTa and MPNet count
    if packing.packed or first is None:
        counted = packing.offset
    else:
        counted = first + 1
    # 512, as in BERT, where a config names no number of positions
    most = (positions or 512) - counted
    if asked is not None and positions and asked > most:
        raise ValueError(
            f"{operation}: max_tokens is {asked}, and {type(encoder).__name__} has {most} positions"
        )
    # a tokenizer without a limit says 1e30
    return asked or min(most, getattr(tokenizer, "model_max_length", most))
