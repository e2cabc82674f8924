"""Hidden states on their way through a model's blocks, batch by batch, and hooks that look at layers on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

Batch = Mapping[str, Any]


def batches(calibration: Iterable[Any]) -> list[dict[str, Any]]:
    """Calibration data as keyword arguments of the model: from dicts, or from tensors of token ids."""
    made = []
    for item in calibration:
        if not isinstance(item, (Tensor, Mapping)):
            raise ValueError(
                f"convert_: a batch of calibration is a {type(item).__name__}, needed a tensor of token ids (B, T) or "
                f"a dict of the model's arguments; a tokenizer makes them from text"
            )
        batch = {"input_ids": item} if isinstance(item, Tensor) else dict(item)
        batch = {k: v for k, v in batch.items() if k not in ("labels", "label")}
        for name, value in batch.items():
            if isinstance(value, Tensor) and name in ("input_ids", "attention_mask") and value.dim() == 1:
                batch[name] = value[None]
        made.append(batch)
    if not made:
        raise ValueError("convert_: calibration is empty, needed batches of token ids")
    return made


@dataclass
class Call:
    """One batch on its way through the blocks."""

    hidden: Tensor
    rest: tuple[tuple, dict[str, Any]]  # the block's other arguments
    keep: Tensor | None  # which tokens are not padding, flat

    def run(self, block: nn.Module) -> Tensor:
        """The block's hidden states from the call's."""
        arguments, named = self.rest
        out = block(self.hidden, *arguments, **named)
        return out[0] if isinstance(out, tuple) else out


class Stop(Exception):
    """Ends a forward that has shown enough."""


def calls_of(model: nn.Module, blocks: Sequence[nn.Module], data: Sequence[Batch]) -> list[list[Call]]:
    """For each block the arguments it gets in the original model; hidden states only for the first."""
    held: list[list[Call]] = [[] for _ in blocks]

    def hook(index: int, keep: Tensor | None) -> Callable:
        def capture(module: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
            named = dict(named)
            if arguments:
                hidden, rest = arguments[0], arguments[1:]
            else:
                hidden, rest = named.pop("hidden_states"), ()
            # a cache would grow with every walk, and later ones would attend to what earlier ones left there
            rest = tuple(None if isinstance(a, Cache) else a for a in rest)
            named = {k: None if isinstance(v, Cache) else v for k, v in named.items()}
            if "use_cache" in named:
                named["use_cache"] = False
            held[index].append(Call(hidden if index == 0 else hidden.new_empty(0), (rest, named), keep))

        return capture

    for batch in data:
        mask = batch.get("attention_mask")
        keep = None if mask is None or mask.dim() != 2 else mask.reshape(-1).bool()
        handles = [b.register_forward_pre_hook(hook(i, keep), with_kwargs=True) for i, b in enumerate(blocks)]
        try:
            model(**batch)
        finally:
            for handle in handles:
                handle.remove()
    return held


@contextmanager
def watched(modules: Mapping[str, nn.Module], see: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Call ``see(name, input, output)`` whenever one of the modules runs."""
    handles = [
        m.register_forward_hook(lambda module, given, out, name=name: see(name, given[0], out))
        for name, m in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tokens(x: Tensor, keep: Tensor | None) -> Tensor:
    """An activation's tokens that are not padding, (N, F)."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if keep is None or len(keep) != len(flat) else flat[keep]


def outputs_of(block: nn.Module, calls: Sequence[Call], hidden: Sequence[Tensor]) -> list[Tensor]:
    """What a block makes of hidden states, batch by batch."""
    made = []
    for call, states in zip(calls, hidden, strict=True):
        call.hidden = states
        made.append(call.run(block))
    return made


class WholeModel(Call):
    """A whole model as one block."""

    def __init__(self, batch: Batch):
        mask = batch.get("attention_mask")
        self.batch, self.hidden = batch, torch.empty(0)
        self.keep = None if mask is None or mask.dim() != 2 else mask.reshape(-1).bool()

    def run(self, block: nn.Module) -> Tensor:
        """Nothing goes from one block to the next."""
        block(**self.batch)
        return self.hidden


def ordered(x: Tensor, order: Tensor | None) -> Tensor:
    """Columns in another order, or as they are."""
    return x if order is None else x[:, order]
