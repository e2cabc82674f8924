"""`load_trainable`: load a model, and prepare it for training by `tune`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from model_components._formats import reading

from ..config import TuneConfig
from ..data import check_packed_examples
from ..losses import fuse_cross_entropy_
from .prepare import prepare_lora


def load_trainable(folder: Path, config: TuneConfig) -> Any:
    """Load a model, and add adapters or select the parameters to train.

    `fuse_cross_entropy_` then replaces the computation of its loss.
    """
    dtype: Any = config.dtype
    if not config.r and dtype == "auto":
        dtype = torch.float32  # small updates of bfloat16 weights would be rounded away
    with reading(folder, "tune"):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    blocks = base.config.get_text_config().num_hidden_layers
    if config.last_blocks is not None and config.last_blocks > blocks:
        raise ValueError(
            f"tune: last_blocks is {config.last_blocks}, expected at most {blocks}, the number of "
            "blocks of the model"
        )
    chosen = range(blocks - (config.last_blocks or blocks), blocks)
    model = base
    if config.r:
        targets: str | list[str] = list(config.target_modules) or "all-linear"
        if config.last_blocks:
            targets = _linear_layers(base, chosen, config.target_modules)
        adapters = LoraConfig(
            r=config.r,
            # pyrefly: ignore[bad-argument-type]: peft also accepts fractions
            lora_alpha=config.lora_alpha or 2 * config.r,
            lora_dropout=config.lora_dropout,
            use_rslora=config.use_rslora,
            target_modules=targets,
            task_type="CAUSAL_LM",
        )
        model = prepare_lora(base, adapters)
    elif config.last_blocks:
        for name, parameter in base.named_parameters():
            # embeddings and head belong to no block, so they are frozen
            parameter.requires_grad_(_block_of(name) in chosen)
    if config.gradient_checkpointing:
        # reentrant checkpointing gives no gradients if the input of a block requires none
        options = {"use_reentrant": False}
        if hasattr(base, "activation_checkpointing_enable"):  # transformers 5.23 and later
            base.activation_checkpointing_enable(options)
        else:
            base.gradient_checkpointing_enable(options)
    fuse_cross_entropy_(model)
    if config.pack:
        check_packed_examples(model)
    return model


def _block_of(name: str) -> int | None:
    """Return the index of the block to which a module or parameter belongs, or None.

    >>> _block_of("model.layers.3.mlp.experts.0.up_proj.weight")
    3
    """
    # the first number in a name is the block's index; a later number may be an expert's index
    found = re.search(r"\.(\d+)\.", name)
    return None if found is None else int(found[1])


def _linear_layers(model: nn.Module, blocks: Sequence[int], names: Sequence[str]) -> list[str]:
    """Return the full names of the linear layers in some blocks.

    If ``names`` is not empty, return only layers whose last name part is in ``names``.
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and _block_of(name) in blocks
        and (not names or name.rpartition(".")[2] in names)
    ]
