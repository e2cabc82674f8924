"""Read the headers, indexes and configs of checkpoints.

These files are not trusted, so their contents are checked.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..dtypes import BY_CODE, DType

_MAX_HEADER = 100_000_000  # bytes; safetensors itself has the same limit
STEMS = ("model", "diffusion_pytorch_model")
"""The first part of the names of weight files, in transformers and in diffusers."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or not supported."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a checkpoint: name, shape, dtype and, in a file, the offset of its first byte."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    file: Path | None = None
    start: int = 0

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.count * self.dtype.itemsize


Json = dict[str, Any]
"""A JSON object, such as a config, an index or the settings of an adapter."""


def read_json(path: Path) -> Json:
    """Read a JSON file that holds an object.

    Raises:
        CheckpointError: The file cannot be read, is not JSON, is nested too deeply, repeats a key,
            or does not hold an object. The message has the file's path.
    """
    with readable(path):
        text = path.read_bytes()
    return parse_object(path, text)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an OSError from reading a file into a `CheckpointError` that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def parse_object(path: Path, text: bytes) -> dict[str, object]:
    """Parse the contents of a JSON file that holds an object.

    Raises:
        CheckpointError: The text is not JSON, is nested too deeply, repeats a key, or does not hold
            an object.
    """

    def unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
        entries: dict[str, object] = {}
        for key, value in pairs:
            # Python's json module would silently keep the last value
            if key in entries:
                raise CheckpointError(f"{path}: expected each key once, got {key!r} twice")
            entries[key] = value
        return entries

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except CheckpointError:
        # a CheckpointError is a ValueError, so the next branch would report it as bad JSON
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def _described(path: Path, name: str, entry: Any) -> tuple[DType, tuple[int, ...], int, int]:
    """Check a tensor's entry in a header; return its dtype, shape, and begin and end offsets."""

    def sizes(key: str) -> list[int]:
        value = entry.get(key)
        # bool is an int in Python, but not a size
        sound = isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
        if not sound:
            raise CheckpointError(
                f"{path}: {name} has {key} {value!r}, expected a list of non-negative integers"
            )
        return value

    if not isinstance(entry, dict):
        raise CheckpointError(
            f"{path}: expected an object with dtype, shape and data_offsets for {name}, got "
            f"{entry!r}"
        )
    code = entry.get("dtype")
    shape = sizes("shape")
    offsets = sizes("data_offsets")
    if not isinstance(code, str) or code not in BY_CODE:
        raise CheckpointError(
            f"{path}: {name} has dtype {code!r}, expected one of {', '.join(BY_CODE)}; if the "
            "checkpoint is quantized, merge the unquantized models"
        )
    if len(offsets) != 2:
        raise CheckpointError(
            f"{path}: {name} has data_offsets {offsets}, expected a begin and an end offset"
        )
    return BY_CODE[code], tuple(shape), offsets[0], offsets[1]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file from its header, without reading their values.

    Raises:
        CheckpointError: The file is truncated, its tensors overlap or do not cover all bytes, or a
            dtype or a size is invalid.
    """
    with readable(path), path.open("rb") as file:
        size = path.stat().st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        # check the length before reading: 8 random bytes could be a length beyond all memory
        if len(prefix) < 8 or length > min(_MAX_HEADER, size - 8):
            advice = ""
            if prefix == b"version ":  # the first word of a Git LFS pointer
                advice = "; it is a Git LFS pointer: run git lfs pull"
            raise CheckpointError(
                f"{path}: not a safetensors file, or truncated ({size} bytes){advice}"
            )
        raw = file.read(length)
    entries = parse_object(path, raw)
    metadata = entries.pop("__metadata__", {})
    texts = metadata.values() if isinstance(metadata, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise CheckpointError(
            f"{path}: expected __metadata__ with string values only, got {str(metadata)[:60]}"
        )
    described = []
    for name, entry in entries.items():
        dtype, shape, start, stop = _described(path, name, entry)
        described.append((start, stop, name, dtype, shape))
    tensors: dict[str, TensorInfo] = {}
    end = 0
    body = size - 8 - length
    # Every byte must belong to exactly one tensor, so tensors are checked in the order of their
    # begin offsets. An empty tensor begins at the same offset as the next one, so ties are sorted
    # by end.
    for start, stop, name, dtype, shape in sorted(described, key=lambda d: d[:2]):
        info = TensorInfo(name, shape, dtype, path, 8 + length + start)
        if stop - start != info.nbytes:
            raise CheckpointError(
                f"{path}: expected {info.nbytes} bytes for {name} of shape {list(shape)} and dtype "
                f"{dtype.code}, got {stop - start}"
            )
        if start < end:
            raise CheckpointError(f"{path}: {name} overlaps the tensor before it")
        if start > end:
            raise CheckpointError(f"{path}: {start - end} bytes before {name} belong to no tensor")
        if stop > body:
            raise CheckpointError(
                f"{path}: expected {stop} or more bytes of tensors, got {body}: the file is "
                f"truncated, and {name} is incomplete"
            )
        end = stop
        tensors[name] = info
    if end < body:
        raise CheckpointError(f"{path}: the last {body - end} bytes belong to no tensor")
    return tensors


def header_bytes(tensors: Sequence[tuple[TensorInfo, int]]) -> bytes:
    """Return the header of a safetensors file that holds the given tensors at the given offsets.

    The header includes the length prefix, and is padded to a multiple of 8 bytes.
    """
    # transformers 4 rejects files without a format entry
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for info, offset in tensors:
        place = [offset, offset + info.nbytes]
        entries[info.name] = {
            "dtype": info.dtype.code,
            "shape": list(info.shape),
            "data_offsets": place,
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    # padded as in safetensors: tensors then begin at a multiple of 8, and can be memory-mapped
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def stem_of(folder: Path) -> str | None:
    """Return the start of weight files' names, such as ``model``; None without safetensors."""
    for stem in STEMS:
        for end in (".safetensors.index.json", ".safetensors"):
            if (folder / f"{stem}{end}").exists():
                return stem
    return None


