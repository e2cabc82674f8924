"""Run a model block by block, with weights for only one block at a time.

The skeleton is a model without weights, made on the meta device, but with real buffers. The layers
outside the blocks are loaded once for each model, and run once for each batch to record the
arguments of every block. Then blocks are loaded one after the other.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_components._formats import reading
from model_components._layers import is_conv1d
from model_components._loading import read_config
from model_components._walk import (
    Batch,
    Call,
    Stop,
    forwards_replaced,
    not_padding,
    shaped_as,
    split_arguments,
)

from ..dtypes import tensor_of
from ..files import CheckpointError, Source

Weights = Source | Mapping[str, Tensor]


_OTHER = object()
"""A placeholder for a block's outputs after the hidden states, such as attention weights."""


class Skeleton:
    """A model without weights, and its blocks.

    Args:
        source: The model whose config defines the architecture.
        auto_class: The AutoModel class of transformers that builds the model.
        dtype: The dtype to compute in.
        device: The device to compute on.

    Raises:
        CheckpointError: The source is not a folder, or its model has no `torch.nn.ModuleList`.
    """

    def __init__(
        self,
        source: Source,
        auto_class: Any,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ):
        if source.folder is None:
            raise CheckpointError(
                f"{source.label}: expected a folder with config.json for a merge with calibration, "
                "got a file or a state dict"
            )
        config = read_config(source.folder, "merge")
        with (
            reading(f"config.json of {source.label}", "merge"),
            # checkpoints have no rotary frequencies: the constructor has to compute these buffers
            init_empty_weights(include_buffers=False),
        ):
            self.model: PreTrainedModel = auto_class.from_config(config)
        # on the meta device every assignment makes a new parameter: tie weights again
        self.model.tie_weights()
        self.model.eval()
        self.dtype = dtype
        self.device = torch.device(device)
        for module in self.model.modules():  # parameters have no values yet, so `to` would fail
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        # the blocks are the ModuleList with the most parameters
        most = 0
        for name, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList):
                size = sum(parameter.numel() for parameter in module.parameters())
                if size > most:
                    most = size
                    self.path = name
                    self.blocks = module
        if not most:
            raise CheckpointError(
                f"{source.label}: expected a model with its blocks in an nn.ModuleList, got "
                f"{type(self.model).__name__}"
            )

    def prefix(self, number: int) -> str:
        """Return the prefix of the names of a block's tensors."""
        return f"{self.path}.{number}."

    def outside(self) -> list[str]:
        """Return the names of parameters outside the blocks, with one name for tied parameters."""
        return [n for n, _ in self.model.named_parameters() if not n.startswith(f"{self.path}.")]

    def load_outside(self, weights: Weights) -> None:
        """Load the weights of everything outside the blocks."""
        loaded: dict[int, nn.Parameter] = {}  # by the replaced parameter's id, to keep ties
        for name, parameter in list(self.model.named_parameters(remove_duplicate=False)):
            if not name.startswith(f"{self.path}."):
                if id(parameter) not in loaded:
                    loaded[id(parameter)] = self.parameter(weights, name)
                owner, _, own = name.rpartition(".")
                self.model.get_submodule(owner)._parameters[own] = loaded[id(parameter)]
        for name in self.stored_buffers():
            if not name.startswith(f"{self.path}."):
                owner, _, own = name.rpartition(".")
                self._fill(self.model.get_submodule(owner), own, weights, name)

    def block(self, number: int, weights: Weights) -> nn.Module:
        """Return a copy of a block with its weights loaded."""
        # its parameters are on the meta device, so the copy takes next to no memory
        block = copy.deepcopy(self.blocks[number])
        for name, _ in list(block.named_parameters()):
            owner, _, own = name.rpartition(".")
            block.get_submodule(owner)._parameters[own] = self.parameter(
                weights, self.prefix(number) + name
            )
        prefix = self.prefix(number)
        for name in self.stored_buffers():
            if name.startswith(prefix):
                owner, _, own = name.removeprefix(prefix).rpartition(".")
                self._fill(block.get_submodule(owner), own, weights, name)
        return block.eval()

    def stored_buffers(self) -> list[str]:
        """Return the names of the buffers that a checkpoint has."""
        # state_dict leaves out buffers that are not persistent, such as rotary frequencies
        stored = self.model.state_dict().keys()
        return [name for name, _ in self.model.named_buffers() if name in stored]

    def _fill(self, module: nn.Module, own: str, weights: Weights, name: str) -> None:
        """Load a buffer from a source, or do nothing for a mapping, which has no buffers."""
        if isinstance(weights, Mapping):
            return
        stored = self.stored_name(weights, name)
        value = tensor_of(weights.read(stored, 0, weights.tensors[stored].count))
        buffer = module.get_buffer(own)
        dtype = self.dtype if buffer.is_floating_point() else buffer.dtype
        module.register_buffer(own, value.view(buffer.shape).to(self.device, dtype))

    def stored_name(self, source: Source, name: str) -> str:
        """Return the name of a parameter or buffer in a source.

        Files may have or lack the name's prefix, which stands for the model without its head.

        Raises:
            CheckpointError: The source has no tensor of that name.
        """
        prefix = f"{self.model.base_model_prefix}."
        for known in (name, name.removeprefix(prefix), f"{prefix}{name}"):
            if known in source.tensors:
                return known
        raise CheckpointError(
            f"{source.label}: tensor {name} is missing, but config.json requires it"
        )

    def parameter(self, weights: Weights, name: str) -> nn.Parameter:
        """Return a parameter with its value, in the skeleton's dtype and on its device."""
        if isinstance(weights, Mapping):
            value = weights[name]
        else:
            stored = self.stored_name(weights, name)
            value = tensor_of(weights.read(stored, 0, weights.tensors[stored].count))
            if not value.is_floating_point():
                raise CheckpointError(
                    f"{weights.label}: {stored} has dtype {value.dtype}, expected a floating-point "
                    "dtype"
                )
            if not value.isfinite().all():
                raise CheckpointError(
                    f"{weights.label}: {stored} has NaN or infinity, expected finite values"
                )
        shape = self.model.get_parameter(name).shape
        return nn.Parameter(value.to(self.device, self.dtype).view(shape), requires_grad=False)

    @torch.no_grad()
    def calls(
        self, batches: Sequence[Batch], block: nn.Module
    ) -> tuple[list[list[Call]], list[Tensor]]:
        """Return the arguments of each block for each batch, and the states before the first block.

        Args:
            batches: The data.
            block: The first block, with weights.

        Raises:
            CheckpointError: A block runs more than once, or passes on more than hidden states.
        """
        form = self._form(batches[0], block)
        calls: list[list[Call]] = [[] for _ in self.blocks]
        first: list[Tensor] = []
        for index, batch in enumerate(batches):

            def record(
                number: int,
                arguments: tuple,
                named: dict,
                batch: Batch = batch,
                index: int = index,
            ) -> object:
                # for example T5's position biases, which do not exist before a block has run
                if any(one is _OTHER for one in (*arguments, *named.values())):
                    self._refuse("has blocks that pass on more than hidden states")
                hidden, call = split_arguments(arguments, named, not_padding(batch))
                # for example ALBERT, which runs the same block for each of its layers
                if len(calls[number]) > index:
                    self._refuse("runs a block more than once, with different states")
                if number == 0:
                    first.append(hidden)
                calls[number].append(call)
                # do not run the block: only its arguments are needed
                return shaped_as(form, hidden, _OTHER)

            with forwards_replaced([*self.blocks], record):
                self.model.base_model(**batch)
        return calls, first

    @torch.no_grad()
    def after(
        self, batches: Sequence[Batch], hidden: Sequence[Tensor], block: nn.Module
    ) -> Iterator[Tensor]:
        """Yield the head's input for each batch, given the states after the last block."""
        form = self._form(batches[0], block)
        for batch, states in zip(batches, hidden, strict=True):
            out = shaped_as(form, states)
            # every block returns the last states, which the layers after the blocks then read
            with forwards_replaced([*self.blocks], lambda *_, out=out: out):
                yield self.model.base_model(**batch)[0]

    def _form(self, batch: Batch, block: nn.Module) -> object:
        """Run the first block and return its output, which has the form of every block's output."""
        outputs: list[object] = []

        def run(number: int, arguments: tuple, named: dict) -> object:
            outputs.append(block(*arguments, **named))
            raise Stop

        with forwards_replaced([*self.blocks], run), contextlib.suppress(Stop):
            self.model.base_model(**batch)
        return outputs[0]

    def _refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(
            f"{type(self.model).__name__} {reason}; merges with calibration need a model that runs "
            "each block once, and passes only hidden states between blocks"
        )


def linear_layers(block: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of a block, including Conv1D layers, by name."""
    layers = {}
    for name, module in block.named_modules():
        # a subclass with its own forward may do more than multiply
        if type(module).forward is nn.Linear.forward or is_conv1d(module):
            layers[name] = module
    return layers


@contextmanager
def inputs_seen(
    layers: Mapping[str, nn.Module], see: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Within the context, call ``see(name, input)`` whenever one of the layers runs."""

    # a function, so that each hook has its own name: lambdas in a loop would share the last name
    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: see(name, inputs[0])

    handles = []
    for name, layer in layers.items():
        handles.append(layer.register_forward_pre_hook(hook(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
