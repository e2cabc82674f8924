"""Checkpoints as they lie on disk or in memory: found, checked, and read in stretches."""

from .adapter import LoraSource
from .headers import CheckpointError, TensorInfo
from .resolve import find_folder, open_source
from .sources import DictSource, FolderSource, Source

__all__ = [
    "CheckpointError",
    "DictSource",
    "FolderSource",
    "LoraSource",
    "Source",
    "TensorInfo",
    "find_folder",
    "open_source",
]
