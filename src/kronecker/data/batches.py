"""Batches of a model's arguments for calibration, checked before any work starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from model_components._devices import on_device
from model_components._walk import Batch

_OF_TOKENS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
)
_LABELS = ("labels", "label")


def batches(
    calibration: Iterable[object], model: nn.Module, operation: str
) -> list[dict[str, Any]]:
    """Return calibration data as keyword arguments of the model, on its device.

    Each item is a dict, or a tensor of token ids. Rows of a tokenized data set are dicts, too:
    their lists become tensors, and their texts are left out.

    Raises:
        ValueError: No batch, or one that the model cannot run on: text, token ids that are not
            integers or not in the vocabulary, rows longer than the model's positions, only labels,
            or padding for an encoder-decoder.
    """
    check_model(operation, model)
    if not isinstance(calibration, Iterable):
        raise ValueError(
            f"{operation}: calibration is {calibration!r}, expected batches of token ids"
        )
    device = next(model.parameters()).device
    checked = []
    for item in calibration:
        batch = _as_model_arguments(item, operation)
        _check_batch(batch, model, operation)
        checked.append(on_device(batch, device))
    if not checked:
        raise ValueError(f"{operation}: calibration is empty, expected batches of token ids")
    return checked


def _as_model_arguments(item: object, operation: str) -> dict[str, Any]:
    """Return a batch as keyword arguments; a single row of token ids becomes a batch of one."""
    if isinstance(item, Tensor):
        batch: dict[str, Any] = {"input_ids": item}
    elif isinstance(item, Mapping):
        batch = _as_tensors(item)
    else:
        raise ValueError(
            f"{operation}: a calibration batch is a {type(item).__name__}, expected a tensor of "
            "token ids (B, T) or a dict of the model's arguments; use a tokenizer to turn text "
            "into token ids"
        )
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    if not any(value.numel() for name, value in tensors.items() if name not in _LABELS):
        raise ValueError(
            f"{operation}: a calibration batch has {sorted(batch)}, expected token ids, or "
            "another tensor that is not empty"
        )
    for name, value in tensors.items():
        if name.endswith("input_ids") and not value.dim():
            raise ValueError(f"{operation}: {name} is a single number, expected (B, T) or (T,)")
        # a row of a tokenized data set is one list of numbers
        if name in _OF_TOKENS and value.dim() == 1:
            batch[name] = value[None]
    return batch


def _check_batch(batch: Mapping[str, Any], model: nn.Module, operation: str) -> None:
    """Check that the model can run on a batch."""
    main = getattr(model, "main_input_name", "input_ids")
    if main != "input_ids" and main not in batch:
        raise ValueError(
            f"{operation}: a calibration batch has {sorted(batch)}, expected dicts with "
            f"{main!r} for {type(model).__name__}"
        )
    for name in ("input_ids", "decoder_input_ids"):
        _check_ids(operation, batch.get(name), model)
    config = getattr(model, "config", None)
    if isinstance(config, PretrainedConfig) and config.is_encoder_decoder:
        _check_two_sides(operation, batch)


def _as_tensors(row: Mapping[str, object]) -> dict[str, Any]:
    """Convert lists of numbers to tensors, and leave out texts, which no model takes."""
    batch = {}
    for name, value in row.items():
        if isinstance(value, list):
            with contextlib.suppress(ValueError, TypeError):  # ragged, or of words: left as it is
                value = torch.tensor(value)
        if not isinstance(value, str):
            batch[name] = value
    return batch


def check_model(operation: str, model: object) -> None:
    """Check that the model is a module, not a folder's name, and has no peft adapters.

    Adapters must be merged first.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"{operation}: model is a {type(model).__name__}, expected a loaded model")
    for name, module in model.named_modules():
        # by the name of the module, so that peft need not be imported
        if type(module).__module__.startswith("peft."):
            raise ValueError(
                f"{operation}: {name or type(module).__name__} belongs to an adapter; merge "
                "adapters first"
            )


