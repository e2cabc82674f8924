from .counting import count_operations
from .equivalence import NotEquivalent, check_equivalent
from .modules import BEHAVIORS, check_module

__all__ = [
    "BEHAVIORS",
    "NotEquivalent",
    "check_equivalent",
    "check_module",
    "count_operations",
]
