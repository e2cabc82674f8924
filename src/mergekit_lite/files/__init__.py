"""Checkpoints as they lie on disk or in memory: found, checked, and read in stretches."""

from .adapter import LoraSource
from .headers import CheckpointError, TensorInfo
from .resolve import find_folder, open_source
from .sources import DictSource, FolderSource, Source, View

__all__ = [
    "CheckpointError",
    "DictSource",
    "FolderSource",
    "LoraSource",
    "Source",
    "TensorInfo",
    "View",
    "find_folder",
    "open_source",
]
