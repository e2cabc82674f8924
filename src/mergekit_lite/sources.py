"""open_source: whatever a user names a model by, as something tensors can be read from."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import CheckpointError, DictSource, FolderSource, Source, read_folder, read_json
from .lora import LoraSource


def _pickled(folder: Path, allow_pickle: str | None, label: str) -> Source | None:
    files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        return None
    if allow_pickle != "weights_only":
        raise CheckpointError(
            f"{label}: holds only pickled weights ({files[0].name}), which can run code when loaded. Convert them to "
            'safetensors, or pass allow_pickle="weights_only" to load tensors and nothing else'
        )
    state: dict[str, Tensor] = {}
    for file in files:
        state |= torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    source = DictSource(state, label, config)
    source.folder = folder
    return source


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["model*.safetensors", "adapter_*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py"]
    return Path(snapshot_download(name, allow_patterns=patterns))


def open_source(model: Any, *, allow_pickle: str | None = None, label: str | None = None) -> Source:
    """Whatever a user names a model by, as a `Source`.

    Args:
        model: A folder, a hub id, ``"model+adapter"``, an ``nn.Module``, a state dict, or a `Source` as it is.
        allow_pickle: ``"weights_only"`` admits pickled ``.bin`` files.
        label: What to call it in messages.

    Raises:
        CheckpointError: It is not there, is quantised or pickled, or its files are unsound.
    """
    if isinstance(model, Source):
        return model
    if isinstance(model, nn.Module):
        to_dict = getattr(getattr(model, "config", None), "to_dict", None)
        config = to_dict() if callable(to_dict) else {}
        tied = set(getattr(model, "_tied_weights_keys", None) or ())
        state = model.state_dict()
        kept: dict[int, str] = {}
        for name, value in list(state.items()):  # a tied tensor is one tensor, under the name a checkpoint has
            if value.numel() and kept.setdefault(value.data_ptr(), name) != name and (not tied or name in tied):
                del state[name]
        return DictSource(state, label or type(model).__name__, config)
    if isinstance(model, Mapping):
        bad = [k for k, v in model.items() if not isinstance(v, Tensor)]
        if bad or not model:
            raise CheckpointError(f"a state dict maps names to tensors; {bad[0] if bad else 'this one'} does not")
        return DictSource(model, label or "state dict")
    if not isinstance(model, (str, os.PathLike)):
        raise CheckpointError(f"a model is a path, a hub id, a module or a state dict, not {type(model).__name__}")
    text = os.fspath(model)
    folder = Path(text).expanduser()
    if not folder.is_dir() and "+" in text:
        base, _, adapter = text.rpartition("+")
        adapter_folder = Path(adapter).expanduser()
        if not adapter_folder.is_dir():
            adapter_folder = _resolve(adapter)
        return LoraSource(open_source(base, allow_pickle=allow_pickle), adapter_folder)
    if not folder.is_dir():
        folder = _resolve(text)
    tensors = read_folder(folder)
    if tensors is None:
        if (folder / "adapter_config.json").exists():
            raise CheckpointError(f"{text}: is a LoRA adapter; name it as MODEL+{text}")
        pickled = _pickled(folder, allow_pickle, text)
        if pickled is None:
            raise CheckpointError(f"{text}: holds no model.safetensors and no index of shards")
        return pickled
    source = FolderSource(folder, label or text, tensors)
    if quantised := source.config.get("quantization_config"):
        kind = quantised.get("quant_method", "unknown")
        raise CheckpointError(f"{text}: is quantised ({kind}); merge the original weights and quantise the result")
    return source


def _resolve(name: str) -> Path:
    if name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise CheckpointError(f"{name}: there is no such folder")
    try:
        return _download(name)
    except Exception as error:  # huggingface_hub raises many unrelated classes for "not there" and "no network"
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{name}: there is no such folder, and the hub did not give it ({reason})") from error