def check_float64(operation: str, model: nn.Module) -> None:
    """Refuse a model on a device without float64, such as mps, since weights are fitted in it."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        torch.empty(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"{operation}: the device {device} has no float64, in which weights are fitted; "
            "expected a model on the CPU"
        ) from error


def tokens_seen(data: Sequence[Batch], least: int) -> list[str]:
    """Return a note on how many tokens errors are measured on, and whether these are too few."""
    count = 0
    for batch in data:
        ids = batch.get("input_ids")
        mask = batch.get("attention_mask")
        if not isinstance(ids, Tensor):
            return []  # such as images
        count += (
            int(mask.sum()) if isinstance(mask, Tensor) and mask.shape == ids.shape else ids.numel()
        )
    if count < least:
        few = f", fewer than the {least:,} unknowns of the fit; expected thousands of tokens"
    else:
        few = ""
    return [f"errors are measured on the {count:,} calibration tokens{few}"]


@torch.no_grad()
def first_output(model: nn.Module, batch: Batch) -> Tensor:
    """Return a model's first output in float32: logits or hidden states."""
    out = model(**without_labels(batch))
    if isinstance(out, Mapping):
        values = out.values()
    elif isinstance(out, tuple):
        values = out
    else:
        values = (out,)
    return next(v for v in values if isinstance(v, Tensor) and v.dim()).float()


def without_labels(batch: Batch) -> dict[str, Any]:
    """Return a batch without labels, so that the model computes no loss."""
    return {k: v for k, v in batch.items() if k not in ("labels", "label")}


def _check_two_sides(operation: str, batch: Batch) -> None:
    """Check that a batch for an encoder-decoder has decoder inputs and no padding."""
    if not any(name.startswith("decoder_input") for name in batch):
        raise ValueError(
            f"{operation}: a batch has {sorted(batch)}, expected decoder_input_ids for an "
            "encoder-decoder"
        )
    # `not_padding` reads one mask, and would apply it to the tokens of the other side, too
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = batch.get(name)
        if isinstance(mask, Tensor) and not mask.all():
            raise ValueError(
                f"{operation}: {name} has padding, expected batches without any for an "
                "encoder-decoder"
            )


def positions_of(model: nn.Module) -> int | None:
    """Return how many tokens a row may have, or None if no limit is known."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return None
    # GPT-2's n_positions can be read by this name, too
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            if isinstance(positions, int) and module.padding_idx is not None:
                positions -= module.padding_idx + 1  # RoBERTa counts positions from padding_idx + 1
            break
    # XLNet has -1, since it has no limit
    if isinstance(positions, int) and positions > 0:
        return positions
    return None


def _check_ids(operation: str, ids: object, model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if not isinstance(ids, Tensor) or not isinstance(config, PretrainedConfig):
        return
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{operation}: token ids are {ids.dtype}, expected integers of 32 or 64 bits"
        )
    if not ids.numel():
        raise ValueError(
            f"{operation}: a batch has no token, {list(ids.shape)}; expected one or more"
        )
    check_vocabulary(operation, ids, config)
    positions = positions_of(model)
    if positions is not None and positions < ids.shape[-1]:
        raise ValueError(
            f"{operation}: rows have {ids.shape[-1]} tokens, expected at most the model's "
            f"{positions}"
        )


def check_vocabulary(operation: str, ids: Tensor, config: object) -> None:
    """Check that all token ids are in the vocabulary of a model's config, if it names a size."""
    if not isinstance(config, PretrainedConfig) or not ids.numel():
        return
    count = getattr(config.get_text_config(), "vocab_size", None)
    least = int(ids.min())
    most = int(ids.max())
    if isinstance(count, int) and not 0 <= least <= most < count:
        raise ValueError(
            f"{operation}: token ids go from {least} to {most}, expected 0 to {count - 1}"
        )
