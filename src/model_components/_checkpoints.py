"""Find the complete checkpoints of a training run."""

from __future__ import annotations

import json
import logging
import math
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

_PREFIX = "checkpoint-"  # the name that transformers uses
_STATE = "trainer_state.json"
_STATE_FIELDS = {  # fields that transformers needs to resume
    "global_step": int,
    "max_steps": int,
    "train_batch_size": int,
    "logging_steps": (int, float),
    "save_steps": (int, float),
    "eval_steps": (int, float),
    "total_flos": (int, float),
    "log_history": list,
    "stateful_callbacks": (dict, type(None)),
    "best_model_checkpoint": (str, type(None)),
}
_OPTIMIZER = ("optimizer.pt", "scheduler.pt")
_SHARDED = re.compile("optimizer_|pytorch_model_fsdp|global_step")  # folders of FSDP and DeepSpeed
_OF_TORCH = re.compile(
    r"(optimizer|scheduler|scaler)\.(pt|bin)|rng_state.*\.pth|(training_args|pytorch_model.*)\.bin"
)
"""Files that transformers writes with torch.save; other files may have any format."""

logger = logging.getLogger(__name__)


def newest_whole(folder: Path, operation: str, needed: Sequence[str] = ()) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None; warn about newer damaged ones.

    Args:
        folder: The ``output_dir`` of a trainer.
        operation: The name that the warning begins with.
        needed: Names of files that a checkpoint must have in addition to transformers' files.
    """
    for path in checkpoints_in(folder):
        problem = problem_of(path, needed)
        if not problem:
            return path
        logger.warning(
            "%s: %s is not a complete checkpoint and is skipped: %s", operation, path, problem
        )
    return None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoint folders in a folder, the newest first."""
    numbered = []
    for path in folder.glob(f"{_PREFIX}*"):
        number = path.name.removeprefix(_PREFIX)
        if number.isdecimal() and path.is_dir():
            numbered.append((int(number), path))
    return [path for _, path in sorted(numbered, reverse=True)]


def is_of_trainer(checkpoint: Path) -> bool:
    """Return whether a trainer wrote a folder; other folders may also be called checkpoint-5."""
    return (checkpoint / _STATE).is_file()


def problem_of(checkpoint: Path, needed: Sequence[str] = ()) -> str:
    """Return the reason why a checkpoint is not complete, or an empty string if it is.

    Files may be cut short if the process was killed or the disk was full. The values of tensors are
    not checked.

    Args:
        checkpoint: The folder.
        needed: Names of files that the checkpoint must have in addition to transformers' files.
            They must be in the format of safetensors or torch.save.
    """
    for name in (_STATE, *needed):
        if not (checkpoint / name).is_file():
            return f"it has no {name}"
    contents = sorted(checkpoint.iterdir())
    return (
        _missing_in(checkpoint, contents)
        or _damaged_in(contents, needed)
        or _problem_of_state(checkpoint)
    )


def _missing_in(checkpoint: Path, contents: Sequence[Path]) -> str:
    # FSDP and DeepSpeed save weights and optimizers in subfolders
    if not any(path.is_dir() and _SHARDED.match(path.name) for path in contents):
        weights = [path for path in contents if path.suffix in (".safetensors", ".bin")]
        # training_args.bin holds settings, not weights
        if not [path for path in weights if path.name != "training_args.bin"]:
            return "it has no weights"
        for name in _OPTIMIZER:
            if not (checkpoint / name).is_file():
                return f"it has no {name} (save_only_model leaves it out)"
    return ""


def _damaged_in(contents: Sequence[Path], needed: Sequence[str]) -> str:
    for path in contents:
        if path.is_dir():
            continue
        if path.suffix == ".safetensors" and not _opens(path):
            return f"{path.name} is damaged"
        # torch.save writes zip files, whose list of contents is at the end; a cut file lacks it
        is_of_torch = path.name in needed or _OF_TORCH.fullmatch(path.name)
        if is_of_torch and path.suffix != ".safetensors" and not zipfile.is_zipfile(path):
            return f"{path.name} is damaged"
    return ""


def _problem_of_state(checkpoint: Path) -> str:
    try:
        state = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return f"{_STATE} is damaged ({error})"
    if not isinstance(state, dict):
        return f"{_STATE} is damaged (it holds a {type(state).__name__})"
    for name, kinds in _STATE_FIELDS.items():
        if not isinstance(state.get(name), kinds):
            return f"{_STATE} is damaged ({name} is {state.get(name)!r})"
    if any(isinstance(value, float) and not math.isfinite(value) for value in state.values()):
        return f"{_STATE} is damaged (it has NaN or infinity)"
    # otherwise a renamed folder would be taken for the checkpoint of another step
    step = checkpoint.name.removeprefix(_PREFIX)
    if step.isdecimal() and int(step) != state["global_step"]:
        return f"{_STATE} has global_step {state['global_step']}, expected {step}"
    return ""


def _opens(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):  # opening compares the length of the file with its header
            return True
    except (SafetensorError, OSError):
        return False
