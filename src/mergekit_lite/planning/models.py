"""Open the models of a recipe, and choose whose config and tokenizer the output takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..dtypes import Array
from ..files import CheckpointError, Source, TensorInfo, View, open_source
from ..files.experts import stacked
from ..recipe import MergeRecipe, model_key, model_label
from ..vocabulary import is_vocabulary_tensor, stored_name
from .plan import MergePlan


@dataclass(frozen=True)
class Models:
    """Every model that a recipe names.

    Args:
        sources: The sources in order of first mention. A base that is not also listed as a model
            comes after the models.
        index: The index in ``sources`` of each model's key.
        donor: The index of the model whose config and files the output takes.
    """

    sources: Sequence[Source]
    index: Mapping[str | int, int]
    donor: int

    def of(self, model: object) -> int:
        """Return the index of a model of the recipe."""
        return self.index[model_key(model)]

    def label(self, place: int) -> str:
        """Return a model's name for messages."""
        return self.sources[place].label

    def alias(self, place: int, name: str) -> str | None:
        """Return a model's tensor for ``name``: the same name, or the embedding of a tied head."""
        return stored_name(self.sources[place], name)


def truncate_vocabularies(models: Models) -> tuple[Models, int | None]:
    """Cut embeddings and heads to the fewest rows of any model.

    Returns:
        The models and the number of rows; the same models and None if all sizes are equal.
    """
    sizes = set()
    for source in models.sources:
        for name, info in source.tensors.items():
            if is_vocabulary_tensor(name) and info.shape:
                sizes.add(info.shape[0])
    if len(sizes) < 2:
        return models, None
    rows = min(sizes)
    sources = []
    for source in models.sources:
        tensors = dict(source.tensors)
        for name, info in tensors.items():
            if is_vocabulary_tensor(name) and info.shape:
                tensors[name] = TensorInfo(name, (rows, *info.shape[1:]), info.dtype)
        sources.append(View(source, tensors))
    return replace(models, sources=sources), rows


class PlannedSource(Source):
    """The result of a stage that is planned and not merged yet.

    Its tensors have names, shapes and dtypes, but no values.
    """

    def __init__(self, plan: MergePlan):
        self.plan = plan
        self.label = model_label(plan.recipe)
        self.config = plan.config
        self.folder = plan.sources[plan.donor].folder
        self.tensors = {t.name: t.info for t in plan.tensors}
        self.tokens = plan.vocabulary.tokens if plan.vocabulary else None
        self.parts = {t.name: t.parts for t in plan.tensors}
        # integer buffers: their values are compared with other models' before any merge
        self.copied: dict[str, tuple[Source, str]] = {}
        for t in plan.tensors:
            if t.method is None:
                self.copied[t.name] = (plan.sources[t.inputs[0].source], t.inputs[0].name)

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return the values of a tensor that is copied."""
        source, there = self.copied[name]
        return source.read(there, start, stop)

    def fingerprint(self) -> object:
        """Return None, since there are no values."""


def open_models(
    recipe: MergeRecipe, stages: Mapping[int, Source], allow_pickle: str | None
) -> tuple[Models | None, list[str]]:
    """Open every model once.

    Args:
        recipe: The recipe that names the models.
        stages: The results of recipes that are listed as models, by the recipe's `id`.
        allow_pickle: ``"weights_only"`` admits pickled checkpoints.

    Returns:
        The models, or None if one could not be opened, and the reasons.
    """
    problems: list[str] = []
    index: dict[str | int, int] = {}
    sources: list[Source] = []
    for model in recipe.mentions():
        try:
            source = stages.get(id(model)) or open_source(model, allow_pickle=allow_pickle)
            # all models, so that separate experts in one file can be merged with stacks in another
            sources.append(stacked(source))
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
            continue
        index[model_key(model)] = len(sources) - 1
    if problems:
        return None, problems
    donor = 0
    if recipe.base_model is not None:
        donor = index[model_key(recipe.base_model)]
    # for example a state dict: then the first model that has a config is the donor
    if not sources[donor].config:
        donor = next((i for i, source in enumerate(sources) if source.config), donor)
    return Models(sources, index, donor), []
