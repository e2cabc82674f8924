"""Open the models of a recipe, and choose the model that provides the config and tokenizer."""

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
        index: The index in ``sources`` of each model, by the model's key.
        donor: The index of the model that provides the output's config and tokenizer files.
    """

    sources: Sequence[Source]
    index: Mapping[str | int, int]
    donor: int

    def of(self, model: object) -> int:
        """Return the index in ``sources`` of a model of the recipe."""
        return self.index[model_key(model)]

    def label(self, place: int) -> str:
        """Return a model's name for messages."""
        return self.sources[place].label

    def alias(self, place: int, name: str) -> str | None:
        """Return the name under which a model stores a tensor, or None if the model lacks it.

        A tied head is stored under the name of the embedding.
        """
        return stored_name(self.sources[place], name)


def truncate_vocabularies(models: Models) -> tuple[Models, int | None]:
    """Cut embeddings and heads to the smallest number of rows in any model.

    Returns:
        The cut models and the number of rows, or the same models and None if all numbers of rows
        are equal.
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
    """The result of a stage that is planned but not yet merged.

    The tensors have names, shapes and dtypes. Only tensors that are copied, such as integer
    buffers, have values.
    """

    def __init__(self, plan: MergePlan):
        self.plan = plan
        self.label = model_label(plan.recipe)
        self.config = plan.config
        self.folder = plan.sources[plan.donor].folder
        self.tensors = {t.name: t.info for t in plan.tensors}
        self.tokens = plan.vocabulary.tokens if plan.vocabulary else None
        self.parts = {t.name: t.parts for t in plan.tensors}
        self.notes = [f"{self.label}: {note}" for note in plan.notes]
        # integer buffers, which are compared with other models' buffers before any merge
        self.copied: dict[str, tuple[Source, str]] = {}
        for t in plan.tensors:
            if t.method is None:
                self.copied[t.name] = (plan.sources[t.inputs[0].source], t.inputs[0].name)

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements of a copied tensor; merged tensors have no values yet."""
        source, there = self.copied[name]
        return source.read(there, start, stop)

    def fingerprint(self) -> object:
        """Return None, because merged values do not exist yet."""


def open_models(
    recipe: MergeRecipe, stages: Mapping[int, Source], allow_pickle: str | None
) -> tuple[Models | None, list[str]]:
    """Open every model once.

    Args:
        recipe: The recipe that names the models.
        stages: The results of recipes that are listed as models, by the recipe's `id`.
        allow_pickle: Pass ``"weights_only"`` to also read pickled checkpoints.

    Returns:
        The models and an empty list, or None and the reasons why models cannot be opened.
    """
    problems: list[str] = []
    index: dict[str | int, int] = {}
    sources: list[Source] = []
    for model in recipe.mentions():
        try:
            source = stages.get(id(model)) or open_source(model, allow_pickle=allow_pickle)
            # stack the experts of all models: one may store them separately, another as a stack
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
    # without a config, as in a state dict, the first model that has one is the donor instead
    if not sources[donor].config:
        donor = next((i for i, source in enumerate(sources) if source.config), donor)
    return Models(sources, index, donor), []
