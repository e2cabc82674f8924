"""The key that identifies the files of an unfinished calibrated merge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from model_components._walk import Batch

from ..files import Source


def run_fingerprint(
    sources: Sequence[Source], data: Sequence[Sequence[Batch]], settings: object
) -> str:
    """Return a hash of everything that a run depends on: the models' files, data and settings."""
    digest = hashlib.sha256()
    for batch in (b for batches in data for b in batches):
        digest.update(repr([(k, v.tolist()) for k, v in sorted(batch.items())]).encode())
    described = [[s.fingerprint() for s in sources], settings, digest.hexdigest()]
    return hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()
