"""Calibration batches of a model's arguments, which are checked before any work begins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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
# calibration tokens that a fit needs per unknown; for SmolLM2 with 757 neurons left in each MLP,
# 2 tokens per unknown gave a loss of 4.61 on held-out text, 4 gave 3.84, 8 gave 3.48, 16 gave 3.31
_ENOUGH = 6


def batches(
    calibration: Iterable[object], model: nn.Module, operation: str
) -> list[dict[str, Any]]:
    """Return calibration data as keyword arguments of the model, on the model's device.

    Each item is a dict of arguments, or a tensor of token ids. The examples of a tokenized data set
    are dicts, too: their lists become tensors, and their strings are left out.

    Raises:
        ValueError: There is no list of batches, or a batch has contents that the model cannot run
            on: text, NaN or infinity, token ids that are not integers or not in the vocabulary,
            sequences longer than the model's positions, or only labels. For an encoder-decoder,
            padding and missing decoder inputs are errors, too.
    """
    check_model(operation, model)
    if isinstance(calibration, str | Path):
        raise ValueError(
            f"{operation}: calibration is a {type(calibration).__name__}, expected batches of "
            "token ids; text_of reads a file, and text_batches makes batches from its text"
        )
    # a tensor of three dimensions is a sequence of batches
    if isinstance(calibration, Mapping) or (
        isinstance(calibration, Tensor) and calibration.dim() < 3
    ):
        raise ValueError(
            f"{operation}: calibration is a single {type(calibration).__name__}, expected a list "
            "of batches"
        )
    if not isinstance(calibration, Iterable):
        raise ValueError(
            f"{operation}: expected batches of token ids as calibration, got {calibration!r}"
        )
    device = next(model.parameters()).device
    checked = []
    for item in calibration:
        batch = _as_model_arguments(item, operation)
        _check_batch(batch, model, operation)
        checked.append(on_device(batch, device))
    if not checked:
        raise ValueError(f"{operation}: calibration is empty, expected batches of token ids")
    masks = [batch.get("attention_mask") for batch in checked]
    # a mask with more dimensions applies to the attention scores, where 0 may mean visible
    if all(isinstance(mask, Tensor) and mask.dim() == 2 and not mask.any() for mask in masks):
        raise ValueError(f"{operation}: expected calibration data with tokens, got only padding")
    return checked


def _as_model_arguments(item: object, operation: str) -> dict[str, Any]:
    """Return a batch as keyword arguments; a single sequence becomes a batch of one."""
    if isinstance(item, Tensor):
        batch: dict[str, Any] = {"input_ids": item}
    elif isinstance(item, Mapping):
        batch = _as_tensors(item)
    else:
        if isinstance(item, str):
            advice = "use a tokenizer to turn text into token ids"
        else:
            advice = "use torch.tensor to convert a list or an array of ids"
        raise ValueError(
            f"{operation}: a calibration batch is a {type(item).__name__}, expected a tensor of "
            f"token ids of shape (B, T) or a dict of the model's arguments; {advice}"
        )
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    if not any(value.numel() for name, value in tensors.items() if name not in _LABELS):
        raise ValueError(
            f"{operation}: a calibration batch has the arguments {sorted(batch)}, expected token "
            "ids or another tensor that is neither empty nor a label"
        )
    for name, value in tensors.items():
        if name.endswith("input_ids") and not value.dim():
            raise ValueError(
                f"{operation}: {name} is a single number, expected a tensor of shape (B, T) or (T,)"
            )
        # an example of a tokenized data set has a single list of numbers
        if name in _OF_TOKENS and value.dim() == 1:
            batch[name] = value[None]
    return batch


def _check_batch(batch: Mapping[str, Any], model: nn.Module, operation: str) -> None:
    """Check that a batch has the arguments and token ids that the model can run on."""
    main = getattr(model, "main_input_name", "input_ids")
    if main != "input_ids" and main not in batch:
        raise ValueError(
            f"{operation}: a calibration batch has the arguments {sorted(batch)}, expected a dict "
            f"with {main!r} for {type(model).__name__}"
        )
    for name in ("input_ids", "decoder_input_ids"):
        _check_ids(operation, batch.get(name), model)
    ids = batch.get("input_ids")
    mask = batch.get("attention_mask")
    # a mask of more dimensions is for the attention itself
    is_of_tokens = isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.dim() == 2
    if is_of_tokens and mask.shape != ids.shape:
        raise ValueError(
            f"{operation}: attention_mask has shape {list(mask.shape)}, expected "
            f"{list(ids.shape)}, the shape of input_ids"
        )
    # other arguments are not checked: labels are not used, and masks may hold -inf
    for name in {main, "inputs_embeds"}:
        value = batch.get(name)
        if isinstance(value, Tensor) and not value.isfinite().all():
            raise ValueError(f"{operation}: {name} has NaN or infinity, expected finite numbers")
    config = getattr(model, "config", None)
    if isinstance(config, PretrainedConfig) and config.is_encoder_decoder:
        _check_two_sides(operation, batch)


def _as_tensors(row: Mapping[str, object]) -> dict[str, Any]:
    """Convert lists of numbers to tensors, and leave out strings, which no model takes."""
    batch = {}
    for name, value in row.items():
        if isinstance(value, list):
            # a ragged list, or a list of words, stays as it is
            with contextlib.suppress(ValueError, TypeError):
                value = torch.tensor(value)
        if not isinstance(value, str):
            batch[name] = value
    return batch


def check_model(operation: str, model: object) -> None:
    """Raise a ValueError if the model is not a loaded module, is compiled or has peft adapters.

    Adapters must be merged first.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"{operation}: model is a {type(model).__name__}, expected a loaded model")
    if model._compiled_call_impl is not None or hasattr(model, "_orig_mod"):
        raise ValueError(
            f"{operation}: expected a model that is not compiled, got a compiled one; call "
            "model.compile() after this call instead"
        )
    for name, module in model.named_modules():
        # recognized by the module's name, so that peft need not be imported
        if type(module).__module__.startswith("peft."):
            raise ValueError(
                f"{operation}: expected a model without peft adapters, got the adapter module "
                f"{name or type(module).__name__}; merge adapters first"
            )


