"""Smaller stock models: hidden neurons, attention heads or whole blocks are dropped, and the rest makes up for them."""

from ..config import PruneConfig
from .prune import PruneReport, prune_

__all__ = ["PruneConfig", "PruneReport", "prune_"]
