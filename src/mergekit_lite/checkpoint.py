"""Where tensors come from: safetensors folders read in stretches, and tensors in memory. Headers are checked first.

Every source answers `read(name, start, stop)` with that stretch of the flattened tensor, in its stored dtype, and
reads nothing else from disk. No source imports transformers.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

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


@runtime_checkable
class Source(Protocol):
    """One model to merge."""

    label: str
    tensors: dict[str, TensorInfo]
    config: dict[str, Any]
    folder: Path | None

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor, shape (stop - start,)."""
        ...

    def prefetch(self, name: str) -> None:
        """Let the system fetch a tensor while something else is computed."""
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
        described = [(n, e["dtype"], tuple(e["shape"]), *map(int, e["data_offsets"])) for n, e in entries.items()]
        described.sort(key=lambda d: (d[3], d[4]))
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path}: the header is not valid safetensors JSON ({error})") from error
    tensors: dict[str, TensorInfo] = {}
    end, body = 0, size - 8 - length
    for name, code, shape, start, stop in described:
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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file, or a CheckpointError that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error


def read_folder(folder: Path) -> dict[str, TensorInfo] | None:
    """All tensors of a safetensors folder; None when it holds no safetensors model."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        return read_header(single) if single.exists() else None
    weight_map = read_json(index).get("weight_map")
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


def byte_view(values: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes."""
    return memoryview(values.view(torch.uint8).numpy()) if values.numel() else memoryview(b"")  # pyrefly: ignore


class FolderSource:
    """A Hugging Face folder of safetensors files."""

    def __init__(self, folder: Path, label: str, tensors: dict[str, TensorInfo]):
        self.label, self.tensors = label, tensors
        self.folder: Path | None = folder
        self._descriptors: dict[Path, int] = {}
        self.config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
        self._lock = threading.Lock()

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            with self._lock:
                if path not in self._descriptors:
                    self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop``, read with pread into fresh memory."""
        info = self.tensors[name]
        assert info.file is not None
        out = torch.empty(stop - start, dtype=info.dtype)
        view = byte_view(out)
        position, done = info.start + start * info.dtype.itemsize, 0
        while done < len(view):
            got = os.preadv(self._descriptor(info.file), [view[done:]], position + done)
            if got == 0:
                raise CheckpointError(f"{info.file}: became shorter while it was being read")
            done += got
        return out

    def prefetch(self, name: str) -> None:
        """Ask the kernel to read ahead; at most 256 MB, so as not to push out what is in use."""
        info = self.tensors[name]
        if hasattr(os, "posix_fadvise") and info.file is not None:
            size = min(info.nbytes, 1 << 28)
            os.posix_fadvise(self._descriptor(info.file), info.start, size, os.POSIX_FADV_WILLNEED)

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
        self.label, self.config = label, config or {}
        self.folder: Path | None = None
        self._state = {name: value.detach() for name, value in state.items()}
        self.tensors = {n: TensorInfo(n, tuple(t.shape), t.dtype) for n, t in self._state.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop``; a view where the tensor is contiguous."""
        value = self._state[name]
        if not value.is_contiguous():  # once, rather than a copy for every stretch
            value = self._state[name] = value.contiguous()
        return value.view(-1)[start:stop]

    def prefetch(self, name: str) -> None:
        """Nothing to do: it is in memory."""

    def fingerprint(self) -> Any:
        """Never equal to another run's: memory leaves no trace to compare."""
        return ["memory", id(self), os.getpid()]
