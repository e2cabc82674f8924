"""XXH64 of files that were written and of values that were read.

It finds what went wrong, not what was forged.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import xxhash

from ..dtypes import Array, byte_view


def hash_bytes(data: bytes | Array) -> str:
    """The hash of bytes, or of an array's.

    >>> hash_bytes(b"abc")
    'xxh64:44bc2cf5ad770999'
    """
    return f"xxh64:{xxhash.xxh64(data if isinstance(data, bytes) else byte_view(data)).hexdigest()}"


def hash_file(path: Path) -> str:
    """The hash of a file's bytes."""
    with path.open("rb", buffering=0) as file:
        return f"xxh64:{hashlib.file_digest(file, xxhash.xxh64).hexdigest()}"
