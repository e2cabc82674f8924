"""XXH64 of files that were written: it finds what went wrong, not what was forged."""

from __future__ import annotations

import hashlib
from pathlib import Path

import xxhash


def hash_file(path: Path) -> str:
    """Return the hash of a file's bytes, as ``xxhsum`` prints it."""
    # file_digest reads into a buffer of its own; a second one would only cost copies
    with path.open("rb", buffering=0) as file:
        return f"xxh64:{hashlib.file_digest(file, xxhash.xxh64).hexdigest()}"
