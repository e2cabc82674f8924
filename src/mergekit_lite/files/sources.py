"""Sources of tensors: safetensors folders, and tensors in memory.

A source's `read(name, start, stop)` returns elements ``start`` to ``stop`` of the flattened tensor
as an array of stored values (`mergekit_lite.dtypes`), and reads nothing else from disk. Sources of
files do not import torch, except `peft_adapters.PeftSource`, which also imports transformers.
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

_AHEAD = 1 << 28  # bytes to read ahead; more could evict other data from the cache


@runtime_checkable
class Source(Protocol):
    """The protocol of a model to merge; subclasses may omit `read_into` and `prefetch`."""

    label: str
    tensors: dict[str, TensorInfo]
    config: Json
    folder: Path | None

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements ``start`` to ``stop`` of the flattened tensor, of shape (stop - start,).

        The elements have the stored dtype or a wider one.
        """
        ...

    def read_into(self, name: str, start: int, out: Array) -> bool:
        """Read a tensor from element ``start`` on into ``out``, which has the stored dtype.

        Return False, without reading, if `read` must be used instead.
        """
        return False

    def prefetch(self, name: str) -> None:
        """Ask the operating system to read a tensor in the background."""
        return

    def fingerprint(self) -> object:
        """Return a JSON value that changes whenever the stored values may have changed."""
        ...


def stat_of(path: Path) -> list[object]:
    """Return properties of a file that change when its contents change.

    They are the name, size, modification time, and change time, which tools cannot set back.
    """
    status = path.stat()
    return [path.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


class FolderSource(Source):
    """A Hugging Face folder of safetensors files, or a single such file.

    Args:
        folder: The folder; None for a single file, which has no config and no tokenizer.
        label: The model's name in messages.
        tensors: The tensors that the headers of the files list.

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
                    "in transformers"
                )
        if folder is not None and (folder / "config.json").exists():
            self.config = read_json(folder / "config.json")

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            # check again under the lock: if two threads opened a file, one descriptor would leak
            with self._lock:
                if path not in self._descriptors:
                    self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements ``start`` to ``stop`` in a new array."""
        out = np.empty(stop - start, self.tensors[name].dtype.storage)
        self.read_into(name, start, out)
        return out

    def read_into(self, name: str, start: int, out: Array) -> bool:
        """Read a tensor from element ``start`` on into ``out``, which has the stored dtype.

        Several threads may call this at once.
        """
        info = self.tensors[name]
        assert info.file is not None
        view = byte_view(out)
        position = info.start + start * info.dtype.itemsize
        done = 0
        while done < len(view):
            # on Linux a call reads at most 2 GiB; with a position, threads can share a descriptor
            count = os.preadv(self._descriptor(info.file), [view[done:]], position + done)
            if count == 0:
                raise CheckpointError(f"{info.file}: became shorter while it was being read")
            done += count
        return True

    def prefetch(self, name: str) -> None:
        """Ask the operating system, if it supports this, to read a tensor in the background."""
        info = self.tensors[name]
        # macOS has no posix_fadvise
        if hasattr(os, "posix_fadvise") and info.file is not None:
            size = min(info.nbytes, _AHEAD)
            os.posix_fadvise(self._descriptor(info.file), info.start, size, os.POSIX_FADV_WILLNEED)

    def fingerprint(self) -> object:
        """Return the names, sizes and times of the files that hold tensors."""
        files = {info.file for info in self.tensors.values() if info.file}
        return [stat_of(file) for file in sorted(files)]

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


class View(Source):
    """A wrapper around a model, which forwards every call that a subclass does not override.

    Args:
        model: The wrapped model.
        tensors: The tensors of the view. If a tensor has fewer rows than in the wrapped model, it
            consists of the first rows, because rows are stored one after another.

    Attributes:
        parts: The stored tensors that make up a tensor, by name, for tensors that are stored under
            another name or in several parts.
    """

    def __init__(self, model: Source, tensors: dict[str, TensorInfo]):
        self.model = model
        self.label = model.label
        self.folder = model.folder
        self.config = model.config
        self.tensors = tensors
        # a custom Source may have only the attributes of the protocol
        self.stem = getattr(model, "stem", "model")
        self.notes = getattr(model, "notes", [])
        self.parts = getattr(model, "parts", {})
        self.tokens = getattr(model, "tokens", None)

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements ``start`` to ``stop``, as the wrapped model does."""
        return self.model.read(name, start, stop)

    def read_into(self, name: str, start: int, out: Array) -> bool:
        """Read a tensor from element ``start`` on into ``out``, as the wrapped model does."""
        return self.model.read_into(name, start, out)

    def prefetch(self, name: str) -> None:
        """Prefetch the wrapped model's tensor of this name, if there is one."""
        if name in self.model.tensors:
            self.model.prefetch(name)

    def fingerprint(self) -> object:
        """Return the wrapped model's fingerprint."""
        return self.model.fingerprint()


class DictSource(Source):
    """A model in memory: the tensors of a state dict or a module.

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
                    f"{label}: {name} has layout {value.layout}, expected a dense tensor"
                )
            if value.device.type == "meta":
                raise CheckpointError(
                    f"{label}: {name} is on the meta device, expected a tensor with values"
                )
            if dtype is None:
                raise CheckpointError(
                    f"{label}: {name} has dtype {value.dtype}, which merges do not support; "
                    "convert it, for example to float32"
                )
            # numpy rejects tensors that require a gradient, such as parameters
            self._state[name] = value.detach()
            self.tensors[name] = TensorInfo(name, tuple(value.shape), dtype)

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements ``start`` to ``stop``.

        For a tensor on the CPU the result is a view, which is cheaper than a copy.
        """
        value = self._state[name]
        if not value.is_contiguous():  # copy once, not in every call
            value = self._state[name] = value.contiguous()
        return stored_of(value.view(-1)[start:stop].cpu())

    def fingerprint(self) -> object:
        """Return a value that differs in every run, because tensors in memory are not hashed."""
        return ["memory", id(self), os.getpid()]
