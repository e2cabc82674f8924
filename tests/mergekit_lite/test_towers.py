"""Models with several lists of layers: a tower for images beside the text, an encoder and a decoder."""

import pytest
import torch

from mergekit_lite import PlanError, make_plan, merge_models
from mergekit_lite.files import DictSource
from mergekit_lite.recipe import MergeRecipe, ModelEntry, Slice

TEXT, VISION, HEAD = "model.language_model.layers.", "model.visual.blocks.", "score."


def towers(text=3, vision=5):
    """A model whose tensors hold the numbers of their layers."""
    names = {f"{TEXT}{k}.w": k for k in range(text)}
    names |= {f"{VISION}{k}.w": k for k in range(vision)} | {f"{HEAD}{k}.w": k for k in (0, 2)}
    config = {"text_config": {"num_hidden_layers": text}, "vision_config": {"depth": vision}}
    return DictSource({n: torch.full((2,), float(k)) for n, k in names.items()}, "towers", config)


def test_a_gradient_runs_over_each_list_of_layers():
    entries = [
        ModelEntry(model=towers(), parameters={"weight": [0.0, 1.0]}),
        ModelEntry(model=towers(), parameters={"weight": [1.0, 0.0]}),
    ]
    plan = make_plan(MergeRecipe(merge_method="linear", models=entries))
    weights = {t.name: t.parameters["weight"][0] for t in plan.tensors}
    assert [weights[f"{TEXT}{k}.w"] for k in range(3)] == [0.0, 0.5, 1.0]
    assert [weights[f"{VISION}{k}.w"] for k in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [weights[f"{HEAD}{k}.w"] for k in (0, 2)] == [0.0, 0.0]  # outside the layers


def sliced(model, *ranges):
    pieces = [Slice(sources=(ModelEntry(model=model, layer_range=span),)) for span in ranges]
    recipe = MergeRecipe(merge_method="passthrough", slices=tuple(pieces))
    return merge_models(recipe, progress=False)


def test_slices_cut_the_text_and_keep_the_rest_whole():
    merged = sliced(towers(), (0, 2), (1, 3))
    values = {name: value[0].item() for name, value in merged.items()}
    assert values == (
        {f"{TEXT}{k}.w": layer for k, layer in enumerate((0, 1, 1, 2))}
        | {f"{VISION}{k}.w": k for k in range(5)}
        | {f"{HEAD}{k}.w": k for k in (0, 2)}
    )
    # the text has three layers, whatever the tower has
    with pytest.raises(
        PlanError,
        match="layer_range of towers to end at 3 or below, because the model has 3 layers",
    ):
        sliced(towers(), (0, 4))


def test_slices_of_an_encoder_and_a_decoder_are_refused():
    state = {
        f"{part}.block.{k}.w": torch.ones(1) for part in ("encoder", "decoder") for k in (0, 1)
    }
    with pytest.raises(
        PlanError, match=r"one list of layers in t5, got 2: decoder.block.*, encoder.block"
    ):
        sliced(DictSource(state, "t5", {"num_layers": 2}), (0, 2), (0, 2))


def test_a_tower_does_not_hide_missing_text_layers():
    model = towers()
    state = {name: torch.ones(2) for name in model.tensors if not name.startswith(f"{TEXT}2")}
    with pytest.raises(
        PlanError, match=f"expected 3 layers, as in config.json, got no tensors of {TEXT}2"
    ):
        merge_models([DictSource(state, "short", model.config)], "passthrough", progress=False)
