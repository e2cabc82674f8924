"""Sources of tensors: safetensors folders read in stretches, and tensors in memory.

A source's `read(name, start, stop)` returns that stretch of the flattened tensor as an array of
stored values (`mergekit_lite.dtypes`), and reads nothing else from disk. Sources of files do not
import torch, except `peft_adapters.PeftSource`, which also imports transformers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from .._torch import Tensor
from ..dtypes import Array, byte_view, from_torch, stored_of
from .headers import CheckpointError, Json, TensorInfo, read_json, stem_of

_AHEAD = 1 << 28  # bytes read ahead; more could evict cached data that is in use


@runtime_checkable
class Source(Protocol):
    """One model to merge; subclasses may omit `read_into` and `prefetch`."""

    label: str
    tensors: dict[str, TensorInfo]
    config: Json
    folder: Path | None

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements ``start`` to ``stop`` of the flattened tensor, as stored or wider.

        The shape is (stop - start,).
        """
        ...

    def read_into(self, name: str, start: int, out: Array) -> bool:
        """Read a tensor from element ``start`` on into ``out``, which has the stored dtype.

        Return False, without reading, if `read` must be used instead.
        """
        return False

    def prefetch(self, name: str) -> None:
        """Let the system fetch a tensor while something else is computed."""
        return

    def fingerprint(self) -> object:
        """Return a JSON value that changes whenever the stored values may have changed."""
        ...


def stat_of(path: Path) -> list[object]:
    """Return properties of a file that change when its contents change.

    They are name, size, modification time, and change time, which tools cannot set back.
    """
    status = path.stat()
    return [path.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


class FolderSource(Source):
    """A Hugging Face folder of safetensors files, or one such file alone.

    Args:
        folder: The folder; None for a file alone, which has no config and no tokenizer.
        label: Its name in messages.
        tensors: The tensors in its headers.

    Raises:
        CheckpointError: ``config.json`` is not a JSON object.
    """

    def __init__(self, folder: Path | None, label: str, tensors: dict[str, TensorInfo]):
        self.label = label
        self.tensors = tensors
        self.folder = folder
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self.config: dict[str, object] = {}
        self.stem = (stem_of(folder) if folder is not None else None) or "model"
        self.notes: list[str] = []
        if folder is not None and (folder / f"{self.stem}.safetensors.index.json").exists():
            single = f"{self.stem}.safetensors"
            if (folder / single).exists():
                self.notes.append(
                    f"{label} holds {single} and an index of several files; {single} is read, as "
                    "by transformers"
                )
        if folder is not None and (folder / "config.json").exists():
            self.config = read_json(folder / "config.json")

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            # checked again with the lock: if two threads opened a file, a descriptor would be lost
            with self._lock:
                if path not in self._descriptors:
                    self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]

    def read(self, name: str, start: int, stop: int) -> Array:
        """Read elements ``start`` to ``stop`` into new memory."""
        out = np.empty(stop - start, self.tensors[name].dtype.storage)
        self.read_into(name, start, out)
        return out

    def read_into(self, name: str, start: int, out: Array) -> bool:
        """Fill ``out``, of the stored dtype, from element ``start`` on; safe from any thread."""
        info = self.tensors[name]
        assert info.file is not None
        view = byte_view(out)
        position = info.start + start * info.dtype.itemsize
        done = 0
        while done < len(view):
            # one call reads 2 GiB at most on Linux; the position is given, so threads share a file
            count = os.preadv(self._descriptor(info.file), [view[done:]], position + done)
            if count == 0:
                raise CheckpointError(f"{info.file}: became shorter while it was being read")
            done += count
        return True

    def prefetch(self, name: str) -> None:
        """Ask the kernel to read ahead."""
        info = self.tensors[name]
        # macOS has no posix_fadvise
        if hasattr(os, "posix_fadvise") and info.file is not None:
            size = min(info.nbytes, _AHEAD)
            os.posix_fadvise(self._descriptor(info.file), info.start, size, os.POSIX_FADV_WILLNEED)

    def fingerprint(self) -> object:
        """Return the sizes and times of the files that hold tensors."""
        files = {info.file for info in self.tensors.values() if info.file}
        return [stat_of(file) for file in sorted(files)]

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


class View(Source):
    """A wrapper around a model that passes on everything a subclass does not change.

    Args:
        model: The model.
        tensors: The tensors that the view has. A tensor with fewer rows than the model's has the
            model's first rows, because rows are stored one after another.

    Attributes:
        parts: For tensors that are stored under other names or in pieces, the stored tensors.
    """

    def __init__(self, model: Source, tensors: dict[str, TensorInfo]):
        self.model = model
        self.label = model.label
        self.folder = model.folder
        self.config = model.config
        self.tensors = tensors
        # a user's own Source may have only the attributes of the protocol
        self.stem = getattr(model, "stem", "model")
        self.notes = getattr(model, "notes", [])
        self.parts = getattr(model, "parts", {})
        self.tokens = getattr(model, "tokens", None)

    def read(self, name: str, start: int, stop: int) -> Array:
        """Read elements ``start`` to ``stop``, as the wrapped model does."""
        return self.model.read(name, start, stop)

    def read_into(self, name: str, start: int, out: Array) -> bool:
        """Read elements from ``start`` into ``out``, as the wrapped model does."""
        return self.model.read_into(name, start, out)

    def prefetch(self, name: str) -> None:
        """Let the system fetch the model's tensor, if it has one of this name."""
        if name in self.model.tensors:
            self.model.prefetch(name)

    def fingerprint(self) -> object:
        """Return the model's fingerprint."""
        return self.model.fingerprint()


class DictSource(Source):
    """Tensors that are in memory already, of a state dict or a module.

    Raises:
        CheckpointError: A tensor is sparse, is on the meta device, or has a dtype that merges do
            not support.
    """

    def __init__(self, state: Mapping[str, Tensor], label: str, config: Json | None = None):
        self.label = label
        self.config = config or {}
        self.folder: Path | None = None
        self.tokens: Mapping[str, int] | None = None  # a vocabulary that is in no folder
        self._state: dict[str, Tensor] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, value in state.items():
            dtype = from_torch(value.dtype)
            if str(value.layout) != "torch.strided":
                raise CheckpointError(
                    f"{label}: {name} has layout {value.layout}, expected dense tensors"
                )
            if value.device.type == "meta":
                raise CheckpointError(f"{label}: {name} is on the meta device and has no values")
            if dtype is None:
                raise CheckpointError(
                    f"{label}: {name} is {value.dtype}, which no merge reads; convert it, for "
                    "example to float32"
                )
            # numpy rejects tensors that require a gradient, such as parameters
            self._state[name] = value.detach()
            self.tensors[name] = TensorInfo(name, tuple(value.shape), dtype)

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements ``start`` to ``stop``.

        For a tensor on the CPU this is a view, which is cheaper than `read_into`.
        """
        value = self._state[name]
        if not value.is_contiguous():  # once, rather than a copy for every stretch
            value = self._state[name] = value.contiguous()
        return stored_of(value.view(-1)[start:stop].cpu())

    def fingerprint(self) -> object:
        """Return a value that no other run has, because tensors in memory cannot be compared."""
        return ["memory", id(self), os.getpid()]
