"""XXH64 hashes of written files: they detect damage, not forgery."""

from __future__ import annotations

import hashlib
from pathlib import Path

import xxhash


def hash_file(path: Path) -> str:
    """Return the hash of a file's bytes, as ``xxhsum`` prints it."""
    # file_digest reads into a buffer of its own; a second one would only cost copies
    with path.open("rb", buffering=0) as file:
        return f"xxh64:{hashlib.file_digest(file, xxhash.xxh64).hexdigest()}"
