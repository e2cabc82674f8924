"""Estimate of what the output's dtype will lose of adapters that are folded in.

It is measured on samples before a merge.
"""

from __future__ import annotations

from statistics import median

import numpy as np

from .dtypes import DType, numbers, stored_as
from .files import AdapterSource, Source, View
from .planning import MergePlan

# of each adapter, and how many weights of each
_LAYERS = 8
_ELEMENTS = 1 << 16
_MUCH = 0.25  # share of an update, as heads.lora's merge_lora has it
_HALF = 2  # bytes of the dtypes that round an update away


def rounding_notes(plan: MergePlan) -> list[str]:
    """A note for each model whose adapter the output would mostly round away.

    A weight of bfloat16 has 8 bits, so that an update dW of a thousandth of W is mostly lost.
    Looked at is, for layers from the first to the last,
    ``|stored(W + dW) - stored(W) - dW| / |dW|``, as if the model were written alone.
    """
    adapted: dict[int, tuple[AdapterSource, list[tuple[str, DType]]]] = {}
    for t in plan.tensors:
        for place in t.everything:
            source = _unaligned(plan.sources[place.source])
            if (
                isinstance(source, AdapterSource)
                and place.name in source.changed
                and t.dtype.itemsize <= _HALF
            ):
                adapted.setdefault(id(source), (source, []))[1].append((place.name, t.dtype))
    notes = []
    for source, layers in adapted.values():
        spread = layers[:: -(-len(layers) // _LAYERS)]
        lost = [
            share for name, dtype in spread if (share := _lost(source, name, dtype)) is not None
        ]
        if lost and median(lost) > _MUCH:
            notes.append(
                f"rounding to {layers[0][1].name} loses {median(lost):.0%} of what the adapter of "
                f"{source.label} changes (median of {len(lost)} layers, if written alone); float32 "
                "keeps it"
            )
    return notes


def _unaligned(source: Source) -> Source:
    """Return the model with its adapter, if it is seen otherwise: with stacks, by tokens, cut."""
    while isinstance(source, View) and not isinstance(source, AdapterSource):
        source = source.model
    return source


def _lost(source: AdapterSource, name: str, dtype: DType) -> float | None:
    """The share of a layer's update that rounding loses; None where it changes nothing."""
    count = min(_ELEMENTS, source.tensors[name].count)
    before = numbers(source.model.read(name, 0, count)).astype(np.float32)
    after = source.read(name, 0, count).astype(np.float32)
    update = after - before
    size = float(np.linalg.norm(update))
    if not size or not np.isfinite(size):  # what is not finite is refused where it is merged
        return None
    stored = numbers(stored_as(after, dtype)) - numbers(stored_as(before, dtype))
    return float(np.linalg.norm(stored - update)) / size
