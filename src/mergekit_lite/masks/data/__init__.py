"""Data for training masks: texts, mixtures of tasks, batches, and cached teachers."""

from model_components._examples import TextExamples

from .collator import MaskCollator
from .mixture import TaskMixture
from .teachers import CachedTeachers, cache_teachers

__all__ = ["CachedTeachers", "MaskCollator", "TaskMixture", "TextExamples", "cache_teachers"]
