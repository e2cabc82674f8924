"""Keep hidden states between two blocks on disk.

An interrupted run goes on at the block that it was at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from model_components._folders import new_file
from model_components._walk import Batch

from ..files import Source

_STATES = "states.safetensors"


def run_fingerprint(
    sources: Sequence[Source], data: Sequence[Sequence[Batch]], settings: object
) -> str:
    """Return a key of what a run depends on: the models' files, their data, its settings."""
    digest = hashlib.sha256()
    for batch in (b for batches in data for b in batches):
        digest.update(repr([(k, v.tolist()) for k, v in sorted(batch.items())]).encode())
    described = [[s.fingerprint() for s in sources], settings, digest.hexdigest()]
    return hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()


def save_states(folder: Path, states: Mapping[str, Tensor], *, done: int, mark: str) -> None:
    """Write them in the place of those before.

    Args:
        folder: Where.
        states: By any names.
        done: How many blocks they have been through.
        mark: What the run depends on, as text that other runs do not have.
    """
    with new_file(folder / _STATES, "merge") as part:
        save_file(
            {name: state.contiguous() for name, state in states.items()},
            part,
            {"mark": mark, "done": str(done)},
        )


def load_states(folder: Path, mark: str) -> tuple[int, dict[str, Tensor]]:
    """Return how many blocks an earlier run of that mark has been through, and its states.

    Else 0 and none.
    """
    path = folder / _STATES
    if not path.is_file():
        return 0, {}
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("mark") != mark:
            return 0, {}
        # the file is no mapping, so `in file` would not do
        return int(metadata["done"]), {
            name: file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118
        }
