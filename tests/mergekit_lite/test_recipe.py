"""Recipes: the dialect on disk means what it says, and survives the round trip."""

import json

import pytest
import torch

from mergekit_lite import MergeRecipe, ModelEntry, RecipeError, load_recipe, merge_models
from mergekit_lite.planning import evaluate_setting, setting
from mergekit_lite.recipe import parse_recipe

FULL = """
merge_method: ties
slices:
- sources:
  - {model: a, layer_range: [0, 2], parameters: {weight: 0.25}}
  - {model: b, layer_range: [1, 3]}
  parameters: {density: 0.5}
base_model: a
parameters: {weight: 1.0, density: [0.1, 0.9], normalize: false}
dtype: bfloat16
out_dtype: float16
tokenizer: {source: union, pad_to_multiple_of: 8, tokens: {x: {source: a, force: true}}}
chat_template: auto
"""


def test_round_trips():
    recipe = load_recipe(FULL)
    assert load_recipe(recipe.to_yaml()) == recipe
    assert parse_recipe(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_the_most_specific_place_wins():
    recipe = load_recipe(FULL)
    piece = recipe.slices[0]
    first, second = piece.sources
    levels = [first.parameters, piece.parameters, recipe.parameters]
    assert setting(levels, "weight", "layers.0.w", 0.5) == 0.25
    assert setting([second.parameters, *levels[1:]], "weight", "layers.0.w", 0.5) == 1.0
    assert setting(levels, "density", "layers.0.w", 0.5) == 0.5
    assert setting(levels, "normalize", "layers.0.w", 0.5) is False
    assert setting(levels, "lambda", "layers.0.w", 0.5) is None


@pytest.mark.parametrize(
    ("value", "depth", "expected"),
    [
        (0.3, 0.7, 0.3),
        ([0, 1], 0.25, 0.25),
        ([0, 1, 0], 0.5, 1),
        ([0, 1, 0], 0.75, 0.5),
        ([0, 2], 1.0, 2),
        ([5], 0.4, 5),
    ],
)
def test_gradients(value, depth, expected):
    assert evaluate_setting(value, "w", depth) == pytest.approx(expected)


def test_a_filter_that_matches_nothing_falls_through():
    levels = [{"t": [{"filter": "mlp", "value": 1}]}, {"t": 0.5}]
    assert setting(levels, "t", "layers.0.self_attn.w", 0) == 0.5
    assert setting(levels, "t", "layers.0.mlp.w", 0) == 1
    assert setting([{"t": {"filter": "*", "value": [0, 4]}}], "t", "w", 0.5) == 2


def test_lambda_by_either_name():
    base, model = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    for name in ("lambda", "lambda_"):
        merged = merge_models([model], "task_arithmetic", base_model=base, weight=1.0, progress=False, **{name: 0.5})
        assert merged["w"].tolist() == [0.5, 0.5]


def test_parameters_that_never_had_an_effect_are_noted(tmp_path):
    recipe = MergeRecipe(
        merge_method="ties",
        base_model={"w": torch.zeros(2)},
        models=[ModelEntry(model={"w": torch.ones(2)}, parameters={"weight": 1.0, "t": 0.5, "normalize": False})],
        parameters={"int8_mask": True, "mood": "good"},
    )
    notes = merge_models(recipe, out=tmp_path / "o", progress=False).notes
    for name in ("int8_mask", "t", "mood"):
        assert any(f"{name} has no effect on ties" in note for note in notes)
    assert any("normalize has no effect at a model" in note for note in notes)


def test_per_model_lists_skip_the_base():
    base, a, b = ({"w": torch.full((2,), v)} for v in (0.0, 1.0, 2.0))
    merged = merge_models([base, a, b], "task_arithmetic", base_model=base, weight=[1.0, 10.0], progress=False)
    assert merged["w"].tolist() == [21.0, 21.0]


def test_a_model_is_text():
    with pytest.raises(RecipeError, match="needed a path or hub id"):
        load_recipe("merge_method: linear\nmodels: [{model: [a]}]")
    text = "merge_method: linear\nmodels: [{model: {model: {path: a, revision: v1}, lora: {path: b}}}]"
    assert load_recipe(text).models[0].model == "a@v1+b"


def test_a_filter_that_no_tensor_answers_to_is_noted(tmp_path):
    options = {"t": [{"filter": "mlp", "value": 1}, {"value": 0}], "out": tmp_path / "o", "progress": False}
    report = merge_models([{"w": torch.ones(2)}], "slerp", base_model={"w": torch.zeros(2)}, **options)
    assert report.notes == ["t: filter 'mlp' is in no tensor's name"]
