from .adapters.combination import merge_adapters
from .adapters.extraction import extract_lora
from .functional import merge_models
from .learning.run import learn_merge
from .masks.layers import AccurateMaskedLinear, EfficientMaskedLinear
from .methods import (
    METHODS,
    Noise,
    PerModel,
    Range,
    merge_method,
)
from .planning import PlanError, make_plan
from .recipe import RecipeError, load_recipe

__version__: str

__all__ = [
    "METHODS",
    "AccurateMaskedLinear",
    "EfficientMaskedLinear",
    "Noise",
    "PerModel",
    "PlanError",
    "Range",
    "RecipeError",
    "extract_lora",
    "learn_merge",
    "load_recipe",
    "make_plan",
    "merge_adapters",
    "merge_method",
    "merge_models",
]
