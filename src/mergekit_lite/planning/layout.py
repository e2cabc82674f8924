"""Lay out the output: list its tensors and, for each, the models' tensors to merge."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..recipe import MergeRecipe, ModelEntry, Slice, model_key
from ..vocabulary import EMBEDDING
from .configs import layer_count, text_config
from .models import Models
from .plan import Input

# Buffers that transformers computes. Older checkpoints hold them, but newer ones do not.
COMPUTED = re.compile(
    r"(^|\.)(position_ids|token_type_ids|inv_freq|masked_bias|attn\.bias|attention\.bias)$"
)
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
# h is GPT-2's, layer BERT's, block T5's
_LISTS = ("layers", "layer", "h", "blocks", "block")
# mtp: layers that predict further tokens, which are not in a config's number of layers
_TOWER = re.compile(r"vision|visual|image|audio|speech|mtp")
_SHOWN = 20  # maximum number of names in a message; more would hide the rest of the message


@dataclass(frozen=True)
class Slot:
    """One tensor of the output, before its settings are known.

    Args:
        name: The tensor's name.
        depth: The position of the tensor's layer in its slice or model, from 0 to 1; 0 for tensors
            outside the layers, as in mergekit.
        inputs: Each model's entry in the recipe (None for a base that is not listed as a model),
            and the model's tensor.
        names: The tensor's name in each of these models, with which filters are compared. A tied
            head has a head's name here, although it is stored as the embedding.
        base: The base's tensor, for methods that use a base.
        piece: The slice that the tensor belongs to; None for whole models.
    """

    name: str
    depth: float
    inputs: tuple[tuple[ModelEntry | None, Input], ...]
    names: tuple[str, ...]
    base: Input | None
    piece: Slice | None = None


@dataclass(frozen=True)
class Layout:
    """The slots of the output, the problems that were found, and notes."""

    slots: list[Slot]
    problems: list[str]
    notes: list[str]


def is_usual_list(before: str) -> bool:
    """Return whether a list of layers has a usual name, such as ``model.layers.``."""
    return before.removesuffix(".").rpartition(".")[2] in _LISTS


def layer_lists(names: Iterable[str]) -> dict[str, int]:
    """Map the name prefix of each list of layers to its number of layers.

    A list counts only if it has a usual name or is the longest, because heads can be numbered, too.

    >>> layer_lists(["model.layers.0.w", "model.layers.1.w", "score.0.w"])
    {'model.layers.': 2}
    """
    counts: dict[str, int] = {}
    for name in names:
        match = _LAYER.search(name)
        if match is not None:
            before = name[: match.start(1)]
            counts[before] = max(counts.get(before, 0), 1 + int(match[1]))
    longest = max(counts, key=counts.__getitem__, default=None)
    found = {}
    for before, count in counts.items():
        if is_usual_list(before) or before == longest:
            found[before] = count
    return found


def text_lists(names: Iterable[str], config: Mapping[str, object]) -> list[str]:
    """Return the prefixes of the lists of layers that are not in an image or audio encoder.

    First come lists with the number of layers in the config, then longer lists before shorter ones.
    """
    lists = layer_lists(names)
    text = {before: n for before, n in lists.items() if not _TOWER.search(before)} or lists
    count = layer_count(config)
    return sorted(text, key=lambda before: (text[before] == count, text[before]), reverse=True)


def layer_of(name: str) -> int | None:
    """Return a tensor's layer, which is the first number among the parts of its name, or None.

    >>> layer_of("model.layers.12.mlp.experts.3.w1.weight"), layer_of("lm_head.weight")
    (12, None)
    """
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def with_layer(name: str, layer: int) -> str:
    """Return the name of the same tensor in another layer."""
    match = _LAYER.search(name)
    assert match is not None
    return f"{name[: match.start(1)]}{layer}{name[match.end(1) :]}"


def some(items: Sequence[str], limit: int = _SHOWN) -> str:
    """Return the first items as text, with the number of items that are left out."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _depth(layer: int, count: int) -> float:
    """Return a layer's position among ``count`` layers, from 0 to 1; a single layer has 1."""
    # 1 for a single layer, as in mergekit; the formula would divide by 0
    return layer / (count - 1) if count > 1 else 1.0


