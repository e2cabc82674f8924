"""Merge methods: pure, differentiable functions of tensors, and the table of their names."""

from .averaging import linear, nearswap, passthrough, task_arithmetic
from .closed_forms import CALIBRATED
from .compiled import BY_ROWS, COMPILED, STRETCH, has_kernel
from .dropping import dare_linear, dare_ties, della, della_linear
from .fusion import arcee_fusion, ram, ramplus_tl
from .noise import Noise
from .parameters import Parameter, PerModel, Range
from .registry import METHODS, MergeMethod, get_method, merge_method
from .spectral import iso_c, tsv
from .spherical import karcher, model_stock, multislerp, nuslerp, slerp
from .trimming import breadcrumbs, breadcrumbs_ties, sce, ties

__all__ = [
    "BY_ROWS",
    "CALIBRATED",
    "COMPILED",
    "METHODS",
    "STRETCH",
    "MergeMethod",
    "Noise",
    "Parameter",
    "PerModel",
    "Range",
    "arcee_fusion",
    "breadcrumbs",
    "breadcrumbs_ties",
    "dare_linear",
    "dare_ties",
    "della",
    "della_linear",
    "get_method",
    "has_kernel",
    "iso_c",
    "karcher",
    "linear",
    "merge_method",
    "model_stock",
    "multislerp",
    "nearswap",
    "nuslerp",
    "passthrough",
    "ram",
    "ramplus_tl",
    "sce",
    "slerp",
    "task_arithmetic",
    "ties",
    "tsv",
]
