"""`BlockMerge`: the state and the steps of a block-by-block merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from model_components._devices import on_device
from model_components._layers import is_conv1d
from model_components._stages import Stage
from model_components._walk import Batch, Call, outputs_of, tokens

from ..dtypes import to_torch
from ..files import Source
from ..methods.closed_forms import CALIBRATED, InputStatistics
from .blocks import Skeleton, Weights, inputs_seen, linear_layers
from .config import CalibratedMerge
from .states import run_fingerprint


class BlockMerge:
    """The state of a merge: hidden states of each model's data, and the parts written so far."""

    def __init__(
        self,
        skeleton: Skeleton,
        sources: Sequence[Source],
        data: Sequence[Sequence[Batch]],
        shares: Sequence[float],
        merge: CalibratedMerge,
        folder: Path,
    ):
        self.skeleton = skeleton
        self.sources = sources
        self.data: list[list[Batch]] = []
        for batches in data:
            placed: list[Batch] = []
            for batch in batches:
                placed.append(on_device(batch, skeleton.device))
            self.data.append(placed)
        self.shares = shares
        self.merge = merge
        self.calls: list[list[list[Call]]] = []  # by model, block and batch
        self.hidden: list[list[Tensor]] = []
        self.form = CALIBRATED[merge.method]
        # unreduced Gram matrices are too close to singular for float32
        self.products = torch.float64 if merge.reduce == 1 else torch.float32
        # results that another type of device computed are not reused
        settings = [merge.method, shares, merge.reduce, skeleton.device.type]
        settings += [type(skeleton.model).__name__, [len(batches) for batches in data]]
        self.stage = Stage(folder, run_fingerprint(sources, data, settings), "merge")

    def begin(self) -> None:
        """Run the data of every model up to the first block, and record the blocks' arguments."""
        for source, outside, batches in zip(self.sources, self._outsides(), self.data, strict=True):
            self.skeleton.load_outside(outside)
            calls, hidden = self.skeleton.calls(batches, self.skeleton.block(0, source))
            self.calls.append(calls)
            self.hidden.append(hidden)

    def _outsides(self) -> Sequence[Weights]:
        """Return the weights outside the blocks to use for each model's data.

        They are the model's own weights or, if the method uses inputs in the merged model, the
        averages of all models' weights.
        """
        if not self.form.merged_inputs:
            return self.sources
        average = {}
        for name in self.skeleton.outside():
            average[name] = self._average(self._values(name)).to(self._dtype(name))
        return [average] * len(self.sources)

    @torch.no_grad()
    def merge_block(self, number: int) -> None:
        """Merge and write one block, and compute the next block's inputs.

        These inputs come from the models' own blocks or, if the method uses inputs in the merged
        model, from the merged block.
        """
        skeleton = self.skeleton
        merged_inputs = self.form.merged_inputs
        blocks = []
        seen = []
        for k, source in enumerate(self.sources):
            block = skeleton.block(number, source)
            statistics, outputs = self._watched(block, k, number)
            if not merged_inputs:
                self.hidden[k] = outputs
            blocks.append(dict(block.named_parameters()))
            seen.append(statistics)
        # only names and types of layers are needed, so a block without weights is enough
        layers = linear_layers(skeleton.blocks[number])
        merged: dict[str, Tensor] = {}
        for name in blocks[0]:
            weights = [parameters[name] for parameters in blocks]
            owner = name.rpartition(".")[0]
            # a layer's bias is averaged, because the closed form covers only the weight
            was_called = all(owner in statistics for statistics in seen)
            if name.endswith("weight") and owner in layers and was_called:
                inputs = [statistics[owner] for statistics in seen]
                value = self._solved(layers[owner], weights, inputs)
            else:
                value = self._average(weights)
            full = skeleton.prefix(number) + name
            merged[full] = value.to(self._dtype(full))
        self._write(number, merged)
        if merged_inputs:
            # use the weights as written, so that the next block's inputs include their rounding
            block = skeleton.block(number, merged)
            for k in range(len(self.sources)):
                self.hidden[k] = outputs_of(block, self.calls[k][number], self.hidden[k])

    @torch.no_grad()
    def merge_outside(self) -> None:
        """Merge and write the tensors outside the blocks.

        An untied head is merged by its inputs, and all other tensors are averaged.
        """
        model = self.skeleton.model
        head = model.get_output_embeddings()
        solved = None
        # a tied head is the embedding, which is not a linear layer
        if isinstance(head, nn.Linear) and head.weight is not model.get_input_embeddings().weight:
            solved = next(name for name, p in model.named_parameters() if p is head.weight)
        merged = {}
        for name in self.skeleton.outside():
            if name == solved and head is not None:
                value = self._solved(head, self._values(name), self._of_head())
            else:
                value = self._average(self._values(name))
            merged[name] = value.to(self._dtype(name))
        self._write(len(self.skeleton.blocks), merged)

    def _of_head(self) -> list[InputStatistics]:
        """Return the input statistics of each model's head."""
        statistics_of_parts = []
        for source, outside, batches, hidden, calls in zip(
            self.sources, self._outsides(), self.data, self.hidden, self.calls, strict=True
        ):
            self.skeleton.load_outside(outside)
            statistics = InputStatistics(hidden[0].shape[-1], self.products)
            # the first block is needed only to find the form in which blocks return their states
            read = self.skeleton.after(batches, hidden, self.skeleton.block(0, source))
            # padding is the same in all blocks, so use the first block's calls
            for call, states in zip(calls[0], read, strict=True):
                statistics.add(tokens(states, call.keep))
            statistics_of_parts.append(statistics)
        return statistics_of_parts

    def _watched(
        self, block: nn.Module, k: int, number: int
    ) -> tuple[dict[str, InputStatistics], list[Tensor]]:
        """Return the input statistics of a block's linear layers, and the block's outputs."""
        statistics: dict[str, InputStatistics] = {}
        owners: dict[str, str] = {}  # the first layer with the same input, as for q, k and v
        outputs = []
        for call, hidden in zip(self.calls[k][number], self.hidden[k], strict=True):
            read: dict[str, Tensor] = {}

            def see(
                name: str, x: Tensor, call: Call = call, read: dict[str, Tensor] = read
            ) -> None:
                if name not in owners:
                    owners[name] = name
                    for earlier, other in read.items():
                        if other is x:
                            owners[name] = earlier
                            break
                read[name] = x
                if owners[name] == name:
                    statistics.setdefault(name, InputStatistics(x.shape[-1], self.products))
                    statistics[name].add(tokens(x, call.keep))

            with inputs_seen(linear_layers(block), see):
                outputs.append(call.run(block, hidden))
        return {name: statistics[owner] for name, owner in owners.items()}, outputs

    def _solved(
        self, layer: nn.Module, weights: Sequence[Tensor], seen: Sequence[InputStatistics]
    ) -> Tensor:
        """Return the merged weight of a layer, in the layout that the layer stores."""
        options = {"reduce": self.merge.reduce, "shares": self.shares}
        if is_conv1d(layer):  # a Conv1D stores (in, out)
            turned = self.form.merge([weight.T for weight in weights], seen, **options)
            return turned.T.contiguous()
        return self.form.merge(weights, seen, **options).contiguous()

    def _values(self, name: str) -> list[Tensor]:
        """Return every model's parameter with the given name."""
        return [self.skeleton.parameter(source, name) for source in self.sources]

    def _average(self, values: Sequence[Tensor]) -> Tensor:
        """Return the mean of tensors, weighted by the models' shares, in float64."""
        mean = torch.zeros_like(values[0], dtype=torch.float64)
        for share, value in zip(self.shares, values, strict=True):
            mean += share * value.detach().double()
        return mean

    def _dtype(self, name: str) -> torch.dtype:
        """Return a parameter's dtype in the first model's files."""
        first = self.sources[0]
        return to_torch(first.tensors[self.skeleton.stored_name(first, name)].dtype)

    def _write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors as one part, under the names in the first model's files."""
        named = {}
        for name, value in tensors.items():
            named[self.skeleton.stored_name(self.sources[0], name)] = value.contiguous()
        self.stage.store(_part(number), named)

    def save(self, done: int) -> None:
        """Save the hidden states, from which an interrupted run continues."""
        states = {}
        for model, batches in enumerate(self.hidden):
            for place, hidden in enumerate(batches):
                states[f"{model}.{place}"] = hidden
        # the block's part is already written; if the run stops in between, it is merged again
        self.stage.store("states", states, done)

    def resumed(self) -> int:
        """Load the states of an earlier run of this merge; return how many blocks that run wrote.

        Return 0 if there are no states, or if a block's file is missing or damaged.
        """
        stored = self.stage.load("states")
        if stored is None:
            return 0
        states, done = stored
        for number in range(done):
            if self.stage.load(_part(number)) is None:
                return 0
        # calls, with their masks and positions, are not stored: recording them again is cheap
        self.begin()
        for model, batches in enumerate(self.hidden):
            for place in range(len(batches)):
                batches[place] = states[f"{model}.{place}"].to(self.skeleton.device)
        return done

    def parts(self) -> list[Path]:
        """Return the paths of the written parts: all blocks, and the tensors outside the blocks."""
        paths = [self.stage.path(_part(number)) for number in range(len(self.skeleton.blocks) + 1)]
        return [path for path in paths if path is not None]


def _part(number: int) -> str:
    return f"part-{number:05d}"