def _depth_in(lists: Mapping[str, int], name: str) -> float:
    """Return the position of a tensor's layer in its list, from 0 to 1; 0 outside the lists."""
    match = _LAYER.search(name)
    if match is None or name[: match.start(1)] not in lists:
        return 0.0
    return _depth(int(match[1]), lists[name[: match.start(1)]])


def whole_models(recipe: MergeRecipe, models: Models, uses_base: bool) -> Layout:
    """Lay out every tensor of the models, which must have the same tensors.

    Buffers that transformers computes may be missing in some models, and are then left out.

    Args:
        recipe: A recipe with ``models``.
        models: The recipe's models, opened.
        uses_base: Whether the method uses a base. If not, the base is merged as one more model.
    """
    layout = Layout([], [], [])
    members: dict[int, ModelEntry | None] = {}  # by the model's index
    for entry in recipe.models:
        members[models.of(entry.model)] = entry
    base = None
    if recipe.base_model is not None:
        base = models.of(recipe.base_model)
        members.setdefault(base, None)
    if not uses_base:
        base = None  # the base is merged as one more model
    names: dict[str, None] = {}  # in the donor's order
    for place in [models.donor, *members]:
        names |= dict.fromkeys(models.sources[place].tensors)
    lists = layer_lists(names)
    missing: dict[int, list[str]] = {}
    for name in names:
        inputs: list[tuple[ModelEntry | None, Input]] = []
        of_base = None
        lacking = []
        for place, entry in members.items():
            alias = models.alias(place, name)
            if alias is None:
                lacking.append(place)
            elif place == base:
                of_base = Input(place, alias)
            else:
                inputs.append((entry, Input(place, alias)))
        if not lacking:
            own_names = (name,) * len(inputs)
            depth = _depth_in(lists, name)
            layout.slots.append(Slot(name, depth, tuple(inputs), own_names, of_base))
        elif COMPUTED.search(name):
            layout.notes.append(
                f"{name} is left out, because not every model has it; transformers computes it"
            )
        else:
            for place in lacking:
                missing.setdefault(place, []).append(name)
    for place, lacked in missing.items():
        layout.problems.append(_problem_of_missing(models, members, place, lacked))
    return layout


def _problem_of_missing(
    models: Models, members: Iterable[int], place: int, lacked: Sequence[str]
) -> str:
    """Return the message about tensors that one model lacks and other models have."""
    holders = [models.label(m) for m in members if lacked[0] in models.sources[m].tensors]
    return (
        f"{models.label(place)}: expected the tensors of {some(holders)}, got all but "
        f"{len(lacked)}: {some(lacked)}"
    )


def stacked_slices(recipe: MergeRecipe, models: Models, uses_base: bool) -> Layout:
    """Lay out the layers of all slices, one slice after the other.

    Embeddings come first, from the first slice. Norms and heads come last, from the last slice.
    """
    problems: list[str] = []
    layers: list[Slot] = []
    before: list[Slot] = []
    after: list[Slot] = []
    first = 0
    last = len(recipe.slices) - 1
    for number, piece in enumerate(recipe.slices):
        base = recipe.base_model if piece.base_model is None else piece.base_model
        stack = _Piece(piece, base, models, uses_base, problems)
        layers += stack.layers(first)
        first += stack.length
        for name in stack.outside():
            is_before = _is_before_layers(name)
            # every slice has these tensors, and the output needs them once
            if number != (0 if is_before else last):
                continue
            slot = stack.slot(name, [name] * stack.count, 0.0)
            if slot is not None:
                (before if is_before else after).append(slot)
    slots = [*before, *layers, *after]
    for name, count in Counter(slot.name for slot in slots).items():
        if count > 1:
            problems.append(f"slices: expected each tensor once, got {name} {count} times")
            break
    return Layout(slots, problems, [])


