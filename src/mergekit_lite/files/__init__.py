"""Checkpoints as they lie on disk or in memory: found, checked, and read in stretches."""

from .headers import CheckpointError, TensorInfo
from .resolve import open_source
from .sources import DictSource, FolderSource, Source

__all__ = ["CheckpointError", "DictSource", "FolderSource", "Source", "TensorInfo", "open_source"]
