"""Where tensors come from: safetensors folders read in stretches, LoRA folds, state dicts. Headers are checked first.

Every source answers `read(name, start, stop)` with that stretch of the flattened tensor, in its stored dtype, and
reads nothing else from disk. No source imports transformers.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as what it claims to be."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a checkpoint: shape, dtype, and for files the absolute byte range that holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path | None = None
    start: int = 0

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize


class Source(Protocol):
    """One model to merge."""

    label: str
    tensors: Mapping[str, TensorInfo]
    config: dict[str, Any]
    folder: Path | None

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor, shape (stop - start,)."""
        ...

    def fingerprint(self) -> Any:
        """Something JSON can hold that changes when the stored values may have."""
        ...


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, from its header alone.

    Raises:
        CheckpointError: Truncated, overlapping or out-of-range data, an unknown dtype, a size that the shape denies.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(_MAX_HEADER, size - 8):
            raise CheckpointError(f"{path}: not a safetensors file, or cut short ({size} bytes)")
        raw = file.read(length)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        held = dict(pairs)
        if len(held) < len(pairs):
            raise CheckpointError(f"{path}: the header names a tensor twice")
        return held

    try:
        entries = json.loads(raw, object_pairs_hook=unique)
        entries.pop("__metadata__", None)
        described = [(name, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in entries.items()]
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the header is not valid safetensors JSON ({error})") from error
    tensors: dict[str, TensorInfo] = {}
    end, body = 0, size - 8 - length
    for name, code, shape, start, stop in sorted(described, key=lambda d: (d[3], d[4])):
        if code not in DTYPES:
            raise CheckpointError(f"{path}: {name} has dtype {code}, which is quantised or unknown; merge originals")
        if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
            raise CheckpointError(f"{path}: {name} has a negative or fractional size")
        info = TensorInfo(name, shape, DTYPES[code], path, 8 + length + start)
        if stop - start != info.nbytes:
            raise CheckpointError(
                f"{path}: {name} of shape {list(shape)} and dtype {code} needs {info.nbytes} bytes, has {stop - start}"
            )
        if start < end:
            raise CheckpointError(f"{path}: {name} overlaps the tensor before it")
        if stop > body:
            raise CheckpointError(f"{path}: {name} ends at byte {stop} of {body}: the file is cut short")
        end = stop
        tensors[name] = info
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error


def _shards(folder: Path) -> dict[str, TensorInfo] | None:
    """All tensors of a safetensors folder; None when it holds no safetensors model."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        return read_header(single) if single.exists() else None
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    tensors: dict[str, TensorInfo] = {}
    for file_name in dict.fromkeys(weight_map.values()):
        # A hub cache links its files to a store outside the folder, so the name is judged and not where it leads.
        if not isinstance(file_name, str) or Path(file_name).name != file_name or file_name in ("", ".", ".."):
            raise CheckpointError(f"{index}: {file_name!r} is not a file of this folder")
        if not (folder / file_name).is_file():
            raise CheckpointError(f"{index}: names {file_name}, which is not there")
        header = read_header(folder / file_name)
        wanted = {name for name, file in weight_map.items() if file == file_name}
        if missing := sorted(wanted - header.keys()):
            raise CheckpointError(f"{index}: {missing[0]} should be in {file_name} and is not")
        if extra := sorted(header.keys() - wanted):
            raise CheckpointError(f"{index}: {file_name} holds {extra[0]}, which the index does not place there")
        tensors |= {name: header[name] for name in header}
    return tensors


class FolderSource:
    """A Hugging Face folder of safetensors files."""

    def __init__(self, folder: Path, label: str, tensors: Mapping[str, TensorInfo]):
        self.label, self.folder, self.tensors = label, folder, tensors
        self.config = _read_json(folder / "config.json") if (folder / "config.json").exists() else {}
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
            return self._descriptors[path]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop``, read with pread into fresh memory."""
        info = self.tensors[name]
        assert info.file is not None
        out = torch.empty(stop - start, dtype=info.dtype)
        view = memoryview(out.view(torch.uint8).numpy()) if out.numel() else memoryview(b"")
        position, done = info.start + start * info.dtype.itemsize, 0
        while done < len(view):
            got = os.preadv(self._descriptor(info.file), [view[done:]], position + done)
            if got == 0:
                raise CheckpointError(f"{info.file}: became shorter while it was being read")
            done += got
        return out

    def fingerprint(self) -> Any:
        """Sizes and modification times of the files that hold tensors."""
        files = sorted({info.file for info in self.tensors.values() if info.file is not None})
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


class DictSource:
    """Tensors that are in memory already: a state dict or a module's."""

    def __init__(self, state: Mapping[str, Tensor], label: str, config: dict[str, Any] | None = None):
        self.label, self.folder, self.config = label, None, config or {}
        self._state = {name: value.detach() for name, value in state.items()}
        self.tensors = {n: TensorInfo(n, tuple(t.shape), t.dtype) for n, t in self._state.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop``; a view where the tensor is contiguous."""
        return self._state[name].reshape(-1)[start:stop]

    def fingerprint(self) -> Any:
        """Never equal to another run's: memory leaves no trace to compare."""
        return ["memory", id(self), os.getpid()]


_LORA_KEY = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.default)?(?:\.weight)?$"
)


