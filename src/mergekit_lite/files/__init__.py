"""Find, check and read checkpoints on disk or in memory, one range of elements at a time."""

from .adapter import AdapterSource, LoraSource
from .headers import CheckpointError, TensorInfo
from .resolve import find_folder, open_source
from .sources import DictSource, FolderSource, Source, View

__all__ = [
    "AdapterSource",
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
