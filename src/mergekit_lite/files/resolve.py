"""`open_source`: open a model for reading, in any of the forms that a user may pass."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_components import _hub
from model_components._folders import run_hint

from .._torch import torch
from .adapter import CONFIG, LoraSource, OtherNamesError, more_than_lora
from .experts import stacked
from .headers import STEMS, CheckpointError, read_folder, read_header, read_index, read_json
from .sources import DictSource, FolderSource, Source

_PICKLES = "pytorch_model*.bin"
# the files of a hub repository that a merge may read
_PATTERNS = (
    *(f"{stem}*.safetensors" for stem in STEMS),
    "adapter_*.safetensors",
    "*.json",
    "*.model",
    "*.txt",
    "*.jinja",
    # a model's custom code, which is copied with trust_remote_code=True
    "*.py",
)


# names of factors in peft's LoRA, LoHa and LoKr
_ADAPTER = re.compile(r"\.(lora_A|lora_embedding_A|hada_w1_a|lokr_w1(_a)?)(\.|$)")


def _pickled(folder: Path, allow_pickle: str | None, label: str) -> Source | None:
    files = sorted(folder.glob(_PICKLES))
    if not files:
        return None
    if allow_pickle != "weights_only":
        raise CheckpointError(
            f"{label}: expected safetensors files, got only pickled weights ({files[0].name}), "
            "which can run code when they are loaded; convert them to safetensors, or pass "
            'allow_pickle="weights_only" (--allow-pickle weights_only) to load only tensors from '
            "them"
        )
    state: dict[str, object] = {}
    for file, wanted in _pickled_files(folder, files, label).items():
        try:
            is_zip = zipfile.is_zipfile(file)  # torch cannot memory-map files from before torch 1.6
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
        except Exception as error:  # a damaged file may raise almost any error
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise CheckpointError(
                f"{file}: cannot be loaded by torch.load with weights_only=True ({reason})"
            ) from error
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"{file}: expected a state dict, got {type(loaded).__name__}")
        missing = sorted(wanted - loaded.keys())
        if missing:
            raise CheckpointError(
                f"{file}: expected {missing[0]}, which the index lists for this file, got no such "
                "tensor"
            )
        state |= loaded
    config = folder / "config.json"
    source = _from_state(state, label, read_json(config) if config.exists() else {})
    source.folder = folder
    return source


def _pickled_files(folder: Path, found: Sequence[Path], label: str) -> dict[Path, set[str]]:
    """Return the pickle files of a model, and the tensors that the index lists for each file."""
    single = folder / "pytorch_model.bin"
    index = folder / "pytorch_model.bin.index.json"
    if single.exists():  # even if there is an index, as in transformers
        return {single: set()}
    if not index.exists():
        raise CheckpointError(
            f"{label}: expected {single.name} or {index.name}, got only {found[0].name}"
        )
    return {folder / name: wanted for name, wanted in read_index(index).items()}


def _from_state(
    state: Mapping[str, Any], label: str, config: dict[str, object] | None = None
) -> DictSource:
    if not state:
        raise CheckpointError(f"{label}: expected a state dict with tensors, got an empty one")
    _check_state(state, label)
    return DictSource(state, label, config)


def open_source(
    model: object, *, allow_pickle: str | None = None, label: str | None = None
) -> Source:
    """Return a `Source` that reads a model.

    Args:
        model: A folder, a ``.safetensors`` file, a hub id (``org/name`` or ``name``, also with
            ``@revision``), ``"model+adapter"``, an ``nn.Module``, a state dict, or a `Source`,
            which is returned unchanged.
        allow_pickle: Pass ``"weights_only"`` to also load pickled ``.bin`` files (only tensors).
        label: The model's name in messages; default: its path, hub id or type.

    Raises:
        CheckpointError: The model is missing, quantized, pickled (without ``allow_pickle``) or of
            an unsupported type, or its files are damaged.
    """
    if isinstance(model, Source):
        return model
    if isinstance(model, Mapping):
        return _from_state(model, label or "state dict")
    # if torch is not imported yet, there are no modules; `torch.nn` would import it needlessly
    if "torch" in sys.modules and isinstance(model, torch.nn.Module):
        return _from_module(model, label or type(model).__name__)
    if not isinstance(model, (str, os.PathLike)):
        raise CheckpointError(
            "expected a path, a hub id, a module or a state dict as a model, got "
            f"{type(model).__name__}"
        )
    text = os.fspath(model)
    # the name of a folder or file may contain a +
    if "+" in text and not _hub.user_path(text).exists():
        base, adapter = _split_adapter(text)
        return _with_adapter(open_source(base, allow_pickle=allow_pickle), find_folder(adapter))
    if text.endswith(".safetensors") and _hub.user_path(text).is_file():
        return FolderSource(None, label or text, read_header(_hub.user_path(text)))
    return _open_folder(text, allow_pickle, label or text)


def _open_folder(text: str, allow_pickle: str | None, label: str) -> Source:
    """Return the source of a folder or hub id."""
    folder = find_folder(text)
    tensors = read_folder(folder)
    if tensors is None:
        return _open_pickled(folder, allow_pickle, text)
    if not tensors:
        raise CheckpointError(f"{text}: expected tensors in its .safetensors files, got none")
    source = FolderSource(folder, label, tensors)
    kind = source.config.get("quantization_config")
    if kind:
        if isinstance(kind, dict):
            kind = kind.get("quant_method", "unknown")
        raise CheckpointError(
            f"{text}: expected weights that are not quantized, got {kind}; merge the originals and "
            "quantize the result"
        )
    return source


def _with_adapter(base: Source, folder: Path) -> Source:
    """Return a model with an adapter merged in: by `LoraSource`, or by peft's code if needed."""
    if more_than_lora(folder) is None:
        try:
            return LoraSource(base, folder)
        except OtherNamesError as error:
            # the adapter may use transformers' names while the model's files use older names
            with contextlib.suppress(OtherNamesError):
                return LoraSource(stacked(base), folder)
            # an adapter with factors for each expert, for a model with stacks, needs peft's code
            if ".experts." not in error.tensor or not base.config:
                raise
    # this module imports torch, transformers and peft, which a plain LoRA does not need
    from .peft_adapters import PeftSource

    return PeftSource(base, folder)


