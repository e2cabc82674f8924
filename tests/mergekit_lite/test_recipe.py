"""Recipes: the dialect on disk means what it says, and survives the round trip."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import mergekit_lite.running
from mergekit_lite import PlanError, RecipeError, load_recipe, make_plan, merge_models
from mergekit_lite.planning.settings import evaluate_setting, setting
from mergekit_lite.recipe import MergeRecipe, ModelEntry, Slice, parse_recipe

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
        merged = merge_models(
            [model], "task_arithmetic", base_model=base, weight=1.0, progress=False, **{name: 0.5}
        )
        assert merged["w"].tolist() == [0.5, 0.5]


def test_parameters_that_never_had_an_effect_are_noted(tmp_path):
    recipe = MergeRecipe(
        merge_method="ties",
        base_model={"w": torch.zeros(2)},
        models=[
            ModelEntry(
                model={"w": torch.ones(2)}, parameters={"weight": 1.0, "t": 0.5, "normalize": False}
            )
        ],
        parameters={"int8_mask": True, "mood": "good"},
    )
    notes = merge_models(recipe, out=tmp_path / "o", progress=False).notes
    for name in ("int8_mask", "t", "mood"):
        assert any(f"{name} has no effect on ties" in note for note in notes)
    assert any("normalize has no effect on a single model" in note for note in notes)


def test_per_model_lists_skip_the_base():
    base, a, b = ({"w": torch.full((2,), v)} for v in (0.0, 1.0, 2.0))
    merged = merge_models(
        [base, a, b], "task_arithmetic", base_model=base, weight=[1.0, 10.0], progress=False
    )
    assert merged["w"].tolist() == [21.0, 21.0]


def test_a_model_is_text():
    with pytest.raises(RecipeError, match=r"models model:.*hub id"):
        load_recipe("merge_method: linear\nmodels: [{model: [a]}]")
    text = (
        "merge_method: linear\nmodels: [{model: {model: {path: a, revision: v1}, lora: {path: b}}}]"
    )
    assert load_recipe(text).models[0].model == "a@v1+b"


def test_a_filter_that_no_tensor_answers_to_is_noted(tmp_path):
    options = {
        "t": [{"filter": "mlp", "value": 1}, {"value": 0}],
        "out": tmp_path / "o",
        "progress": False,
    }
    report = merge_models(
        [{"w": torch.ones(2)}], "slerp", base_model={"w": torch.zeros(2)}, **options
    )
    assert report.notes == ["t: filter 'mlp' matches no tensor's name"]


def folder_of(path, **tensors):
    path.mkdir()
    save_file(
        {name: torch.tensor(values) for name, values in tensors.items()}, path / "model.safetensors"
    )
    return path


@pytest.fixture
def three(tmp_path):
    return [
        folder_of(tmp_path / name, w=[value, 2 * value])
        for name, value in (("a", 1.0), ("b", 3.0), ("c", 8.0))
    ]


STAGED = """
name: half
merge_method: linear
models: [{{model: {a}}}, {{model: {b}}}]
parameters: {{weight: 1}}
---
merge_method: task_arithmetic
base_model: {a}
models: [{{model: half}}, {{model: {c}}}]
parameters: {{weight: 1}}
"""


def test_stages_are_merged_first_and_leave_nothing(three, tmp_path):
    recipe = load_recipe(STAGED.format(a=three[0], b=three[1], c=three[2]))
    assert recipe.to_dict()["models"][0] == {"model": "half"}
    assert load_recipe(recipe.to_yaml()) == load_recipe(load_recipe(recipe.to_yaml()).to_yaml())
    expected = [1.0 + (2 - 1) + (8 - 1), 2 * 9.0]
    assert merge_models(recipe, progress=False)["w"].tolist() == expected
    report = merge_models(recipe, out=tmp_path / "out", progress=False)
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == expected
    assert report.tensors[0]["name"] == "w"
    assert not list(tmp_path.glob(".*"))
    manifest = json.loads((tmp_path / "out" / "merge_manifest.json").read_text())
    assert [entry["model"] for entry in manifest["inputs"]] == [
        "half",
        str(three[2]),
        str(three[0]),
    ]
    again = load_recipe(tmp_path / "out" / "mergekit_config.yml")
    assert merge_models(again, progress=False)["w"].tolist() == expected


def test_a_stage_that_is_whole_is_not_made_again(three, tmp_path, monkeypatch):
    recipe = load_recipe(STAGED.format(a=three[0], b=three[1], c=three[2]))
    merged, real = [], mergekit_lite.running._write

    def write(engine, out, *rest):
        merged.append(out.name)
        if len(merged) == 2:
            raise KeyboardInterrupt
        return real(engine, out, *rest)

    monkeypatch.setattr(mergekit_lite.running, "_write", write)
    with pytest.raises(KeyboardInterrupt):
        merge_models(recipe, out=tmp_path / "out", progress=False)
    assert (tmp_path / ".out.stages.partial").exists()
    merge_models(recipe, out=tmp_path / "out", progress=False)
    assert merged == ["half", "out", "out"]
    assert not list(tmp_path.glob(".*"))
    shutil.rmtree(tmp_path / "out")
    merged.clear()
    with pytest.raises(KeyboardInterrupt):
        merge_models(recipe, out=tmp_path / "out", progress=False)
    save_file({"w": torch.tensor([5.0, 5.0])}, three[1] / "model.safetensors")
    merge_models(recipe, out=tmp_path / "out", progress=False)
    assert merged == ["half", "out", "half", "out"]
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [
        1 + 2 + 7,
        2 + 1.5 + 14,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: ../x\nmerge_method: linear\nmodels: [{model: A}]\n---\nmerge_method: "
            "linear\nmodels: [{model: ../x}]",
            r"recipe:.*'../x'",
        ),
        (
            "name: x\nmerge_method: linear\nmodels: [{model: A}]\n---\nmerge_method: "
            "linear\nmodels: [{model: A}]",
            r"recipe:.*'x'",
        ),
        (
            "name: x\nmerge_method: linear\nmodels: [y]\n---\nname: y\nmerge_method: "
            "linear\nmodels: [x]",
            r"recipe:.*cycle",
        ),
        (
            "name: x\nmerge_method: linear\nmodels: [a]\n---\nname: x\nmerge_method: "
            "linear\nmodels: [a]",
            r"recipe:.*'x'",
        ),
    ],
)
def test_bad_stages(text, message, three, tmp_path):
    with pytest.raises(RecipeError, match=message):
        merge_models(
            load_recipe(text.replace("A", str(three[0]))), out=tmp_path / "out", progress=False
        )
    assert not (tmp_path / "out").exists()


def test_a_slice_has_a_base_of_its_own(tmp_path):
    a, b, c = (
        folder_of(tmp_path / n, **{f"layers.{i}.w": [v * (i + 1)] for i in range(2)})
        for n, v in zip("abc", (1.0, 10.0, 100.0), strict=True)
    )
    text = f"""