def _is_before_layers(name: str) -> bool:
    """Return whether a tensor outside the layers belongs before them, as embeddings do."""
    if "embed_out" in name:  # GPT-NeoX's head
        return False
    return bool(EMBEDDING.search(name)) or "wpe" in name or "embed" in name


class _Piece:
    """The tensors of one slice's sources, grouped by layer."""

    def __init__(
        self, piece: Slice, base: object, models: Models, uses_base: bool, problems: list[str]
    ):
        self._piece = piece
        self._models = models
        self._problems = problems
        self._members = [models.of(source.model) for source in piece.sources]
        # `Slice` has checked that no range is missing and that all have the same length
        self._ranges = [source.layer_range or (0, 0) for source in piece.sources]
        self._base = None
        if uses_base and base is not None:
            self._base = models.index[model_key(base)]
        self.count = len(self._members)
        self.length = self._ranges[0][1] - self._ranges[0][0]
        self._by_layer: list[dict[int | None, list[str]]] = []
        for member, (_, stop) in zip(self._members, self._ranges, strict=True):
            layers: dict[int | None, list[str]] = {}
            source = models.sources[member]
            # image and audio encoders are kept whole
            lists = text_lists(source.tensors, text_config(source.config))
            if len(lists) > 1:
                problems.append(
                    f"slices: expected one list of layers in {models.label(member)}, got "
                    f"{len(lists)}: {some(sorted(before + '*' for before in lists))}"
                )
            for name in source.tensors:
                inside = name.startswith(tuple(lists[:1]))
                layers.setdefault(layer_of(name) if inside else None, []).append(name)
            self._by_layer.append(layers)
            available = 1 + max((layer for layer in layers if layer is not None), default=-1)
            if stop > available:
                problems.append(
                    f"slice: expected layer_range of {models.label(member)} to end at {available} "
                    f"or below, because the model has {available} layers, got {stop}"
                )
                self.length = 0  # do not lay out a slice that needs layers beyond the model's last

    def outside(self) -> list[str]:
        """Return the names of the tensors outside the layers."""
        names: dict[str, None] = {}
        for layers in self._by_layer:
            names |= dict.fromkeys(layers.get(None, ()))
        return list(names)

    def layers(self, first: int) -> list[Slot]:
        """Return the slots of the slice's layers, which begin at the output's layer ``first``."""
        slots = []
        for step in range(self.length):
            numbers = [start + step for start, _ in self._ranges]
            names: dict[str, None] = {}  # names in layer 0, so that sources can be compared
            for layers, number in zip(self._by_layer, numbers, strict=True):
                for name in layers.get(number, ()):
                    names[with_layer(name, 0)] = None
            for name in names:
                there = [with_layer(name, number) for number in numbers]
                slot = self.slot(with_layer(name, first + step), there, _depth(step, self.length))
                if slot is not None:
                    slots.append(slot)
        return slots

    def slot(self, name: str, names: Sequence[str], depth: float) -> Slot | None:
        """Return the slot of one tensor, given its name in each source.

        If a source lacks the tensor, add a problem and return None.
        """
        inputs: list[tuple[ModelEntry | None, Input]] = []
        for entry, member, there in zip(self._piece.sources, self._members, names, strict=True):
            alias = self._models.alias(member, there)
            if alias is None:
                self._problems.append(
                    f"{name}: expected {there} in {self._models.label(member)}, got none"
                )
                return None
            inputs.append((entry, Input(member, alias)))
        if self._base is None:
            return Slot(name, depth, tuple(inputs), tuple(names), None, self._piece)
        # a base that is not a source provides the same layers as the first source
        alias = self._models.alias(self._base, names[0])
        base = None if alias is None else Input(self._base, alias)
        others = []
        other_names = []
        for (entry, i), there in zip(inputs, names, strict=True):
            # a base that is a source provides the layers of its own layer_range
            if i.source == self._base:
                base = i
            else:
                others.append((entry, i))
                other_names.append(there)
        if base is None:
            self._problems.append(
                f"{name}: expected {names[0]} in the base model {self._models.label(self._base)}, "
                "got none"
            )
            return None
        return Slot(name, depth, tuple(others), tuple(other_names), base, self._piece)