def read_index(index: Path) -> dict[str, set[str]]:
    """Return the names of the tensors in each file of an index; check that the files exist."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: expected a weight_map with at least one tensor, got {weight_map!r:.60}"
        )
    by_file: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        # A hub cache links its files to a store outside the folder, so check the name, not the
        # target of the link.
        plain = isinstance(file_name, str) and Path(file_name).name == file_name
        if not plain or file_name in ("", ".", ".."):
            raise CheckpointError(
                f"{index}: expected the name of a file in the same folder, got {file_name!r}"
            )
        by_file.setdefault(file_name, set()).add(name)
    for file_name in by_file:
        if not (index.parent / file_name).is_file():
            raise CheckpointError(f"{index}: lists {file_name}, which does not exist")
    return by_file


def read_folder(folder: Path) -> dict[str, TensorInfo] | None:
    """Return all tensors of a safetensors folder, or None if it holds no safetensors model.

    Raises:
        CheckpointError: A file is missing or damaged, or the index does not fit the files.
    """
    stem = stem_of(folder)
    if stem is None:
        return None
    index = folder / f"{stem}.safetensors.index.json"
    single = folder / f"{stem}.safetensors"
    if single.exists():  # even if there is an index: transformers prefers this file
        return read_header(single)
    tensors: dict[str, TensorInfo] = {}
    for file_name, wanted in read_index(index).items():
        header = read_header(folder / file_name)
        missing = sorted(wanted - header.keys())
        if missing:
            raise CheckpointError(
                f"{index}: expected {missing[0]} in {file_name}, which does not hold it"
            )
        extra = sorted(header.keys() - wanted)
        if extra:
            raise CheckpointError(
                f"{index}: {file_name} holds {extra[0]}, which the index does not list there"
            )
        tensors |= header
    return tensors
