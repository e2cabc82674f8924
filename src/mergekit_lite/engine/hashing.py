"""XXH64 hashes of written files, which detect damage but not tampering."""

from __future__ import annotations

import hashlib
from pathlib import Path

import xxhash


def hash_file(path: Path) -> str:
    """Return ``xxh64:`` and the hash of a file's bytes, in hexadecimal digits as in ``xxhsum``."""
    # file_digest has its own buffer; a second one would only cost copies
    with path.open("rb", buffering=0) as file:
        return f"xxh64:{hashlib.file_digest(file, xxhash.xxh64).hexdigest()}"