def check_float64(operation: str, model: nn.Module) -> None:
    """Raise a ValueError if the model's device, such as mps, has no float64.

    Weights are fitted in float64.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        torch.empty(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"{operation}: weights are fitted in float64, which the device {device} does not "
            "support; expected a model on another device, such as the CPU"
        ) from error


def tokens_seen(data: Sequence[Batch], least: int) -> list[str]:
    """Return a note with the number of calibration tokens, and a warning if they are too few.

    Args:
        data: The calibration batches. Without token ids, as for images, there is no note.
        least: The number of unknowns of the fit, each of which needs `_ENOUGH` tokens.
    """
    count = 0
    for batch in data:
        ids = batch.get("input_ids")
        mask = batch.get("attention_mask")
        if not isinstance(ids, Tensor):
            return []  # other inputs, such as images, have no tokens to count
        count += (
            int(mask.sum()) if isinstance(mask, Tensor) and mask.shape == ids.shape else ids.numel()
        )
    few = ""
    if count < _ENOUGH * least:
        few = f", only {count / least:.1f} per unknown of a fit; use {_ENOUGH * least:,} or more, "
        few += "because errors on other text are larger"
    return [f"errors are measured on the {count:,} calibration tokens{few}"]


@torch.no_grad()
def first_output(model: nn.Module, batch: Batch) -> Tensor:
    """Return the first tensor that a model outputs (logits or hidden states), in float32."""
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
            f"{operation}: a batch has the arguments {sorted(batch)}, expected decoder_input_ids "
            "as well for an encoder-decoder"
        )
    # `not_padding` reads only one mask, which it would also apply to the tokens of the other side
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = batch.get(name)
        if isinstance(mask, Tensor) and not mask.all():
            raise ValueError(
                f"{operation}: {name} marks padding, expected batches without padding for an "
                "encoder-decoder"
            )


def positions_of(model: nn.Module) -> int | None:
    """Return the maximum length of a sequence in tokens, or None if no limit is known."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return None
    # GPT-2's config gives n_positions under this name, too
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            if isinstance(positions, int) and module.padding_idx is not None:
                positions -= module.padding_idx + 1  # RoBERTa counts positions from padding_idx + 1
            break
    # XLNet has the value -1, since it has no limit
    if isinstance(positions, int) and positions > 0:
        return positions
    return None


def _check_ids(operation: str, ids: object, model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if not isinstance(ids, Tensor) or not isinstance(config, PretrainedConfig):
        return
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{operation}: token ids have dtype {ids.dtype}, expected torch.int32 or torch.int64"
        )
    if not ids.numel():
        raise ValueError(
            f"{operation}: expected one or more tokens in a batch, got token ids of shape "
            f"{list(ids.shape)}"
        )
    check_vocabulary(operation, ids, config)
    positions = positions_of(model)
    if positions is not None and positions < ids.shape[-1]:
        raise ValueError(
            f"{operation}: rows have {ids.shape[-1]} tokens, expected at most the model's "
            f"{positions} positions"
        )


def check_vocabulary(operation: str, ids: Tensor, config: object) -> None:
    """Check that all token ids are below the vocabulary size of a model's config, if it has one."""
    if not isinstance(config, PretrainedConfig) or not ids.numel():
        return
    count = getattr(config.get_text_config(), "vocab_size", None)
    least = int(ids.min())
    most = int(ids.max())
    if isinstance(count, int) and not 0 <= least <= most < count:
        raise ValueError(
            f"{operation}: token ids go from {least} to {most}, expected 0 to {count - 1}, the "
            "model's vocabulary"
        )
