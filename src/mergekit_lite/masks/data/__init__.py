"""What masks are trained on: mixtures of tasks, text, batches, and teachers that run once."""

from .collator import MaskCollator
from .mixture import TaskMixture, TaskStream
from .teachers import CachedTeachers, cache_teachers
from .texts import TextExamples

__all__ = ["CachedTeachers", "MaskCollator", "TaskMixture", "TaskStream", "TextExamples", "cache_teachers"]
