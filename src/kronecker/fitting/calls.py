"""Record the arguments with which a model calls its blocks, batch by batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from model_components._walk import (
    Batch,
    Call,
    forwards_replaced,
    not_padding,
    shaped_as,
    split_arguments,
)

from ..data.batches import without_labels
from .precision import blocks_in_float32

Calls = list[list[Call]]
"""A list for each block, with the block's call for each batch."""


class _NoStatesError(Exception):
    """Raised when a block is called without hidden states."""


def calls_of(
    model: nn.Module, blocks: Sequence[nn.Module], data: Sequence[Batch]
) -> tuple[Calls, list[Tensor]] | None:
    """Return the arguments that each block gets in the original model.

    The blocks are computed for the first batch. If their arguments are the same when blocks return
    their inputs unchanged, the other batches run in this way, without computing the blocks.

    Returns:
        One list of calls for each block, and the hidden states before the first block; None if a
        block is called without hidden states, or its input is not the output of the block before
        it.
    """
    # without the head, whose product with a large vocabulary is not needed
    body = _body(model, blocks, data[0])
    watched = _watched_run(body, blocks, data[0])
    if watched is None:
        return None
    first, inputs, outputs = watched
    states = [out[0] if isinstance(out, tuple) else out for out in outputs]
    # no block reads the output of the last block, so there is one more output than pairs
    if not all(map(torch.equal, inputs[1:], states)):
        return None
    rest = data[1:]
    # a block has to run if it passes on more than hidden states, such as a position bias, or if it
    # runs several times, as in ALBERT, since it then reads its own output
    once = len(outputs) == len(blocks)
    if rest and once and _is_one_tensor(outputs[-1]):
        with _passed_by(blocks, outputs[-1]):
            if _same_arguments(_captured(body, blocks, data[0])[0], first[0]):
                return _joined(first, body, blocks, rest)
    with blocks_in_float32(blocks):
        return _joined(first, body, blocks, rest)


def _watched_run(
    body: nn.Module, blocks: Sequence[nn.Module], batch: Batch
) -> tuple[tuple[Calls, list[Tensor]], list[Tensor], list[Any]] | None:
    """Run the model on a batch, skipping no block, and record the blocks' inputs and outputs.

    Returns:
        The calls with the hidden states before the first block, the hidden states that each block
        got, and each block's outputs; None if a block is called without hidden states.
    """
    inputs: list[Tensor] = []
    outputs: list[Any] = []

    def reads(module: nn.Module, given: tuple, named: Mapping[str, Any]) -> None:
        if not given and "hidden_states" not in named:
            raise _NoStatesError
        inputs.append(given[0] if given else named["hidden_states"])

    with blocks_in_float32(blocks), ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(reads, with_kwargs=True))
            hooks.enter_context(
                block.register_forward_hook(lambda module, given, out: outputs.append(out))
            )
        try:
            return _captured(body, blocks, batch), inputs, outputs
        except _NoStatesError:  # for example, the argument has another name in PatchTST's blocks
            return None


def _body(model: nn.Module, blocks: Sequence[nn.Module], batch: Batch) -> nn.Module:
    """Return the model without its head if this part accepts the batch, else the whole model."""
    body = getattr(model, "base_model", model)
    if not isinstance(body, nn.Module) or not any(m is blocks[0] for m in body.modules()):
        return model
    if set(batch) <= set(inspect.signature(body.forward).parameters):
        return body
    return model


def _captured(
    model: nn.Module, blocks: Sequence[nn.Module], batch: Batch
) -> tuple[Calls, list[Tensor]]:
    """Return each block's calls in one forward pass, and the states before the first block."""
    keep = not_padding(batch)
    calls: Calls = [[] for _ in blocks]
    first: list[Tensor] = []

    def hook(index: int) -> Callable:
        def capture(module: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
            hidden, call = split_arguments(arguments, named, keep)
            calls[index].append(call)
            if index == 0:
                first.append(hidden)

        return capture

    with ExitStack() as hooks:
        for index, block in enumerate(blocks):
            hooks.enter_context(block.register_forward_pre_hook(hook(index), with_kwargs=True))
        try:
            model(**without_labels(batch))
        except torch.OutOfMemoryError:  # a RuntimeError, but not the batch's fault
            raise
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            shapes = {name: list(v.shape) for name, v in batch.items() if isinstance(v, Tensor)}
            raise ValueError(
                f"kronecker: {type(model).__name__} cannot run on a calibration batch with the "
                f"shapes {shapes} ({type(error).__name__}: {error})"
            ) from error
    return calls, first


def _is_one_tensor(out: object) -> bool:
    """Return whether a block's output consists of hidden states and nothing else."""
    return isinstance(out, Tensor) or (isinstance(out, tuple) and all(o is None for o in out[1:]))


def _passed_by(blocks: Sequence[nn.Module], out: Tensor | tuple) -> AbstractContextManager[None]:
    """Return a context manager in which blocks return their hidden states unchanged.

    If ``out``, an output of a block, is a tuple, the blocks return tuples too, with None after the
    first element.
    """

    def unchanged(number: int, arguments: tuple, named: Mapping[str, Any]) -> object:
        return shaped_as(out, arguments[0] if arguments else named["hidden_states"])

    return forwards_replaced(blocks, unchanged)


def _same_arguments(calls: Calls, others: Calls) -> bool:
    """Return whether blocks got the same arguments, hidden states aside, in two forward passes."""
    values, structure = _flattened(calls)
    other_values, other_structure = _flattened(others)
    return structure == other_structure and all(map(_equal, values, other_values))


def _flattened(calls: Calls) -> tuple[list[Any], TreeSpec]:
    """Return all arguments of all calls in one list, and the structure of their nesting."""
    return tree_flatten([[(call.arguments, call.named) for call in block] for block in calls])


def _equal(value: object, other: object) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return value is other or value == other


def _joined(
    first: tuple[Calls, list[Tensor]],
    body: nn.Module,
    blocks: Sequence[nn.Module],
    rest: Sequence[Batch],
) -> tuple[Calls, list[Tensor]]:
    """Add the calls and first hidden states of the other batches to those of the first batch."""
    calls, states = first
    for batch in rest:
        calls_of_batch, states_of_batch = _captured(body, blocks, batch)
        for of_block, new in zip(calls, calls_of_batch, strict=True):
            of_block += new
        states += states_of_batch
    return calls, states


class WholeModel(Call):
    """The call of a whole model as one block, which passes its hidden states on unchanged."""

    @classmethod
    def of(cls, batch: Batch) -> WholeModel:
        """Return the call for a batch."""
        return cls((), without_labels(batch), not_padding(batch))

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Run the model on the batch, and return ``hidden`` unchanged."""
        # the model's output is not needed: hooks record its layers' inputs and outputs
        block(**self.named)
        return hidden
