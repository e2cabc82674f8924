"""Hashes of files that were written and of values that were read: XXH64 where kernels run, SHA-256 where they cannot.

A hash is a text that begins with its kind, ``xxh64:`` or ``sha256:``. XXH64 is a checksum: it finds what went wrong,
not what was forged. (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from io import RawIOBase
from pathlib import Path

import numpy as np

from ..dtypes import Array, byte_view

_CHUNK = 1 << 22
_WORD = (1 << 64) - 1
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def _rotated(x: int, by: int) -> int:
    return (x << by | x >> (64 - by)) & _WORD


def _round(accumulator: int, word: int) -> int:
    return _rotated((accumulator + word * _P2) & _WORD, 31) * _P1 & _WORD


class _Xxh64:
    """XXH64 with seed 0, of bytes that come in pieces whose lengths are multiples of 32, but for the last."""

    def __init__(self) -> None:
        from . import _numba

        self._stripes = _numba.xxh64_stripes
        self._state = np.array([(_P1 + _P2) & _WORD, _P2, 0, -_P1 & _WORD], np.uint64)
        self._length, self._tail = 0, b""

    def update(self, data: memoryview) -> None:
        whole = len(data) // 32 * 32
        self._length += len(data)
        if whole:
            self._stripes(np.frombuffer(data[:whole], np.uint64), self._state)
        self._tail = bytes(data[whole:])

    def hexdigest(self) -> str:
        state = [int(word) for word in self._state]
        if self._length >= 32:
            x = sum(_rotated(word, by) for word, by in zip(state, (1, 7, 12, 18), strict=True)) & _WORD
            for word in state:
                x = ((x ^ _round(0, word)) * _P1 + _P4) & _WORD
        else:
            x = _P5
        x, tail = (x + self._length) & _WORD, self._tail
        while len(tail) >= 8:
            x = (_rotated(x ^ _round(0, int.from_bytes(tail[:8], "little")), 27) * _P1 + _P4) & _WORD
            tail = tail[8:]
        if len(tail) >= 4:
            x = (_rotated(x ^ int.from_bytes(tail[:4], "little") * _P1 & _WORD, 23) * _P2 + _P3) & _WORD
            tail = tail[4:]
        for byte in tail:
            x = _rotated(x ^ byte * _P5 & _WORD, 11) * _P1 & _WORD
        x = (x ^ x >> 33) * _P2 & _WORD
        x = (x ^ x >> 29) * _P3 & _WORD
        return f"{x ^ x >> 32:016x}"


def _kind() -> str:
    try:
        from . import _numba  # noqa: F401, only whether it can be imported
    except ImportError:
        return "sha256"
    return "xxh64"


def _hash(kind: str, pieces: Iterable[memoryview]) -> str:
    digest = _Xxh64() if kind == "xxh64" else hashlib.new(kind)
    for piece in pieces:
        digest.update(piece)
    return f"{kind}:{digest.hexdigest()}"


def hash_bytes(data: bytes | Array) -> str:
    """The hash of bytes, or of an array's.

    >>> hash_bytes(b"abc") in ("xxh64:44bc2cf5ad770999", "sha256:" + hashlib.sha256(b"abc").hexdigest())
    True
    """
    return _hash(_kind(), [memoryview(data) if isinstance(data, bytes) else byte_view(data)])


def hash_file(path: Path, kind: str | None = None) -> str:
    """The hash of a file's bytes, of the kind that can be had or is asked for."""
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:

        def pieces() -> Iterable[memoryview]:
            while count := _fill(file, buffer):
                yield buffer[:count]

        return _hash(kind or _kind(), pieces())


def _fill(file: RawIOBase, buffer: memoryview) -> int:
    """Read until the buffer is full or the file ends."""
    done = 0
    while done < len(buffer) and (count := file.readinto(buffer[done:])):
        done += count
    return done


def is_hash_of(text: object, path: Path) -> bool:
    """Whether a recorded hash is that of a file; False for one that cannot be computed here."""
    kind = text.partition(":")[0] if isinstance(text, str) else None
    if kind not in ("sha256", "xxh64") or (kind == "xxh64" and _kind() != "xxh64"):
        return False
    return hash_file(path, kind) == text
