"""Merges that look at what layers read, block by block.

So one block of each model need be resident.
"""

from .closed_forms import InputStatistics, merge_by_inputs
from .config import CalibratedMerge
from .merging import merged_source

__all__ = ["CalibratedMerge", "InputStatistics", "merge_by_inputs", "merged_source"]