merge_method: task_arithmetic
slices:
- {{sources: [{{model: {a}, layer_range: [0, 1]}}, {{model: {b}, layer_range: [0, 1]}}], base_model: {a}}}
- {{sources: [{{model: {c}, layer_range: [1, 2]}}, {{model: {b}, layer_range: [1, 2]}}], base_model: {c}}}
parameters: {{weight: 0.5}}
"""
    merged = merge_models(load_recipe(text), progress=False)
    assert merged["layers.0.w"].tolist() == [1 + 0.5 * 9]
    assert merged["layers.1.w"].tolist() == [200 + 0.5 * (20 - 200)]


def test_one_slice_object_may_stand_twice_and_has_sources(tmp_path):
    model = folder_of(tmp_path / "m", **{f"layers.{i}.w": [float(i)] for i in range(3)}, norm=[9.0])
    piece = Slice(sources=(ModelEntry(model=model, layer_range=(1, 3)),))
    merged = merge_models(
        MergeRecipe(merge_method="passthrough", slices=(piece, piece)), progress=False
    )
    assert {n: v.tolist() for n, v in merged.items()} == {
        "layers.0.w": [1.0],
        "layers.1.w": [2.0],
        "layers.2.w": [1.0],
        "layers.3.w": [2.0],
        "norm": [9.0],
    }
    with pytest.raises(RecipeError, match=r"slice:.*sources"):
        Slice(sources=())


def test_what_is_wrong_with_the_last_stage_is_said_before_the_first_is_merged(three, tmp_path):
    odd = folder_of(tmp_path / "odd", w=[1.0, 2.0, 3.0])
    text = STAGED.format(a=three[0], b=three[1], c=odd)
    assert "task_arithmetic of 2: half" in str(
        make_plan(load_recipe(STAGED.format(a=three[0], b=three[1], c=three[2])))
    )
    for merge in (
        make_plan,
        lambda recipe: merge_models(recipe, out=tmp_path / "out", progress=False),
    ):
        with pytest.raises(PlanError, match="shapes differ: w"):
            merge(load_recipe(text))
    assert not list(tmp_path.glob(".*"))


def test_a_recipe_says_its_method_itself(three):
    recipe = load_recipe(f"merge_method: passthrough\nmodels: [{three[0]}]\n")
    with pytest.raises(ValueError, match=r"merge_models:.*method"):
        merge_models(recipe, "linear")


def test_stages_made_in_python_have_names(three):
    stages = [
        MergeRecipe(merge_method="linear", models=[ModelEntry(model=path)]) for path in three[:2]
    ]
    with pytest.raises(RecipeError, match=r"recipe:.*stages"):
        MergeRecipe(merge_method="linear", models=[ModelEntry(model=stage) for stage in stages])


def test_the_card_and_the_manifest_of_stages(three, tmp_path):
    merge_models(
        load_recipe(STAGED.format(a=three[0], b=three[1], c=three[2])),
        out=tmp_path / "out",
        progress=False,
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in card
    assert all(f"- {name}\n" in card for name in "abc")
    manifest = json.loads((tmp_path / "out" / "merge_manifest.json").read_text())
    assert manifest["stages"][0]["name"] == "half"
    assert [entry["model"] for entry in manifest["inputs"][0]["merged_from"]] == [
        str(three[0]),
        str(three[1]),
    ]


def test_a_base_alone_is_written(three):
    """Such as task arithmetic that only adds an adapter to its base."""
    recipe = load_recipe(f"merge_method: task_arithmetic\nbase_model: {three[0]}\nmodels: []")
    assert recipe.merge_method == "passthrough"
    assert "the base" in recipe.notes[0]
    with pytest.warns(UserWarning, match="is a copy of the base") as warned:
        merged = merge_models(recipe, progress=False)
    assert warned[0].filename == __file__  # the caller's line is blamed
    stored = load_file(f"{three[0]}/model.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in merged.items())


def test_long_texts_and_mappings_that_hold_themselves_are_refused():
    with pytest.raises(RecipeError, match="there is no such file"):
        load_recipe("merge_method: linear " * 50)
    model: dict = {}
    model["model"] = model
    with pytest.raises(RecipeError, match="expected a path, a hub id or MODEL"):
        parse_recipe({"merge_method": "linear", "models": [{"model": model}]})
    text = "merge_method: linear\nmodels: [a, b]\nparameters: {weight: 1}\nchat_template: "
    with pytest.raises(PlanError, match=r"chat_template: expected .*, got 'xxxx"):
        make_plan(load_recipe(text + "x" * 300))
