"""Mixtures of experts: one layout for merging, whatever the files have.

Files hold the experts of a layer as separate matrices or as one stack. Methods that use whole
tensors, such as `ties`, would give different results for the two. So every model is read as if it
had stacks, and the output gets the first model's names and shapes.

A stack is a sequence of parts: gate and up of the first expert, gate and up of the second, and so
on. So a stretch of a stack consists of stretches of its parts, and nothing else is read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..dtypes import Array, numbers
from .headers import TensorInfo
from .sources import Source, View

Stacks = Mapping[tuple[str, ...], str]


@dataclass(frozen=True)
class Family:
    """Names of a family's experts in files.

    Attributes:
        stacks: The names of an expert's matrices that one stack holds, in order, and the name of
            that stack.
        renamed: Parts of names in files with separate matrices, and their names with stacks.
        model_types: The family's ``model_type`` in config.json.
    """

    stacks: Stacks
    renamed: tuple[tuple[str, str], ...]
    model_types: tuple[str, ...]


_GATED: Stacks = {("gate_proj", "up_proj"): "gate_up_proj", ("down_proj",): "down_proj"}
# Mixtral's names: w1 is the gate, w3 up, w2 down
_NUMBERED: Stacks = {("w1", "w3"): "gate_up_proj", ("w2",): "down_proj"}
_MIXTRAL = (".block_sparse_moe.", ".mlp.")

# as transformers 5 converts them; a test compares this table with that of transformers
FAMILIES = (
    Family(
        _GATED,
        (),
        (
            "afmoe",
            "deepseek_v2",
            "deepseek_v3",
            "dots1",
            "flex_olmo",
            "glm4_moe",
            "glm4v_moe",
            "hunyuan_v1_moe",
            "jamba",
            "longcat_flash",
            "olmoe",
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
            "solar_open",
        ),
    ),
    Family(_NUMBERED, (_MIXTRAL,), ("minimax", "mixtral")),
    Family(_NUMBERED, (_MIXTRAL, (".gate.weight", ".router.weight")), ("phimoe",)),
    Family(_NUMBERED, (), ("lfm2_moe",)),
    Family(
        {("up_proj",): "up_proj", ("down_proj",): "down_proj"},
        (("backbone.", "model."),),
        ("nemotron_h",),
    ),
)
_EXPERT = re.compile(r"^(?P<before>.*\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight$")


def family_of(source: Source) -> Family | None:
    """Return the family of a model with experts, or None."""
    for family in FAMILIES:
        if source.config.get("model_type") in family.model_types:
            return family
    return None


def stacked(source: Source) -> Source:
    """Return a model with its experts in stacks; the model itself if there is nothing to stack."""
    family = family_of(source)
    if family is None:
        return source
    parts = _parts(source, family)
    if all(name == infos[0].name for name, infos in parts.items()):
        return source
    return StackedSource(source, parts)


def _parts(source: Source, family: Family) -> dict[str, tuple[TensorInfo, ...]]:
    """Return the stored tensors of each tensor in the merge, by name; several for a stack."""
    members_of: dict[str, tuple[str, ...]] = {}  # for each matrix, all in its stack, in order
    for members in family.stacks:
        members_of |= dict.fromkeys(members, members)
    found: dict[str, tuple[TensorInfo, ...]] = {}
    stacks: dict[str, tuple[str, ...]] = {}  # the matrices of each stack
    experts: dict[str, dict[tuple[int, str], TensorInfo]] = {}  # by stack, number and matrix
    for name, info in source.tensors.items():
        match = _EXPERT.match(name)
        if match is None or match["matrix"] not in members_of:
            found[_renamed(name, family)] = (info,)
            continue
        members = members_of[match["matrix"]]
        stack = f"{_renamed(match['before'] + '.', family)}{family.stacks[members]}"
        stacks[stack] = members
        found.setdefault(stack, ())  # at the position of its first part
        place = (int(match["number"]), match["matrix"])
        experts.setdefault(stack, {})[place] = info
    for stack, members in stacks.items():
        parts = experts[stack]
        count = len({number for number, _ in parts})
        places = list(itertools.product(range(count), members))
        kinds = {(info.shape, info.dtype) for info in parts.values()}
        if parts.keys() == set(places) and len(kinds) == 1:
            found[stack] = tuple(parts[place] for place in places)
            continue
        # incomplete or uneven: keep the names in the files, so that messages show what is missing
        del found[stack]
        for info in parts.values():
            found[info.name] = (info,)
    return found


def _renamed(name: str, family: Family) -> str:
    for before, after in family.renamed:
        name = name.replace(before, after)
    return name


class StackedSource(View):
    """A view of a model with its experts in stacks.

    Args:
        model: The model.
        parts: For each tensor, the stored tensors that it is made of, in order.
    """

    def __init__(self, model: Source, parts: dict[str, tuple[TensorInfo, ...]]):
        super().__init__(model, {name: _whole(name, infos) for name, infos in parts.items()})
        self.parts = parts

    def _stretches(self, name: str, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yield the stretches of parts that make up a stretch of a tensor."""
        first = 0
        for info in self.parts[name]:
            low = max(start, first)
            high = min(stop, first + info.count)
            if low < high:
                yield info.name, low - first, high - first
            first += info.count

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements ``start`` to ``stop``, in float32 if the parts' dtypes differ."""
        pieces = [self.model.read(*stretch) for stretch in self._stretches(name, start, stop)]
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return self.model.read(self.parts[name][0].name, 0, 0)
        # a part that an adapter changed comes in float32, its neighbors as they are stored
        if len({piece.dtype for piece in pieces}) > 1:
            pieces = [numbers(piece) for piece in pieces]
        return np.concatenate(pieces)

    def read_into(self, name: str, start: int, out: Array) -> bool:
        """Fill ``out`` from element ``start`` on; return False if a part does not support it."""
        # test all parts first, with nothing to read: if one returns False, `out` is unchanged
        for info in self.parts[name]:
            if not self.model.read_into(info.name, 0, out[:0]):
                return False
        done = 0
        for part, low, high in self._stretches(name, start, start + len(out)):
            self.model.read_into(part, low, out[done : done + high - low])
            done += high - low
        return True

    def prefetch(self, name: str) -> None:
        """Let the system fetch all parts."""
        for info in self.parts[name]:
            self.model.prefetch(info.name)


def _whole(name: str, parts: tuple[TensorInfo, ...]) -> TensorInfo:
    """Return shape and dtype of a tensor; a stack is (experts, rows of its matrices, columns)."""
    first = parts[0]
    if name.endswith(".weight") or not _EXPERT.match(first.name):  # no stack has this ending
        return TensorInfo(name, first.shape, first.dtype)
    rows, columns = first.shape
    last = _EXPERT.match(parts[-1].name)
    assert last is not None  # parts are in the order of experts
    experts = 1 + int(last["number"])
    # len(parts) / experts matrices lie below each other: 2 of gate and up, else 1
    return TensorInfo(name, (experts, rows * len(parts) // experts, columns), first.dtype)
