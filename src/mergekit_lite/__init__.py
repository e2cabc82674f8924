"""Merge several checkpoints into one: by formula, streaming, in constant memory.

>>> import torch, mergekit_lite
>>> models = [{"w": torch.zeros(2)}, {"w": torch.ones(2)}]
>>> mergekit_lite.merge_models(models, method="linear", weight=[1, 3], progress=False)
{'w': tensor([0.7500, 0.7500])}
"""

from model_components import __version__ as __version__
from model_components._folders import OutputError

from .adapters import extract_lora, merge_adapters
from .engine import NotFiniteError
from .files import CheckpointError
from .functional import merge_models
from .methods import (
    METHODS,
    Largest,
    MergeMethod,
    Noise,
    PerModel,
    Range,
    Sum,
    get_method,
    merge_method,
)
from .planning import PlanError, make_plan
from .recipe import (
    MergeRecipe,
    ModelEntry,
    RecipeError,
    Slice,
    TokenizerSpec,
    TokenRule,
    load_recipe,
)

__all__ = [
    "METHODS",
    "CheckpointError",
    "Largest",
    "MergeMethod",
    "MergeRecipe",
    "ModelEntry",
    "Noise",
    "NotFiniteError",
    "OutputError",
    "PerModel",
    "PlanError",
    "Range",
    "RecipeError",
    "Slice",
    "Sum",
    "TokenRule",
    "TokenizerSpec",
    "extract_lora",
    "get_method",
    "load_recipe",
    "make_plan",
    "merge_adapters",
    "merge_method",
    "merge_models",
]