def _split_adapter(text: str) -> tuple[str, str]:
    """Split ``"model+adapter"`` at the last + before an existing folder, or else at the last +."""
    for place in range(len(text) - 1, -1, -1):
        if text[place] == "+" and _hub.user_path(text[place + 1 :]).is_dir():
            return text[:place], text[place + 1 :]
    base, _, adapter = text.rpartition("+")
    return base, adapter


def _open_pickled(folder: Path, allow_pickle: str | None, text: str) -> Source:
    """Return the source of a folder with pickled weights; raise an error if it has none."""
    if (folder / CONFIG).exists():
        raise CheckpointError(
            f"{text}: expected a model, got a LoRA adapter; pass it with its base, as MODEL+{text}"
        )
    if allow_pickle == "weights_only":
        # download pickled weights from the hub only if there is no safetensors file
        folder = find_folder(text, (*_PATTERNS, _PICKLES))
    pickled = _pickled(folder, allow_pickle, text)
    if pickled is not None:
        return pickled
    # without allow_pickle no pickled weights were downloaded, so the hub may have some
    where = ' (allow_pickle="weights_only" also reads pickled weights)'
    if _hub.user_path(text).is_dir() or allow_pickle:
        where = ""
    shards = sorted(folder.glob("*-of-*.safetensors"))
    if shards:
        index = f"{shards[0].name.partition('-')[0]}.safetensors.index.json"
        raise CheckpointError(
            f"{text}: for the shard {shards[0].name}, expected {index} in the same folder, got none"
        )
    names = " and no ".join(f"{stem}.safetensors" for stem in STEMS)
    raise CheckpointError(f"{text}: has no {names}{where}{run_hint(folder)}")


def _from_module(model: torch.nn.Module, label: str) -> DictSource:
    """Return the source of a module: its state dict and, for a transformers model, its config."""
    model = _unwrapped(model)
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    config = to_dict() if callable(to_dict) else {}
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    state = model.state_dict()
    _check_state(state, label)
    first_names: dict[tuple[object, ...], str] = {}
    # keep a tied tensor once, under the name that a checkpoint has
    for name, value in list(state.items()):
        # tensors without memory all have the address 0, so they would count as one tensor
        if value.device.type == "meta" or not value.numel():
            continue
        # the address is not enough, because a view may begin at the address of another tensor
        view = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        first = first_names.setdefault(view, name)
        if first != name and (not tied or name in tied):
            del state[name]
    return DictSource(state, label, config)


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model without torch.compile and data-parallel wrappers, which rename tensors."""
    inner: Any = model
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while isinstance(inner, parallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, parallel) else inner._orig_mod
    return inner


def _check_state(state: Mapping[str, object], label: str) -> None:
    """Raise an error if a state dict has adapter weights, or entries that are not named tensors."""
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{label}: expected a state dict that maps names to tensors, got {name!r} with "
                f"{type(value).__name__}"
            )
        if _ADAPTER.search(name):
            raise CheckpointError(
                f"{label}: expected a model without adapters, got one with {name}; pass "
                'model.merge_and_unload(), or a path "model+adapter"'
            )


def find_folder(name: str, patterns: Sequence[str] = _PATTERNS) -> Path:
    """Return the folder at a path, or the folder of a hub id in the local hub cache.

    For a hub id, the repository's files that match ``patterns`` are downloaded. The id may end with
    ``@revision``.

    Raises:
        CheckpointError: There is no such folder, and the hub did not provide one.
    """
    try:
        return _hub.find_folder(name, patterns=patterns)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
