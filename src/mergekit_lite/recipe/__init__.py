"""Recipes, which define merges, and the YAML dialect in which they are written."""

from .dialect import RECIPE_KEYS, load_recipe, parse_recipe
from .recipe import (
    MergeRecipe,
    ModelEntry,
    RecipeError,
    Slice,
    TokenizerSpec,
    TokenRule,
    model_key,
    model_label,
)

__all__ = [
    "RECIPE_KEYS",
    "MergeRecipe",
    "ModelEntry",
    "RecipeError",
    "Slice",
    "TokenRule",
    "TokenizerSpec",
    "load_recipe",
    "model_key",
    "model_label",
    "parse_recipe",
]
