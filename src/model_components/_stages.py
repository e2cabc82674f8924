"""Store the parts of a long run one by one, so that the run can be resumed after a stop."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ._folders import new_file

if TYPE_CHECKING:
    from torch import Tensor


class Stage:
    """A folder of parts, each a file of tensors, that belong to one run.

    Args:
        folder: The folder. If it is None, nothing is stored.
        key: A hash of everything that the parts depend on: settings, data, weights. Parts with
            another key are not read.
        operation: The name that error messages begin with.
    """

    def __init__(self, folder: str | Path | None, key: str, operation: str):
        self.folder = None if folder is None else Path(folder)
        self.key = key
        self.operation = operation

    def path(self, name: str) -> Path | None:
        """Return the path of a part's file, or None if the stage has no folder."""
        return None if self.folder is None else self.folder / f"{name}.safetensors"

    def store(self, name: str, tensors: Mapping[str, Tensor], notes: object = None) -> None:
        """Write a part; its file appears only when it is complete.

        Args:
            name: The part's name.
            tensors: The part's tensors.
            notes: A JSON value to store with the tensors.
        """
        path = self.path(name)
        if path is None:
            return
        from safetensors.torch import save_file

        # safetensors rejects tensors that are not contiguous
        stored = {n: tensor.detach().cpu().contiguous() for n, tensor in tensors.items()}
        described = json.dumps(notes)
        metadata = {
            "key": self.key,
            "hash": hash_of(stored.items(), described),
            "notes": described,
        }
        with new_file(path, self.operation) as part:
            save_file(stored, part, metadata)

    def load(self, name: str) -> tuple[dict[str, Tensor], Any] | None:
        """Return a part's tensors and notes, or None if there is no complete part of this run."""
        path = self.path(name)
        if path is None or not path.is_file():
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("key") != self.key:
                    return None
                # the file is not a mapping, so `in file` would fail
                tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
        except SafetensorError:  # the file was cut short
            return None
        notes = metadata.get("notes", "")
        if metadata.get("hash") != hash_of(tensors.items(), notes):  # the file was changed later
            return None
        return tensors, json.loads(notes)


def hash_of(tensors: Iterable[tuple[str, Any]], *beside: str) -> str:
    """Return a hash of named tensors and of other text.

    Args:
        tensors: Pairs of names and tensors, in any order. The repr of other values is hashed.
        *beside: Other text to hash.
    """
    import torch

    digest = xxhash.xxh3_128("\n".join(beside).encode())
    for name, value in sorted(tensors, key=lambda pair: pair[0]):
        if not isinstance(value, torch.Tensor):
            digest.update(f"{name} {value!r}".encode())
            continue
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        # as bytes, since NumPy has no bfloat16
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
