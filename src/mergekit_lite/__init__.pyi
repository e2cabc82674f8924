from .adapters import extract_lora, merge_adapters
from .engine import NotFiniteError
from .engine.output import OutputError
from .files import CheckpointError
from .functional import merge_models
from .learning.run import learn_merge
from .masks.layers import AccurateMaskedLinear, EfficientMaskedLinear
from .methods import (
    METHODS,
    Noise,
    PerModel,
    Range,
    get_method,
    merge_method,
)
from .planning import PlanError, make_plan
from .recipe import (
    MergeRecipe,
    RecipeError,
    load_recipe,
)

__version__: str

__all__ = [
    "METHODS",
    "AccurateMaskedLinear",
    "CheckpointError",
    "EfficientMaskedLinear",
    "MergeRecipe",
    "Noise",
    "NotFiniteError",
    "OutputError",
    "PerModel",
    "PlanError",
    "Range",
    "RecipeError",
    "extract_lora",
    "get_method",
    "learn_merge",
    "load_recipe",
    "make_plan",
    "merge_adapters",
    "merge_method",
    "merge_models",
]
