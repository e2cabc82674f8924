"""Commands: lora show, lora merge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_components._cli import ON_TERMINAL
from model_components._formats import reading
from model_components._hub import find_folder
from model_components._model_folders import load_tokenizer
from model_components._report import Report

if TYPE_CHECKING:
    from peft import PeftModel


def _load(base: Path, adapter: str, **options: Any) -> PeftModel:
    """Load an adapter on its base, in the base's dtype. The adapter's file is checked first."""
    from transformers import AutoModelForCausalLM

    from .storage.adapters import load_lora, read_shapes

    folder = find_folder(adapter, patterns=["*adapter_*"], operation="load_lora")
    read_shapes("load_lora", folder)
    with reading(base, "load_lora"):
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    return load_lora(model, folder, **options)


def show(model: str, adapter: str, /) -> Report:
    """Print an adapter's layers, ranks, scalings and sizes of updates.

    Args:
        model: Folder or hub id of the base, a causal language model.
        adapter: Folder or hub id of the adapter.
    """
    from .report.adapters import lora_report

    return lora_report(_load(find_folder(model), adapter, is_trainable=True), trained=True)


def merge(
    model: str,
    adapter: str,
    out: Path,
    /,
    *,
    dtype: str | None = None,
    max_lost: float = 0.25,
    progress: bool = ON_TERMINAL,
) -> Report:
    """Merge an adapter into its base model, and write an ordinary checkpoint.

    Args:
        model: Folder or hub id of the base, a causal language model.
        adapter: Folder or hub id of the adapter.
        out: Output folder: a new path, or an empty folder.
        dtype: Dtype of what is written, such as float32; default: the base's.
        max_lost: Largest fraction of the updates that rounding may lose; if more would be lost,
            nothing is written.
        progress: Show a progress bar; default: only on a terminal.
    """
    from model_components._folders import check_new

    from .storage.merge import merge_lora

    check_new(out, "merge_lora")
    base = find_folder(model)
    return merge_lora(
        _load(base, adapter, accelerate=False),
        out,
        dtype=dtype,
        max_lost=max_lost,
        tokenizer=load_tokenizer(base),
        progress=progress,
    )
