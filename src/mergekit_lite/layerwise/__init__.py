"""Merges that look at what layers read, block by block, so that one block of each model need be resident."""

from .closed_forms import InputStatistics, merge_by_inputs
from .config import METHODS, CalibratedMerge
from .merging import merged_source

__all__ = ["METHODS", "CalibratedMerge", "InputStatistics", "merge_by_inputs", "merged_source"]
