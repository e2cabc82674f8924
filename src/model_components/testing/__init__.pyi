from .counting import OperationCount, count_operations
from .equivalence import Judgment, NotEquivalent, check_equivalent
from .modules import BEHAVIORS, ModuleReport, check_module

__all__ = [
    "BEHAVIORS",
    "Judgment",
    "ModuleReport",
    "NotEquivalent",
    "OperationCount",
    "check_equivalent",
    "check_module",
    "count_operations",
]
