"""Data-driven merges, which use the inputs of layers and merge block by block.

Only one block of each model is in memory at a time.
"""

from ..methods.closed_forms import InputStatistics, merge_by_inputs
from .config import CalibratedMerge
from .merging import merged_source

__all__ = ["CalibratedMerge", "InputStatistics", "merge_by_inputs", "merged_source"]
