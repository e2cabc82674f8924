"""Merge several checkpoints into one: by formula, streaming, in constant memory.

>>> import torch, mergekit_lite
>>> models = [{"w": torch.zeros(2)}, {"w": torch.ones(2)}]
>>> mergekit_lite.merge_models(models, method="linear", weight=[1, 3], progress=False)
{'w': tensor([0.7500, 0.7500])}
"""

from model_components import __version__ as __version__
from model_components._folders import OutputError

from .checkpoint import CheckpointError
from .engine import NotFiniteError, TensorFact
from .merge import merge_models
from .methods import METHODS, MergeMethod, PerModel, Range, get_method, merge_method
from .noise import Noise
from .plan import MergePlan, PlanError
from .planner import make_plan
from .recipe import MergeRecipe, ModelEntry, RecipeError, Slice, TokenizerSpec, load_recipe
from .report import MergeReport
from .select import Largest, Sum

__all__ = [
    "METHODS",
    "CheckpointError",
    "Largest",
    "MergeMethod",
    "MergePlan",
    "MergeRecipe",
    "MergeReport",
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
    "TensorFact",
    "TokenizerSpec",
    "get_method",
    "load_recipe",
    "make_plan",
    "merge_method",
    "merge_models",
]