class LoraSource:
    """A model with a peft LoRA adapter folded in, stretch by stretch: W + s B A, with no merged copy anywhere."""

    def __init__(self, base: Source, adapter: Path):
        self.label, self.folder = f"{base.label}+{adapter}", base.folder
        self._base, self._adapter_folder = base, adapter
        for needed in ("adapter_config.json", "adapter_model.safetensors"):
            if not (adapter / needed).is_file():
                raise CheckpointError(f"adapter {adapter}: has no {needed}")
        settings = _read_json(adapter / "adapter_config.json")
        if settings.get("peft_type", "LORA") != "LORA" or settings.get("use_dora") or settings.get("lora_bias"):
            raise CheckpointError(
                f"adapter {adapter}: only plain LoRA adapters can be folded in (no DoRA, no lora_bias)"
            )
        self.config = dict(base.config)
        stored = FolderSource(adapter, str(adapter), read_header(adapter / "adapter_model.safetensors"))
        self._pairs: dict[str, tuple[Tensor, Tensor, float]] = {}
        self._replaced: dict[str, Tensor] = {}
        self._transposed = bool(settings.get("fan_in_fan_out"))
        found: dict[str, dict[str, Tensor]] = {}
        for key, info in stored.tensors.items():
            value = stored.read(key, 0, info.count).view(info.shape)
            if match := _LORA_KEY.match(key):
                found.setdefault(match["module"], {})[match["part"]] = value.float()
            else:  # modules_to_save, and biases that were trained
                self._replaced[key.removeprefix("base_model.model.").replace(".modules_to_save", "")] = value
        for module, parts in found.items():
            self._add_pair(f"{module}.weight", parts, settings)
        for name, value in self._replaced.items():
            if name not in base.tensors:
                raise CheckpointError(f"adapter {adapter}: {name} is not a tensor of {base.label}")
            if tuple(value.shape) != base.tensors[name].shape:
                raise CheckpointError(
                    f"adapter {adapter}: {name} has shape {list(value.shape)}, the model's is "
                    f"{list(base.tensors[name].shape)}"
                )
        self.tensors = {
            name: TensorInfo(name, info.shape, self._dtype(name, info.dtype)) for name, info in base.tensors.items()
        }

    def _dtype(self, name: str, stored: torch.dtype) -> torch.dtype:
        return self._replaced[name].dtype if name in self._replaced else stored

    def _add_pair(self, name: str, parts: dict[str, Tensor], settings: dict[str, Any]) -> None:
        kinds = sorted(parts)
        if kinds not in (["lora_A", "lora_B"], ["lora_embedding_A", "lora_embedding_B"]):
            raise CheckpointError(f"adapter {self._adapter_folder}: {name} has {kinds}, needed an A and a B")
        down, up = parts[kinds[0]], parts[kinds[1]]
        if name not in self._base.tensors:
            raise CheckpointError(f"adapter {self._adapter_folder}: {name} is not a tensor of {self._base.label}")
        shape = self._base.tensors[name].shape
        turned = kinds[0] == "lora_embedding_A" or self._is_transposed(name, (up.shape[0], down.shape[1]))
        if turned:  # the stored weight is (in, out): rows of it come from A's transpose
            up, down = down.mT.contiguous(), up.mT.contiguous()
        if up.dim() != 2 or down.dim() != 2 or (up.shape[0], down.shape[1]) != shape or up.shape[1] != down.shape[0]:
            raise CheckpointError(
                f"adapter {self._adapter_folder}: {name} of shape {list(shape)} does not fit "
                f"A {list(parts[kinds[0]].shape)} and B {list(parts[kinds[1]].shape)}"
            )
        module = name.removesuffix(".weight")
        rank = self._pattern(settings, "rank_pattern", module, settings["r"])
        alpha = self._pattern(settings, "alpha_pattern", module, settings["lora_alpha"])
        if up.shape[1] != rank:
            raise CheckpointError(f"adapter {self._adapter_folder}: {name} has rank {up.shape[1]}, its config {rank}")
        self._pairs[name] = (up, down, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))

    def _is_transposed(self, name: str, product: tuple[int, int]) -> bool:
        """Peft sets fan_in_fan_out for GPT-2's Conv1D by module class; where the product only fits turned, it is."""
        shape = self._base.tensors[name].shape
        return self._transposed or (shape != product and shape == product[::-1])

    @staticmethod
    def _pattern(settings: dict[str, Any], key: str, module: str, default: float) -> float:
        for pattern, value in (settings.get(key) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return default

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements of the folded weight: float32 where an adapter changes it, as stored elsewhere."""
        if name in self._replaced:
            return self._replaced[name].reshape(-1)[start:stop]
        stored = self._base.read(name, start, stop)
        if name not in self._pairs or start == stop:
            return stored
        up, down, scale = self._pairs[name]
        columns = down.shape[1]
        first, last = start // columns, -(-stop // columns)
        change = (up[first:last] @ down).reshape(-1)[start - first * columns : stop - first * columns]
        return stored.to(torch.promote_types(stored.dtype, torch.float32)).add_(change, alpha=scale)

    def fingerprint(self) -> Any:
        """The base's, and the adapter file's."""
        file = (self._adapter_folder / "adapter_model.safetensors").stat()
        return [self._base.fingerprint(), file.st_size, file.st_mtime_ns]


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
    config = _read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    source = DictSource(state, label, config)
    source.folder = folder
    return source


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
    return Path(snapshot_download(name, allow_patterns=patterns))


def open_source(model: Any, *, allow_pickle: str | None = None, label: str | None = None) -> Source:
    """Whatever a user names a model by, as a `Source`.

    Args:
        model: A folder, a hub id, ``"model+adapter"``, an ``nn.Module``, or a state dict.
        allow_pickle: ``"weights_only"`` admits pickled ``.bin`` files.
        label: What to call it in messages.

    Raises:
        CheckpointError: It is not there, is quantised or pickled, or its files are unsound.
    """
    if isinstance(model, nn.Module):
        config = model.config.to_dict() if hasattr(model, "config") and hasattr(model.config, "to_dict") else {}
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
    tensors = _shards(folder)
    if tensors is None:
        if (folder / "adapter_config.json").exists():
            raise CheckpointError(f"{text}: is a LoRA adapter; name it as MODEL+{text}")
        pickled = _pickled(folder, allow_pickle, text)
        if pickled is None:
            raise CheckpointError(f"{text}: holds no model.safetensors and no index of shards")
        return pickled
    source = FolderSource(folder, label or text, tensors)
    if "quantization_config" in source.config:
        kind = source.config["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(f"{text}: is quantised ({kind}); merge the original weights and quantise the result")
    return source


def _resolve(name: str) -> Path:
    if name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise CheckpointError(f"{name}: there is no such folder")
    try:
        return _download(name)
    except Exception as error:  # huggingface_hub raises many unrelated classes for "not there" and "no network"
        raise CheckpointError(f"{name}: is no folder here and could not be fetched from the hub ({error})") from error
