"""Read mixtures of experts in one layout, whatever the layout in the files.

Files hold the experts of a layer as separate matrices or as one stacked tensor. Methods that use
whole tensors, such as `ties`, would give different results for the two layouts. So every model is
read as if it had stacks, and the output gets the first model's names and shapes.

A stack is a sequence of parts: the gate and up matrices of the first expert, the same matrices of
the second expert, and so on. So a range of a stack's elements consists of ranges of its parts, and
only these are read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import numpy as np

from ..dtypes import Array, numbers, promote
from .headers import TensorInfo
from .sources import Source, View

STACKS: dict[tuple[str, ...], str] = {
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("down_proj",): "down_proj",
    # Mixtral's names: w1 is the gate, w3 up, w2 down
    ("w1", "w3"): "gate_up_proj",
    ("w2",): "down_proj",
    # names in a vision encoder (dots3)
    ("fc1", "fc3"): "gate_up_proj",
    ("fc2",): "down_proj",
}
"""The names of an expert's matrices that one stack holds, in order, and the name of that stack."""

UNGATED: dict[tuple[str, ...], str] = {("up_proj",): "up_proj", ("down_proj",): "down_proj"}
"""The same names for experts without a gate (Nemotron-H)."""

_BIAS = ("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias")
_MIXTRAL = (".block_sparse_moe.", ".mlp.")

_GRANITE = (
    ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
    ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
)

RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "ernie4_5_moe": (("mlp.moe_statics.", "mlp.gate.moe_statics."),),
    "exaone_moe": (_BIAS,),
    "flint": (("self_attn.softmax_offset", "self_attn.sinks"),),
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "laguna": (
        ("mlp.experts.e_score_correction_bias", _BIAS[1]),
        ("mlp.shared_expert.", "mlp.shared_experts."),
    ),
    "mimo_v2_flash": (("self_attn.attention_sink_bias", "self_attn.sinks"),),
    "minimax": (_MIXTRAL,),
    "minimax_m2": (_MIXTRAL,),
    "mixtral": (_MIXTRAL,),
    "nemotron_h": (("backbone.", "model."),),
    "phimoe": (_MIXTRAL, (".gate.weight", ".router.weight")),
}
"""For each ``model_type``, pairs of name parts that differ between two layouts.

The first is used in files with separate matrices, the second in files with stacks.
"""

_EXPERT = re.compile(r"^(?P<before>.*\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight$")


def stacked(source: Source) -> Source:
    """Return a view of a model with its experts in stacks, or the model if nothing changes."""
    parts = _parts(source)
    if all(name == infos[0].name for name, infos in parts.items()):
        return source
    return StackedSource(source, parts)


def _parts(source: Source) -> dict[str, tuple[TensorInfo, ...]]:
    """Map each tensor of the merge to its tensors in the files: one, or several for a stack."""
    renamed = RENAMED.get(str(source.config.get("model_type")), ())
    gates = {name for name in source.tensors if name.endswith(".gate_proj.weight")}
    found: dict[str, tuple[TensorInfo, ...]] = {}
    stacks: dict[str, tuple[str, ...]] = {}  # the matrices of each stack
    experts: dict[str, dict[tuple[int, str], TensorInfo]] = {}  # by stack, number and matrix
    for name, info in source.tensors.items():
        match = _EXPERT.match(name)
        members = None if match is None else _members(match, gates)
        if match is None or members is None:
            found[with_new_name(name, renamed)] = (info,)
            continue
        stack_name = (STACKS | UNGATED)[members]
        stack = f"{with_new_name(match['before'] + '.', renamed)}{stack_name}"
        stacks[stack] = members
        found.setdefault(stack, ())  # at the position of its first part
        place = (int(match["number"]), match["matrix"])
        experts.setdefault(stack, {})[place] = info
    for stack, members in stacks.items():
        parts = experts[stack]
        count = len({number for number, _ in parts})
        places = list(itertools.product(range(count), members))
        shapes = {info.shape for info in parts.values()}
        # a stack needs matrices of one shape
        are_matrices = len(shapes) == 1 and len(next(iter(shapes))) == 2
        if parts.keys() == set(places) and are_matrices:
            found[stack] = tuple(parts[place] for place in places)
            continue
        # if matrices are missing or differ in shape, keep the names in the files for messages
        del found[stack]
        for info in parts.values():
            found[info.name] = (info,)
    return found


def _members(match: re.Match[str], gates: set[str]) -> tuple[str, ...] | None:
    """Return the names of the matrices in the stack of this matrix, or None if it has no stack."""
    gate = f"{match['before']}.{match['number']}.gate_proj.weight"
    for members in STACKS if gate in gates else {**UNGATED, **STACKS}:
        if match["matrix"] in members:
            return members
    return None


def with_new_name(name: str, renamed: tuple[tuple[str, str], ...]) -> str:
    """Return a tensor's name in files with stacks."""
    for before, after in renamed:
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
        """Yield (name, start, stop) for each part in a tensor range, counted within the part."""
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
        # a part that an adapter changes is read in float32, the other parts as they are stored
        if len({piece.dtype for piece in pieces}) > 1:
            pieces = [numbers(piece) for piece in pieces]
        return np.concatenate(pieces)

    def read_into(self, name: str, start: int, out: Array) -> bool:
        """Read a tensor from element ``start`` on into ``out``.

        Return False, without reading, if a part does not support this.
        """
        # parts of several dtypes are read as numbers
        if len({info.dtype for info in self.parts[name]}) > 1:
            return False
        # test all parts first, with an empty buffer: if one returns False, `out` is unchanged
        for info in self.parts[name]:
            if not self.model.read_into(info.name, 0, out[:0]):
                return False
        done = 0
        for part, low, high in self._stretches(name, start, start + len(out)):
            self.model.read_into(part, low, out[done : done + high - low])
            done += high - low
        return True

    def prefetch(self, name: str) -> None:
        """Ask the operating system to read all parts in the background."""
        for info in self.parts[name]:
            self.model.prefetch(info.name)


def _whole(name: str, parts: tuple[TensorInfo, ...]) -> TensorInfo:
    """Return the name, shape and dtype of a tensor that is made of parts.

    The shape of a stack is (experts, rows of one expert's matrices, columns).
    """
    first = parts[0]
    dtype = first.dtype
    if len({info.dtype for info in parts}) > 1:
        dtype = promote(info.dtype for info in parts)
    if name.endswith(".weight") or not _EXPERT.match(first.name):  # no stack has this ending
        return TensorInfo(name, first.shape, first.dtype)
    rows, columns = first.shape
    last = _EXPERT.match(parts[-1].name)
    assert last is not None  # parts are in the order of experts
    experts = 1 + int(last["number"])
    # an expert has len(parts) / experts matrices, one below the other: gate and up, or one
    return TensorInfo(name, (experts, rows * len(parts) // experts, columns), dtype)
