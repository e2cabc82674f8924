"""Checkpoints of trainings: which of them are whole."""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

_PREFIX = "checkpoint-"  # transformers' own
_STATE = "trainer_state.json"

logger = logging.getLogger(__name__)


def newest_whole(folder: Path, operation: str, needed: Sequence[str] = ()) -> Path | None:
    """Return the newest whole checkpoint in a folder, or None; warn of newer ones that are not.

    Args:
        folder: The ``output_dir`` of a trainer.
        operation: The name that the warning begins with.
        needed: Names of files that a checkpoint must have besides those of transformers.
    """
    for path in checkpoints_in(folder):
        problem = problem_of(path, needed)
        if not problem:
            return path
        logger.warning("%s: %s is not whole and is passed over: %s", operation, path, problem)
    return None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the folders of checkpoints in a folder, the newest first."""
    numbered = {
        int(path.name.removeprefix(_PREFIX)): path
        for path in folder.glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdecimal() and path.is_dir() and not path.is_symlink()
    }
    return [path for _, path in sorted(numbered.items(), reverse=True)]


def problem_of(checkpoint: Path, needed: Sequence[str] = ()) -> str:
    """Return the reason why a checkpoint is not whole, or an empty string.

    A kill or a full disk cuts files short. What they hold is not compared with anything.
    """
    for name in (_STATE, *needed):
        if not (checkpoint / name).is_file():
            return f"it has no {name}"
    try:
        json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    except ValueError as error:
        return f"{_STATE} is damaged ({error})"
    contents = sorted(checkpoint.iterdir())
    # sharded trainings keep weights in folders
    weights = [path for path in contents if path.suffix in (".safetensors", ".bin")]
    weights = [path for path in weights if path.name != "training_args.bin"]
    if not weights and not any(path.is_dir() for path in contents):
        return "it has no weights"
    for path in contents:
        if path.is_dir():
            continue
        if path.suffix == ".safetensors" and not _opens(path):
            return f"{path.name} is damaged"
        if path.suffix in (".pt", ".pth", ".bin") and not _unpacks(path):
            return f"{path.name} is damaged"
    return ""


def _opens(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):  # which compares the length with the header
            return True
    except (SafetensorError, OSError):
        return False


def _unpacks(path: Path) -> bool:
    """Return whether a file of ``torch.save`` has its end.

    It is a zip file, whose list of contents comes last, or an old pickle, of which one cannot tell.
    Checksums are not compared: torch can be told to write none.
    """
    with path.open("rb") as file:
        start = file.read(2)
    return zipfile.is_zipfile(path) if start == b"PK" else bool(start)
