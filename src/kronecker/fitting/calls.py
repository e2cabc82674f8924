"""Hidden states on their way through a model's blocks, batch by batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from transformers import Cache

from ..data.batches import Batch, without_labels


@dataclass
class Call:
    """One batch on its way through the blocks."""

    hidden: Tensor
    rest: tuple[tuple, dict[str, object]]  # the block's other arguments
    keep: Tensor | None  # which tokens are not padding, flat

    def run(self, block: nn.Module) -> Tensor:
        """The block's hidden states from the call's."""
        arguments, named = self.rest
        out = block(self.hidden, *arguments, **named)
        return out[0] if isinstance(out, tuple) else out


class Stop(Exception):
    """Ends a forward that has shown enough."""


def calls_of(
    model: nn.Module, blocks: Sequence[nn.Module], data: Sequence[Batch]
) -> list[list[Call]] | None:
    """The arguments that each block gets in the original model.

    Hidden states are stored for the first block only.

    The arguments are nearly always masks and positions. If on the first batch they are the same
    when blocks return their inputs unchanged, the other batches are run that way, without computing
    the blocks.

    Returns:
        One list of calls for each block; None where a block's input is not the output of the one
        before it.
    """
    body = _body(model, blocks, data[0])
    outputs: list[Any] = []
    inputs: list[Any] = []

    def reads(module: nn.Module, given: tuple, named: Mapping[str, object]) -> None:
        inputs.append(given[0] if given else named["hidden_states"])

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(reads, with_kwargs=True))
            hooks.enter_context(
                block.register_forward_hook(lambda module, given, out: outputs.append(out))
            )
        calls = _captured(body, blocks, data[0])
    states = [out[0] if isinstance(out, tuple) else out for out in outputs]
    if any(not torch.equal(read, before) for read, before in zip(inputs[1:], states, strict=False)):
        return None
    rest = data[1:]
    if rest and outputs and _is_one_tensor(outputs[-1]):
        out = outputs[-1]
        with _passed_by(blocks, len(out) if isinstance(out, tuple) else None):
            if _same(_captured(body, blocks, data[0]), calls):
                return _joined([calls, *(_captured(body, blocks, batch) for batch in rest)])
    return _joined([calls, *(_captured(body, blocks, batch) for batch in rest)])


def _body(model: nn.Module, blocks: Sequence[nn.Module], batch: Batch) -> nn.Module:
    """The model without its head, where that takes the same arguments."""
    body = getattr(model, "base_model", model)
    if not isinstance(body, nn.Module) or not any(m is blocks[0] for m in body.modules()):
        return model
    if set(batch) <= set(inspect.signature(body.forward).parameters):
        return body
    return model


def _captured(model: nn.Module, blocks: Sequence[nn.Module], batch: Batch) -> list[list[Call]]:
    """Each block's calls in one forward."""
    keep = not_padding(batch)
    calls: list[list[Call]] = [[] for _ in blocks]

    def hook(index: int) -> Callable:
        def capture(module: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
            named = dict(named)
            if arguments:
                hidden = arguments[0]
                rest = arguments[1:]
            else:
                hidden = named.pop("hidden_states")
                rest = ()
            # a cache would grow with every walk, and later ones would attend to what earlier ones
            # left there
            rest = tuple(None if isinstance(a, Cache) else a for a in rest)
            named = {k: None if isinstance(v, Cache) else v for k, v in named.items()}
            if "use_cache" in named:
                named["use_cache"] = False
            calls[index].append(
                Call(hidden if index == 0 else hidden.new_empty(0), (rest, named), keep)
            )

        return capture

    with ExitStack() as hooks:
        for index, block in enumerate(blocks):
            hooks.enter_context(block.register_forward_pre_hook(hook(index), with_kwargs=True))
        model(**without_labels(batch))
    return calls


def not_padding(batch: Batch) -> Tensor | None:
    """Which of a batch's tokens its mask keeps, flat; None where there is no such mask."""
    mask = batch.get("attention_mask")
    if mask is None or mask.dim() != 2:
        return None
    return mask.reshape(-1).bool()


def _is_one_tensor(out: object) -> bool:
    """Return whether a block's output is hidden states and nothing else."""
    return isinstance(out, Tensor) or (isinstance(out, tuple) and all(o is None for o in out[1:]))


@contextmanager
def _passed_by(blocks: Sequence[nn.Module], size: int | None) -> Iterator[None]:
    """Within, blocks give back what they get, alone or in a tuple of this size."""

    def same(*arguments: object, **named: object) -> Any:
        hidden = arguments[0] if arguments else named["hidden_states"]
        if size is None:
            return hidden
        return (hidden, *[None] * (size - 1))

    before = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = same
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward


def _same(calls: Sequence[Sequence[Call]], others: Sequence[Sequence[Call]]) -> bool:
    """Return whether two forwards gave their blocks the same arguments but for hidden states."""
    a, b = ([tree_flatten(call.rest) for block in c for call in block] for c in (calls, others))
    if [spec for _, spec in a] != [spec for _, spec in b]:
        return False
    pairs = [pair for (x, _), (y, _) in zip(a, b, strict=True) for pair in zip(x, y, strict=True)]
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y or x == y
        for x, y in pairs
    )


def _joined(parts: Sequence[list[list[Call]]]) -> list[list[Call]]:
    """Each block's calls, those of all batches."""
    return [[call for part in parts for call in part[block]] for block in range(len(parts[0]))]


def tokens(x: Tensor, keep: Tensor | None) -> Tensor:
    """An activation's tokens that are not padding, (N, F)."""
    flat = x.reshape(-1, x.shape[-1])
    if keep is None or len(keep) != len(flat):
        return flat
    return flat[keep]


def outputs_of(block: nn.Module, calls: Sequence[Call], hidden: Sequence[Tensor]) -> list[Tensor]:
    """Return what a block makes of hidden states, batch by batch."""
    outputs = []
    for call, states in zip(calls, hidden, strict=True):
        call.hidden = states
        outputs.append(call.run(block))
    return outputs


class WholeModel(Call):
    """A whole model as one block."""

    def __init__(self, batch: Batch):
        self.batch = without_labels(batch)
        self.hidden = torch.empty(0)
        self.keep = not_padding(batch)

    def run(self, block: nn.Module) -> Tensor:
        """Nothing goes from one block to the next."""
        block(**self.batch)
        return self.hidden
